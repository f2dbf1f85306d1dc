"""The `.metadata` of a DCP checkpoint, ours or one that DCP wrote, read without running anything.

[Note: reading] A pickle is a program. It may name any function of any module and call it, and set attributes of
what it has named. So names are looked up in a list, and what is found there is not the classes of DCP, whose attributes
could be set for the whole process, but blank records that hold what they are given. Only once every field of a record
has been found to be of the right type does it become the object that it stands for.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError


def parse_metadata(content: bytes, source: str) -> Metadata:
    """Reads a `.metadata`, ours or one that DCP wrote, without running anything. See [Note: reading].

    Args:
        source: the file's name, for messages.

    Raises:
        CheckpointDamagedError: if it is not a whole `Metadata` whose fields have the types they should have.
        CheckpointError: if it names anything but DCP's own classes, or files outside of its folder.
    """
    stream = io.BytesIO(content)
    try:
        found = _SafeUnpickler(stream, source).load()
    except CheckpointError:
        raise
    except Exception as error:  # unpickling raises anything: IndexError, UnicodeDecodeError, MemoryError ...
        raise CheckpointDamagedError(
            f"Expected a pickle of checkpoint metadata in {source}, got {type(error).__name__}: {error}."
        ) from error
    if stream.tell() != len(content):
        raise CheckpointDamagedError(
            f"Expected {source} to end with its pickle at byte {stream.tell()}, got {len(content)} bytes."
        )
    return _RecordReader(source).metadata(found)


class _Sealed(type):
    """The type of classes whose attributes cannot be set."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"Expected {cls.__name__} to be left as it is, got a value for {name}.")


def _keep_state(record: Any, state: object) -> None:
    record.state = state


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
# What stands for each class until its fields have been found right: an object that holds anything.
_RECORDS = {kind: _Sealed(f"Blank{kind.__name__}", (), {}) for kind in _FIELDS}
# DCP pickles these as a tuple.
_RECORDS[dcp.TensorProperties] = _Sealed("BlankTensorProperties", (), {"__setstate__": _keep_state})


class _Call(metaclass=_Sealed):
    """A function that pickles of metadata name; without attributes that could be set."""

    __slots__ = ("_function",)
    _function: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError(f"Expected a function to be left as it is, got a value for {name}.")

    def __call__(self, *args: object) -> object:
        return self._function(*args)


_MEMORY_FORMATS = {
    dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value: torch.contiguous_format,
    dcp._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value: torch.channels_last,
    dcp._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value: torch.preserve_format,
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# All that a pickle of metadata may name.
_ADMITTED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): record for kind, record in _RECORDS.items()},
    (dcp._MEM_FORMAT_ENCODING.__module__, dcp._MEM_FORMAT_ENCODING.__qualname__): _Call(_MEMORY_FORMATS.__getitem__),
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _Call({"torch.strided": torch.strided}.__getitem__),
    # The folder that DCP was told to save in: the class's home depends on the version of Python.
    ("pathlib", "PosixPath"): _Call(PurePosixPath),
    ("pathlib._local", "PosixPath"): _Call(PurePosixPath),
}


class _SafeUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, source: str) -> None:
        super().__init__(stream)
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise CheckpointError(
                f"Expected nothing but the classes of DCP's metadata in {self._source}, got {module}.{name}."
            ) from None


class _RecordReader:
    """Turns records into the objects that they stand for, if all of their fields are of the right type.

    A record that is referred to from several places has become its object when it is met again, and an object is never
    anything but a record that has been found right.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._files: set[str] = set()  # whose names have been found right

    def metadata(self, record: Any) -> Metadata:
        fields = self._fields(record, dcp.Metadata)
        entries = self._expect(fields["state_dict_metadata"], dict, "state_dict_metadata")
        places = self._expect(fields["storage_data"], dict, "storage_data")
        return Metadata(
            state_dict_metadata={self._expect(key, str, "a key"): self._entry(entries[key], key) for key in entries},
            planner_data=self._planner_data(fields.get("planner_data")),
            storage_data=self._storage_data(places),
            storage_meta=self._storage_meta(fields.get("storage_meta")),
            version=self._expect_or_none(fields.get("version"), str, "version"),
        )

    def _entry(self, record: Any, key: str) -> dcp.STORAGE_TYPES:
        if type(record) is _RECORDS[dcp.BytesStorageMetadata]:
            self._fields(record, dcp.BytesStorageMetadata)
            return dcp.BytesStorageMetadata()
        fields = self._fields(record, dcp.TensorStorageMetadata)
        chunks = self._expect(fields["chunks"], list, f"the chunks of {key}")
        return dcp.TensorStorageMetadata(
            properties=self._properties(fields["properties"], key),
            size=self._size(fields["size"], key),
            chunks=[self._chunk(chunk, key) for chunk in chunks],
        )

    def _chunk(self, record: Any, key: str) -> dcp.ChunkStorageMetadata:
        if type(record) is not dcp.ChunkStorageMetadata:
            fields = self._fields(record, dcp.ChunkStorageMetadata)
            self._size(fields["offsets"], key)
            self._size(fields["sizes"], key)
            record.__class__ = dcp.ChunkStorageMetadata
        return cast(dcp.ChunkStorageMetadata, record)

    def _properties(self, record: Any, key: str) -> dcp.TensorProperties:
        fields = self._fields(record, dcp.TensorProperties)
        state = self._expect(fields["state"], tuple, f"the properties of {key}")
        names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
        kinds = (torch.dtype, torch.layout, bool, torch.memory_format, bool)
        if len(state) != len(kinds):
            self._fail(f"{len(kinds)} properties of {key}", f"{len(state)}")
        for value, kind, name in zip(state, kinds, names, strict=True):
            self._expect(value, kind, f"{name} of {key}")
        return dcp.TensorProperties(*state)

    def _storage_data(self, places: dict[Any, Any]) -> dict[dcp.MetadataIndex, _StorageInfo]:
        found = {self._index(index): self._info(info) for index, info in places.items()}
        if len(found) != len(places):
            self._fail("one place for each chunk", f"{len(places)} places for {len(found)} chunks")
        return found

    def _index(self, record: Any) -> dcp.MetadataIndex:
        if type(record) is not dcp.MetadataIndex:
            fields = self._fields(record, dcp.MetadataIndex)
            key = self._expect(fields["fqn"], str, "fqn")
            self._expect_or_none(fields["index"], int, f"the index of a chunk of {key}")
            if fields.get("offset") is not None:
                self._size(fields["offset"], key)
            record.__class__ = dcp.MetadataIndex
        return cast(dcp.MetadataIndex, record)

    def _info(self, record: Any) -> _StorageInfo:
        if type(record) is not _StorageInfo:
            fields = self._fields(record, _StorageInfo)
            file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
            if type(file) is not str or file not in self._files:
                self._check_file(file)
            if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
                self._fail(f"a place in {file} as numbers of bytes", f"{offset!r:.40} and {length!r:.40}")
            for name in self._expect_or_none(fields.get("transform_descriptors"), list, "transform_descriptors") or []:
                self._expect(name, str, "a transform's descriptor")
            record.__class__ = _StorageInfo
        return cast(_StorageInfo, record)

    def _check_file(self, file: Any) -> None:
        self._expect(file, str, "the name of a data file")
        paths = (PurePosixPath(file), PureWindowsPath(file))
        if not file or "\0" in file or any(path.anchor or ".." in path.parts for path in paths):
            raise CheckpointError(f"Expected data files in the folder of {self._source}, got {file!r}.")
        self._files.add(file)

    def _planner_data(self, found: Any) -> dict[str, tuple[str | int, ...]] | None:
        for key, path in (self._expect_or_none(found, dict, "planner_data") or {}).items():
            self._expect(key, str, "a key of planner_data")
            for part in self._expect(path, tuple, f"the path of {key}"):
                if type(part) is not str:
                    self._expect(part, int, f"a part of the path of {key}")
        return cast("dict[str, tuple[str | int, ...]] | None", found)

    def _storage_meta(self, record: Any) -> dcp.StorageMeta | None:
        if record is None:
            return None
        fields = self._fields(record, dcp.StorageMeta)
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
            self._fail(f"sizes and offsets of {key} as torch.Size of at least 0", f"{found!r:.40}")
        return found

    def _fields(self, record: Any, kind: type) -> dict[str, Any]:
        """What a blank record that stands for an object of `kind` holds, if that is what it should."""
        if type(record) is not _RECORDS[kind]:
            self._fail(f"a {kind.__name__}", f"a {type(record).__name__}")
        fields: dict[str, Any] = record.__dict__
        needed, optional = _FIELDS[kind]
        for name in fields:
            # A record may be among them, which cannot be looked up any more once it has become an object.
            self._expect(name, str, f"the name of a field of a {kind.__name__}")
        if fields.keys() != needed and not needed <= fields.keys() <= needed | optional:
            self._fail(f"the fields {sorted(needed)} of a {kind.__name__}", f"{list(fields)!r:.200}")
        return fields

    def _expect_or_none(self, found: Any, kind: type, what: str) -> Any:
        return None if found is None else self._expect(found, kind, what)

    def _expect(self, found: Any, kind: type, what: str) -> Any:
        if type(found) is not kind:
            self._fail(f"{what} as {kind.__name__}", f"a {type(found).__name__}")
        return found

    def _fail(self, expected: str, got: str) -> NoReturn:
        raise CheckpointDamagedError(f"Expected {expected} in {self._source}, got {got}.")
