"""Reads the output of `torch.save` from memory, without running it.

[Note: archives] `torch.save` writes a zip archive of uncompressed records: a pickle, and the bytes
of each storage. The pickle names the storages and describes each tensor as a view of one of them.

    archive/data.pkl     _rebuild_tensor_v2(('storage', FloatStorage, '0', 'cpu', 12),
                                            0, (3, 4), (4, 1), False, OrderedDict())
    archive/byteorder    little
    archive/data/0       48 bytes

`torch.load(weights_only=True)` reads the pickle; its unpickler only calls functions that rebuild
tensors. On the meta device it allocates no storage, whatever size the pickle states, and records
the offset of each storage in the archive. Each tensor is then checked against its record, and
becomes a view of the bytes in memory or in a mapped file.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from typing import IO, Any, cast

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError, UntrustedReader, reason, shown
from megatron.core.dist_checkpointing.format.manifest import DTYPES

MAX_PLAIN_BYTES = 1 << 28  # of one piece of plain data in a checkpoint

_LOCAL_HEADER_BYTES = 30  # its last two fields are the lengths of a name and of extra data
_NAME_LENGTHS = struct.Struct("<HH")

# Callers traverse and print the values.
_MAX_DEPTH = 100
_MAX_VALUES = 1 << 24

_ON_META: dict[str, Any] = {"map_location": "meta", "weights_only": True, "mmap": False}
_LEAVES = {str, bool, int, float, type(None), torch.dtype, torch.Size}
_TENSORS = {torch.Tensor, torch.nn.Parameter}


def read_archive(memory: torch.Tensor, source: str, *, checks_crc: bool = True) -> object:
    """The plain data and the tensors in an archive. See [Note: archives].

    Parameters and ordered dicts become tensors and dicts.

    Args:
        memory: the whole archive, [nbytes] uint8, in host memory or mapped from a file. Tensors are
            views of it.
        source: its name in messages: a path, or a key and a path.
        checks_crc: whether to compare storages with the CRC-32 in the archive. All other records
            are always compared. A CRC-32 of 0 means that there is none.

    Raises:
        CheckpointDamagedError: if it is not a whole archive of `torch.save`.
        CheckpointError: if it contains anything but dense tensors and plain data.
    """
    return _ArchiveReader(memory, source, copies=False).read(checks_crc)


def read_plain(memory: torch.Tensor, source: str, *, checks_crc: bool = True) -> object:
    """As `read_archive`, but each tensor is a contiguous copy."""
    return _ArchiveReader(memory, source, copies=True).read(checks_crc)


class _MemoryFile(io.RawIOBase):
    """A file over memory, without a copy."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # of bytes alone
        part = self._content[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, len(self._content))[whence]
        if base + offset < 0:
            raise OSError(f"Expected a position in the file, got {base + offset}.")
        self._position = base + offset
        return self._position


class _ArchiveReader(UntrustedReader):
    """Reads one archive, once."""

    def __init__(self, memory: torch.Tensor, source: str, *, copies: bool) -> None:
        super().__init__(source)
        self._memory = memory
        self._copies = copies
        self._content = memory.numpy().data
        self._records: dict[int, int] = {}  # number of bytes by offset
        self._tensors: dict[int, torch.Tensor] = {}  # by the ids of those on the meta device
        self._num_values = 0

    def read(self, checks_crc: bool) -> object:
        try:
            self._read_directory(checks_crc)
            value = torch.load(self._file(), **_ON_META)
            return self._placed(value, 0)
        except CheckpointError:
            raise
        except pickle.UnpicklingError:
            # torch's message recommends `weights_only=False`, which would run the file.
            self._refuse_names()
            self._fail("tensors and plain data pickled by protocol 2", "another pickle")
        except MemoryError:
            self._fail("what torch.save writes", "numbers that do not fit in memory")
        except Exception as error:  # a damaged archive raises anything
            got = reason(error).partition("\n")[0]
            self._fail("what torch.save writes", f"something else ({got})")

    def _file(self) -> IO[bytes]:
        return cast(IO[bytes], _MemoryFile(self._content))

    def _read_directory(self, checks_crc: bool) -> None:
        """Checks all records before torch reads any of them, and keeps their offsets."""
        with zipfile.ZipFile(self._file()) as archive:
            entries = archive.infolist()
        for entry in entries:
            name = entry.filename
            lengths = entry.header_offset + _LOCAL_HEADER_BYTES - _NAME_LENGTHS.size
            begin = lengths + _NAME_LENGTHS.size
            begin += sum(_NAME_LENGTHS.unpack_from(self._content, lengths))
            data = self._content[begin : begin + entry.file_size]
            if entry.compress_type != zipfile.ZIP_STORED or len(data) != entry.file_size:
                wanted = f"the record {shown(name)} of {entry.file_size} bytes, not compressed"
                self._fail(wanted, f"{len(data)} bytes, compressed by {entry.compress_type}")

            # Programs that write data piece by piece, like this one, leave its CRC-32 at 0.
            if entry.CRC and (checks_crc or "/data/" not in name):
                found = zlib.crc32(data)
                if found != entry.CRC:
                    self._fail(f"CRC-32 {entry.CRC:08x} of {shown(name)}", f"{found:08x}")
            # torch would swap bytes in the memory of a meta tensor, which has none.
            if name.endswith("/byteorder") and bytes(data) != b"little":
                self._fail("numbers in little-endian byte order", "another order")
            self._records[begin] = entry.file_size

    def _refuse_names(self) -> None:
        """CheckpointError for a pickle with names that `torch.load` does not accept."""
        names: list[str] = []
        with contextlib.suppress(Exception):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(self._file())
        if names:
            raise CheckpointError(
                f"Expected nothing but tensors and plain data in {self._source}, got {min(names)}."
            )

    def _placed(self, value: object, depth: int) -> object:
        """A copy of a value with tensors in memory. Its size and depth are bounded."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        self._num_values += len(value) if isinstance(value, dict | list | tuple) else 1
        if depth > _MAX_DEPTH or self._num_values > _MAX_VALUES:
            self._fail(f"{_MAX_VALUES} values in {_MAX_DEPTH} levels at most", "more")

        if isinstance(value, list | tuple) and kind in (list, tuple):
            return kind(self._placed(item, depth + 1) for item in value)
        if isinstance(value, dict) and kind in (dict, OrderedDict):
            return {
                self._placed(key, depth + 1): self._placed(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, torch.Tensor) and kind in _TENSORS:
            if id(value) not in self._tensors:
                # By the class: a pickle may give a tensor attributes, which are dropped here.
                view = self._view(torch.Tensor.detach(value))
                contiguous = torch.contiguous_format
                own = view.clone(memory_format=contiguous) if self._copies else view
                self._tensors[id(value)] = own
            return self._tensors[id(value)]
        raise CheckpointError(
            f"Expected tensors and plain data in {self._source}, got a {kind.__name__}."
        )

    def _view(self, meta: torch.Tensor) -> torch.Tensor:
        """The tensor in memory for a tensor on the meta device."""
        is_plain = meta.layout is torch.strided and not meta.is_conj() and not meta.is_neg()
        if not is_plain or meta.dtype not in DTYPES.values() or meta.is_quantized:
            raise CheckpointError(f"Expected dense tensors in {self._source}, got another kind.")
        if not meta.numel():
            return torch.empty(meta.shape, dtype=meta.dtype)

        strides, offset, itemsize = meta.stride(), meta.storage_offset(), meta.itemsize
        last = offset + sum(
            (size - 1) * stride for size, stride in zip(meta.shape, strides, strict=True)
        )
        nbytes = (last + 1) * itemsize
        begin = getattr(meta.untyped_storage(), "_checkpoint_offset", None)
        if begin not in self._records or nbytes > self._records[begin]:
            self._fail(f"the {nbytes} bytes of a tensor in its record", "another record")

        elements = self._memory[begin : begin + nbytes]
        if elements.data_ptr() % itemsize or elements.storage_offset() % itemsize:
            elements = elements.clone()  # torch aligns records; other programs need not
        elements = elements.view(meta.dtype)
        # `as_strided` counts from the start of the storage, not of the view.
        return elements.as_strided(meta.shape, strides, elements.storage_offset() + offset)
