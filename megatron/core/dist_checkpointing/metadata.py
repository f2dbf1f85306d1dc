"""The `.metadata` of a DCP checkpoint: composed from arithmetic, read without running anything, and checked for gaps.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: for every tensor its dtype, shape and
chunks, and for every chunk the file and the place in it.

[Note: composing] A checkpoint of a thousand ranks has a hundred thousand chunks. Making four objects for each, only
for `pickle` to take them apart again, takes several times as long as writing down the opcodes, of which there are few:
the pickle begins with everything that is named over and over, and the rest refers to that.

[Note: reading] A pickle is a program. It may name any function of any module and call it, and set attributes of
what it has named. So names are looked up in a list, and what is found there is not the classes of DCP, whose attributes
could be set for the whole process, but blank records that hold what they are given. Only once every field of a record
has been found to be of the right type does it become the object that it stands for.

[Note: coverage] That boxes tile a tensor exactly is proven by their corners, in one pass for any number of dimensions.
A box [a, b) is what remains of +1 at a and -1 at b, summed up from the left; a box in d dimensions has 2^d such
corners, +1 and -1 by turns. Corners of neighbours cancel. What is left of all chunks is exactly the corners of the
tensor if and only if the chunks cover each element once:

    0       4     6       9          chunks [0, 4), [4, 6), [6, 9) of [0, 9)
    +1     -1
           +1    -1
                 +1      -1
    -1                   +1          the tensor's own, subtracted: nothing is left

The first corner that is left over, in the order of rows, is an element that is covered not once: its number says
whether too rarely (-1) or too often.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError

_MAX_CUT_DIMS = 8  # a box cut along so many dimensions has 256 corners


class SavedChunk(NamedTuple):
    """A box of a tensor, and where its blob lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int  # in whose data file
    blob_offset: int
    blob_nbytes: int


class SavedTensor(NamedTuple):
    """A tensor, and all of its chunks on all ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[SavedChunk]


class SavedPlain(NamedTuple):
    """Something that is no tensor, and where its blob lies."""

    key: str
    rank: int
    blob_offset: int
    blob_nbytes: int


def compose_metadata(tensors: Iterable[SavedTensor], plain: Iterable[SavedPlain]) -> bytes:
    """The `.metadata` that DCP would write for these, in their order. See [Note: composing].

    Raises:
        ValueError: if two have the same key.
    """
    saved_tensors, saved_plain = list(tensors), list(plain)
    counts = Counter([tensor.key for tensor in saved_tensors] + [item.key for item in saved_plain])
    repeated = [key for key, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"Expected each key once, got several of {', '.join(repeated)}.")
    return _Composer().compose(saved_tensors, saved_plain)


def nested_path(key: str) -> tuple[str, ...]:
    """Where a key's value stands in the nested dict that DCP gives to those who ask for all of a checkpoint.

    "model.layers.0.weight" is at "layers.0.weight" in "model": names of parameters are not taken apart.
    """
    root, dot, rest = key.partition(".")
    if not dot:
        return (key,)
    if root == "optimizer" and rest.startswith("state."):
        name, dot, state = rest.removeprefix("state.").rpartition(".")
        return (root, "state", name, state) if dot else (root, "state", state)
    if root == "rng":
        return (root, *rest.split(".", 1))
    return (root, rest)


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


def check_coverage(metadata: Metadata, source: str) -> None:
    """Proves that the chunks of every tensor tile it exactly, and that it is known where each blob lies.

    Raises:
        CheckpointDamagedError: for a chunk outside of its tensor, an element that lies in no chunk or in several, or
            a chunk or plain value without a place in a file; with the key and the place.
    """
    stored = {(index.fqn, index.offset) for index in metadata.storage_data}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            _check_tiling(key, entry, source)
            needed: list[torch.Size | None] = [chunk.offsets for chunk in entry.chunks]
        else:
            needed = [None]
        for offsets in needed:
            if (key, offsets) not in stored:
                place = "" if offsets is None else f" at {tuple(offsets)}"
                raise CheckpointDamagedError(f"Expected {source} to say where {key}{place} is stored, got no place.")


# Composing.

_BEGIN_DICT = pickle.EMPTY_DICT + pickle.MARK
_BLANK_OBJECT = pickle.EMPTY_TUPLE + pickle.NEWOBJ
_BEGIN_OBJECT = _BLANK_OBJECT + _BEGIN_DICT
_END_OBJECT = pickle.SETITEMS + pickle.BUILD
_COMPOSED_CLASSES = (
    dcp.ChunkStorageMetadata,
    dcp.TensorStorageMetadata,
    dcp.TensorProperties,
    dcp.BytesStorageMetadata,
    dcp.MetadataIndex,
    _StorageInfo,
    dcp.Metadata,
)
_FIELD_NAMES = (
    *("offsets", "sizes", "properties", "size", "chunks"),
    *("fqn", "offset", "index", "relative_path", "length"),
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
)


def _code_of_int(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(digits)]) + digits


def _code_of_text(value: str) -> bytes:
    content = value.encode()
    return pickle.BINUNICODE + len(content).to_bytes(4, "little") + content


class _Composer:
    """Writes the opcodes of one pickle. Lives for one `compose_metadata`.

    The unpickler numbers what it is told to remember in the order in which it meets it, so opcodes have to be made in
    the order in which they are written.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_remembered = 0
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._files: dict[int, bytes] = {}
        self._dtypes: dict[torch.dtype, bytes] = {}
        # Everything below is a reference to what has been put and dropped at the beginning.
        self._text = {name: self._prepared(_code_of_text(name)) for name in _FIELD_NAMES}
        self._chunk, self._tensor, self._properties, self._bytes, self._index, self._info, self._metadata = (
            self._prepared_class(kind.__module__, kind.__qualname__) for kind in _COMPOSED_CLASSES
        )
        self._size = self._prepared_class("torch", "Size")
        get_layout = self._prepared_class("torch.serialization", "_get_layout")
        self._strided = self._prepared(get_layout + _code_of_text("torch.strided") + pickle.TUPLE1 + pickle.REDUCE)
        encoding = self._prepared_class(dcp._MEM_FORMAT_ENCODING.__module__, dcp._MEM_FORMAT_ENCODING.__qualname__)
        self._contiguous = self._prepared(encoding + _code_of_int(0) + pickle.TUPLE1 + pickle.REDUCE)

    def compose(self, tensors: list[SavedTensor], plain: list[SavedPlain]) -> bytes:
        text, parts = self._text, self._parts
        names = [*(tensor.key for tensor in tensors), *(item.key for item in plain)]
        keys = {name: self._prepared(_code_of_text(name)) for name in names}
        parts += [self._metadata, _BEGIN_OBJECT, text["state_dict_metadata"], _BEGIN_DICT]
        for tensor in tensors:
            parts.append(keys[tensor.key])
            self._add_tensor(tensor)
        for item in plain:
            parts += [keys[item.key], self._bytes, _BLANK_OBJECT]
        parts += [pickle.SETITEMS, text["planner_data"], _BEGIN_DICT]
        for key, code in keys.items():
            parts += [code, pickle.MARK, *map(_code_of_text, nested_path(key)), pickle.TUPLE]
        parts += [pickle.SETITEMS, text["storage_data"], _BEGIN_DICT]
        for tensor in tensors:
            self._add_places(tensor, keys[tensor.key])
        for item in plain:
            parts += [self._index, _BEGIN_OBJECT, text["fqn"], keys[item.key], text["index"], pickle.NONE, _END_OBJECT]
            self._add_place(item.rank, item.blob_offset, item.blob_nbytes)
        parts += [pickle.SETITEMS, text["storage_meta"], pickle.NONE]
        parts += [text["version"], _code_of_text(CURRENT_DCP_VERSION), _END_OBJECT, pickle.STOP]
        body = b"".join(parts)
        return pickle.PROTO + b"\x04" + pickle.FRAME + len(body).to_bytes(8, "little") + body

    def _add_tensor(self, tensor: SavedTensor) -> None:
        text = self._text
        self._parts += [self._tensor, _BEGIN_OBJECT, text["properties"], self._properties_of(tensor.dtype)]
        self._parts += [text["size"], self._size_of(tensor.shape), text["chunks"], pickle.EMPTY_LIST, pickle.MARK]
        size_of = self._size_of
        begin, between = self._chunk + _BEGIN_OBJECT + text["offsets"], text["sizes"]
        for offsets, sizes, *_ in tensor.chunks:
            self._parts += [begin, size_of(offsets), between, size_of(sizes), _END_OBJECT]
        self._parts += [pickle.APPENDS, _END_OBJECT]

    def _add_places(self, tensor: SavedTensor, key: bytes) -> None:
        text = self._text
        begin = self._index + _BEGIN_OBJECT + text["fqn"] + key + text["offset"]
        for i, (offsets, _, rank, blob_offset, blob_nbytes) in enumerate(tensor.chunks):
            self._parts += [begin, self._size_of(offsets), text["index"], _code_of_int(i), _END_OBJECT]
            self._add_place(rank, blob_offset, blob_nbytes)

    def _add_place(self, rank: int, blob_offset: int, blob_nbytes: int) -> None:
        text = self._text
        file = self._files.get(rank)
        if file is None:
            self._files[rank], file = self._remembered(_code_of_text(f"__{rank}_0.distcp"))
        self._parts += [self._info, _BEGIN_OBJECT, text["relative_path"], file, text["offset"]]
        self._parts += [_code_of_int(blob_offset), text["length"], _code_of_int(blob_nbytes), _END_OBJECT]

    def _properties_of(self, dtype: torch.dtype) -> bytes:
        code = self._dtypes.get(dtype)
        if code is None:
            name = _code_of_text("torch") + _code_of_text(str(dtype).removeprefix("torch.")) + pickle.STACK_GLOBAL
            state = [pickle.MARK, name, self._strided, pickle.NEWFALSE, self._contiguous, pickle.NEWFALSE, pickle.TUPLE]
            self._dtypes[dtype], code = self._remembered(
                b"".join([self._properties, pickle.EMPTY_TUPLE, pickle.NEWOBJ, *state, pickle.BUILD])
            )
        return code

    def _size_of(self, sizes: tuple[int, ...]) -> bytes:
        code = self._sizes.get(sizes)
        if code is None:
            integers = b"".join([pickle.MARK, *map(_code_of_int, sizes), pickle.TUPLE])
            self._sizes[sizes], code = self._remembered(self._size + integers + pickle.TUPLE1 + pickle.REDUCE)
        return code

    def _prepared_class(self, module: str, name: str) -> bytes:
        return self._prepared(_code_of_text(module) + _code_of_text(name) + pickle.STACK_GLOBAL)

    def _prepared(self, code: bytes) -> bytes:
        """Has the unpickler make something and set it aside. Returns the opcodes that bring it back."""
        reference, code = self._remembered(code)
        self._parts += [code, pickle.POP]
        return reference

    def _remembered(self, code: bytes) -> tuple[bytes, bytes]:
        """The opcodes that bring back what `code` makes, and those that make it now."""
        number = self._num_remembered
        self._num_remembered += 1
        short = number < 256
        reference = pickle.BINGET + bytes([number]) if short else pickle.LONG_BINGET + number.to_bytes(4, "little")
        return reference, code + pickle.MEMOIZE


# Reading.


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


# Coverage.


def _check_tiling(key: str, tensor: dcp.TensorStorageMetadata, source: str) -> None:
    """Proves that the chunks are a tiling. See [Note: coverage]."""
    cut_dims = _cut_dims(key, tensor, source)
    if 0 in tensor.size:
        return
    signs = [math.prod(choice) for choice in itertools.product((1, -1), repeat=len(cut_dims))]
    own_corners = itertools.product(*((0, tensor.size[dim]) for dim in cut_dims))
    left = {corner: -sign for corner, sign in zip(own_corners, signs, strict=True)}
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        corners = itertools.product(*[(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut_dims])
        for corner, sign in zip(corners, signs, strict=True):
            left[corner] = left.get(corner, 0) + sign
    wrong = min((corner for corner, number in left.items() if number), default=None)
    if wrong is not None:
        place = [0] * len(tensor.size)
        for dim, offset in zip(cut_dims, wrong, strict=True):
            place[dim] = offset
        raise CheckpointDamagedError(
            f"Expected each element of {key} in one chunk in {source}, got the one at {tuple(place)} in "
            f"{left[wrong] + 1}."
        )


def _cut_dims(key: str, tensor: dcp.TensorStorageMetadata, source: str) -> list[int]:
    """The dimensions that not every chunk has all of. CheckpointDamagedError for a chunk that is not in the tensor."""
    shape = tuple(tensor.size)
    cut_dims: set[int] = set()
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            _fail_outside(key, shape, chunk, source)
        for dim, size in enumerate(chunk.sizes):
            if size != shape[dim]:
                cut_dims.add(dim)
            if chunk.offsets[dim] + size > shape[dim]:
                _fail_outside(key, shape, chunk, source)
    if len(cut_dims) > _MAX_CUT_DIMS:
        raise CheckpointDamagedError(
            f"Expected {key} in {source} to be cut along at most {_MAX_CUT_DIMS} dimensions, got {len(cut_dims)}."
        )
    return sorted(cut_dims)


def _fail_outside(key: str, shape: tuple[int, ...], chunk: dcp.ChunkStorageMetadata, source: str) -> NoReturn:
    raise CheckpointDamagedError(
        f"Expected chunks of {key} inside {shape} in {source}, got {tuple(chunk.sizes)} at {tuple(chunk.offsets)}."
    )
