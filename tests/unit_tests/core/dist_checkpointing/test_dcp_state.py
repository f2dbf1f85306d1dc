"""`DCPState` handed to vanilla DCP: save, destroy, load, for FSDP2 and plain modules, with and without optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.state import DCPState, flatten
from megatron.core.distributed.torch_fsdp2 import shard_model
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer
from tests.ranks import run_ranks


class TwoLayers(nn.Module):
    """A module list for FSDP2's groups, and parameters of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def build(is_sharded: bool, seed: int, optimizer: str = "adam") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = TwoLayers()
    if is_sharded:
        mesh = build_mesh("cpu", dist.get_world_size())
        shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    return model, build_torch_optimizer(model, OptimizerConfig(optimizer=optimizer), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for number in range(num_steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def local_tensors(state: dict) -> dict[str, torch.Tensor]:
    tensors = {key: value for key, value in flatten(state).items() if isinstance(value, torch.Tensor)}
    return {key: (v.to_local() if isinstance(v, DTensor) else v).detach().clone() for key, v in tensors.items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(got[key], expected[key])] == []


def _save_destroy_load(path: str, is_sharded: bool, optimizer_name: str) -> None:
    model, optimizer = build(is_sharded, seed=0, optimizer=optimizer_name)
    train(model, optimizer, 2)
    saved = local_tensors(DCPState(model, optimizer).state_dict())
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    train(model, optimizer, 1)
    continued = local_tensors(DCPState(model, optimizer).state_dict())

    fresh_model, fresh_optimizer = build(is_sharded, seed=1, optimizer=optimizer_name)
    with torch.no_grad():
        for parameter in fresh_model.parameters():
            parameter.zero_()
    dcp.load({"app": DCPState(fresh_model, fresh_optimizer)}, checkpoint_id=path)
    assert_same(local_tensors(DCPState(fresh_model, fresh_optimizer).state_dict()), saved)

    train(fresh_model, fresh_optimizer, 1)
    assert_same(local_tensors(DCPState(fresh_model, fresh_optimizer).state_dict()), continued)


@pytest.mark.parametrize("optimizer_name", ["adam", "sgd"])
@pytest.mark.parametrize(("world_size", "is_sharded"), [(1, False), (1, True), (2, True)])
def test_what_is_loaded_equals_what_was_saved_and_goes_on_alike(tmp_path, world_size, is_sharded, optimizer_name):
    run_ranks(world_size, _save_destroy_load, str(tmp_path / "checkpoint"), is_sharded, optimizer_name)


def _weights_only(path: str) -> None:
    model, optimizer = build(True, seed=0)
    train(model, optimizer, 1)
    dcp.save({"app": DCPState(model)}, checkpoint_id=path)
    assert list(DCPState(model).state_dict()) == ["model"]
    fresh_model, fresh_optimizer = build(True, seed=1)
    dcp.load({"app": DCPState(fresh_model)}, checkpoint_id=path)
    assert_same(local_tensors(DCPState(fresh_model).state_dict()), local_tensors(DCPState(model).state_dict()))
    assert not fresh_optimizer.state
    with pytest.raises(CheckpointError, match=r"optimizer's state, got \['model'\]"):
        DCPState(fresh_model, fresh_optimizer).load_state_dict(DCPState(model).state_dict())


def test_without_an_optimizer_only_weights_travel(tmp_path):
    run_ranks(2, _weights_only, str(tmp_path / "checkpoint"))


def _saved_before_the_first_step(path: str) -> None:
    model, optimizer = build(True, seed=0)
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    train(model, optimizer, 2)
    untouched_model, untouched_optimizer = build(True, seed=0)
    train(untouched_model, untouched_optimizer, 2)
    expected = local_tensors(DCPState(untouched_model, untouched_optimizer).state_dict())
    assert_same(local_tensors(DCPState(model, optimizer).state_dict()), expected)


def test_saving_before_the_first_step_changes_nothing(tmp_path):
    """PyTorch's helper allocates the states by a step of its own, which must not count."""
    run_ranks(2, _saved_before_the_first_step, str(tmp_path / "checkpoint"))


def _states_are_dtensors() -> None:
    model, optimizer = build(True, seed=0)
    flat = flatten(DCPState(model, optimizer).state_dict())
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    assert "model.layers.0.weight" in tensors
    assert "optim.state.layers.0.weight.exp_avg" in tensors
    assert all(isinstance(value, DTensor) for key, value in tensors.items() if not key.endswith(".step"))
    model_weight = next(model.parameters())
    assert tensors["model.layers.0.weight"].to_local().data_ptr() == model_weight.to_local().data_ptr()


def test_nothing_is_gathered_or_copied():
    run_ranks(2, _states_are_dtensors)
