"""The offsets of the bytes in safetensors files. Each byte is written once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.layout.boxes import Box, pieces
from megatron.core.dist_checkpointing.layout.holdings import (
    EvenShards,
    Holdings,
    RankMesh,
    replicated,
    shares,
)
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.models.families.row_map import RowMap
from megatron.training.checkpoint.hf_layout import (
    FileTensor,
    FolderLayout,
    Part,
    RowPlan,
    check_dtype,
    file_dtype,
    main_dtype,
    row_boxes,
    rows_in_file,
    shifted,
    tensors_of_parts,
)

DTYPES = (torch.int64, torch.int32, torch.uint8)
NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8}


class Own(NamedTuple):
    """One of our tensors with its values."""

    part: Part
    values: np.ndarray
    holdings: Holdings


def row_maps(draw: st.DrawFn, name: str) -> list[tuple[RowMap, int]]:
    """Draws tensors that tile a tensor of the files: the map and the number of rows of each."""
    blocks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if draw(st.booleans()):  # consecutive
        starts = np.cumsum([0, *blocks]).tolist()
        return [(RowMap(name, start), rows) for start, rows in zip(starts, blocks, strict=False)]

    count, stride, start = draw(st.integers(1, 4)), sum(blocks), 0
    found = []
    for block in blocks:
        found.append((RowMap(name, start, block, stride), block * count))
        start += block
    return found


@st.composite
def owned(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], list[Own], int]:
    """Draws (the tensors of the files, our tensors, the number of ranks)."""
    num_ranks = draw(st.integers(1, 4))
    mesh = RankMesh((num_ranks,), tuple(draw(st.permutations(range(num_ranks)))))
    theirs: dict[str, np.ndarray] = {}
    own: list[Own] = []
    for number in range(draw(st.integers(1, 5))):
        name, dtype = f"tensor{number}", draw(st.sampled_from(DTYPES))
        tail = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
        maps = row_maps(draw, name)
        num_rows = sum(rows for _, rows in maps)
        numel = num_rows * int(np.prod(tail, dtype=int))
        values = (np.arange(1, numel + 1) * 7 + number).astype(NUMPY[dtype])
        in_rows = values.reshape(num_rows, *tail)
        theirs[name] = in_rows
        if draw(st.booleans()):  # a stack of matrices
            divisors = [rows for rows in range(1, num_rows + 1) if num_rows % rows == 0]
            matrix_rows = draw(st.sampled_from(divisors))
            maps = [(replace(rows, matrix_rows=matrix_rows), count) for rows, count in maps]
            theirs[name] = values.reshape(num_rows // matrix_rows, matrix_rows, *tail)

        for rows, num_own in maps:
            where = [
                there
                for run in rows.ranges(0, num_own)
                for there in range(run.start, run.start + run.own_stop - run.own_start)
            ]
            shape = (num_own, *tail)
            dim = draw(st.sampled_from([None, *range(len(shape))]))
            holdings: Holdings = EvenShards(shape, mesh, [dim]).holdings
            if draw(st.booleans()):
                holdings = replicated(shape, range(num_ranks))
            own.append(Own(Part(rows, shape, dtype), in_rows[where], holdings))
    if draw(st.booleans()):
        theirs["scalar"] = np.array(77, np.int64)
        part = Part(RowMap("scalar"), (), torch.int64)
        own.append(Own(part, theirs["scalar"], replicated((), range(num_ranks))))
    return theirs, draw(st.permutations(own)), num_ranks


def written(
    layout: FolderLayout,
    own: Sequence[Own],
    theirs: dict[str, np.ndarray],
    num_ranks: int,
    piece: int,
) -> list[np.ndarray]:
    """Returns the files that the ranks write; -1 for unwritten bytes."""
    files = {file.name: np.full(file.nbytes, -1) for file in layout.files}
    for file in layout.files:
        files[file.name][: len(file.header)] = list(file.header)

    held = [(each.holdings, each.part.dtype.itemsize) for each in own]
    for rank in range(num_ranks):
        own_boxes = (
            (each, box)
            for each, division in zip(own, shares(held, rank), strict=True)
            for box in division.boxes
        )
        for (part, values, _), mine in own_boxes:
            place = layout.places[part.rows.name]
            for box in pieces(mine.sizes, piece):
                where = shifted(box, mine.offsets)
                rest = values[where.slices()].tobytes()
                for run in rows_in_file(part.rows, where, place):
                    assert run.box.numel == run.own.numel
                    content = values[run.own.slices()].tobytes()
                    assert content == theirs[run.name][run.box.slices()].tobytes()
                    assert content == rest[: run.nbytes], "they come in the order of memory"
                    target = files[run.file][run.offset : run.offset + run.nbytes]
                    assert (target == -1).all(), "a byte is written twice"
                    target[:], rest = list(content), rest[run.nbytes :]
                assert not rest
    return list(files.values())


@given(owned(), st.integers(1, 60), st.integers(1, 7))
def test_ranks_write_every_byte_of_every_file_once_to_its_offset(
    case: tuple[dict[str, np.ndarray], list[Own], int], max_shard_bytes: int, piece: int
) -> None:
    theirs, own, num_ranks = case
    tensors = tensors_of_parts(each.part for each in own)
    layout = FolderLayout.of(tensors, max_shard_bytes)
    files = written(layout, own, theirs, num_ranks, piece)

    found = {}
    for content, file in zip(files, layout.files, strict=True):
        assert (content >= 0).all(), "a byte is missing"
        assert sum(tensor.nbytes for tensor in file.tensors) <= max_shard_bytes or (
            len(file.tensors) == 1
        )
        found |= load(content.astype(np.uint8).tobytes())
    assert found.keys() == theirs.keys()
    for name, values in theirs.items():
        assert found[name].shape == values.shape
        assert found[name].numpy().tobytes() == values.tobytes()

    index = layout.index
    assert (index is None) == (len(layout.files) == 1)
    if index is not None:
        assert index["metadata"]["total_size"] == sum(values.nbytes for values in theirs.values())
        assert list(index["weight_map"]) == [tensor.name for tensor in tensors]
        assert set(index["weight_map"].values()) == {file.name for file in layout.files}


def test_parts_of_different_dtypes_or_columns_are_an_error() -> None:
    part = Part(RowMap("a"), (2, 3), torch.float32)
    for other in (part._replace(shape=(2, 4)), part._replace(dtype=torch.bfloat16)):
        with pytest.raises(CheckpointError, match=r"parts of a .* got \[2, 3\] of torch.float32"):
            tensors_of_parts([part, other])


def test_a_dtype_that_safetensors_does_not_have_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"safetensors has for a, got torch\.complex64"):
        FolderLayout.of([FileTensor("a", (2,), torch.complex64)], 100)
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(ValueError, match="floating-point dtype"):
            check_dtype(dtype)
    check_dtype(None)


def test_fp32_becomes_bf16_unless_something_else_is_asked_for() -> None:
    assert file_dtype(torch.float32, None) == torch.bfloat16
    assert file_dtype(torch.float16, None) == torch.float16
    assert file_dtype(torch.float32, torch.float32) == torch.float32
    assert file_dtype(torch.bfloat16, torch.float32) == torch.float32
    assert file_dtype(torch.int64, torch.float32) == torch.int64
    several = [
        FileTensor("a", (9,), torch.int64),
        FileTensor("b", (3,), torch.float32),
        FileTensor("c", (2, 2), torch.bfloat16),
    ]
    assert main_dtype(several) == torch.bfloat16
    assert main_dtype(several[:1]) is None


def test_rows_of_a_stack_are_divided_by_matrix() -> None:
    rows = RowMap("a", 5, matrix_rows=4)
    assert list(rows.ranges(1, 9)) == [(1, 3, 6), (3, 7, 8), (7, 9, 12)]
    boxes = [there for _, there in row_boxes(rows, Box((1, 1), (8, 2)))]
    assert boxes == [
        Box((1, 2, 1), (1, 2, 2)),
        Box((2, 0, 1), (1, 4, 2)),
        Box((3, 0, 1), (1, 2, 2)),
    ]
    with pytest.raises(ValueError, match="matrices of at least one row, got 0"):
        RowMap("a", matrix_rows=0)


def test_each_of_the_ranks_that_hold_the_same_rows_writes_a_part_of_them() -> None:
    model = nn.Linear(8, 300, bias=False)
    rows = {"model.weight": RowMap("weight")}
    numels = []
    for rank in range(3):
        entries = collect(model, rank=rank, world_size=3).entries
        plan = RowPlan.of(entries, rows, {"model.weight": torch.bfloat16}, 10**9)
        numels.append(sum(own.box.numel for own in plan.own_rows(entries, rank)))
    assert numels == [800, 800, 800]
