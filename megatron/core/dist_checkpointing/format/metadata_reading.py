"""The `.metadata` of a DCP checkpoint, ours or one that DCP wrote, read without running anything.

[Note: reading] `safe_pickle` reads the pickle into records, which take the place of DCP's objects.
What a load needs is taken from their fields once these have been found to be of the right type.
Everything else is left alone: paths in the dict that was saved, memory formats, versions.

A small pickle can refer to one long list from a hundred thousand records. So what records share is
checked once. Keys and sizes have a bounded length, because the readers of a checkpoint walk them
for every chunk.
"""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.core.dist_checkpointing.errors import CheckpointError, UntrustedReader, shown
from megatron.core.dist_checkpointing.format.index import MAX_KEY_CHARS
from megatron.core.dist_checkpointing.format.manifest import DTYPES, writer_of
from megatron.core.dist_checkpointing.format.safe_pickle import (
    Call,
    Record,
    RecordClass,
    read_pickle,
    size_of,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor


class Blob(NamedTuple):
    """Where DCP has put what `torch.save` made of a chunk, or of plain data."""

    file: str  # in the checkpoint's folder
    offset: int  # in bytes
    nbytes: int
    transforms: list[str]  # by extensions of DCP, after `torch.save`


class DcpIndex(NamedTuple):
    """What a `.metadata` says, each dict in its order."""

    tensors: dict[str, SavedTensor]  # a chunk's offset is that of its blob
    blobs: dict[tuple[str, tuple[int, ...]], Blob]  # of chunks, by key and the box's offsets
    plain: dict[str, Blob]


def parse_metadata(content: bytes, source: str) -> DcpIndex:
    """Reads a `.metadata`, ours or one that DCP wrote. See [Note: reading].

    Args:
        source: the file's name, for messages.

    Raises:
        CheckpointDamagedError: if it is not a whole `Metadata` with fields of the right types, and
            a place in a file for each chunk and all plain data.
        CheckpointError: if it names anything but DCP's own classes, or files outside of its folder.
    """
    found = read_pickle(content, source, _ADMITTED, "the classes of DCP's metadata")
    return _RecordReader(source).index(found)


# The fields that stand in a pickle of each class, and those that may. None of the last is read.
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
_unread = Call(lambda *_: None)
# All that a pickle of metadata may name.
_ADMITTED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): RecordClass(kind) for kind in _FIELDS},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): Call(size_of),
    (dcp.__name__, dcp._MEM_FORMAT_ENCODING.__qualname__): _unread,
    ("torch.serialization", "_get_layout"): _unread,
    # The folder that DCP was told to save in. Its class has moved between versions of Python.
    ("pathlib", "PosixPath"): _unread,
    ("pathlib._local", "PosixPath"): _unread,
}


class _RecordReader(UntrustedReader):
    """Takes from records what a load needs, if all of that has the right type."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        # What has been checked. The pickle's value keeps all of it alive, so no id is used twice.
        self._files: set[str] = set()
        self._ids: set[int] = set()  # of sizes and lists

    def index(self, record: Any) -> DcpIndex:
        fields = self._fields(record, dcp.Metadata)
        entries = self._expect(fields["state_dict_metadata"], dict, "state_dict_metadata")
        records = self._expect(fields["storage_data"], dict, "storage_data")
        places = {self._place(index): self._blob(blob) for index, blob in records.items()}
        # Two records are different keys of a dict, even if they stand for the same chunk.
        if len(places) != len(records):
            got = f"{len(records)} places for {len(places)} chunks"
            self._fail("one place for each chunk", got)

        found = DcpIndex({}, {}, {})
        num_chunks = 0
        for key, entry in entries.items():
            self._check_key(key)
            if type(entry) is Record and entry.kind is dcp.BytesStorageMetadata:
                self._fields(entry, dcp.BytesStorageMetadata)
                found.plain[key] = self._blob_at(places, key, None)
                continue
            # A million tensors could refer to one list of chunks; but each chunk has its own place.
            fields = self._fields(entry, dcp.TensorStorageMetadata)
            records = self._expect(fields["chunks"], list, f"the chunks of {key}")
            num_chunks += len(records)
            if num_chunks > len(places):
                self._fail(f"no more chunks than the {len(places)} places", "more")
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
        self._check_key(key)
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
        if id(transforms) not in self._ids:
            for name in self._expect(transforms, list, "transform_descriptors"):
                self._expect(name, str, "a transform's descriptor")
            self._ids.add(id(transforms))
        return Blob(file, offset, length, transforms)

    def _check_file(self, file: Any) -> None:
        self._expect(file, str, "the name of a data file")
        # A path out of the folder of either kind of system, whichever this one is.
        paths = (PurePosixPath(file), PureWindowsPath(file))
        if not file or "\0" in file or any(path.anchor or ".." in path.parts for path in paths):
            raise CheckpointError(
                f"Expected data files in the folder of {self._source}, got {shown(file)}."
            )
        self._files.add(file)

    def _size(self, found: Any, key: str) -> tuple[int, ...]:
        # Most sizes are shared by many chunks.
        if id(found) not in self._ids:
            if type(found) is not torch.Size or min(found, default=0) < 0:
                wanted = f"sizes and offsets of {key} as torch.Size of at least 0"
                self._fail(wanted, shown(found))
            self._ids.add(id(found))
        return tuple(found)

    def _check_key(self, found: Any) -> None:
        if len(self._expect(found, str, "a key")) > MAX_KEY_CHARS:
            self._fail(f"keys of at most {MAX_KEY_CHARS} characters", f"one of {len(found)}")

    def _fields(self, record: Any, kind: type) -> dict[str, Any]:
        """The fields of a record of `kind`, if they are those of its class."""
        if type(record) is not Record or record.kind is not kind:
            self._fail(f"a {kind.__name__}", f"a {_kind_name(record)}")

        state = record.state
        if kind is dcp.TensorProperties:
            state = {"state": state}  # DCP pickles these as a tuple
        fields: Any = self._expect(
            {} if state is None else state, dict, f"the fields of a {kind.__name__}"
        )
        needed, optional = _FIELDS[kind]
        # Names may be anything; those that are equal to the needed ones are strings.
        if fields.keys() != needed:
            for name in fields:
                self._expect(name, str, f"the name of a field of a {kind.__name__}")
            if not needed <= fields.keys() <= needed | optional:
                self._fail(f"the fields {sorted(needed)} of a {kind.__name__}", shown([*fields]))
        return cast("dict[str, Any]", fields)

    def _expect(self, found: Any, kind: type, what: str) -> Any:
        if type(found) is not kind:
            self._fail(f"{what} as {kind.__name__}", f"a {_kind_name(found)}")
        return found


def _kind_name(found: object) -> str:
    return found.kind.__name__ if isinstance(found, Record) else type(found).__name__
