from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.layout import Chunk, FlatRange, GlobalLayout, row_numel

SHAPES = st.lists(
    st.lists(st.integers(1, 6), min_size=0, max_size=2).flatmap(
        lambda row: st.integers(0, 9).map(lambda rows: (rows, *row))
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def meshes(draw) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """A mesh shape, and which of its axes cut: the last ones."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    num_cut = draw(st.integers(0, len(shape)))
    return shape, tuple(axis >= len(shape) - num_cut for axis in range(len(shape)))


def coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in shape)))


def test_the_worked_example():
    layout = GlobalLayout.build([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5)
    assert layout.tensor_to_offset == (0, 12, 32, 28, 48)
    assert layout.size == 60
    held = [
        [(c.tensor, c.first_row, c.num_rows) for c in layout.chunks(FlatRange(12 * rank, 12))]
        for rank in range(5)
    ]
    assert held == [
        [(0, 0, 2)],
        [(1, 0, 3)],
        [(1, 3, 1), (2, 0, 1), (3, 0, 1)],
        [(2, 1, 3)],
        [(4, 0, 1)],
    ]
    assert layout.chunk(2, FlatRange(24, 12)) == Chunk(tensor=2, first_row=0, num_rows=1, offset=8)


def test_one_tensor_is_its_own_alignment():
    assert GlobalLayout.build([(7, 3)], 2).size == 24
    assert GlobalLayout.build([(7,)], 4) == GlobalLayout(((7,),), (0,), 8)


def test_tensors_without_rows_take_no_room():
    layout = GlobalLayout.build([(0, 5), (2, 5)], 1)
    assert layout.size == 10
    assert layout.chunks(FlatRange(0, 10)) == [Chunk(1, 0, 2, 0)]


@settings(max_examples=300, deadline=None)
@given(shapes=SHAPES, dp_size=st.integers(1, 9))
def test_tensors_do_not_overlap_and_every_rank_boundary_falls_between_rows(shapes, dp_size):
    layout = GlobalLayout.build(shapes, dp_size)
    owners = [-1] * layout.size
    for tensor, (shape, offset) in enumerate(zip(shapes, layout.tensor_to_offset, strict=True)):
        assert offset % row_numel(shape) == 0
        for element in range(offset, offset + math.prod(shape)):
            assert owners[element] == -1
            owners[element] = tensor
    gaps = [element for gap in layout.gaps for element in range(gap.start, gap.stop)]
    assert gaps == [element for element, owner in enumerate(owners) if owner == -1]
    alignment = math.lcm(*(row_numel(shape) for shape in shapes))
    assert layout.size % (alignment * dp_size) == 0
    for boundary in range(0, layout.size, layout.size // dp_size if layout.size else 1):
        for shape, offset in zip(shapes, layout.tensor_to_offset, strict=True):
            assert (boundary - offset) % row_numel(shape) == 0


@settings(max_examples=300, deadline=None)
@given(shapes=SHAPES, dp_size=st.integers(1, 5))
def test_padding_stays_small(shapes, dp_size):
    """Less than a unit behind each large tensor and for each small one's alignment, and the last
    rounding.
    """
    layout = GlobalLayout.build(shapes, dp_size)
    alignment = math.lcm(*(row_numel(shape) for shape in shapes))
    assert layout.size - sum(math.prod(shape) for shape in shapes) < alignment * (
        len(shapes) + dp_size
    )


@settings(max_examples=300, deadline=None)
@given(shapes=SHAPES, mesh=meshes())
def test_every_row_is_owned_exactly_once_by_each_set_of_ranks_that_cuts(shapes, mesh):
    """Against brute force: every rank's rows, read off a list of the buffer's elements one by
    one.
    """
    mesh_shape, is_sharded = mesh
    layout = GlobalLayout.build(shapes, math.prod(mesh_shape))
    elements: list[tuple[int, int] | None] = [None] * layout.size
    for tensor, (shape, offset) in enumerate(zip(shapes, layout.tensor_to_offset, strict=True)):
        for row in range(shape[0]):
            for element in range(row_numel(shape)):
                elements[offset + row * row_numel(shape) + element] = (tensor, row)
    owners: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for coordinate in coordinates(mesh_shape):
        piece = layout.local_range(mesh_shape, is_sharded, coordinate)
        there = {entry for entry in elements[piece.start : piece.stop] if entry is not None}
        told = {
            (c.tensor, c.first_row + row) for c in layout.chunks(piece) for row in range(c.num_rows)
        }
        assert told == there
        for chunk in layout.chunks(piece):
            assert elements[piece.start + chunk.offset] == (chunk.tensor, chunk.first_row)
        for row in told:
            owners.setdefault(row, []).append(coordinate)
    num_replicas = math.prod(
        size for size, cuts in zip(mesh_shape, is_sharded, strict=True) if not cuts
    )
    assert len(owners) == sum(shape[0] for shape in shapes)
    assert all(len(ranks) == num_replicas for ranks in owners.values())


@settings(max_examples=200, deadline=None)
@given(shapes=SHAPES, mesh=meshes())
def test_a_piece_cut_on_more_axes_lies_inside_the_one_cut_on_fewer(shapes, mesh):
    mesh_shape, is_sharded = mesh
    layout = GlobalLayout.build(shapes, math.prod(mesh_shape))
    for coordinate in coordinates(mesh_shape):
        fine = layout.local_range(mesh_shape, is_sharded, coordinate)
        for num_cut in range(sum(is_sharded)):
            fewer = tuple(axis >= len(mesh_shape) - num_cut for axis in range(len(mesh_shape)))
            coarse = layout.local_range(mesh_shape, fewer, coordinate)
            assert coarse.start <= fine.start
            assert fine.stop <= coarse.stop


@pytest.mark.parametrize("shape", [(), (3, 0), (2, 0, 4)])
def test_scalars_and_empty_rows_are_refused(shape):
    with pytest.raises(ValueError, match="Expected a tensor with rows of at least one element"):
        GlobalLayout.build([(2, 2), shape], 2)


def test_a_layout_for_another_number_of_ranks_is_refused():
    layout = GlobalLayout.build([(4, 2)], 2)
    for num_ranks in (3, 8):
        with pytest.raises(
            ValueError,
            match=rf"Expected a layout built for the mesh \({num_ranks},\), got one of size 8",
        ):
            layout.local_range((num_ranks,), (True,), (0,))
    with pytest.raises(ValueError, match="Expected a piece cut between rows of tensor 0"):
        layout.chunks(FlatRange(1, 4))
    with pytest.raises(ValueError, match="Expected at least one rank, got 0"):
        GlobalLayout.build([(4, 2)], 0)
