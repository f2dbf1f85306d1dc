"""Which rows each rank holds, as integers: the cut of a layout against the layout itself."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp.layout import FlatRange, GlobalLayout
from megatron.core.distributed.fsdp.placement import Flat
from megatron.core.distributed.fsdp.uneven_shard import RowCut, UnevenShard, uneven_placements

SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 6)) | st.tuples(st.integers(1, 40)),
    min_size=1,
    max_size=5,
)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def chunks(shard: UnevenShard) -> list[range]:
    return [shard.cut.rows(place) for place in range(shard.cut.num_pieces)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SHAPES, st.integers(1, 7))
def test_the_pieces_of_an_axis_are_all_rows_once_and_in_order(shapes, num_ranks):
    layout = GlobalLayout.build(shapes, num_ranks)
    for tensor, shape in enumerate(layout.tensor_shapes):
        (shard,) = uneven_placements(layout, tensor, [num_ranks], [0], [Flat()])
        rows = [row for piece in chunks(shard) for row in piece]
        assert rows == list(range(shape[0]))
        assert shard.cut.bounds == (0, *itertools.accumulate(map(len, chunks(shard))))


def _own_rows(placements, coordinate) -> range:
    leftmost = placements[0]
    rows = leftmost.cut.rows(coordinate[0])
    return range(leftmost.first_row + rows.start, leftmost.first_row + rows.stop)


def _product(numbers) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SHAPES, MESHES)
def test_all_ranks_agree_which_tensors_are_cut_alike(shapes, mesh):
    layout = GlobalLayout.build(shapes, _product(mesh))
    placements = [Flat()] * len(mesh)
    answers = set()
    for coordinate in itertools.product(*map(range, mesh)):
        found = [
            uneven_placements(layout, tensor, mesh, coordinate, placements)
            for tensor in range(len(shapes))
        ]
        answers.add(tuple(one == other for one in found for other in found))
        own = [_own_rows(each, coordinate) for each in found]
        for (one, rows), (other, other_rows) in itertools.product(
            zip(found, own, strict=True), repeat=2
        ):
            assert one != other or rows == other_rows or not (rows or other_rows)
    assert len(answers) == 1


def test_the_drawing_in_the_docstring():
    # Nine rows of 4 elements from offset 8 of a buffer of 64, on two ranks.
    cut = RowCut(num_rows=9, row_numel=4, offset=8, piece_numel=32, num_pieces=2)
    assert cut.bounds == (0, 6, 9)


def test_an_uneven_shard_is_a_shard_but_never_equal_to_an_even_one():
    layout = GlobalLayout.build([(8, 2)], 2)
    (shard,) = uneven_placements(layout, 0, [2], [0], [Flat()])
    assert shard.cut.bounds == (0, 4, 8)  # as torch.chunk would cut it
    assert isinstance(shard, Shard)
    assert shard.is_shard(0)
    assert not shard.is_replicate()
    assert shard.dim == 0
    assert shard != Shard(0)
    assert Shard(0) != shard
    assert (shard,) != (Shard(0),)
    assert shard != Replicate()


def test_shards_that_are_cut_alike_are_equal_whatever_their_rows_are_made_of():
    narrow = UnevenShard(RowCut(9, 4, 8, 32, 2))
    wide = UnevenShard(RowCut(9, 8, 16, 64, 2))
    other = UnevenShard(RowCut(9, 4, 0, 32, 2))
    assert narrow == wide
    assert hash(narrow) == hash(wide)
    assert narrow != other
    assert len({narrow, wide, other}) == 2


def test_it_can_be_copied_and_pickled():
    shard = UnevenShard(
        RowCut(9, 4, 8, 32, 2), first_row=3, is_leftmost=False, whole=RowCut(12, 4, 8, 16, 4)
    )
    for again in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
        assert again == shard
        assert (again.first_row, again.is_leftmost) == (3, False)


def test_a_tensor_of_another_size_or_mesh_is_refused():
    shard = UnevenShard(RowCut(9, 4, 8, 32, 2))
    with pytest.raises(
        ValueError, match=r"Expected 2 ranks, as UnevenShard\(bounds=\(0, 6, 9\)\) has, got 3"
    ):
        shard._local_shard_size_and_offset(9, 3, 0)
    with pytest.raises(ValueError, match=r"Expected the rows of UnevenShard.*, got a tensor of 8"):
        shard._local_shard_size_and_offset(8, 2, 0)


def test_axes_that_do_not_shard_keep_their_placement():
    layout = GlobalLayout.build([(9, 4)], 4)
    outer, inner = uneven_placements(layout, 0, [2, 2], [1, 0], [Partial("avg"), Flat()])
    assert outer == Partial("avg")
    assert isinstance(inner, UnevenShard)
    assert layout.local_range([2, 2], [False, True], [1, 0]) == FlatRange(0, layout.size // 2)


# Of tensors in one block or several


@st.composite
def blocked(draw):
    """(a layout of blocks, a mesh whose last axes the blocks are, placements, a tensor)."""
    kept = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    others = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    num_blocks = _product(kept)
    rows = st.integers(1, 12).map(lambda number: number * num_blocks)
    shape = st.tuples(rows, st.integers(1, 6)) | st.tuples(rows)
    shapes = draw(st.lists(shape, min_size=1, max_size=5))
    mesh = [*others, *kept]
    layout = GlobalLayout.build(shapes, _product(mesh), num_blocks)

    num_cut = len(kept) + draw(st.integers(0, len(others)))
    placements = [Replicate()] * (len(mesh) - num_cut) + [Flat()] * num_cut
    return layout, mesh, placements, draw(st.integers(0, len(shapes) - 1))


def _told(found, num_rows, mesh, coordinate) -> range:
    """As compute_local_shape_and_global_offset does: from the left, each in what is left."""
    size, offset = num_rows, 0
    for placement, num_ranks, place in zip(found, mesh, coordinate, strict=True):
        if isinstance(placement, Shard):
            size, more = placement._local_shard_size_and_offset(size, num_ranks, place)
            offset += more
    return range(offset, offset + size)


def _rows_by_piece(layout, mesh, placements, tensor) -> list[list[int]]:
    """The rows in each piece of the buffer, in the order of the pieces; from the layout alone."""
    is_sharded = [isinstance(placement, Shard) for placement in placements]
    pieces = {
        layout.local_range(mesh, is_sharded, coordinate)
        for coordinate in itertools.product(*map(range, mesh))
    }
    chunks = [layout.chunk(tensor, piece) for piece in sorted(pieces)]
    return [list(range(chunk.first_row, chunk.first_row + chunk.num_rows)) for chunk in chunks]


def _rows_of(cut: RowCut) -> list[list[int]]:
    return [list(cut.rows(piece)) for piece in range(cut.num_pieces)]


def _each_shard(placements, change) -> list:
    return [change(p) if isinstance(p, UnevenShard) else p for p in placements]


def _whole(placements) -> RowCut:
    return next(p.whole for p in placements if isinstance(p, UnevenShard))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(blocked())
def test_what_pytorch_is_told_of_a_rank_is_the_chunk_that_the_layout_gives_it(drawn):
    layout, mesh, placements, tensor = drawn
    is_sharded = [isinstance(placement, Shard) for placement in placements]
    by_piece = _rows_by_piece(layout, mesh, placements, tensor)
    for coordinate in itertools.product(*map(range, mesh)):
        found = uneven_placements(layout, tensor, mesh, coordinate, placements)
        told = _told(found, layout.tensor_shapes[tensor][0], mesh, coordinate)
        chunk = layout.chunk(tensor, layout.local_range(mesh, is_sharded, coordinate))
        assert len(told) == chunk.num_rows
        assert told.start == chunk.first_row or not told
        assert _rows_of(_whole(found)) == by_piece


@settings(max_examples=200, deadline=None, derandomize=True)
@given(blocked(), st.data())
def test_windows_and_elements_are_those_that_counting_gives(drawn, data):
    layout, mesh, placements, tensor = drawn
    num_rows, *row = layout.tensor_shapes[tensor]
    columns = _product(row)
    first = data.draw(st.integers(0, num_rows - 1))
    last = data.draw(st.integers(first + 1, num_rows))
    by_piece = _rows_by_piece(layout, mesh, placements, tensor)
    in_window = [[row - first for row in rows if first <= row < last] for rows in by_piece]

    for coordinate in itertools.product(*map(range, mesh)):
        rows = uneven_placements(layout, tensor, mesh, coordinate, placements)
        window = _each_shard(rows, lambda shard: shard.window(first, last - first))
        assert _rows_of(_whole(window)) == in_window
        own = _told(window, last - first, mesh, coordinate)
        held = _told(rows, num_rows, mesh, coordinate)
        assert [row + first for row in own] == [row for row in held if first <= row < last]

        flat = _each_shard(window, lambda shard: shard.flattened(columns))
        elements = _told(flat, (last - first) * columns, mesh, coordinate)
        assert elements == range(own.start * columns, own.stop * columns)
        assert _each_shard(flat, lambda shard: shard.grouped(columns)) == window


@settings(max_examples=200, deadline=None, derandomize=True)
@given(blocked(), st.integers(2, 4))
def test_rows_are_grouped_only_where_no_rank_separates_them(drawn, factor):
    layout, mesh, placements, tensor = drawn
    by_piece = _rows_by_piece(layout, mesh, placements, tensor)
    found = uneven_placements(layout, tensor, mesh, [0] * len(mesh), placements)
    grouped = [p.grouped(factor) for p in found if isinstance(p, UnevenShard)]

    if any(len(rows) % factor for rows in by_piece):
        assert set(grouped) == {None}
        return
    rows_of_groups = [[row // factor for row in rows[::factor]] for rows in by_piece]
    assert all(_rows_of(shard.whole) == rows_of_groups for shard in grouped)
