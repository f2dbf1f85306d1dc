"""Host memory as checked before the weights exist, as planned, as reported, and as allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.host_memory import HostNeed
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training import engines
from megatron.training.config import EngineConfig
from megatron.training.engines import build_engine
from tests.helpers.ranks import run_ranks

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0)
PARALLEL = {
    "fully_shard": DataParallelConfig(),
    "FSDP2": DataParallelConfig(use_torch_fsdp2=True),
    "a plain module": DataParallelConfig(use_megatron_fsdp=False),
}


class Layer(nn.Module):
    """Of two dtypes, and so of two groups in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.wide = nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 2)


TOTAL = sum(parameter.numel() for parameter in Model().parameters())


def _figures(name: str) -> list[tuple[int, ...]]:
    """At each fraction: main weights asked for, planned, held and reported, in elements."""
    asked: list[HostNeed] = []
    original = engines.check_memory_on_all_ranks

    def recorded(needs, num_local_ranks, mesh):
        asked.extend(need for need in needs if need.what == "main weights")
        original(needs, num_local_ranks, mesh)

    engines.check_memory_on_all_ranks = recorded
    found = []
    try:
        for fraction in FRACTIONS:
            asked.clear()
            optimizer = OptimizerConfig(
                optimizer_cpu_offload=True, optimizer_offload_fraction=fraction
            )
            config = EngineConfig(
                optimizer, LRScheduleConfig(lr=0.1), PARALLEL[name], train_iters=1
            )
            engine = build_engine(config, Device("cpu"), build_mesh("cpu", 1))
            engine.initialize(Model)
            hybrid = engine.state.optimizer.optimizer
            held = [p.numel() for p in engine.model.parameters() if hybrid.holds(p)]
            reported = engine.state.optimizer.state_memory(engine.model)
            on_host = reported["main weights"].host if "main weights" in reported else 0
            found.append(
                (sum(n.nbytes for n in asked) // 4, hybrid.plan.host_numel, sum(held), on_host // 4)
            )
    finally:
        engines.check_memory_on_all_ranks = original
    return found


@pytest.mark.parametrize("name", PARALLEL)
def test_layers_of_two_dtypes_are_planned_once_for_everybody(name):
    (found,) = run_ranks(1, _figures, name)
    for fraction, (asked, planned, held, reported) in zip(FRACTIONS, found, strict=True):
        assert planned == held, fraction
        assert asked == reported, "a run checks for the memory that it takes"
        assert planned >= fraction * TOTAL
        # Arrays that start on a cache line are padded.
        assert planned <= reported <= planned + 64 * 11, fraction
    assert len({planned for _, planned, *_ in found}) >= 4
