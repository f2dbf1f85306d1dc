"""Checkpoints of a model of which other parameters are frozen: while it is loaded, or when it was
saved.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.fsdp import fully_shard
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import run_ranks

SHARDS = {"fully_shard": fully_shard, "FSDP2": fsdp2.fully_shard}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "FusedAdam": FusedAdam,
    "HybridDeviceOptimizer": HybridDeviceOptimizer,
}
FORMATS = ("DCPState", "load_checkpoint", "fsdp_dtensor")


def build(
    engine: str, optimizer: str, seed: int, *, is_frozen: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[0].requires_grad_(not is_frozen)
    for module in (model[0], model):
        SHARDS[engine](module)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, OPTIMIZERS[optimizer](trained, lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_frozen_and_thawed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer, 2)
    model[0].requires_grad_(True)
    step(model, optimizer, 3)


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize()
    return [
        local_tensor(tensor).detach().clone()
        for parameter in model.parameters()
        for tensor in (parameter, *states_of(optimizer, parameter))
    ]


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[torch.Tensor]:
    found = optimizer.state.get(parameter, {})
    return [found[name] for name in ("step", "exp_avg", "exp_avg_sq") if name in found]


def collected(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contents:
    return collect(model, optimizer, rank=dist.get_rank(), world_size=dist.get_world_size())


def save(root: str, form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if form == "DCPState":
        dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=root)
    elif form == "load_checkpoint":
        save_checkpoint(model, optimizer, root)
    else:
        ranks = (dist.get_rank(), dist.get_world_size())
        with CheckpointManager(open_store(root), Device("cpu"), *ranks, "token") as manager:
            manager.save(1, collected(model, optimizer), {}, name="saved")
            manager.finish()


def load(root: str, form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if form == "DCPState":
        dcp.load({"app": DCPState(model, optimizer)}, checkpoint_id=root)
    elif form == "load_checkpoint":
        load_checkpoint(model, optimizer, root)
    else:
        contents = collected(model, optimizer)
        checkpoint = PublishedCheckpoint.open(open_store(root), "saved")
        load_entries(checkpoint, contents, check_contents(checkpoint, contents))


def _thaws(root: str, engine: str) -> list[str]:
    """The combinations that do not continue as the uninterrupted run does."""
    failed = []
    for name in OPTIMIZERS:
        for form in FORMATS:
            model, optimizer = build(engine, name, seed=0)
            step(model, optimizer, 0)
            step(model, optimizer, 1)
            folder = f"{root}/{name}-{form}"
            save(folder, form, model, optimizer)
            model[0].requires_grad_(False)
            step_frozen_and_thawed(model, optimizer)

            other, other_optimizer = build(engine, name, seed=1)
            other[0].requires_grad_(False)
            try:
                load(folder, form, other, other_optimizer)
                step_frozen_and_thawed(other, other_optimizer)
                got, expected = local_state(other, other_optimizer), local_state(model, optimizer)
                if not all(torch.equal(*pair) for pair in zip(got, expected, strict=True)):
                    failed.append(f"{name}, {form}")
            except Exception as error:
                failed.append(f"{name}, {form}: {error!r}")
    return failed


@pytest.mark.parametrize("engine", SHARDS)
def test_states_of_a_parameter_frozen_while_loading_continue_once_it_is_trained_again(
    tmp_path, engine
):
    for failed in run_ranks(2, _thaws, str(tmp_path), engine):
        assert failed == []


def _other_parts(root: str, engine: str) -> list[str]:
    """The failures after loading into a model of which another part is frozen."""
    failed = []
    for name in OPTIMIZERS:
        for form in FORMATS[1:]:
            for was_frozen in (True, False):
                model, optimizer = build(engine, name, seed=0, is_frozen=was_frozen)
                other, other_optimizer = build(engine, name, seed=1, is_frozen=not was_frozen)
                for number in range(2):
                    step(model, optimizer, number)
                    step(other, other_optimizer, 10 + number)
                other_optimizer.param_groups[0]["lr"] = 0.02
                folder = f"{root}/{name}-{form}-{was_frozen}"
                save(folder, form, model, optimizer)
                load(folder, form, other, other_optimizer)

                what = f"{name}, {form}, {was_frozen}"
                pairs = zip(other.parameters(), model.parameters(), strict=True)
                for number, (own, saved) in enumerate(pairs):
                    has_weight = torch.equal(local_tensor(own), local_tensor(saved))
                    found, expected = states_of(other_optimizer, own), states_of(optimizer, saved)
                    if number < 2:  # of the part that only one of the two has trained
                        is_right = not any(local_tensor(state).any() for state in found)
                        is_right = is_right and bool(found) == was_frozen
                    else:
                        states = zip(found, expected, strict=True)
                        is_right = all(torch.equal(*map(local_tensor, pair)) for pair in states)
                    if not (has_weight and is_right):
                        failed.append(f"{what}: parameter {number}")
                rate = other_optimizer.param_groups[0]["lr"]
                if form == "load_checkpoint" and rate != 0.01:
                    failed.append(f"{what}: a rate of {rate}")
                step(other, other_optimizer, 20)
    return failed


@pytest.mark.parametrize("engine", SHARDS)
def test_a_part_that_was_frozen_starts_fresh_and_the_states_of_one_that_is_are_left_out(
    tmp_path, engine
):
    for failed in run_ranks(2, _other_parts, str(tmp_path), engine):
        assert failed == []
