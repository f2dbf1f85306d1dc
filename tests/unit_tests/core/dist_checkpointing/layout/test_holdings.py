"""Which rank holds and which rank writes each chunk, compared with sharded tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import (
    EvenShards,
    FlatShards,
    HeldBoxes,
    Holding,
    Holdings,
    RankMesh,
    replicated,
    section_holdings,
    shares,
)
from megatron.core.distributed.fsdp.layout import GlobalLayout

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 12)),
        st.tuples(st.integers(1, 12), st.integers(1, 5)),
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=6,
)


def each_share(
    tensors: Sequence[tuple[Holdings, int]], rank: int | None = None
) -> Iterator[tuple[int, Box, int]]:
    """The tensor's number, a box of it, and the rank that writes it."""
    for number, division in enumerate(shares(tensors, rank)):
        assert division.files == [f"__{owner}_0.distcp" for owner in division.ranks]
        for box, owner in zip(division.boxes, division.ranks, strict=True):
            yield number, box, owner


@st.composite
def flat_shards(draw: st.DrawFn) -> FlatShards:
    """Random layouts on random meshes, whose ranks need not be in order, cut on some of the last
    axes, some of which may divide blocks.
    """
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(math.prod(mesh_shape))))
    num_cut = draw(st.integers(0, len(mesh_shape)))
    is_sharded = tuple(axis >= len(mesh_shape) - num_cut for axis in range(len(mesh_shape)))
    num_kept = draw(st.integers(0, num_cut))
    num_blocks = math.prod(mesh_shape[len(mesh_shape) - num_kept :])
    divided = [(rows * num_blocks, *row) for rows, *row in draw(shapes)]
    layout = GlobalLayout.build(divided, math.prod(mesh_shape), num_blocks)
    return FlatShards(layout, RankMesh(mesh_shape, tuple(ranks)), is_sharded)


def counts(shape: tuple[int, ...], boxes: Iterable[Box]) -> torch.Tensor:
    """How many of the boxes have each element."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices()] += 1
    return count


@settings(deadline=None)
@given(flat_shards())
def test_holdings_of_a_flat_buffer_are_the_chunks_of_every_rank(shards):
    layout, mesh = shards.layout, shards.mesh
    whole = torch.full((layout.size,), -1)
    tensors = [
        torch.arange(layout.numel(i)).view(shape) for i, shape in enumerate(layout.tensor_shapes)
    ]
    for i, tensor in enumerate(tensors):
        for block, part in enumerate(tensor.chunk(layout.num_blocks)):
            begin = block * layout.size // layout.num_blocks + layout.tensor_to_offset[i]
            whole[begin : begin + part.numel()] = part.flatten()
    for place, rank in enumerate(mesh.ranks):
        piece = layout.local_range(mesh.shape, shards.is_sharded, mesh.coordinate(place))
        held = whole[piece.start : piece.stop]
        for i, tensor in enumerate(tensors):
            own = list(shards.holdings(i, rank))
            assert own == [holding for holding in shards.holdings(i, None) if rank in holding.ranks]
            chunk = layout.chunk(i, piece)
            assert len(own) == (chunk.num_rows > 0)
            for holding in own:
                box = holding.box
                values = held[chunk.offset :][: box.numel].view(box.sizes)
                assert torch.equal(values, tensor[box.slices()])


@settings(deadline=None)
@given(flat_shards())
def test_every_element_is_written_once_by_a_rank_that_holds_it(shards):
    tensors: list[tuple[Holdings, int]] = [
        (partial(shards.holdings, i), 4) for i in range(len(shards.layout.tensor_shapes))
    ]
    scalar, own = replicated((), shards.mesh.ranks), replicated((3,), shards.mesh.ranks[-1:])
    tensors += [(scalar, 4), (own, 1)]
    all_shapes = [*shards.layout.tensor_shapes, (), (3,)]
    written = list(each_share(tensors))
    for number, shape in enumerate(all_shapes):
        assert (counts(shape, [box for tensor, box, _ in written if tensor == number]) == 1).all()
    for number, box, owner in written:
        holders = {
            rank
            for holding in tensors[number][0](None)
            for rank in holding.ranks
            if counts(all_shapes[number], [holding.box])[box.slices()].all()
        }
        assert owner in holders


@settings(deadline=None)
@given(flat_shards())
def test_a_rank_computes_its_shares_from_its_holdings_alone(shards):
    tensors = [(partial(shards.holdings, i), 2) for i in range(len(shards.layout.tensor_shapes))]
    everyone = list(each_share(tensors))
    for rank in shards.mesh.ranks:
        assert list(each_share(tensors, rank)) == [share for share in everyone if share[2] == rank]
    assert list(each_share(tensors, rank=1000)) == []


@settings(deadline=None)
@given(flat_shards())
def test_ranks_with_the_same_holdings_write_the_same_bytes_to_within_a_row(shards):
    tensors = [(partial(shards.holdings, i), 4) for i in range(len(shards.layout.tensor_shapes))]
    nbytes = dict.fromkeys(shards.mesh.ranks, 0)
    for _, box, owner in each_share(tensors):
        nbytes[owner] += 4 * box.numel
    largest_row = 4 * max(math.prod(shape[1:]) for shape in shards.layout.tensor_shapes)
    groups = {holding.ranks for tensor, _ in tensors for holding in tensor(None)}
    for ranks in groups:
        written = [nbytes[rank] for rank in ranks]
        assert max(written) - min(written) <= 2 * largest_row


@settings(deadline=None)
@given(
    st.one_of(
        st.integers(1, 5).flatmap(lambda number: st.permutations(range(number))),
        st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    )
)
def test_a_mesh_may_have_its_ranks_in_any_order(ranks):
    mesh = SimpleNamespace(shape=(len(ranks),), mesh=torch.tensor(ranks, dtype=torch.int))
    found = RankMesh.of(mesh)
    assert tuple(found.ranks) == tuple(ranks)
    assert [found.place(rank) for rank in ranks] == list(range(len(ranks)))
    assert found.place(10) is None


def test_the_example_in_the_note_is_right():
    tensors = [(replicated((rows, 2), (0, 1, 2)), 4) for rows in (2, 4, 3)]
    owners = [[owner] * box.sizes[0] for _, box, owner in each_share(tensors)]
    assert list(itertools.chain(*owners)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_even_shards_match_pytorch(shape, mesh_shape, data):
    dims = [data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh_shape]
    mesh = RankMesh(
        tuple(mesh_shape), tuple(data.draw(st.permutations(range(math.prod(mesh_shape)))))
    )
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    shards = EvenShards(shape, mesh, dims)
    everyone = list(shards.holdings(None))
    for place, rank in enumerate(mesh.ranks):
        sizes, offsets = _compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh_shape), list(mesh.coordinate(place)), placements
        )
        own = list(shards.holdings(rank))
        assert own == [holding for holding in everyone if rank in holding.ranks]
        assert [holding.box for holding in own] == (
            [Box(tuple(offsets), tuple(sizes))] if math.prod(sizes) else []
        )
    assert list(shards.holdings(rank=1000)) == []


@settings(deadline=None)
@given(flat_shards(), st.data())
def test_sections_are_the_rows_of_the_whole(shards, data):
    rows = shards.layout.tensor_shapes[0][0]
    cut = data.draw(st.integers(0, rows))
    whole = partial(shards.holdings, 0)
    found = []
    for begin, end in ((0, cut), (cut, rows)):
        for (offsets, sizes), ranks in section_holdings(whole, begin, end - begin, None):
            assert offsets[0] + sizes[0] <= end - begin
            found.append(Holding(Box((offsets[0] + begin, *offsets[1:]), sizes), ranks))
    shape = shards.layout.tensor_shapes[0]
    boxes = [[holding.box for holding in holdings] for holdings in (found, whole(None))]
    assert torch.equal(*(counts(shape, each) for each in boxes))
    assert {holding.ranks for holding in found} == {holding.ranks for holding in whole(None)}


def test_a_section_reads_only_near_chunks():
    """An expert's rows are one of hundreds of sections, on as many ranks."""

    class Seen(HeldBoxes):
        def __getitem__(self, place):
            looked_at.append(place)
            return super().__getitem__(place)

    looked_at: list[object] = []
    found = Seen(Holding(Box((4 * n, 0), (4, 3)), (n,)) for n in range(1024))
    assert list(section_holdings(lambda _: found, 2002, 4, None)) == [
        Holding(Box((0, 0), (2, 3)), (500,)),
        Holding(Box((2, 0), (2, 3)), (501,)),
    ]
    assert len(looked_at) < 30


def test_tensors_without_elements_have_no_chunks():
    assert list(replicated((0, 3), (0, 1))(None)) == []
    assert list(each_share([(replicated((0, 3), (0, 1)), 4)])) == []
