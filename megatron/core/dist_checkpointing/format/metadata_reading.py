"""Reads the `.metadata` of a DCP checkpoint without running it.

[Note: reading] A pickle can name any function of any module, call it, and set attributes of
whatever it has named. Python's unpickler resolves each name with `find_class`, which is limited
here to a fixed list: dtypes, `torch.Size`, and replacements for the rest. The replacement for a DCP
class keeps the state of an object; the replacement for a function ignores its arguments. A pickle
cannot change the replacements, so it has no effect on the next one. A load uses the state only
after its types have been checked.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    UntrustedReader,
    reason,
    shown,
)
from megatron.core.dist_checkpointing.format.manifest import DTYPES, writer_of
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor


class Blob(NamedTuple):
    """The location of one output of `torch.save`: a chunk of a tensor, or plain data."""

    file: str  # relative to the checkpoint's directory
    offset: int  # in bytes
    nbytes: int
    transforms: list[str]  # applied by DCP's extensions after `torch.save`


class DcpIndex(NamedTuple):
    """The contents of a `.metadata`, each dict in its order."""

    tensors: dict[str, SavedTensor]  # a chunk's offset is the offset of its blob
    blobs: dict[tuple[str, tuple[int, ...]], Blob]  # of chunks, by key and the box's offsets
    plain: dict[str, Blob]


def parse_metadata(content: bytes, source: str) -> DcpIndex:
    """Reads a `.metadata` that this project or DCP wrote. See [Note: reading].

    Args:
        source: the file's name, for messages.

    Raises:
        CheckpointDamagedError: if it is not a whole `Metadata` with fields of the right types, and
            a location in a file for each chunk and all plain data.
        CheckpointError: if it names anything but DCP's classes, or files outside its directory.
    """
    stream = io.BytesIO(content)
    try:
        found = _Unpickler(stream, source).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        is_too_large = isinstance(error, MemoryError)
        got = "one that does not fit in memory" if is_too_large else reason(error)
        raise CheckpointDamagedError(f"Expected a pickle in {source}, got {got}.") from None
    # Two writers may have left them. A crafted frame can hold more bytes, which are not read.
    if rest := len(stream.read()):
        raise CheckpointDamagedError(
            f"Expected {source} to end with its pickle, got {rest} further bytes."
        )
    return _RecordReader(source).index(found)


# The fields of each class in a pickle: required, optional.
_FIELDS: dict[type, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(needed.split()), frozenset(optional.split()))
    for kind, needed, optional in [
        (dcp.Metadata, "state_dict_metadata storage_data", "planner_data storage_meta version"),
        (dcp.TensorStorageMetadata, "properties size chunks", ""),
        (dcp.TensorProperties, "state", ""),
        (dcp.ChunkStorageMetadata, "offsets sizes", ""),
        (dcp.BytesStorageMetadata, "", ""),
        (dcp.MetadataIndex, "fqn index", "offset"),
        (_StorageInfo, "relative_path offset length", "transform_descriptors"),
        (dcp.StorageMeta, "", ""),
    ]
}


class _StandIn(type):
    """The metaclass of the replacements: their attributes are fixed."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"Expected no attributes of {cls.__name__}, got {name}.")


class _Record(metaclass=_StandIn):
    """Replaces an object of a DCP class, and keeps the state that a pickle sets."""

    __slots__ = ("state",)

    def __new__(cls) -> _Record:
        record = super().__new__(cls)
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state: Any = state


class _Unread(metaclass=_StandIn):
    """Replaces a function whose result is not needed."""

    def __new__(cls, *_: object) -> None:  # type: ignore[misc]  # there are no objects of it
        return None


_RECORDS = {kind: _StandIn(kind.__name__, (_Record,), {"__slots__": ()}) for kind in _FIELDS}
# Every name that a pickle of metadata may contain.
_ADMITTED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): _RECORDS[kind] for kind in _FIELDS},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): torch.Size,
    (dcp.__name__, dcp._MEM_FORMAT_ENCODING.__qualname__): _Unread,
    ("torch.serialization", "_get_layout"): _Unread,
    # The directory that DCP saved to. Its class has moved between versions of Python.
    ("pathlib", "PosixPath"): _Unread,
    ("pathlib._local", "PosixPath"): _Unread,
}


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, restricted to the names of `_ADMITTED`."""

    def __init__(self, stream: io.BytesIO, source: str) -> None:
        super().__init__(stream)
        self._source = source

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ADMITTED:
            raise CheckpointError(
                f"Expected nothing but the classes of DCP's metadata in {self._source}, got "
                f"{module}.{name}."
            )
        return _ADMITTED[module, name]


class _RecordReader(UntrustedReader):
    """Converts records to an index, after checking the type of every field that a load reads."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._files: set[str] = set()  # names that have been checked

    def index(self, record: Any) -> DcpIndex:
        fields = self._fields(record, dcp.Metadata)
        entries = self._expect(fields["state_dict_metadata"], dict, "state_dict_metadata")
        records = self._expect(fields["storage_data"], dict, "storage_data")
        places = {self._place(index): self._blob(blob) for index, blob in records.items()}
        # Two records are different keys of a dict, even for the same chunk.
        if len(places) != len(records):
            got = f"{len(records)} places for {len(places)} chunks"
            self._fail("one place for each chunk", got)

        found = DcpIndex({}, {}, {})
        for key, entry in entries.items():
            self._expect(key, str, "a key")
            if type(entry) is _RECORDS[dcp.BytesStorageMetadata]:
                self._fields(entry, dcp.BytesStorageMetadata)
                found.plain[key] = self._blob_at(places, key, None)
                continue
            fields = self._fields(entry, dcp.TensorStorageMetadata)
            records = self._expect(fields["chunks"], list, f"the chunks of {key}")
            size, chunks = self._size(fields["size"], key), []
            for box in [self._box(each, key) for each in records]:
                blob = found.blobs[key, box.offsets] = self._blob_at(places, key, box.offsets)
                chunks.append(SavedChunk(box, writer_of(blob.file), blob.file, blob.offset))
            found.tensors[key] = SavedTensor(
                key, self._dtype(fields["properties"], key), size, chunks
            )
        return found

    def _blob_at(self, places: dict[Any, Blob], key: str, offsets: tuple[int, ...] | None) -> Blob:
        if (key, offsets) not in places:
            at = "" if offsets is None else f" at {offsets}"
            self._fail(f"a place for {key}{at}", "none")
        return places[key, offsets]

    def _box(self, record: Any, key: str) -> Box:
        fields = self._fields(record, dcp.ChunkStorageMetadata)
        return Box(self._size(fields["offsets"], key), self._size(fields["sizes"], key))

    def _dtype(self, record: Any, key: str) -> torch.dtype:
        state = self._fields(record, dcp.TensorProperties)["state"]
        if type(state) is not tuple or not state or type(state[0]) is not torch.dtype:
            self._fail(f"properties of {key} that begin with its dtype", shown(state))
        dtype: torch.dtype = state[0]
        return dtype

    def _place(self, record: Any) -> tuple[str, tuple[int, ...] | None]:
        fields = self._fields(record, dcp.MetadataIndex)
        key, offsets = fields["fqn"], fields.get("offset")
        self._expect(key, str, "a key")
        return key, None if offsets is None else self._size(offsets, key)

    def _blob(self, record: Any) -> Blob:
        fields = self._fields(record, _StorageInfo)
        file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if type(file) is not str or file not in self._files:
            self._check_file(file)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            got = f"{shown(offset)} and {shown(length)}"
            self._fail(f"a place in {file} as numbers of bytes", got)

        transforms = fields.get("transform_descriptors") or []
        for name in self._expect(transforms, list, "transform_descriptors"):
            self._expect(name, str, "a transform's descriptor")
        return Blob(file, offset, length, transforms)

    def _check_file(self, file: Any) -> None:
        self._expect(file, str, "the name of a data file")
        # A path out of the directory, in the syntax of any system.
        paths = (PurePosixPath(file), PureWindowsPath(file))
        if not file or "\0" in file or any(path.anchor or ".." in path.parts for path in paths):
            raise CheckpointError(
                f"Expected data files in the directory of {self._source}, got {shown(file)}."
            )
        self._files.add(file)

    def _size(self, found: Any, key: str) -> tuple[int, ...]:
        if type(found) is not torch.Size or min(found, default=0) < 0:
            self._fail(f"sizes or offsets of {key}, of at least 0", shown(found))
        return tuple(found)

    def _fields(self, record: Any, kind: type) -> dict[str, Any]:
        """The fields of a record of `kind`, if its class has them."""
        if type(record) is not _RECORDS[kind]:
            self._fail(f"a {kind.__name__}", f"a {type(record).__name__}")

        state = record.state
        if kind is dcp.TensorProperties:
            state = {"state": state}  # DCP pickles these as a tuple
        fields: Any = self._expect(
            {} if state is None else state, dict, f"the fields of a {kind.__name__}"
        )
        needed, optional = _FIELDS[kind]
        # Names may be anything; names that equal the required ones are strings.
        if fields.keys() != needed:
            for name in fields:
                self._expect(name, str, f"the name of a field of a {kind.__name__}")
            if not needed <= fields.keys() <= needed | optional:
                self._fail(f"the fields {sorted(needed)} of a {kind.__name__}", shown([*fields]))
        return cast("dict[str, Any]", fields)

    def _expect(self, found: Any, kind: type, what: str) -> Any:
        if type(found) is not kind:
            self._fail(f"{what} as {kind.__name__}", f"a {type(found).__name__}")
        return found
