"""The work of a rank for the other ranks of its run, with 64 and with 4,096 ranks.

Process groups are fake: they send no messages, and have any number of ranks. Counts and memory do
not depend on the speed of the machine.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.dist_checkpointing.layout.saved import ChunkColumns
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.distributed.fsdp.fully_shard import fully_shard
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.mesh import build_mesh

FEW, MANY = 64, 4096
NUM_LAYERS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8192, bias=False)
        self.norm = nn.LayerNorm(8)


class Found(NamedTuple):
    """The work of a rank."""

    peak_nbytes: int  # of Python allocations
    num_evaluations: int  # of layouts, for the rows in a piece
    num_entries: int
    num_chunks: int


def _measured(work: Callable[[], Contents], rank: int | None) -> Found:
    num_evaluations = 0
    chunks = GlobalLayout.chunks

    def counted(*arguments: Any) -> Any:
        nonlocal num_evaluations
        num_evaluations += 1
        return chunks(*arguments)

    with mock.patch.object(GlobalLayout, "chunks", counted):
        tracemalloc.start()
        contents = work()
        index = contents.index("a save", rank)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    num_chunks = sum(len(tensor.chunks) for tensor in index.all_tensors)
    _check_that_equally_sharded_tensors_share_their_columns(index.tensors)
    return Found(peak, num_evaluations, len(contents.entries), num_chunks)


def _check_that_equally_sharded_tensors_share_their_columns(tensors: Any) -> None:
    names = [f"{number}.up.weight" for number in range(NUM_LAYERS)]
    keys = [f"model.{name}" for name in names]
    keys += [f"optimizer.state.{name}.exp_avg" for name in names]
    chunks = [tensors[key].chunks for key in keys]
    assert all(isinstance(each, ChunkColumns) for each in chunks)
    assert len({id(each.division) for each in chunks}) == 1


def _save(world_size: int, rank: int, of_all: bool) -> Found:
    """One rank shards a model and saves it, twice: the first time it imports its modules."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    mesh = build_mesh("cpu", world_size)
    private = {f"rng.{kind}": torch.zeros(9) for kind in ("torch", "python")}

    def contents() -> Contents:
        model = nn.Sequential(*[Layer() for _ in range(NUM_LAYERS)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        return collect(model, optimizer, private=private, rank=rank, world_size=world_size)

    which = None if of_all else rank
    return [_measured(contents, which) for _ in range(2)][1]


def _found(world_size: int, rank: int, *, of_all: bool = False) -> Found:
    # A fresh process, without the process group of other tests.
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_save, (world_size, rank, of_all))


def test_another_rank_does_the_same_among_4096_ranks_as_among_64():
    few, many = _found(FEW, FEW // 2), _found(MANY, MANY // 2)
    assert many[1:] == few[1:]
    assert few.num_evaluations == 1, "all layers have one layout"
    assert many.peak_nbytes < 1.05 * few.peak_nbytes


def test_rank_0_evaluates_a_layout_once_for_each_rank_however_many_tensors_have_it():
    few, many = _found(FEW, 0, of_all=True), _found(MANY, 0, of_all=True)
    # Once more for its own part of the parameters.
    assert few.num_evaluations == FEW + 1
    assert many.num_evaluations == MANY + 1
    assert many.num_chunks > 10 * few.num_chunks
