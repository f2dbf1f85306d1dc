"""Where every byte of a folder of safetensors files lies. Integers only: no files, no ranks.

A file is the length of its header in 8 bytes, the header in JSON, and the tensors end to end. The
header ends in spaces, so that the tensors begin on a page. So names, shapes and dtypes alone say
where each tensor begins, and whoever holds some of its rows can write them there. Two files of at
most 40 bytes of tensors, and where rows 2 and 3 of `b` go:

    tensors    a fp32 [2, 2]   b bf16 [4, 2]   c fp32 [5]
    files      |8|header|aaaaaaaaaaaaaaaa|bbbbbbbbBBBBBBBB|    |8|header|cccccccccccccccccccc|
                                                  ^ offset of b + 2 rows of 4 bytes

One of their tensors may consist of several of ours, each of which has a `RowMap` that says where
its rows go (`megatron/core/models/families/row_map.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT
from megatron.core.dist_checkpointing.layout.boxes import Box, ranges
from megatron.core.dist_checkpointing.save.export import ExportedRows
from megatron.core.models.families.row_map import RowMap

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9  # of the tensors in one file, unless something else is asked for
_LENGTH_BYTES = 8  # before the header, which it is the length of

# With the names of safetensors.
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
    """The dtype in which a tensor is written.

    Args:
        own: in which we keep it.
        asked: of all floating-point tensors; None: bf16 for those in fp32, and the others as they
            are.
        stays_fp32: whether it belongs to an `Fp32Module`. The transformers library, too, writes
            what its models keep in fp32 as fp32 among bf16.
    """
    if not own.is_floating_point or (stays_fp32 and own == torch.float32):
        return own
    if asked is None:
        return torch.bfloat16 if own == torch.float32 else own
    return asked


def check_dtype(asked: torch.dtype | None) -> None:
    """ValueError unless `file_dtype` can be asked for it."""
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
    """One of our tensors, as rows of a tensor in a file. A scalar is a whole tensor."""

    rows: RowMap
    shape: tuple[int, ...]  # ours
    dtype: torch.dtype  # in the file


def main_dtype(tensors: Iterable[FileTensor]) -> torch.dtype | None:
    """The floating-point dtype of most elements; None if no tensor has one."""
    numels: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            numels[tensor.dtype] = numels.get(tensor.dtype, 0) + tensor.numel
    return max(numels, key=lambda dtype: numels[dtype], default=None)


def tensors_of_parts(parts: Iterable[Part]) -> list[FileTensor]:
    """The tensors that the parts make up, in the order of their first parts.

    Raises:
        CheckpointError: for parts that do not cover each row of their tensor exactly once, or
            differ in dtype or in the other dims.
    """
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.rows.name, []).append(part)
    return [_whole(name, own) for name, own in by_name.items()]


def _whole(name: str, parts: Sequence[Part]) -> FileTensor:
    """The tensor that consists of these parts."""
    kinds = {(part.shape[1:], part.dtype, len(part.shape), part.rows.matrix_rows) for part in parts}
    if len(kinds) > 1:
        got = ", ".join(f"{list(part.shape)} of {part.dtype}" for part in parts)
        raise CheckpointError(
            f"Expected parts of {name} that differ in their rows alone, got {got}."
        )

    first = parts[0]
    if not first.shape:
        if len(parts) > 1 or first.rows != RowMap(name):
            raise CheckpointError(f"Expected one part of {name}, a scalar, got {len(parts)}.")
        return FileTensor(name, (), first.dtype)

    row = 0
    for start, num_rows in sorted(run for part in parts for run in _row_runs(part)):
        if start != row:
            got = "no part" if start > row else "more than one"
            raise CheckpointError(
                f"Expected one part with row {min(row, start)} of {name}, got {got}."
            )
        row += num_rows
    if row % (first.rows.matrix_rows or 1):
        raise CheckpointError(
            f"Expected matrices of {first.rows.matrix_rows} rows in {name}, got {row} rows."
        )
    return FileTensor(name, first.rows.shape_of_rows(row, first.shape[1:]), first.dtype)


def _row_runs(part: Part) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) in the file's tensor."""
    for run in part.rows.ranges(0, part.shape[0]):
        yield run.start, run.own_stop - run.own_start


class Place(NamedTuple):
    """Where a tensor lies."""

    file: str  # its name in the folder
    offset: int  # bytes from the beginning of the file
    tensor: FileTensor


@dataclass(frozen=True)
class FileLayout:
    """One file.

    Attributes:
        name: in the folder.
        header: all bytes before the tensors.
        tensors: in the order in which they lie.
    """

    name: str
    header: bytes
    tensors: tuple[FileTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class FolderLayout:
    """The files of weights of one folder.

    Attributes:
        files: in the order of their names.
        tensors: all of them, in the order of the model.
    """

    files: tuple[FileLayout, ...]
    tensors: tuple[FileTensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[FileTensor], max_shard_bytes: int) -> FolderLayout:
        """One file, or several of at most `max_shard_bytes` of tensors or a single larger one.

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
        """Of all names, shapes, dtypes and offsets; for messages, too."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.header)
        num_files, short = len(self.files), digest.hexdigest()[:16]
        return (
            f"{num_files} {'file' if num_files == 1 else 'files'} of {self.nbytes} bytes ({short})"
        )

    @property
    def index(self) -> dict[str, Any] | None:
        """The content of the index file; None for a single file, which has none."""
        if len(self.files) == 1:
            return None
        return {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in self.tensors)},
            "weight_map": {tensor.name: self.places[tensor.name].file for tensor in self.tensors},
        }

    @cached_property
    def places(self) -> dict[str, Place]:
        """By the names of the tensors."""
        found: dict[str, Place] = {}
        for file in self.files:
            offset = len(file.header)
            for tensor in file.tensors:
                found[tensor.name] = Place(file.name, offset, tensor)
                offset += tensor.nbytes
        return found


def _shards(tensors: Sequence[FileTensor], max_bytes: int) -> Iterator[list[FileTensor]]:
    """Runs of tensors with at most `max_bytes` together, or of a single larger one."""
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
    # Whole pages first, as nearly all large tensors are: direct I/O can write those. Of the others,
    # the largest elements first. So each tensor begins at a multiple of its elements' size.
    ordered = tuple(
        sorted(tensors, key=lambda own: (own.nbytes % DATA_ALIGNMENT > 0, -own.dtype.itemsize))
    )
    # Some readers insist on the name of the framework.
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
    """Where the elements of a box of one of our tensors go, in the order in which they lie in it.

    Args:
        rows: of our tensor, in the one at `place`.
        box: of our tensor; it must have elements.
    """
    file, begin, tensor = place
    for own, there in row_boxes(rows, box):
        for part in ranges(there, tensor.shape, max_span=there.numel, max_gap=0):
            # A matrix of a stack has come with a dim of its own, of one index.
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
    """A box that is seen from `by`, seen from the beginning of the tensor."""
    return Box(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.sizes)


def row_boxes(rows: RowMap, box: Box) -> Iterator[tuple[Box, Box]]:
    """Cuts a box of one of our tensors where its rows are not consecutive in the file.

    Yields:
        (a box of our tensor, the same elements in the tensor in the file), in the order of rows.
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
