"""Units with parameters of two compute dtypes, on an accelerator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.config import EngineConfig
from megatron.training.engines import build_engine
from tests.helpers.fp32_models import LR, SEED, Model, batches, forward_step, seen_dtypes
from tests.helpers.ranks import random_delays, run_ranks

pytestmark = pytest.mark.sim

STEPS = 4
CLIP = 0.05  # which every step's norm exceeds


def _train(optimizer: OptimizerConfig, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and this rank's part of the main weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    schedule = LRScheduleConfig(lr=LR, lr_decay_style="constant")
    # Two dtypes in one unit: bf16, and fp32 in a separate group.
    parallel = DataParallelConfig(main_grads_dtype="bf16")
    config = EngineConfig(optimizer, schedule, parallel, 99, "bf16", SEED)
    device = Device(kind, rank if kind != "cpu" else 0)
    engine = build_engine(config, device, build_mesh(kind, world_size))
    engine.initialize(Model)

    losses = [engine.train_batch(batches(step, rank), forward_step).loss for step in range(STEPS)]
    engine.state.optimizer.synchronize()
    assert seen_dtypes(engine.model) == ({torch.float32}, {torch.bfloat16})
    weights = {name: local_tensor(p).detach().cpu() for name, p in engine.model.named_parameters()}
    return losses, weights


def _offloaded_and_not() -> list[float]:
    losses, weights = _train(OptimizerConfig(clip_grad=CLIP), "sim")
    for number, fraction in enumerate((0.5, 1.0, 1.0)):
        offloaded = OptimizerConfig(
            clip_grad=CLIP,
            optimizer_cpu_offload=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            overlap_optimizer_with_forward=True,
            optimizer_offload_fraction=fraction,
        )
        with random_delays(number):
            others, other_weights = _train(offloaded, "sim")
        assert others == losses, fraction
        for name, weight in weights.items():
            assert torch.equal(other_weights[name], weight), (fraction, name)
    return losses


def test_offloaded_steps_of_two_dtypes_in_one_unit_are_bit_equal_to_the_devices():
    on_device = run_ranks(2, _offloaded_and_not, device="sim")
    ((expected, _), _) = run_ranks(2, _train, OptimizerConfig(clip_grad=CLIP), "cpu")
    for losses in on_device:
        assert losses == pytest.approx(expected, rel=2e-3)
