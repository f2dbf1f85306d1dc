"""The `.metadata` of a DCP checkpoint, composed from arithmetic, and read without running it.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: for every tensor its
dtype, shape and chunks, and for every chunk the file and the place in it.

[Note: composing] A checkpoint of a thousand ranks has a hundred thousand chunks. Making four
objects for each, only for `pickle` to take them apart again, takes several times as long as writing
the opcodes directly. Few are needed: the pickle starts with all repeated objects, and the rest
refers to them.

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
from collections.abc import Iterable
from functools import cache
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    fail,
    reason,
    shown,
)
from megatron.core.dist_checkpointing.format.blob import blob_layout
from megatron.core.dist_checkpointing.format.manifest import DTYPES, dtype_name, writer_of
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import Division
from megatron.core.dist_checkpointing.layout.saved import ChunkColumns, SavedChunk, SavedTensor


def compose_metadata(tensors: Iterable[SavedTensor], plain: Iterable[SavedTensor] = ()) -> bytes:
    """The `.metadata` that DCP would write for these, in their order. See [Note: composing].

    Args:
        tensors: tensors with all chunks in `.distcp` files.
        plain: see layout/saved.py.
    """
    return _Composer().compose(list(tensors), list(plain))


def nested_path(key: str) -> tuple[str, ...]:
    """The path of a key in the nested dict that DCP makes of a whole checkpoint.

    "model.layers.0.weight" is at "layers.0.weight" in "model": names of parameters stay whole.
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
    # Always four bytes for small numbers. `pickle` writes shorter opcodes for some of them, but
    # its readers take either.
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(digits)]) + digits


def _code_of_text(value: str) -> bytes:
    content = value.encode()
    return pickle.BINUNICODE + len(content).to_bytes(4, "little") + content


class _Composer:
    """Writes the opcodes of one pickle. Lives for one `compose_metadata`.

    The unpickler numbers memoized objects in order, so opcodes must be created in the order in
    which they are written.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_remembered = 0
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._files: dict[str, bytes] = {}
        self._dtypes: dict[torch.dtype, bytes] = {}
        # By the division of chunks; all of them exist until the end.
        self._box_codes: dict[int, bytes] = {}
        self._place_codes: dict[tuple[int, torch.dtype], list[tuple[bytes, int, bytes]]] = {}

        # The pickle first creates and drops these objects, and refers to them later. Their order
        # determines the bytes of every `.metadata`.
        self._text = {name: self._prepared(_code_of_text(name)) for name in _FIELD_NAMES}
        classes = [self._prepared_class(c.__module__, c.__qualname__) for c in _COMPOSED_CLASSES]
        self._chunk, self._tensor, self._properties, self._bytes = classes[:4]
        self._index, self._info, self._metadata = classes[4:]
        self._size = self._prepared_class("torch", "Size")
        call = pickle.TUPLE1 + pickle.REDUCE
        get_layout = self._prepared_class("torch.serialization", "_get_layout")
        self._strided = self._prepared(get_layout + _code_of_text("torch.strided") + call)
        encoding = dcp._MEM_FORMAT_ENCODING
        encode = self._prepared_class(encoding.__module__, encoding.__qualname__)
        self._contiguous = self._prepared(encode + _code_of_int(0) + call)

    def compose(self, tensors: list[SavedTensor], plain: list[SavedTensor]) -> bytes:
        text, parts = self._text, self._parts
        names = [*(tensor.key for tensor in tensors), *(item.key for item in plain)]
        keys = {name: self._prepared(_code_of_text(name)) for name in names}

        parts += [self._metadata, _BEGIN_OBJECT, text["state_dict_metadata"], _BEGIN_DICT]
        columns = [ChunkColumns.of(tensor.chunks) for tensor in tensors]
        for tensor, own in zip(tensors, columns, strict=True):
            parts.append(keys[tensor.key])
            self._add_tensor(tensor, own)
        for item in plain:
            parts += [keys[item.key], self._bytes, _BLANK_OBJECT]

        parts += [pickle.SETITEMS, text["planner_data"], _BEGIN_DICT]
        code_of_text = cache(_code_of_text)  # names of parameters are in the paths of their states
        for key, code in keys.items():
            parts += [code, pickle.MARK, *map(code_of_text, nested_path(key)), pickle.TUPLE]

        parts += [pickle.SETITEMS, text["storage_data"], _BEGIN_DICT]
        for tensor, own in zip(tensors, columns, strict=True):
            self._add_places(tensor, own, keys[tensor.key])
        for item in plain:
            parts += [self._index, _BEGIN_OBJECT, text["fqn"], keys[item.key]]
            parts += [text["index"], pickle.NONE, _END_OBJECT]
            (chunk,) = item.chunks
            parts += [self._info_until_offset(chunk.file), _code_of_int(chunk.offset)]
            parts += [text["length"], _code_of_int(item.nbytes), _END_OBJECT]

        parts += [pickle.SETITEMS, text["storage_meta"], pickle.NONE]
        parts += [text["version"], _code_of_text(CURRENT_DCP_VERSION), _END_OBJECT, pickle.STOP]
        # One frame around all: `pickle` starts a new one every 64 KiB.
        body = b"".join(parts)
        return pickle.PROTO + b"\x04" + pickle.FRAME + len(body).to_bytes(8, "little") + body

    def _add_tensor(self, tensor: SavedTensor, columns: ChunkColumns) -> None:
        text, parts, size_of = self._text, self._parts, self._size_of
        properties = self._properties_of(tensor.dtype)
        parts += [self._tensor, _BEGIN_OBJECT, text["properties"], properties]
        parts += [text["size"], size_of(tensor.shape)]
        parts += [text["chunks"], pickle.EMPTY_LIST, pickle.MARK]
        parts += [self._boxes(columns.division), pickle.APPENDS, _END_OBJECT]

    def _boxes(self, division: Division) -> bytes:
        if id(division) in self._box_codes:
            return self._box_codes[id(division)]

        num_before, size_of = self._num_remembered, self._size_of
        begin, between = self._chunk + _BEGIN_OBJECT + self._text["offsets"], self._text["sizes"]
        boxes = (
            begin + size_of(offsets) + between + size_of(sizes) + _END_OBJECT
            for offsets, sizes in division.boxes
        )
        found = b"".join(boxes)
        # Written again unchanged, once it creates no further objects.
        if self._num_remembered == num_before:
            self._box_codes[id(division)] = found
        return found

    def _add_places(self, tensor: SavedTensor, columns: ChunkColumns, key: bytes) -> None:
        begin = self._index + _BEGIN_OBJECT + self._text["fqn"] + key + self._text["offset"]
        around = self._around_offsets(tensor.dtype, columns.division)
        chunks = zip(around, columns.offsets, strict=True)
        self._parts += [
            begin + between + (offset - before).to_bytes(8, "little") + behind
            for (between, before, behind), offset in chunks
        ]

    def _around_offsets(
        self, dtype: torch.dtype, division: Division
    ) -> list[tuple[bytes, int, bytes]]:
        """For each chunk the code between the key of its tensor and the eight bytes of the offset
        of its blob, the bytes of the blob before the data, and the code behind the offset.
        """
        which, num_before = (id(division), dtype), self._num_remembered
        if which in self._place_codes:
            return self._place_codes[which]

        found, columns = [], zip(division.boxes, division.files, strict=True)
        for i, ((offsets, sizes), file) in enumerate(columns):
            header_nbytes, _, nbytes = blob_layout(dtype, sizes)
            index = self._size_of(offsets) + self._text["index"] + _code_of_int(i) + _END_OBJECT
            length = self._text["length"] + _code_of_int(nbytes) + _END_OBJECT
            # Offsets take eight bytes, whatever their size: files are larger than four address.
            between = index + self._info_until_offset(file) + pickle.LONG1 + b"\x08"
            found.append((between, header_nbytes, length))
        if self._num_remembered == num_before:
            self._place_codes[which] = found
        return found

    def _info_until_offset(self, file: str) -> bytes:
        # A file's name is written once, and recalled later.
        name = self._files.get(file)
        if name is None:
            self._files[file], name = self._remembered(_code_of_text(file))
        text = self._text
        return self._info + _BEGIN_OBJECT + text["relative_path"] + name + text["offset"]

    def _properties_of(self, dtype: torch.dtype) -> bytes:
        code = self._dtypes.get(dtype)
        if code is None:
            name = _code_of_text("torch") + _code_of_text(dtype_name(dtype)) + pickle.STACK_GLOBAL
            state = [pickle.MARK, name, self._strided, pickle.NEWFALSE]
            state += [self._contiguous, pickle.NEWFALSE, pickle.TUPLE]
            blank = self._properties + _BLANK_OBJECT
            self._dtypes[dtype], code = self._remembered(b"".join([blank, *state, pickle.BUILD]))
        return code

    def _size_of(self, sizes: tuple[int, ...]) -> bytes:
        # Most sizes and offsets occur in several chunks.
        code = self._sizes.get(sizes)
        if code is None:
            integers = b"".join([pickle.MARK, *map(_code_of_int, sizes), pickle.TUPLE])
            self._sizes[sizes], code = self._remembered(
                self._size + integers + pickle.TUPLE1 + pickle.REDUCE
            )
        return code

    def _prepared_class(self, module: str, name: str) -> bytes:
        return self._prepared(_code_of_text(module) + _code_of_text(name) + pickle.STACK_GLOBAL)

    def _prepared(self, code: bytes) -> bytes:
        """Has the unpickler make and memoize something. Returns the opcodes that recall it."""
        reference, code = self._remembered(code)
        self._parts += [code, pickle.POP]
        return reference

    def _remembered(self, code: bytes) -> tuple[bytes, bytes]:
        """The opcodes that recall an object, and the opcodes that create and memoize it."""
        number = self._num_remembered
        self._num_remembered += 1
        if number < 256:
            return pickle.BINGET + bytes([number]), code + pickle.MEMOIZE
        return pickle.LONG_BINGET + number.to_bytes(4, "little"), code + pickle.MEMOIZE


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
        is_too_large = isinstance(error, MemoryError | RecursionError)
        got = "one that does not fit in memory" if is_too_large else reason(error)
        raise CheckpointDamagedError(f"Expected a pickle in {source}, got {got}.") from None
    # Two writers may have left them. A crafted frame can hold more bytes, which are not read.
    if rest := len(stream.read()):
        raise CheckpointDamagedError(
            f"Expected {source} to end with its pickle, got {rest} further bytes."
        )
    return _RecordReader(source).index(found)


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


_RECORDS: dict[type, Any] = {
    kind: _StandIn(kind.__name__, (_Record,), {"__slots__": ()})
    for kind in (*_COMPOSED_CLASSES, dcp.StorageMeta)
}
# Every name that a pickle of metadata may contain.
_ADMITTED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): record for kind, record in _RECORDS.items()},
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
                f"Expected only the classes of DCP metadata in {self._source}, got {module}.{name}."
            )
        return _ADMITTED[module, name]


class _RecordReader:
    """Converts records to an index, after checking the type of every field that a load reads."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._files: set[str] = set()  # names that have been checked

    def index(self, record: Any) -> DcpIndex:
        fields = self._fields(record, dcp.Metadata, "state_dict_metadata", "storage_data")
        entries = self._expect(fields["state_dict_metadata"], dict, "state_dict_metadata")
        records = self._expect(fields["storage_data"], dict, "storage_data")
        places = {self._place(index): self._blob(blob) for index, blob in records.items()}
        # Two records are different keys of a dict, even for the same chunk.
        if len(places) != len(records):
            got = f"{len(records)} places for {len(places)} chunks"
            fail("one place for each chunk", got, self._source)

        found = DcpIndex({}, {}, {})
        for key, entry in entries.items():
            self._expect(key, str, "a key")
            if type(entry) is _RECORDS[dcp.BytesStorageMetadata]:
                found.plain[key] = self._blob_at(places, key, None)
                continue
            names = ("properties", "size", "chunks")
            fields = self._fields(entry, dcp.TensorStorageMetadata, *names)
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
            fail(f"a place for {key}{at}", "none", self._source)
        return places[key, offsets]

    def _box(self, record: Any, key: str) -> Box:
        fields = self._fields(record, dcp.ChunkStorageMetadata, "offsets", "sizes")
        return Box(self._size(fields["offsets"], key), self._size(fields["sizes"], key))

    def _dtype(self, record: Any, key: str) -> torch.dtype:
        # DCP pickles these as a tuple.
        state = record.state if type(record) is _RECORDS[dcp.TensorProperties] else None
        if type(state) is not tuple or not state or type(state[0]) is not torch.dtype:
            fail(f"properties of {key} with its dtype first", shown(state), self._source)
        dtype: torch.dtype = state[0]
        return dtype

    def _place(self, record: Any) -> tuple[str, tuple[int, ...] | None]:
        fields = self._fields(record, dcp.MetadataIndex, "fqn")
        key, offsets = fields["fqn"], fields.get("offset")
        self._expect(key, str, "a key")
        return key, None if offsets is None else self._size(offsets, key)

    def _blob(self, record: Any) -> Blob:
        fields = self._fields(record, _StorageInfo, "relative_path", "offset", "length")
        file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if type(file) is not str or file not in self._files:
            self._check_file(file)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            got = f"{shown(offset)} and {shown(length)}"
            fail(f"a place in {file} as numbers of bytes", got, self._source)

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
            fail(f"sizes or offsets of {key}, of at least 0", shown(found), self._source)
        return tuple(found)

    def _fields(self, record: Any, kind: type, *needed: str) -> dict[str, Any]:
        """The fields of a record, after checking that it is a `kind` and has the needed fields."""
        if type(record) is not _RECORDS[kind]:
            fail(f"a {kind.__name__}", f"a {type(record).__name__}", self._source)

        fields: dict[str, Any] = self._expect(
            record.state, dict, f"the fields of a {kind.__name__}"
        )
        if missing := [name for name in needed if name not in fields]:
            fail(f"{missing} in a {kind.__name__}", shown([*fields]), self._source)
        return fields

    def _expect(self, found: Any, kind: type, what: str) -> Any:
        if type(found) is not kind:
            fail(f"{what} as {kind.__name__}", f"a {type(found).__name__}", self._source)
        return found
