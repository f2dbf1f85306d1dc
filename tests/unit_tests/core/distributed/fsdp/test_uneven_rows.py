"""Which rows each rank holds, as integers: the cut of a layout against the layout itself."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import Flat
from megatron.core.distributed.fsdp.uneven_rows import UnevenShard, uneven_placements


def _cut(shapes, tensor=0, mesh=(2,), coordinate=None, num_blocks=1):
    """The placements of a tensor of a buffer that all axes of a mesh cut."""
    layout = GlobalLayout.build(shapes, math.prod(mesh), num_blocks)
    coordinate = coordinate or [0] * len(mesh)
    return uneven_placements(layout, tensor, mesh, coordinate, [Flat()] * len(mesh))


def _told(found, num_rows, mesh, coordinate) -> range:
    """As compute_local_shape_and_global_offset does: from the left, each in what is left."""
    size, offset = num_rows, 0
    for placement, num_ranks, place in zip(found, mesh, coordinate, strict=True):
        if isinstance(placement, Shard):
            size, more = placement._local_shard_size_and_offset(size, num_ranks, place)
            offset += more
    return range(offset, offset + size)


@st.composite
def blocked(draw):
    """(a layout of one block or several, a mesh whose last axes the blocks are, placements)."""
    kept = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    others = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    num_blocks = draw(st.sampled_from([1, math.prod(kept)]))
    rows = st.integers(1, 12).map(lambda number: number * num_blocks)
    shape = st.tuples(rows, st.integers(1, 6)) | st.tuples(rows)
    shapes = draw(st.lists(shape, min_size=1, max_size=5))
    mesh = [*others, *kept]
    layout = GlobalLayout.build(shapes, math.prod(mesh), num_blocks)

    num_cut = len(kept) + draw(st.integers(0, len(others)))
    return layout, mesh, [Replicate()] * (len(mesh) - num_cut) + [Flat()] * num_cut


@settings(max_examples=200, deadline=None, derandomize=True)
@given(blocked())
def test_each_rank_has_the_rows_that_the_layout_gives_it_and_all_agree_on_equal_cuts(drawn):
    layout, mesh, placements = drawn
    is_sharded = [isinstance(placement, Shard) for placement in placements]
    tensors, answers = range(len(layout.tensor_shapes)), set()
    for coordinate in itertools.product(*map(range, mesh)):
        piece, own = layout.local_range(mesh, is_sharded, coordinate), []
        for tensor in tensors:
            found = uneven_placements(layout, tensor, mesh, coordinate, placements)
            rows = _told(found, layout.tensor_shapes[tensor][0], mesh, coordinate)
            chunk = layout.chunk(tensor, piece)
            assert len(rows) == chunk.num_rows
            assert rows.start == chunk.first_row or not rows
            own.append((found, rows))

        answers.add(tuple(one[0] == other[0] for one in own for other in own))
        for (one, rows), (other, other_rows) in itertools.product(own, repeat=2):
            assert one != other or rows == other_rows or not (rows or other_rows)
    assert len(answers) == 1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(blocked(), st.data())
def test_the_places_of_an_axis_have_the_rows_that_axes_to_its_right_leave(drawn, data):
    layout, mesh, placements = drawn
    tensor = data.draw(st.integers(0, len(layout.tensor_shapes) - 1))
    coordinate = [data.draw(st.integers(0, length - 1)) for length in mesh]
    found = uneven_placements(layout, tensor, mesh, coordinate, placements)

    rows = list(range(layout.tensor_shapes[tensor][0]))
    for shard, place in reversed(list(zip(found, coordinate, strict=True))):
        if isinstance(shard, UnevenShard):
            assert [row for each in range(shard.num_places) for row in shard.rows(each)] == rows
            rows = list(shard.rows(place))


def test_the_drawing_in_the_docstring():
    # Nine rows of 4 elements from offset 8 of a buffer of 64, on two ranks.
    layout = GlobalLayout(((2, 4), (9, 4)), (0, 8), 64)
    (shard,) = uneven_placements(layout, 1, [2], [0], [Flat()])
    assert [shard.rows(place) for place in (0, 1)] == [range(6), range(6, 9)]
    assert str(shard) == "UnevenShard(bounds=(0, 6, 9))"


def test_an_uneven_shard_is_a_shard_but_never_equal_to_an_even_one():
    (shard,) = _cut([(8, 2)])
    assert [len(shard.rows(place)) for place in (0, 1)] == [4, 4]  # as torch.chunk would cut it
    assert isinstance(shard, Shard)
    assert shard.is_shard(0)
    assert not shard.is_replicate()
    assert shard.dim == 0
    assert shard != Shard(0)
    assert Shard(0) != shard
    assert (shard,) != (Shard(0),)
    assert shard != Replicate()


def test_shards_that_are_cut_alike_are_equal_whatever_their_rows_are_made_of():
    (narrow,), (wide,), (other,) = _cut([(9, 4)]), _cut([(9, 8)]), _cut([(9, 4), (2, 4)])
    assert narrow == wide
    assert hash(narrow) == hash(wide)
    assert narrow != other
    assert len({narrow, wide, other}) == 2


def test_it_can_be_copied_and_pickled():
    for shard in _cut([(9, 4), (12, 4)], 1, (2, 2), [1, 1]):
        for again in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
            assert again == shard
            assert vars(again).items() >= vars(shard).items()


def test_a_tensor_of_another_size_or_mesh_is_rejected():
    (shard,) = _cut([(9, 4)])
    with pytest.raises(ValueError, match=r"Expected 2 ranks.*got 3"):
        shard._local_shard_size_and_offset(9, 3, 0)
    for num_rows in (8, 10):
        with pytest.raises(ValueError, match=rf"got a tensor of {num_rows}"):
            shard._local_shard_size_and_offset(num_rows, 2, 0)


def test_axes_that_do_not_shard_keep_their_placement():
    layout = GlobalLayout.build([(9, 4)], 4)
    outer, inner = uneven_placements(layout, 0, [2, 2], [1, 0], [Partial("avg"), Flat()])
    assert outer == Partial("avg")
    assert isinstance(inner, UnevenShard)
