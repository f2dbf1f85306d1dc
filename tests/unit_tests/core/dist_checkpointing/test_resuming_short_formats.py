"""Runs whose states have scales, saved and resumed at every step, in either format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.state_tensors import like
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    Setting,
    Trained,
    full_tensors,
    moments,
)

NUM_STEPS = 6


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 64) for _ in range(4))


def _build(setting: Setting, seed: int) -> Trained:
    with torch.device("meta"):
        model = Layers()
    return Trained(setting, seed, model=model)


def _step(trained: Trained, number: int) -> None:
    """With gradients of very different magnitudes, so that a format's least numbers are in use."""
    generator = torch.Generator().manual_seed(100 * number + trained.rank)
    for parameter in trained.model.parameters():
        shape = local_tensor(parameter).shape
        sizes = torch.rand(shape, generator=generator) ** 8 * 10.0 ** -(number % 3)
        parameter.grad = like(parameter, torch.randn(shape, generator=generator) * sizes)
    trained.optimizer.step(1.0)


def _resumed_everywhere(
    root: str,
    setting: Setting,
    ckpt_format: str,
) -> list[tuple[int, list[str]]]:
    """For each step at which the run was saved and resumed: the tensors that differ in the end."""
    ends = {}
    for resumed_at in range(NUM_STEPS):  # 0: never
        trained = _build(setting, seed=0)
        for number in range(NUM_STEPS):
            if number and number == resumed_at:
                trained = _resumed(trained, setting, f"{root}/{number}", ckpt_format)
            _step(trained, number)
        ends[resumed_at] = full_tensors(trained)
    uninterrupted = ends.pop(0)
    return [
        (
            number,
            [key for key, tensor in uninterrupted.items() if not torch.equal(end[key], tensor)],
        )
        for number, end in ends.items()
    ]


def _resumed(trained: Trained, setting: Setting, path: str, ckpt_format: str) -> Trained:
    other = _build(setting, seed=1)
    if ckpt_format == "torch_dcp":
        states = [DCPState(each.model, each.optimizer.optimizer) for each in (trained, other)]
        dcp.save({"app": states[0]}, checkpoint_id=path)
        dcp.load({"app": states[1]}, checkpoint_id=path)
    else:
        Path(path).mkdir(exist_ok=True)
        trained.save(path)
        other.load(path)
    return other


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dcp"])
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(tmp_path, ckpt_format):
    setting = Setting(optimizer=moments("fp8", "fp16"))
    for differences in run_ranks(2, _resumed_everywhere, str(tmp_path), setting, ckpt_format):
        assert differences == [(number, []) for number in range(1, NUM_STEPS)]
