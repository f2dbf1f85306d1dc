"""The `.metadata` of a DCP checkpoint, composed from arithmetic.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: for every tensor its
dtype, shape and chunks, and for every chunk the file and the place in it.

[Note: composing] A checkpoint of a thousand ranks has a hundred thousand chunks. Making four
objects for each, only for `pickle` to take them apart again, takes several times as long as writing
the opcodes directly. Few are needed: the pickle starts with all repeated objects, and the rest
refers to them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from megatron.core.dist_checkpointing.format.index import blob_place
from megatron.core.dist_checkpointing.format.manifest import dtype_name
from megatron.core.dist_checkpointing.layout.saved import SavedTensor


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
            parts += [self._index, _BEGIN_OBJECT, text["fqn"], keys[item.key]]
            parts += [text["index"], pickle.NONE, _END_OBJECT]
            (chunk,) = item.chunks
            self._add_place(chunk.file, chunk.offset, item.nbytes)

        parts += [pickle.SETITEMS, text["storage_meta"], pickle.NONE]
        parts += [text["version"], _code_of_text(CURRENT_DCP_VERSION), _END_OBJECT, pickle.STOP]
        # One frame around all: `pickle` starts a new one every 64 KiB.
        body = b"".join(parts)
        return pickle.PROTO + b"\x04" + pickle.FRAME + len(body).to_bytes(8, "little") + body

    def _add_tensor(self, tensor: SavedTensor) -> None:
        text, parts, size_of = self._text, self._parts, self._size_of
        properties = self._properties_of(tensor.dtype)
        parts += [self._tensor, _BEGIN_OBJECT, text["properties"], properties]
        parts += [text["size"], size_of(tensor.shape)]
        parts += [text["chunks"], pickle.EMPTY_LIST, pickle.MARK]

        begin, between = self._chunk + _BEGIN_OBJECT + text["offsets"], text["sizes"]
        for (offsets, sizes), *_ in tensor.chunks:
            parts += [begin, size_of(offsets), between, size_of(sizes), _END_OBJECT]
        parts += [pickle.APPENDS, _END_OBJECT]

    def _add_places(self, tensor: SavedTensor, key: bytes) -> None:
        begin = self._index + _BEGIN_OBJECT + self._text["fqn"] + key + self._text["offset"]
        number = self._text["index"]
        for i, chunk in enumerate(tensor.chunks):
            offsets = self._size_of(chunk.box.offsets)
            self._parts += [begin, offsets, number, _code_of_int(i), _END_OBJECT]
            self._add_place(chunk.file, *blob_place(tensor, chunk))

    def _add_place(self, file: str, blob_offset: int, blob_nbytes: int) -> None:
        text, parts = self._text, self._parts
        # A file's name is written once, and recalled later.
        name = self._files.get(file)
        if name is None:
            self._files[file], name = self._remembered(_code_of_text(file))
        parts += [self._info, _BEGIN_OBJECT, text["relative_path"], name]
        parts += [text["offset"], _code_of_int(blob_offset)]
        parts += [text["length"], _code_of_int(blob_nbytes), _END_OBJECT]

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
        # Most sizes and offsets are those of other chunks.
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
