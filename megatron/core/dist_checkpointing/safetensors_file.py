"""The safetensors format: tensors by name and strings by name in one file, without a pickle.

    8 bytes     length of the header, little-endian
    header      JSON, filled up with spaces: {"__metadata__": {name: string},
                name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    data        the tensors, row-major, end to end; offsets count from here

https://huggingface.co/docs/safetensors. A file is written piece by piece, so that no tensor need be in memory as a
whole, and read by mapping it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError

_METADATA = "__metadata__"
_ALIGNMENT = 8  # bytes: of the data's beginning
_MAX_HEADER_NBYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorShape(NamedTuple):
    """What the header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def data_order(tensors: Mapping[str, TensorShape]) -> list[str]:
    """The names in the order in which the data stands: wide dtypes first, so that each lies on its own size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_header(stream: BinaryIO, tensors: Mapping[str, TensorShape], metadata: Mapping[str, str]) -> None:
    """Writes everything before the data, which must follow in the order of `data_order`.

    Raises:
        ValueError: for a dtype that the format does not have, or too many names.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name in data_order(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or name == _METADATA:
            raise ValueError(f"Expected a dtype and a name that safetensors has, got {tensor.dtype} for {name!r}.")
        end = begin + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    if len(content) > _MAX_HEADER_NBYTES:
        raise ValueError(f"Expected a header of at most {_MAX_HEADER_NBYTES} bytes, got {len(content)}.")
    stream.write(len(content).to_bytes(8, "little") + content)


class SafetensorsContent(NamedTuple):
    """What is in a file."""

    tensors: dict[str, torch.Tensor]  # over the mapped file: read when they are used
    metadata: dict[str, str]


def read_safetensors(path: Path) -> SafetensorsContent:
    """Maps a file.

    Raises:
        CheckpointError: if it is not of the format.
        OSError: if it cannot be read.
    """
    with path.open("rb") as stream:
        prefix = stream.read(8)
        size = path.stat().st_size
        header_nbytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_nbytes > min(size - 8, _MAX_HEADER_NBYTES):
            raise CheckpointError(f"Expected a safetensors header in {path}, got {size} bytes that begin {prefix!r}.")
        header, metadata = _parse_header(stream.read(header_nbytes), path)
        begin = 8 + header_nbytes
        _check_places(header, size - begin, path)
        # Private, since a tensor may be written to; nothing of it reaches the file.
        memory = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY)
    tensors = {name: _tensor(memory, begin + start, tensor) for name, (tensor, start) in header.items()}
    return SafetensorsContent(tensors, metadata)


def _tensor(memory: mmap.mmap, begin: int, tensor: TensorShape) -> torch.Tensor:
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=math.prod(tensor.shape), offset=begin)
    return flat.reshape(tensor.shape)


def _parse_header(content: bytes, path: Path) -> tuple[dict[str, tuple[TensorShape, int]], dict[str, str]]:
    """Tensors with the beginnings of their data, and the metadata."""
    try:
        header = json.loads(content)
        metadata = {str(name): str(value) for name, value in header.pop(_METADATA, {}).items()}
        tensors = {name: _parse_tensor(entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"Expected a safetensors header in {path}, got {type(error).__name__}: {error}."
        ) from error
    return tensors, metadata


def _parse_tensor(entry: dict[str, Any]) -> tuple[TensorShape, int]:
    tensor = TensorShape(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*tensor.shape, begin, end)):
        raise ValueError(f"{entry} has numbers that are none")
    if end - begin != tensor.nbytes:
        raise ValueError(f"{entry} has {end - begin} bytes for {tensor.nbytes}")
    return tensor, begin


def _check_places(header: Mapping[str, tuple[TensorShape, int]], nbytes: int, path: Path) -> None:
    """The data of all tensors fills the rest of the file, without gaps and overlaps."""
    end = 0
    for tensor, begin in sorted(header.values(), key=lambda place: (place[1], place[0].nbytes)):
        if begin != end:
            raise CheckpointError(f"Expected data at byte {end} of those in {path}, got {begin}.")
        end += tensor.nbytes
    if end != nbytes:
        raise CheckpointError(f"Expected {end} bytes of data in {path}, got {nbytes}.")
