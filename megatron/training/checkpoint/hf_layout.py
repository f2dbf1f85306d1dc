"""The byte offset of every tensor in a directory of safetensors files. Integer arithmetic only.

A file is the length of its header in 8 bytes, the header in JSON, and the tensors end to end. The
header is padded with spaces, so that the tensors start on a page. The offsets follow from names,
shapes and dtypes alone, so a rank that holds some rows of a tensor can write them directly. Two
files of at most 40 bytes of tensors, and the offset of rows 2 and 3 of `b`:

    tensors    a fp32 [2, 2]   b bf16 [4, 2]   c fp32 [5]
    files      |8|header|aaaaaaaaaaaaaaaa|bbbbbbbbBBBBBBBB|    |8|header|cccccccccccccccccccc|
                                                  ^ offset of b + 2 rows of 4 bytes

A tensor in a file may consist of several of our tensors, each with a `RowMap` of its rows
(`megatron/core/models/families/row_map.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.index import ExportedRows
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT
from megatron.core.dist_checkpointing.layout.boxes import Box, ranges
from megatron.core.dist_checkpointing.layout.holdings import shares
from megatron.core.dist_checkpointing.state.entries import Entry
from megatron.core.models.families.row_map import RowMap

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8  # the header's length, at the start of a file

# The dtypes of safetensors, with its names.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def file_dtype(
    own: torch.dtype, asked: torch.dtype | None, *, stays_fp32: bool = False
) -> torch.dtype:
    """Returns the dtype in which a tensor is written.

    Args:
        own: the tensor's dtype in the model.
        asked: the dtype of all floating-point tensors; None writes fp32 as bf16 and keeps other
            dtypes.
        stays_fp32: whether the tensor belongs to an `Fp32Module`. The transformers library also
            keeps such weights in fp32 among bf16 weights.
    """
    if not own.is_floating_point or (stays_fp32 and own == torch.float32):
        return own
    if asked is None:
        return torch.bfloat16 if own == torch.float32 else own
    return asked


def check_dtype(asked: torch.dtype | None) -> None:
    """Raises ValueError for a dtype that `file_dtype` does not accept as `asked`."""
    if asked is not None and not (asked.is_floating_point and asked in DTYPE_NAMES):
        raise ValueError(f"Expected a floating-point dtype that safetensors has, got {asked}.")


class FileTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Part(NamedTuple):
    """One of our tensors as rows of a tensor in a file. A scalar is a whole tensor."""

    rows: RowMap
    shape: tuple[int, ...]  # of our tensor
    dtype: torch.dtype  # in the file


def main_dtype(tensors: Iterable[FileTensor]) -> torch.dtype | None:
    """Returns the floating-point dtype with the most elements; None if no tensor has one."""
    numels: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            numels[tensor.dtype] = numels.get(tensor.dtype, 0) + tensor.numel
    return max(numels, key=lambda dtype: numels[dtype], default=None)


def tensors_of_parts(parts: Iterable[Part]) -> list[FileTensor]:
    """Returns the tensors that consist of these parts, in the order of their first parts.

    Raises:
        CheckpointError: if the parts of a tensor differ in dtype or in the other dims.
    """
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.rows.name, []).append(part)
    return [_whole(name, own) for name, own in by_name.items()]


def _whole(name: str, parts: Sequence[Part]) -> FileTensor:
    """Returns the tensor that consists of these parts."""
    first = parts[0]
    if any((part.shape[1:], part.dtype) != (first.shape[1:], first.dtype) for part in parts):
        got = ", ".join(f"{list(part.shape)} of {part.dtype}" for part in parts)
        raise CheckpointError(
            f"Expected parts of {name} that differ only in their rows, got {got}."
        )

    if not first.shape:
        return FileTensor(name, (), first.dtype)
    num_rows = sum(part.shape[0] for part in parts)
    return FileTensor(name, first.rows.shape_of_rows(num_rows, first.shape[1:]), first.dtype)


class Place(NamedTuple):
    """The position of a tensor."""

    file: str  # its name in the directory
    offset: int  # bytes from the start of the file
    tensor: FileTensor


@dataclass(frozen=True)
class FileLayout:
    """One file.

    Attributes:
        name: file name in the directory.
        header: all bytes before the tensors.
        tensors: the tensors by ascending offset.
    """

    name: str
    header: bytes
    tensors: tuple[FileTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class FolderLayout:
    """The weight files of one directory.

    Attributes:
        files: the files in the order of their names.
        tensors: the tensors of all files, in the order of the model.
    """

    files: tuple[FileLayout, ...]
    tensors: tuple[FileTensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[FileTensor], max_shard_bytes: int) -> FolderLayout:
        """Lays out one file, or several of at most `max_shard_bytes` of tensors each. A larger
        tensor gets a separate file.

        Raises:
            CheckpointError: for a dtype that safetensors does not have.
        """
        shards = list(_shards(tensors, max_shard_bytes))
        names = [
            f"model-{number:05}-of-{len(shards):05}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        if len(shards) == 1:
            names = [WEIGHTS_FILE]
        files = (_file(name, shard) for name, shard in zip(names, shards, strict=True))
        return cls(tuple(files), tuple(tensors))

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all names, shapes, dtypes and offsets, in a form for messages."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.header)
        num_files, short = len(self.files), digest.hexdigest()[:16]
        return (
            f"{num_files} {'file' if num_files == 1 else 'files'} of {self.nbytes} bytes ({short})"
        )

    @property
    def index(self) -> dict[str, Any] | None:
        """The content of the index file; None for a single file, which needs no index."""
        if len(self.files) == 1:
            return None
        return {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in self.tensors)},
            "weight_map": {tensor.name: self.places[tensor.name].file for tensor in self.tensors},
        }

    @cached_property
    def places(self) -> dict[str, Place]:
        """The position of each tensor, by name."""
        found: dict[str, Place] = {}
        for file in self.files:
            offset = len(file.header)
            for tensor in file.tensors:
                found[tensor.name] = Place(file.name, offset, tensor)
                offset += tensor.nbytes
        return found


def _shards(tensors: Sequence[FileTensor], max_bytes: int) -> Iterator[list[FileTensor]]:
    """Yields runs of tensors with at most `max_bytes` together, or of a single larger one."""
    shard: list[FileTensor] = []
    nbytes = 0
    for tensor in tensors:
        if shard and nbytes + tensor.nbytes > max_bytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(tensor)
        nbytes += tensor.nbytes
    yield shard


def _file(name: str, tensors: Iterable[FileTensor]) -> FileLayout:
    # Tensors of whole pages come first, since direct I/O can write them; nearly all large tensors
    # are. The others follow by descending element size, so that each tensor is aligned to it.
    ordered = tuple(
        sorted(tensors, key=lambda own: (own.nbytes % DATA_ALIGNMENT > 0, -own.dtype.itemsize))
    )
    # Some readers require the name of the framework.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}

    end = 0
    for tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"Expected a dtype that safetensors has for {tensor.name}, got {tensor.dtype}."
            )
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }

    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    return FileLayout(name, len(text).to_bytes(_LENGTH_BYTES, "little") + text, ordered)


def rows_in_file(rows: RowMap, box: Box, place: Place) -> Iterator[ExportedRows]:
    """Yields the file ranges of a box of one of our tensors, in the order of its elements.

    Args:
        rows: the rows of our tensor in the tensor at `place`.
        box: a box of our tensor that has elements.
    """
    file, begin, tensor = place
    for own, there in row_boxes(rows, box):
        for part in ranges(there, tensor.shape, max_span=there.numel, max_gap=0):
            # In a stack of matrices the file's box has one dim more, of size 1.
            offsets, sizes = part.box.within(there.offsets)
            first = len(offsets) - len(own.offsets)
            yield ExportedRows(
                tensor.name,
                tensor.dtype,
                part.box,
                shifted(Box(offsets[first:], sizes[first:]), own.offsets),
                file,
                begin + part.start * tensor.dtype.itemsize,
            )


def shifted(box: Box, by: Sequence[int]) -> Box:
    """Moves a box by these offsets."""
    return Box(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.sizes)


def row_boxes(rows: RowMap, box: Box) -> Iterator[tuple[Box, Box]]:
    """Cuts a box of one of our tensors where its rows are not consecutive in the file.

    Yields:
        (box of our tensor, box of the same elements in the file's tensor), in the order of rows.
        In a stack of matrices the second box has one dim more, of one matrix.
    """
    if not box.sizes:
        yield box, box
        return

    first, num_rows = box.offsets[0], box.sizes[0]
    for run in rows.ranges(first, first + num_rows):
        sizes = (run.own_stop - run.own_start, *box.sizes[1:])
        own, there = Box((run.own_start, *box.offsets[1:]), sizes), (run.start, *box.offsets[1:])
        if rows.matrix_rows is None:
            yield own, Box(there, sizes)
        else:
            matrix = divmod(run.start, rows.matrix_rows)
            yield own, Box((*matrix, *there[1:]), (1, *sizes))


class OwnRows(NamedTuple):
    """A share of one of our tensors that this rank writes."""

    entry: Entry
    rows: RowMap  # of the whole entry
    place: Place
    box: Box  # of the entry's global tensor


@dataclass(frozen=True)
class RowPlan:
    """The offsets of the rows of all entries, the same on every rank. It holds no tensors.

    Attributes:
        layout: the layout of the directory.
        row_maps: the rows of each entry in a tensor of the layout, by the entry's key.
        is_exact: whether every entry is written without conversion.
    """

    layout: FolderLayout
    row_maps: Mapping[str, RowMap]
    is_exact: bool

    @classmethod
    def of(
        cls,
        entries: Sequence[Entry],
        row_maps: Mapping[str, RowMap],
        dtypes: Mapping[str, torch.dtype],
        max_shard_bytes: int,
    ) -> RowPlan:
        """Plans the files of these entries without communication.

        Args:
            entries: the same entries on every rank.
            row_maps: the rows of each entry in a tensor of the files, by key.
            dtypes: the dtype of each entry in the files, by key.
            max_shard_bytes: as in `FolderLayout.of`.

        Raises:
            CheckpointError: as `tensors_of_parts` and `FolderLayout.of`.
        """
        saved = [entry.saved_as for entry in entries]
        parts = [Part(row_maps[own.key], own.shape, dtypes[own.key]) for own in saved]
        layout = FolderLayout.of(tensors_of_parts(parts), max_shard_bytes)

        is_exact = all(dtypes[own.key] == own.dtype for own in saved)
        return cls(layout, {own.key: row_maps[own.key] for own in saved}, is_exact)

    def rows(self, key: str, box: Box) -> Iterator[ExportedRows]:
        """Yields the file ranges of a box of an entry, if the plan has the entry."""
        rows = self.row_maps.get(key)
        if rows is not None:
            yield from rows_in_file(rows, box, self.layout.places[rows.name])

    def own_rows(self, entries: Sequence[Entry], rank: int) -> list[OwnRows]:
        """Returns the rows that a rank writes. Replicated rows are divided among their ranks.

        Args:
            entries: the entries that the plan was made of.
        """
        places = [self.layout.places[self.row_maps[entry.key].name] for entry in entries]
        held = [
            (entry.saved_as.holdings, place.tensor.dtype.itemsize)
            for entry, place in zip(entries, places, strict=True)
        ]

        return [
            OwnRows(entry, self.row_maps[entry.key], place, box)
            for entry, place, own in zip(entries, places, shares(held, rank), strict=True)
            for box in own.boxes
        ]
