"""The `.metadata` of a DCP checkpoint, ours or one that DCP wrote, read without running anything.

[Note: reading] `safe_pickle` reads the pickle into records, which take the place of DCP's objects.
An object is made only once every field of its record has been found to be of the right type.

A small pickle can refer to one long list from a hundred thousand records. So lists and tuples are
checked once, however many records share them. Keys, sizes and paths have a bounded length, because
the readers of a checkpoint walk them for every chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    UntrustedReader,
    shown,
)
from megatron.core.dist_checkpointing.format.index import MAX_KEY_CHARS
from megatron.core.dist_checkpointing.format.manifest import DTYPES, writer_of
from megatron.core.dist_checkpointing.format.safe_pickle import (
    Call,
    Record,
    RecordClass,
    read_pickle,
    size_of,
)
from megatron.core.dist_checkpointing.plan.boxes import Box
from megatron.core.dist_checkpointing.plan.coverage import check_coverage
from megatron.core.dist_checkpointing.plan.saved import Chunk, SavedTensor

_MAX_PATH_PARTS = 256  # of the place of a value in the nested dict that was saved
_MAX_FOLDER_CHARS = 4096


def parse_metadata(content: bytes, source: str) -> Metadata:
    """Reads a `.metadata`, ours or one that DCP wrote. See [Note: reading].

    Args:
        source: the file's name, for messages.

    Raises:
        CheckpointDamagedError: if it is not a whole `Metadata` with fields of the right types.
        CheckpointError: if it names anything but DCP's own classes, or files outside of its folder.
    """
    found = read_pickle(content, source, _ADMITTED, "the classes of DCP's metadata")
    return _RecordReader(source).metadata(found)


def parse_covered(content: bytes, source: str) -> Metadata:
    """A `.metadata` whose chunks tile every tensor.

    Raises what `parse_metadata`, `saved_tensors` and `check_coverage` raise.
    """
    metadata = parse_metadata(content, source)
    check_coverage(saved_tensors(metadata, source).values(), source)
    return metadata


def saved_tensors(metadata: Metadata, source: str) -> dict[str, SavedTensor]:
    """The tensors that a `.metadata` describes, in its order. A chunk's offset is that of its blob.

    Raises:
        CheckpointDamagedError: for a chunk, or plain data, without a place in a file.
    """
    # Looked up a hundred thousand times; hashing a `MetadataIndex` runs Python code.
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}

    def place(key: str, offsets: torch.Size | None) -> _StorageInfo:
        if (key, offsets) not in places:
            at = "" if offsets is None else f" at {tuple(offsets)}"
            raise CheckpointDamagedError(
                f"Expected {source} to say where {key}{at} is stored, got no place."
            )
        info: _StorageInfo = places[key, offsets]
        return info

    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, dcp.TensorStorageMetadata):
            place(key, None)
            continue
        chunks = []
        for each in entry.chunks:
            info = place(key, each.offsets)
            box, file = Box(tuple(each.offsets), tuple(each.sizes)), info.relative_path
            chunks.append(Chunk(box, writer_of(file), file, info.offset))
        found[key] = SavedTensor(key, entry.properties.dtype, tuple(entry.size), chunks)
    return found


def plain_keys(metadata: Metadata) -> list[str]:
    """The keys of plain data."""
    entries = metadata.state_dict_metadata.items()
    return [key for key, entry in entries if isinstance(entry, dcp.BytesStorageMetadata)]


# The fields that stand in a pickle of each class, and those that may.
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
        (dcp.StorageMeta, "", "checkpoint_id save_id load_id modules"),
    ]
}


def _looked_up(table: Mapping[Any, object], kind: type) -> Call:
    """A function that a pickle may call to look something up in a table."""

    def look_up(name: object) -> object:
        # The type comes first: hashing an arbitrary object could take for ever.
        if type(name) is not kind:
            raise ValueError(f"Expected a {kind.__name__}, got a {type(name).__name__}.")
        return table[name]

    return Call(look_up)


def _path_of(*parts: object) -> PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise ValueError("Expected a path of strings.")
    if sum(map(len, cast("tuple[str, ...]", parts))) > _MAX_FOLDER_CHARS:
        raise ValueError(f"Expected a path of at most {_MAX_FOLDER_CHARS} characters.")
    return PurePosixPath(*parts)  # type: ignore[arg-type]  # as just checked


_MEMORY_FORMATS = {
    dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value: torch.contiguous_format,
    dcp._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value: torch.channels_last,
    dcp._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value: torch.preserve_format,
}
# All that a pickle of metadata may name.
_ADMITTED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): RecordClass(kind) for kind in _FIELDS},
    (dcp.__name__, dcp._MEM_FORMAT_ENCODING.__qualname__): _looked_up(_MEMORY_FORMATS, int),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): Call(size_of),
    ("torch.serialization", "_get_layout"): _looked_up({"torch.strided": torch.strided}, str),
    # The folder that DCP was told to save in. Its class has moved between versions of Python.
    ("pathlib", "PosixPath"): Call(_path_of),
    ("pathlib._local", "PosixPath"): Call(_path_of),
}


class _RecordReader(UntrustedReader):
    """Turns records into the objects they stand for, if all of their fields have the right type."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        # What has been checked. The pickle's value keeps all of it alive, so no id is used twice.
        self._files: set[str] = set()
        self._size_ids: set[int] = set()
        self._path_ids: set[int] = set()
        self._descriptor_ids: set[int] = set()
        self._num_chunks = 0  # so far, of all tensors
        self._max_chunks = 0

    def metadata(self, record: Any) -> Metadata:
        fields = self._fields(record, dcp.Metadata)
        entries = self._expect(fields["state_dict_metadata"], dict, "state_dict_metadata")
        places = self._expect(fields["storage_data"], dict, "storage_data")
        # A million tensors could refer to one list of chunks; but each chunk needs its own place.
        self._max_chunks = len(places)

        return Metadata(
            state_dict_metadata={self._key(key): self._entry(entries[key], key) for key in entries},
            planner_data=self._planner_data(fields.get("planner_data")),
            storage_data=self._storage_data(places),
            storage_meta=self._storage_meta(fields.get("storage_meta")),
            version=self._expect_or_none(fields.get("version"), str, "version"),
        )

    def _entry(self, record: Any, key: str) -> dcp.STORAGE_TYPES:
        if type(record) is Record and record.kind is dcp.BytesStorageMetadata:
            self._fields(record, dcp.BytesStorageMetadata)
            return dcp.BytesStorageMetadata()

        fields = self._fields(record, dcp.TensorStorageMetadata)
        chunks = fields["chunks"]
        if type(chunks) is not list:
            self._fail(f"the chunks of {key} as list", f"a {_kind_name(chunks)}")
        self._num_chunks += len(chunks)
        if self._num_chunks > self._max_chunks:
            self._fail(f"no more chunks than the {self._max_chunks} places", "more")
        return dcp.TensorStorageMetadata(
            properties=self._properties(fields["properties"], key),
            size=self._size(fields["size"], key),
            chunks=[self._chunk(chunk, key) for chunk in chunks],
        )

    def _chunk(self, record: Any, key: str) -> dcp.ChunkStorageMetadata:
        fields = self._fields(record, dcp.ChunkStorageMetadata)
        # Most sizes are shared by many chunks, and have been checked for another one.
        for size in (fields["offsets"], fields["sizes"]):
            if id(size) not in self._size_ids:
                self._size(size, key)
        return cast(dcp.ChunkStorageMetadata, _object_of(dcp.ChunkStorageMetadata, fields))

    def _properties(self, record: Any, key: str) -> dcp.TensorProperties:
        fields = self._fields(record, dcp.TensorProperties)
        state = fields["state"]
        if type(state) is not tuple:
            self._fail(f"the properties of {key} as tuple", f"a {_kind_name(state)}")
        names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
        kinds = (torch.dtype, torch.layout, bool, torch.memory_format, bool)
        if len(state) != len(kinds):
            self._fail(f"{len(kinds)} properties of {key}", f"{len(state)}")
        for value, kind, name in zip(state, kinds, names, strict=True):
            if type(value) is not kind:
                self._fail(f"{name} of {key} as {kind.__name__}", f"a {_kind_name(value)}")
        return dcp.TensorProperties(*state)

    def _storage_data(self, places: dict[Any, Any]) -> dict[dcp.MetadataIndex, _StorageInfo]:
        found = {self._index(index): self._info(info) for index, info in places.items()}
        # Two records are different keys of a dict, even if they stand for the same chunk.
        if len(found) != len(places):
            self._fail("one place for each chunk", f"{len(places)} places for {len(found)} chunks")
        return found

    def _index(self, record: Any) -> dcp.MetadataIndex:
        fields = self._fields(record, dcp.MetadataIndex)
        key, number, offset = fields["fqn"], fields["index"], fields.get("offset")
        if type(key) is not str or len(key) > MAX_KEY_CHARS:
            self._key(key)
        if number is not None and type(number) is not int:
            self._fail(f"the index of a chunk of {key} as int", f"a {_kind_name(number)}")
        if offset is not None and id(offset) not in self._size_ids:
            self._size(offset, key)
        return cast(dcp.MetadataIndex, _object_of(dcp.MetadataIndex, fields))

    def _info(self, record: Any) -> _StorageInfo:
        fields = self._fields(record, _StorageInfo)
        file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if type(file) is not str or file not in self._files:
            self._check_file(file)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            got = f"{shown(offset)} and {shown(length)}"
            self._fail(f"a place in {file} as numbers of bytes", got)

        descriptors = fields.get("transform_descriptors")
        if descriptors is not None and id(descriptors) not in self._descriptor_ids:
            for name in self._expect(descriptors, list, "transform_descriptors"):
                self._expect(name, str, "a transform's descriptor")
            self._descriptor_ids.add(id(descriptors))
        return cast(_StorageInfo, _object_of(_StorageInfo, fields))

    def _check_file(self, file: Any) -> None:
        self._expect(file, str, "the name of a data file")
        # A path out of the folder of either kind of system, whichever this one is.
        paths = (PurePosixPath(file), PureWindowsPath(file))
        if not file or "\0" in file or any(path.anchor or ".." in path.parts for path in paths):
            raise CheckpointError(
                f"Expected data files in the folder of {self._source}, got {shown(file)}."
            )
        self._files.add(file)

    def _planner_data(self, found: Any) -> dict[str, tuple[str | int, ...]] | None:
        for key, path in (self._expect_or_none(found, dict, "planner_data") or {}).items():
            self._key(key)
            if id(path) not in self._path_ids:
                self._check_path(path, key)
        return cast("dict[str, tuple[str | int, ...]] | None", found)

    def _check_path(self, path: Any, key: str) -> None:
        if type(path) is not tuple or len(path) > _MAX_PATH_PARTS:
            self._fail(f"the path of {key} as a tuple of at most {_MAX_PATH_PARTS}", shown(path))
        for part in path:
            if type(part) is not str:
                self._expect(part, int, f"a part of the path of {key}")
        self._path_ids.add(id(path))

    def _storage_meta(self, record: Any) -> dcp.StorageMeta | None:
        if record is None:
            return None
        fields = self._fields(record, dcp.StorageMeta)
        # DCP stores the folder as it was given: as text, or as a path.
        folder = fields.get("checkpoint_id")
        if isinstance(folder, PurePosixPath):
            folder = str(folder)
        modules = self._expect(fields.get("modules", []), list, "modules")
        for name in modules:
            self._expect(name, str, "a module's name")
        return dcp.StorageMeta(
            checkpoint_id=self._expect_or_none(folder, str, "checkpoint_id"),
            save_id=self._expect_or_none(fields.get("save_id"), str, "save_id"),
            load_id=self._expect_or_none(fields.get("load_id"), str, "load_id"),
            modules=modules,
        )

    def _size(self, found: Any, key: str) -> torch.Size:
        if type(found) is not torch.Size or min(found, default=0) < 0:
            self._fail(f"sizes and offsets of {key} as torch.Size of at least 0", shown(found))
        self._size_ids.add(id(found))
        return found

    def _key(self, found: Any) -> str:
        key: str = self._expect(found, str, "a key")
        if len(key) > MAX_KEY_CHARS:
            self._fail(f"keys of at most {MAX_KEY_CHARS} characters", f"one of {len(key)}")
        return key

    def _fields(self, record: Any, kind: type) -> dict[str, Any]:
        """The fields of a record of `kind`, if they are those of its class."""
        if type(record) is not Record or record.kind is not kind:
            self._fail(f"a {kind.__name__}", f"a {_kind_name(record)}")

        state = record.state
        if kind is dcp.TensorProperties:
            state = {"state": state}  # DCP pickles these as a tuple
        fields: Any = {} if state is None else state
        needed, optional = _FIELDS[kind]
        # Almost all records take this way out. Equal keys are strings, as the names in `needed`.
        if type(fields) is dict and fields.keys() == needed:
            return fields

        self._expect(fields, dict, f"the fields of a {kind.__name__}")
        for name in fields:
            self._expect(name, str, f"the name of a field of a {kind.__name__}")
        if not needed <= fields.keys() <= needed | optional:
            self._fail(f"the fields {sorted(needed)} of a {kind.__name__}", shown(list(fields)))
        return cast("dict[str, Any]", fields)

    def _expect_or_none(self, found: Any, kind: type, what: str) -> Any:
        return None if found is None else self._expect(found, kind, what)

    def _expect(self, found: Any, kind: type, what: str) -> Any:
        if type(found) is not kind:
            self._fail(f"{what} as {kind.__name__}", f"a {_kind_name(found)}")
        return found


def _object_of(kind: type, fields: dict[str, Any]) -> object:
    """An object of a dataclass, without a call of its constructor for hundreds of thousands."""
    made: object = object.__new__(kind)
    vars(made).update(fields)
    return made


def _kind_name(found: object) -> str:
    return found.kind.__name__ if isinstance(found, Record) else type(found).__name__
