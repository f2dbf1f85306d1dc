"""Reads the output of `torch.save` from memory, without running it.

[Note: archives] `torch.save` writes a zip archive of uncompressed records: a pickle, and the bytes
of each storage. The pickle names the storages and describes each tensor as a view of one of them.

    archive/data.pkl     _rebuild_tensor_v2(('storage', FloatStorage, '0', 'cpu', 12),
                                            0, (3, 4), (4, 1), False, OrderedDict())
    archive/byteorder    little
    archive/data/0       48 bytes

The unpickler of `torch.load(weights_only=True)` reads the pickle, after every name in it has been
compared with a fixed list: other modules extend torch's own list, for example by DeviceMesh, which
creates process groups. Storages are made on the meta device, which takes no memory, and are marked
with their record. Each tensor is then checked against its record, and becomes a view of the bytes
in memory or in a mapped file.

The records are found by Python's zipfile, not by torch's reader: on the meta device, `torch.load`
computes the offset of every storage but the first from the order in the pickle, which need not be
the order in the archive, and it swaps the bytes of a storage that has none.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from typing import IO, Any, NamedTuple, cast

import torch
from torch import _weights_only_unpickler as weights_only

from megatron.core.dist_checkpointing.errors import CheckpointError, fail, reason, shown
from megatron.core.dist_checkpointing.format.manifest import DTYPES

# Of a record: a signature, and the lengths of a name and of extra data, which follow.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\3\4"

# Callers traverse and print the values.
_MAX_DEPTH = 100
_MAX_VALUES = 1 << 20

# Every name that a pickle may contain.
_NAMES = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.UntypedStorage",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    *map(str, DTYPES.values()),
    *(f"torch.{name}" for name in vars(torch) if name.endswith("Storage")),
}
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
            are always compared. A CRC-32 of 0 means none.

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


class _Record(NamedTuple):
    """The place of a record's content in the archive, in bytes."""

    begin: int
    nbytes: int


class _ArchiveReader:
    """Reads one archive, once."""

    def __init__(self, memory: torch.Tensor, source: str, *, copies: bool) -> None:
        self._source = source
        self._memory = memory
        self._copies = copies
        self._content = memory.numpy().data
        # By name in lower case, without the directory: torch finds names without regard to case.
        self._records: dict[str, _Record] = {}
        self._num_values = 0
        self._tensors: dict[int, torch.Tensor] = {}  # by the ids of the tensors on the meta device

    def read(self, checks_crc: bool) -> object:
        try:
            self._read_directory(checks_crc)
            return self._placed(self._unpickled(), 0)
        except CheckpointError:
            raise
        except pickle.UnpicklingError:
            fail("tensors and plain data pickled by protocol 2", "another pickle", self._source)
        except MemoryError:
            fail("what torch.save writes", "numbers that do not fit in memory", self._source)
        except Exception as error:  # a damaged archive raises anything
            got = reason(error).partition("\n")[0]
            fail("what torch.save writes", f"something else ({got})", self._source)

    def _read_directory(self, checks_crc: bool) -> None:
        """Finds all records and checks their contents."""
        with zipfile.ZipFile(cast(IO[bytes], _MemoryFile(self._content))) as archive:
            entries = archive.infolist()
        # By these bytes torch distinguishes archives from its format before 1.6.
        if self._content[: len(_LOCAL_SIGNATURE)] != _LOCAL_SIGNATURE:
            fail("an archive", "one behind other bytes", self._source)

        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise CheckpointError(
                f"Expected an archive of torch.save in {self._source}, got one of TorchScript."
            )
        folder = entries[0].filename.partition("/")[0] + "/" if entries else ""
        for entry in entries:
            name = entry.filename.removeprefix(folder).lower()
            if not entry.filename.startswith(folder) or name in self._records:
                fail("each record once, in one directory", shown(entry.filename), self._source)
            self._records[name] = self._record(entry)
            if checks_crc or not name.startswith("data/"):
                self._check_crc(entry, name)

        if "byteorder" in self._records and bytes(self._bytes("byteorder")) != b"little":
            fail("numbers in little-endian byte order", "another order", self._source)

    def _record(self, entry: zipfile.ZipInfo) -> _Record:
        """The place of a record, if all of it is there."""
        begin = entry.header_offset + _LOCAL_HEADER.size
        signature, *lengths = _LOCAL_HEADER.unpack_from(self._content, entry.header_offset)
        record = _Record(begin + sum(lengths), entry.file_size)
        found = max(min(record.nbytes, len(self._content) - record.begin), 0)
        is_there = entry.header_offset >= 0 and signature == _LOCAL_SIGNATURE
        if entry.compress_type != zipfile.ZIP_STORED or not is_there or found != record.nbytes:
            wanted = f"the record {shown(entry.filename)} of {record.nbytes} bytes, not compressed"
            fail(wanted, f"{found} bytes, compressed by {entry.compress_type}", self._source)
        return record

    def _check_crc(self, entry: zipfile.ZipInfo, name: str) -> None:
        # Programs that write data piece by piece, like this one, leave its CRC-32 at 0.
        found = zlib.crc32(self._bytes(name)) if entry.CRC else 0
        if found != entry.CRC:
            fail(f"CRC-32 {entry.CRC:08x} of {shown(entry.filename)}", f"{found:08x}", self._source)

    def _bytes(self, name: str) -> memoryview:
        begin, nbytes = self._records[name]
        return self._content[begin : begin + nbytes]

    def _unpickled(self) -> object:
        """The value in the pickle, with tensors on the meta device."""
        if "data.pkl" not in self._records:
            fail("a pickle data.pkl", "an archive without one", self._source)
        content = io.BytesIO(self._bytes("data.pkl"))
        if unknown := weights_only.get_globals_in_pkl(content) - _NAMES:
            raise CheckpointError(
                f"Expected dense tensors and plain data in {self._source}, got {min(unknown)}."
            )

        content.seek(0)
        unpickler: Any = weights_only.Unpickler(content, encoding="utf-8")
        unpickler.persistent_load = self._storage
        return unpickler.load()

    def _storage(self, saved_id: Any) -> object:
        """A storage without memory for a storage that the pickle names."""
        _, kind, key, _, num_elements = saved_id
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        record = self._records.get(f"data/{key}".lower()) if type(key) is str else None
        # It may have more: the size of a storage need not be a multiple of its elements' size.
        if record is None or num_elements * dtype.itemsize > record.nbytes:
            fail(f"{shown(num_elements)} elements in storage {shown(key)}", "fewer", self._source)

        storage: Any = torch.UntypedStorage(record.nbytes, device="meta")
        storage.record = record
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _placed(self, value: object, depth: int) -> object:
        """A copy of a value with tensors in memory. Its size and depth are bounded."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        self._num_values += len(value) if isinstance(value, dict | list | tuple) else 1
        if depth > _MAX_DEPTH or self._num_values > _MAX_VALUES:
            fail(f"{_MAX_VALUES} values in {_MAX_DEPTH} levels at most", "more", self._source)

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
        record = getattr(meta.untyped_storage(), "record", None)
        if type(record) is not _Record or nbytes > record.nbytes:
            fail(f"the {nbytes} bytes of a tensor in its record", "another record", self._source)

        elements = self._memory[record.begin : record.begin + nbytes]
        if elements.data_ptr() % itemsize or elements.storage_offset() % itemsize:
            elements = elements.clone()  # torch aligns records; other programs need not
        elements = elements.view(meta.dtype)
        # `as_strided` counts from the start of the storage, not of the view.
        return elements.as_strided(meta.shape, strides, elements.storage_offset() + offset)
