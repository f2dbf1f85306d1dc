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


@pytest.mark.parametrize(
    ("offsets", "size", "num_blocks"),
    [
        pytest.param((0, 10), 24, 1, id="overlap"),
        pytest.param((0, 13), 24, 1, id="between rows"),
        pytest.param((0, 18), 24, 1, id="behind the end"),
        pytest.param((0, 12), 23, 1, id="no whole unit"),
        pytest.param((0, 6), 12, 2, id="behind the end of a block"),
        pytest.param((0, 12), 24, 0, id="no blocks"),
    ],
)
def test_offsets_that_no_ranks_could_share_are_rejected(offsets, size, num_blocks):
    shapes = ((6, 2), (4, 2))
    assert GlobalLayout(shapes, (0, 12), 24) == GlobalLayout(shapes, (0, 12), 24, 1)
    with pytest.raises(ValueError):
        GlobalLayout(shapes, offsets, size, num_blocks)


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


def test_a_packed_layout_has_the_rows_of_the_layout_in_half_of_the_elements():
    layout = GlobalLayout.build([(2, 6), (4, 4), (6, 4)], 4, num_blocks=2)
    packed = layout.packed(2)
    assert packed.tensor_shapes == ((2, 3), (4, 2), (6, 2))
    numel = layout.size // 4
    for start in range(0, layout.size, numel):
        whole = layout.chunks(FlatRange(start, numel))
        halved = packed.chunks(FlatRange(start // 2, numel // 2))
        assert halved == [chunk._replace(offset=chunk.offset // 2) for chunk in whole]
    with pytest.raises(ValueError, match="3"):
        packed.packed(2)


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
def test_scalars_and_empty_rows_are_rejected(shape):
    with pytest.raises(ValueError, match="Expected a tensor with rows of at least one element"):
        GlobalLayout.build([(2, 2), shape], 2)


def test_a_layout_for_another_number_of_ranks_is_rejected():
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


# Blocks


@st.composite
def blocked(draw) -> tuple[list[tuple[int, ...]], tuple[int, ...], int]:
    """(shapes whose rows some blocks divide, a mesh whose last axis the blocks are, how many)."""
    num_blocks = draw(st.integers(1, 4))
    rows = st.integers(1, 6).map(lambda number: number * num_blocks)
    columns = st.lists(st.integers(1, 6), min_size=0, max_size=2)
    shape = st.tuples(rows, columns).map(lambda pair: (pair[0], *pair[1]))
    shapes = draw(st.lists(shape, min_size=1, max_size=6))
    others = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return shapes, (*others, num_blocks), num_blocks


def test_the_worked_example_of_blocks():
    layout = GlobalLayout.build([(4, 2), (8, 1)], 4, num_blocks=2)
    assert (layout.tensor_to_offset, layout.size) == ((0, 4), 16)
    held = [
        [(c.tensor, c.first_row, c.num_rows, c.offset) for c in layout.chunks(FlatRange(start, 4))]
        for start in range(0, 16, 4)
    ]
    assert held == [[(0, 0, 2, 0)], [(1, 0, 4, 0)], [(0, 2, 2, 0)], [(1, 4, 4, 0)]]


@settings(max_examples=200, deadline=None)
@given(blocked())
def test_every_block_is_laid_out_as_its_rows_alone_would_be(drawn):
    shapes, mesh, num_blocks = drawn
    layout = GlobalLayout.build(shapes, math.prod(mesh), num_blocks)
    alone = GlobalLayout.build(
        [(rows // num_blocks, *row) for rows, *row in shapes], math.prod(mesh) // num_blocks
    )
    assert layout.tensor_to_offset == alone.tensor_to_offset
    assert layout.block_numel == alone.size
    assert layout.alignment == alone.alignment
    assert [gap.start % alone.size for gap in layout.gaps] == [
        gap.start for gap in alone.gaps
    ] * num_blocks


@settings(max_examples=200, deadline=None)
@given(blocked(), st.integers(0, 2))
def test_every_rank_has_rows_of_its_block_and_every_row_has_its_ranks(drawn, num_replicated):
    shapes, mesh, num_blocks = drawn
    is_sharded = (*(axis >= num_replicated for axis in range(len(mesh) - 1)), True)
    layout = GlobalLayout.build(shapes, math.prod(mesh), num_blocks)
    num_replicas = math.prod(size for size, cuts in zip(mesh, is_sharded, strict=True) if not cuts)

    held = {(tensor, row): 0 for tensor, shape in enumerate(shapes) for row in range(shape[0])}
    for coordinate in coordinates(mesh):
        piece = layout.local_range(mesh, is_sharded, coordinate)
        found = layout.chunks(piece)
        assert found == [
            chunk for i in range(len(shapes)) if (chunk := layout.chunk(i, piece)).num_rows
        ]
        for tensor, first_row, num_rows, offset in found:
            rows_of_block = shapes[tensor][0] // num_blocks
            assert coordinate[-1] * rows_of_block <= first_row
            assert first_row + num_rows <= (coordinate[-1] + 1) * rows_of_block
            assert offset + num_rows * row_numel(shapes[tensor]) <= piece.numel
            for row in range(first_row, first_row + num_rows):
                held[tensor, row] += 1
    assert set(held.values()) == {num_replicas}


@pytest.mark.parametrize(
    ("shapes", "dp_size", "num_blocks", "message"),
    [
        ([(4, 2), (6, 3)], 8, 4, r"Expected rows that 4 blocks divide, got shape \(6, 3\)"),
        ([(0, 2)], 2, 2, r"Expected rows that 2 blocks divide, got shape \(0, 2\)"),
        ([()], 2, 2, r"Expected a tensor with rows .*, got shape \(\)"),
        ([(4, 2)], 6, 4, "Expected a number of blocks that divides 6 ranks, got 4"),
        ([(4, 2)], 6, 0, "Expected a number of blocks that divides 6 ranks, got 0"),
    ],
)
def test_what_blocks_do_not_divide_is_rejected(shapes, dp_size, num_blocks, message):
    with pytest.raises(ValueError, match=message):
        GlobalLayout.build(shapes, dp_size, num_blocks)


def test_a_piece_of_several_blocks_is_rejected():
    layout = GlobalLayout.build([(4, 2), (8, 1)], 4, num_blocks=2)
    for ask in (layout.chunks, lambda piece: layout.chunk(1, piece)):
        with pytest.raises(
            ValueError, match=r"inside one of 2 blocks of 8 elements, got .*start=4"
        ):
            ask(FlatRange(4, 8))
