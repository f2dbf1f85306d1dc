"""What `torch.save` writes around a tensor's data, made without the tensor.

DCP stores each chunk of a tensor as one blob, the output of `torch.save`: a zip archive with a
small pickle, the raw data in a separate record, and a directory. The length of a blob can be
computed, so one rank computes the offsets of all blobs. Header and footer do not depend on the
data, which is written in place.

[Note: blob lengths] The header contains the sizes, the strides, and the number of elements or bytes
of the storage, as pickled integers; an integer takes 2, 3, 5 or more bytes by its magnitude alone.
So all tensors of one dtype and number of dimensions whose integers take the same number of bytes
together have headers of the same length. Records are aligned to 64 bytes, so the footer's length
depends on how far the data reaches beyond one.

    | pickle | small records | record's head |     data     | small records | directory |
    0                                        ^ 64 * k
    <------------ header_nbytes ------------><-data_nbytes-><--------- footer --------->

Lengths are measured with `torch.save`, once per class. Sizes and offsets of 4 GiB and more take
more bytes in a zip archive, so such data are separate classes. Two kinds of shapes are always
measured: data just short of 4 GiB, where only some of the later offsets exceed it, and empty data,
which has another kind of record.

[Note: a guard that dies with its thread] Where torch is built for GPUs and finds none, the first
FakeTensorMode of the process replaces torch's device guard with a fake one, which serves all
threads. In torch 2.11 it belongs to the thread that entered the mode: when that thread ends, torch
is left with a pointer to freed memory, and the next backward, or the next FakeTensorMode, is a
segmentation fault. Saves run on lanes, whose threads end. So a thread that never ends enters the
mode before any other does. torch 2.12 keeps the guard as long as the process.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

MAX_FRAME_BYTES = 1 << 20  # more than `torch.save` writes around the data of one tensor

_RECORD_ALIGNMENT = 64  # bytes
_LARGE_NBYTES = 1 << 32  # of data whose size and all offsets behind it do not fit 32 bits


def _pickled_nbytes(bits: int) -> int:
    """Bytes of a non-negative integer of so many bits in protocol 2, which torch.save uses."""
    if bits <= 8:
        return 2
    if bits <= 16:
        return 3
    return 5 if bits <= 31 else 2 + bits // 8 + 1


_PICKLED_NBYTES = [_pickled_nbytes(bits) for bits in range(256)]  # by `int.bit_length`

# Learned from torch.save, by class. See [Note: blob lengths].
_header_nbytes: dict[tuple[torch.dtype, int, int, int, bool], int] = {}
_footer_nbytes: dict[tuple[int, bool], int] = {}

# `bytes` are left out: empty ones do not load with weights_only.
_PLAIN_LEAVES = (type(None), bool, int, float, torch.dtype)


class BlobLayout(NamedTuple):
    """Lengths of the parts of a blob, in bytes."""

    header_nbytes: int
    data_nbytes: int
    nbytes: int  # of the whole blob, with the footer


def blob_layout(dtype: torch.dtype, shape: Sequence[int]) -> BlobLayout:
    """The lengths of the blob of a contiguous CPU tensor, by arithmetic. See [Note: blob lengths].

    Raises:
        ValueError: for a negative size.
    """
    if shape and min(shape) < 0:
        raise ValueError(f"Expected sizes of at least 0, got {tuple(shape)}.")

    integers_nbytes, stride = 0, 1  # after the loop, the stride is the number of elements
    for size in reversed(shape):
        integers_nbytes += _PICKLED_NBYTES[size.bit_length()] + _PICKLED_NBYTES[stride.bit_length()]
        stride *= size
    data_nbytes = stride * dtype.itemsize
    if not data_nbytes or 0 < _LARGE_NBYTES - data_nbytes <= MAX_FRAME_BYTES:
        return _measured_layout(dtype, tuple(shape))

    # The pickle has the storage's length in elements for some dtypes and in bytes for others, so
    # the class has the number of bytes of both.
    integers_nbytes += _PICKLED_NBYTES[stride.bit_length()]
    length_nbytes = _PICKLED_NBYTES[data_nbytes.bit_length()]
    is_large = data_nbytes >= _LARGE_NBYTES
    header_class = (dtype, len(shape), integers_nbytes, length_nbytes, is_large)
    footer_class = (data_nbytes % _RECORD_ALIGNMENT, is_large)

    if header_class not in _header_nbytes or footer_class not in _footer_nbytes:
        measured = _measured_layout(dtype, tuple(shape))
        _header_nbytes[header_class] = measured.header_nbytes
        _footer_nbytes[footer_class] = measured.nbytes - measured.header_nbytes - data_nbytes
    header_nbytes, footer_nbytes = _header_nbytes[header_class], _footer_nbytes[footer_class]
    return BlobLayout(header_nbytes, data_nbytes, header_nbytes + data_nbytes + footer_nbytes)


def blob_frame(dtype: torch.dtype, shape: Sequence[int]) -> tuple[bytes, bytes]:
    """The bytes before and behind the data in the blob of a contiguous CPU tensor.

    No memory is needed for the data, however large. For a tensor without elements, the header is
    the whole blob. The CRC-32 of the data is left 0; torch does not check it.

    Raises:
        ValueError: for a negative size.
        RuntimeError: if this version of torch does not follow [Note: blob lengths].
    """
    layout = blob_layout(dtype, shape)
    # Rank 0 has placed this blob by arithmetic alone, without these bytes: they have to agree.
    got = _measured_layout(dtype, tuple(shape))
    if got != layout:
        raise RuntimeError(
            f"Expected torch.save of {dtype} {tuple(shape)} to write {layout}, got {got} "
            f"from torch {torch.__version__}."
        )
    return _frame(dtype, tuple(shape))


def plain_blob(value: object) -> bytes:
    """Plain data as `torch.save` writes it; `torch.load` reads it with `weights_only`.

    Equal values give equal bytes, whichever of their parts are one object.

    Args:
        value: None, numbers, strings, dtypes, tensors, and lists, tuples and dicts of these.
            Tensors are saved as contiguous CPU tensors without the rest of their storage.

    Raises:
        ValueError: if it contains anything else; names its place.
    """
    stream = io.BytesIO()
    torch.save(_canonical(value, "the value", {}), stream)
    return stream.getvalue()


def _measured_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> BlobLayout:
    header, footer = _frame(dtype, shape)
    data_nbytes = math.prod(shape) * dtype.itemsize
    return BlobLayout(len(header), data_nbytes, len(header) + data_nbytes + len(footer))


@lru_cache(maxsize=4096)  # 2 KB each
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Header and footer as torch.save writes them around the data of a tensor without memory."""
    sink = _FrameSink()
    with torch.serialization.skip_data(materialize_fake_tensors=True), fake_tensor_mode():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), sink)  # type: ignore[arg-type]

    data_nbytes = math.prod(shape) * dtype.itemsize
    if sink.skipped_nbytes != data_nbytes:
        raise RuntimeError(
            f"Expected torch.save of {dtype} {shape} to leave room for {data_nbytes} bytes, got "
            f"{sink.skipped_nbytes} from torch {torch.__version__}."
        )
    return bytes(sink.header), bytes(sink.footer)


def fake_tensor_mode() -> FakeTensorMode:
    """A FakeTensorMode that any thread may enter. See [Note: a guard that dies with its thread]."""
    if torch.__version__ < "2.12":  # versions are compared, not strings
        _enter_on_a_thread_that_stays()
    return FakeTensorMode()


@cache
def _enter_on_a_thread_that_stays() -> None:
    # The main thread would do as well, but this code cannot make it enter.
    has_entered = threading.Event()
    threading.Thread(
        target=_enter_and_stay, args=(has_entered,), name="fake tensors", daemon=True
    ).start()
    has_entered.wait()


def _enter_and_stay(has_entered: threading.Event) -> None:
    # The caller enters the mode next and sees an error there, so none is reported from here.
    try:
        with FakeTensorMode():
            pass
    finally:
        has_entered.set()

    threading.Event().wait()


class _FrameSink:
    """A file for torch.save under skip_data. Keeps the written bytes and the seek over the data."""

    def __init__(self) -> None:
        self.header = bytearray()
        self.footer = bytearray()
        self.skipped_nbytes = 0

    def write(self, content: bytes) -> int:
        part = self.footer if self.skipped_nbytes else self.header
        part += content
        return len(content)

    def seek(self, offset: int, whence: int) -> int:
        if whence != io.SEEK_CUR or self.skipped_nbytes:
            raise RuntimeError(
                f"Expected one seek from the current place over the data, got another of {offset} "
                f"bytes with whence {whence} from torch {torch.__version__}."
            )
        self.skipped_nbytes = offset
        return 0

    def flush(self) -> None:
        pass


def _canonical(value: object, place: str, strings: dict[str, str]) -> object:
    """A copy of plain data in which only equal strings are shared objects.

    A pickle refers back to an object that it has seen before, so its bytes would depend on whether
    two equal values are one object.
    """
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return value
    if isinstance(value, str) and kind is str:
        return strings.setdefault(value, value)
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return kind(_canonical(item, f"{place}[{i}]", strings) for i, item in enumerate(value))
    if isinstance(value, dict) and kind is dict:
        keys = [_canonical(key, f"a key of {place}", strings) for key in value]
        items = [_canonical(value[key], f"{place}[{key!r}]", strings) for key in value]
        return dict(zip(keys, items, strict=True))
    if isinstance(value, torch.Tensor) and kind is torch.Tensor:
        # Without the clone, torch.save would write all of the storage of a view.
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)

    raise ValueError(
        f"Expected plain data at {place}, got a {kind.__module__}.{kind.__qualname__}."
    )
