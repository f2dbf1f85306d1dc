"""The output of `torch.save`, read without running anything and without trusting its numbers.

[Note: archives] `torch.save` writes a zip archive of uncompressed records: a pickle, and the bytes
of each storage. The pickle names the storages and says which views of them the tensors are.

    archive/data.pkl     _rebuild_tensor_v2(('storage', FloatStorage, '0', 'cpu', 12),
                                            0, (3, 4), (4, 1), False, OrderedDict())
    archive/byteorder    little
    archive/data/0       48 bytes

`torch.load` would allocate whatever the pickle asks for. Here every number is first checked against
the archive: a record lies within it, a storage has the bytes of its record, a tensor lies within
its storage. `safe_pickle` reads the pickle, and a tensor is a view of the very bytes that were
checked: they are read once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import UntrustedReader, shown
from megatron.core.dist_checkpointing.format.archive_directory import (
    MAX_BLOB_DIRECTORY_BYTES,
    MAX_DIRECTORY_BYTES,
    ArchiveBytes,
    ArchiveRecord,
    ReadAt,
)
from megatron.core.dist_checkpointing.format.manifest import DTYPES
from megatron.core.dist_checkpointing.format.safe_pickle import (
    MAX_DIMS,
    Admitted,
    Call,
    expect_tree,
    read_pickle,
    size_of,
)

MAX_PLAIN_BYTES = 1 << 28  # of one piece of plain data in a checkpoint

_MAX_PICKLE_BYTES = 1 << 26  # of plain data and of what describes tensors
_MAX_REBUILD_ARGUMENTS = 16

# All tensors together may have so many bytes, or so many times those of the archive, whichever is
# more: tensors can share a storage, and elements of one tensor can be the same memory.
_MAX_TENSOR_BYTES = 1 << 26
_MAX_SHARING = 16


@dataclass(frozen=True)
class TensorPlace:
    """Where the elements of a tensor lie in an archive.

    Attributes:
        begin, nbytes: of its storage, in bytes from the beginning of the archive.
        shape, strides, offset: of the view of it that the tensor is, in elements.
    """

    dtype: torch.dtype
    begin: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of an archive's bytes.

        Args:
            memory: all of the archive, [nbytes] uint8.
        """
        storage = memory[self.begin : self.begin + self.nbytes]
        if storage.data_ptr() % self.dtype.itemsize:
            storage = storage.clone()  # torch aligns records; other programs need not
        elements = storage.view(self.dtype)
        # `as_strided` counts from the beginning of all memory, not from that of the view.
        first = elements.storage_offset() + self.offset
        return elements.as_strided(self.shape, self.strides, first)


class _Storage(NamedTuple):
    """A storage that a pickle names, once it has been checked against its record."""

    dtype: torch.dtype | None  # None: untyped, of bytes
    begin: int
    nbytes: int


class Archive(UntrustedReader):
    """An archive whose directory and pickle have been read and checked, but no data yet.

    Attributes:
        value: what was saved, with a `TensorPlace` for every tensor.
    """

    def __init__(
        self,
        read_at: ReadAt,
        nbytes: int,
        source: str,
        *,
        checks_crc: bool,
        max_directory_nbytes: int = MAX_DIRECTORY_BYTES,
    ) -> None:
        """
        Args:
            read_at: reads it; places count from its first byte.
            nbytes: length of the archive.
            source: what it is, for messages: a path, or a key and a path.
            checks_crc: whether records must have the CRC-32 that the directory says.
            max_directory_nbytes: bound on the directory, which takes eleven times that in memory.

        Raises:
            CheckpointDamagedError: if it is no whole archive of torch.save.
            CheckpointError: if its pickle names anything but tensors and plain data.
            OSError: if it cannot be read.
        """
        super().__init__(source)
        self._bytes = ArchiveBytes(read_at, nbytes, source)
        self._nbytes = nbytes
        self._checks_crc = checks_crc
        self._tensor_nbytes = 0  # of all tensors that the pickle has described
        self._records = self._bytes.directory(max_directory_nbytes)

        # All records stand in one folder, which torch names after the file, or "archive".
        pickles = [
            name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")
        ]
        if len(pickles) != 1:
            self._fail("what torch.save writes", f"an archive with {len(pickles)} records data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        self._check_byteorder()

        pickled = self._read(pickles[0], _MAX_PICKLE_BYTES)
        what = "tensors and plain data"
        self.value = read_pickle(pickled, source, self._admitted(), what, self._storage)
        expect_tree(self.value, len(pickled), _LEAVES, source)

    def check_memory(self, memory: torch.Tensor) -> None:
        """Compares every record of an archive that has been read, [nbytes] uint8, with its CRC-32.
        Raises CheckpointDamagedError.
        """
        content = memory.numpy().data
        for name, record in self._records.items():
            found = zlib.crc32(content[record.begin : record.begin + record.nbytes])
            self._check_crc(name, record, found)

    def _check_crc(self, name: str, record: ArchiveRecord, found: int) -> None:
        # 0 stands for none: a program that writes data piece by piece, as ours does, does not know
        # it yet when it writes the header.
        if record.crc not in (0, found):
            self._fail(f"CRC-32 {record.crc:08x} of the record {shown(name)}", f"{found:08x}")

    def _check_byteorder(self) -> None:
        name = f"{self._root}byteorder"
        if name in self._records and self._read(name, 16) != b"little":
            self._fail("numbers whose low bytes come first", "another order of bytes")

    def _read(self, name: str, max_bytes: int) -> bytes:
        """A small record, whole."""
        record = self._records[name]
        if record.nbytes > max_bytes:
            self._fail(f"a record {shown(name)} of at most {max_bytes} bytes", f"{record.nbytes}")
        content = self._bytes.read_at(record.begin, record.nbytes)
        if self._checks_crc:
            self._check_crc(name, record, zlib.crc32(content))
        return content

    # What a pickle may name and call. It gives arguments of any type.

    def _admitted(self) -> Admitted:
        return {
            **_NAMED,
            ("torch._utils", "_rebuild_tensor_v2"): Call(self._tensor),
            ("torch._utils", "_rebuild_tensor_v3"): Call(self._tensor),
            ("torch._utils", "_rebuild_parameter"): Call(_first_tensor),
            ("torch._utils", "_rebuild_parameter_with_state"): Call(_first_tensor),
            ("torch._tensor", "_rebuild_from_type_v2"): Call(_plain_tensor),
        }

    def _storage(self, persistent_id: object) -> _Storage:
        """A persistent id is ('storage', class, name of the record, device, number of elements)."""
        if type(persistent_id) is not tuple or len(persistent_id) != 5:
            self._fail("a storage of 5 parts", shown(persistent_id))
        what, kind, name, _, numel = persistent_id
        if what != "storage" or (type(kind), type(name), type(numel)) != (_StorageKind, str, int):
            self._fail("a storage with its kind, its record and its length", "something else")

        record = self._records.get(f"{self._root}data/{name}")
        nbytes = numel * (1 if kind.dtype is None else kind.dtype.itemsize)
        if record is None or record.nbytes != nbytes:
            got = "none of that name" if record is None else f"{record.nbytes}"
            self._fail(f"a record {shown(name)} of {shown(nbytes)} bytes", got)
        return _Storage(kind.dtype, record.begin, record.nbytes)

    def _tensor(
        self, storage: object, offset: object, shape: object, strides: object, *more: object
    ) -> TensorPlace:
        """A tensor, checked against its storage.

        Args:
            more: whether it wants a gradient, its hooks, its dtype if that is not the storage's,
                and perhaps metadata.
        """
        if not isinstance(storage, _Storage):
            self._fail("a tensor over a storage", shown(storage))
        dtype, metadata = storage.dtype, more[2:]
        if metadata and isinstance(metadata[0], torch.dtype):
            dtype, metadata = metadata[0], metadata[1:]
        if dtype is None:
            self._fail("a tensor over a storage of numbers", shown(storage))
        sizes, steps, (start,) = self._counts(shape), self._counts(strides), self._counts((offset,))
        if len(sizes) != len(steps) or len(sizes) > MAX_DIMS:
            got = f"{len(sizes)} and {len(steps)}"
            self._fail(f"as many strides as sizes, {MAX_DIMS} at most", got)
        if any(metadata):
            self._fail("a tensor without conjugation or the like", "one with it")

        numel = math.prod(sizes)
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        end = start + last + 1 if numel else start
        if end * dtype.itemsize > storage.nbytes or storage.nbytes % dtype.itemsize:
            wanted = f"a tensor within the {storage.nbytes} bytes of its storage"
            self._fail(wanted, f"{shown(end)} elements")

        # Elements of one tensor may be the same memory, as `expand` makes them, and tensors may
        # share a storage. But copying all of the tensors takes memory for each.
        self._tensor_nbytes += numel * dtype.itemsize
        most = max(self._nbytes * _MAX_SHARING, _MAX_TENSOR_BYTES)
        if self._tensor_nbytes > most:
            self._fail(f"tensors of at most {most} bytes", shown(self._tensor_nbytes))
        return TensorPlace(dtype, storage.begin, storage.nbytes, sizes, steps, start)

    def _counts(self, values: object) -> tuple[int, ...]:
        if not isinstance(values, tuple) or not all(
            type(value) is int and value >= 0 for value in values
        ):
            self._fail("sizes and strides as integers of at least 0", shown(values))
        return tuple(values)


def open_memory(memory: torch.Tensor, source: str, *, checks_crc: bool) -> Archive:
    """Opens the archive of a chunk or of plain data that has been read, and checks all of it. See
    [Note: archives].

    Args:
        memory: all of the archive, [nbytes] uint8, in host memory.
        source, checks_crc: as in `Archive`.

    Raises:
        CheckpointDamagedError, CheckpointError: as `Archive`.
    """
    content = memory.numpy().data

    def read_at(begin: int, nbytes: int) -> bytes:
        return bytes(content[begin : begin + nbytes])

    archive = Archive(
        read_at,
        content.nbytes,
        source,
        checks_crc=checks_crc,
        max_directory_nbytes=MAX_BLOB_DIRECTORY_BYTES,
    )
    if checks_crc:
        archive.check_memory(memory)
    return archive


def read_plain(memory: torch.Tensor, source: str, *, checks_crc: bool = True) -> object:
    """The plain data in an archive; tensors in it get memory of their own.

    Args, errors: as `open_memory`.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy_of(place: TensorPlace) -> torch.Tensor:
        # A tensor that the value refers to twice stays one tensor.
        if id(place) not in copies:
            copies[id(place)] = place.tensor(memory).clone(memory_format=torch.contiguous_format)
        return copies[id(place)]

    return with_tensors(open_memory(memory, source, checks_crc=checks_crc).value, copy_of)


def with_tensors(value: object, tensor_of: Callable[[TensorPlace], torch.Tensor]) -> object:
    """An archive's value with a tensor for every `TensorPlace`."""
    if isinstance(value, TensorPlace):
        return tensor_of(value)
    # By exact type: a `torch.Size` is a tuple, too, and stays as it is.
    if type(value) is dict:
        return {key: with_tensors(item, tensor_of) for key, item in value.items()}
    if type(value) is list:
        return [with_tensors(item, tensor_of) for item in value]
    if type(value) is tuple:
        return tuple(with_tensors(item, tensor_of) for item in value)
    return value


class _StorageKind:
    """A class of storages that a pickle names."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


class _TensorClass:
    """`torch.Tensor`, or a subclass of it that adds nothing to what is saved."""


def _ordered(items: object = ()) -> dict[Any, Any]:
    """An OrderedDict; torch.save fills it in afterwards."""
    if items not in ((), []):
        raise ValueError("Expected an empty OrderedDict.")
    return {}


def _first_tensor(data: object, *_: object) -> object:
    """A parameter, as a plain tensor: `requires_grad` and hooks are not kept."""
    if not isinstance(data, TensorPlace):
        raise ValueError(f"Expected a tensor as a parameter's data, got {shown(data)}.")
    return data


def _plain_tensor(rebuild: object, kind: object, args: object, *_: object) -> object:
    """A tensor with attributes of its own, which are not kept."""
    is_tensor = isinstance(kind, _TensorClass)
    if not is_tensor or not isinstance(rebuild, Call) or type(args) is not tuple:
        got = shown(args)
        raise ValueError(f"Expected a function, a class of tensors and arguments, got {got}.")
    if len(args) > _MAX_REBUILD_ARGUMENTS:
        raise ValueError(f"Expected at most {_MAX_REBUILD_ARGUMENTS} arguments, got {len(args)}.")
    return rebuild.result(args)


# A pickle names the dtype of a storage by the class that older versions of torch had for it.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_NAMED: dict[tuple[str, str], object] = {
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", name): _StorageKind(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageKind(None),
    ("torch", "Size"): Call(size_of),
    ("collections", "OrderedDict"): Call(_ordered),
    ("torch", "Tensor"): _TensorClass(),
    ("torch._tensor", "Tensor"): _TensorClass(),
    ("torch.nn.parameter", "Parameter"): _TensorClass(),
}
_LEAVES = (str, bool, int, float, type(None), torch.dtype, torch.Size, TensorPlace)
