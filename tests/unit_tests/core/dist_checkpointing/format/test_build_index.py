"""Offsets of blobs in the ranks' files."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.format.blob import blob_layout
from megatron.core.dist_checkpointing.format.index import Index, SavedAs, blob_place, build_index
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT, data_file
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import (
    FlatShards,
    RankMesh,
    replicated,
)
from megatron.core.distributed.fsdp.layout import GlobalLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def state(shapes: list[tuple[int, ...]], num_ranks: int, is_sharded: bool) -> list[SavedAs]:
    """Three tensors for every shape, and a scalar that all ranks have."""
    mesh = RankMesh((num_ranks,), tuple(range(num_ranks)))
    shards = FlatShards(GlobalLayout.build(shapes, num_ranks), mesh, (is_sharded,))
    tensors = [
        SavedAs(f"{i}.{dtype}", dtype, shape, partial(shards.holdings, i))
        for i, shape in enumerate(shapes)
        for dtype in DTYPES
    ]
    return [*tensors, SavedAs("step", torch.float32, (), replicated((), mesh.ranks))]


sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=4)


PLAIN = {"optimizer.param_groups": 1234, "rng.0.python": 77}


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_blobs_follow_each_other_with_data_on_pages(shapes, num_ranks, is_sharded):
    ends = dict.fromkeys(range(num_ranks), 0)
    index = build_index("a save", state(shapes, num_ranks, is_sharded), PLAIN)
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            assert chunk.file == data_file(chunk.rank)
            assert chunk.offset % DATA_ALIGNMENT == 0
            begin, nbytes = blob_place(tensor, chunk)
            layout = blob_layout(tensor.dtype, chunk.box.sizes)
            assert (chunk.offset - begin, nbytes) == (layout.header_nbytes, layout.nbytes)
            assert 0 <= begin - ends[chunk.rank] < DATA_ALIGNMENT
            ends[chunk.rank] = begin + nbytes
    for key, nbytes in PLAIN.items():
        (chunk,) = index.plain[key].chunks
        assert (chunk.rank, chunk.file, chunk.offset) == (0, data_file(0), ends[0])
        assert chunk.box == Box.whole((nbytes,))
        ends[0] += nbytes
    assert {rank: index.data_file_nbytes(rank) for rank in ends} == ends


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_a_rank_lays_out_its_file_and_rank_zero_all_files(shapes, num_ranks, is_sharded):
    tensors = state(shapes, num_ranks, is_sharded)
    everything = build_index("a save", tensors, PLAIN)
    for rank in range(num_ranks):
        own = build_index("a save", tensors, PLAIN, rank)
        assert own.tensors.keys() == everything.tensors.keys()
        for key, tensor in everything.tensors.items():
            chunks = [chunk for chunk in tensor.chunks if chunk.rank == rank]
            assert own.tensors[key] == tensor._replace(chunks=chunks)
        assert own.plain == (everything.plain if rank == 0 else {})
        assert own.layout_of(rank) == everything.layout_of(rank)
        assert own.data_file_nbytes(rank) == everything.data_file_nbytes(rank)


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_readers_accept_a_built_index(shapes, num_ranks, is_sharded):
    index = build_index("a save", state(shapes, num_ranks, is_sharded), PLAIN)
    assert Index.from_bytes(index.to_bytes(), None, "here") == index
    assert [*index.tensors] == [tensor.key for tensor in state(shapes, num_ranks, is_sharded)]
