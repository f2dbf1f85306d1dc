"""States of a parameter that is frozen while its checkpoint is loaded, and trained later."""

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


def build(engine: str, optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for module in (model[0], model):
        SHARDS[engine](module)
    return model, OPTIMIZERS[optimizer](model.parameters(), lr=0.01)


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
        for tensor in (parameter, *(optimizer.state[parameter][name] for name in STATES))
    ]


STATES = ("step", "exp_avg", "exp_avg_sq")


def save(root: str, form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if form == "DCPState":
        dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=root)
    elif form == "load_checkpoint":
        save_checkpoint(model, optimizer, root)
    else:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        contents = collect(model, optimizer, rank=rank, world_size=world_size)
        with CheckpointManager(
            open_store(root), Device("cpu"), rank, world_size, "token"
        ) as manager:
            manager.save(1, contents, {}, name="saved")
            manager.finish()


def load(root: str, form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if form == "DCPState":
        dcp.load({"app": DCPState(model, optimizer)}, checkpoint_id=root)
    elif form == "load_checkpoint":
        load_checkpoint(model, optimizer, root)
    else:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        contents = collect(model, optimizer, rank=rank, world_size=world_size)
        checkpoint = PublishedCheckpoint.open(open_store(root), "saved")
        load_entries(checkpoint, contents, check_contents(checkpoint, contents))


def _thaws(root: str, engine: str) -> list[str]:
    """The combinations that do not go on as the run that was not interrupted."""
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
@pytest.mark.parametrize("world_size", [1, 2])
def test_states_of_a_parameter_frozen_while_loading_continue_once_it_is_trained_again(
    tmp_path, world_size, engine
):
    for failed in run_ranks(world_size, _thaws, str(tmp_path), engine):
        assert failed == []
