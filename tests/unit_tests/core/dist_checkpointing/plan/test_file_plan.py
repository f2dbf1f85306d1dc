"""Where blobs lie in the ranks' files."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.format.blob import blob_layout
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT
from megatron.core.dist_checkpointing.plan.chunks import (
    FlatShards,
    FlatTensor,
    RankMesh,
    Replicated,
)
from megatron.core.dist_checkpointing.plan.file_plan import SavedAs, place
from megatron.core.distributed.fsdp.layout import GlobalLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def state(shapes: list[tuple[int, ...]], num_ranks: int, is_sharded: bool) -> list[SavedAs]:
    """Three tensors for every shape, and a scalar that all ranks have."""
    mesh = RankMesh((num_ranks,), tuple(range(num_ranks)))
    shards = FlatShards(GlobalLayout.build(shapes, num_ranks), mesh, (is_sharded,))
    tensors = [
        SavedAs(f"{i}.{dtype}", dtype, shape, FlatTensor(shards, i))
        for i, shape in enumerate(shapes)
        for dtype in DTYPES
    ]
    return [*tensors, SavedAs("step", torch.float32, (), Replicated((), mesh.ranks))]


sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=4)


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_blobs_follow_each_other_with_data_on_pages(shapes, num_ranks, is_sharded):
    ends = dict.fromkeys(range(num_ranks), 0)
    for placed in place(state(shapes, num_ranks, is_sharded)):
        assert placed.blob == blob_layout(DTYPES[placed.tensor % 3], placed.sizes)
        assert placed.data_offset % DATA_ALIGNMENT == 0
        gap = placed.blob_offset - ends[placed.rank]
        assert 0 <= gap < DATA_ALIGNMENT
        ends[placed.rank] = placed.stop


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_a_rank_knows_its_own_file_and_rank_zero_all_of_them(shapes, num_ranks, is_sharded):
    tensors = state(shapes, num_ranks, is_sharded)
    everything = list(place(tensors))
    for rank in range(num_ranks):
        assert list(place(tensors, rank)) == [
            placed for placed in everything if placed.rank == rank
        ]
