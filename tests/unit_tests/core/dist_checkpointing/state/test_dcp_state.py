"""`DCPState` handed to vanilla DCP: save, destroy, load, for every engine, with and without
optimizer.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer
from tests.helpers.ranks import on_ranks, run_ranks


class TwoLayers(nn.Module):
    """A module list for FSDP2's groups, and parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


# Engines for `build`, in addition to the sharding strategies.
PLAIN, FSDP2, HSDP, HFSDP = "plain", "fsdp2", "hsdp", "hfsdp"


def build(
    engine: str, seed: int, optimizer: str = "adam"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = TwoLayers()
    mesh = build_mesh("cpu", dist.get_world_size())
    if engine == FSDP2:
        torch_fsdp2.shard_model(
            model, mesh, compute_dtype=torch.float32, reshard_after_forward=True
        )
    elif engine != PLAIN:
        if engine in SHARDING_STRATEGIES:
            config = DataParallelConfig(data_parallel_sharding_strategy=engine)
        else:
            outer = {HSDP: "no_shard", HFSDP: "optim"}[engine]
            config = DataParallelConfig(
                num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer
            )
        megatron_fsdp.shard_model(
            model,
            mesh,
            Device("cpu"),
            config,
            compute_dtype=torch.float32,
            reset_parameters=_not_on_meta,
        )
    if optimizer == "scaled":
        dtypes = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16}
        return model, FusedAdam(model.parameters(), lr=0.1, **dtypes)
    return model, build_torch_optimizer(model, OptimizerConfig(optimizer=optimizer), lr=0.1)


def _not_on_meta(module: nn.Module) -> None:
    raise AssertionError(f"{module} is not on meta")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for number in range(num_steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def local_tensors(state: dict) -> dict[str, torch.Tensor]:
    tensors = {
        key: value
        for key, value in flatten_state_dict(state)[0].items()
        if isinstance(value, torch.Tensor)
    }
    return {
        key: (v.to_local() if isinstance(v, DTensor) else v).detach().clone()
        for key, v in tensors.items()
    }


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(got[key], expected[key])] == []


def _save_destroy_load(path: str, engine: str, optimizer_name: str) -> None:
    model, optimizer = build(engine, seed=0, optimizer=optimizer_name)
    train(model, optimizer, 2)
    saved = local_tensors(DCPState(model, optimizer).state_dict())
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    train(model, optimizer, 1)
    continued = local_tensors(DCPState(model, optimizer).state_dict())

    fresh_model, fresh_optimizer = build(engine, seed=1, optimizer=optimizer_name)
    with torch.no_grad():
        for parameter in fresh_model.parameters():
            parameter.zero_()
    dcp.load({"app": DCPState(fresh_model, fresh_optimizer)}, checkpoint_id=path)
    assert_same(local_tensors(DCPState(fresh_model, fresh_optimizer).state_dict()), saved)

    train(fresh_model, fresh_optimizer, 1)
    assert_same(local_tensors(DCPState(fresh_model, fresh_optimizer).state_dict()), continued)


@pytest.mark.parametrize(
    ("world_size", "engine", "optimizer_name"),
    [
        (1, PLAIN, "adam"),
        (2, FSDP2, "sgd"),
        (2, "no_shard", "sgd"),
        (2, "optim_grads_params", "adam"),
        (2, "optim_grads_params", "scaled"),
        (4, HFSDP, "adam"),
        *(
            pytest.param(size, engine, "adam", marks=pytest.mark.wide)
            for size in (1, 2)
            for engine in (FSDP2, *SHARDING_STRATEGIES)
        ),
    ],
)
def test_a_loaded_run_equals_the_saved_one_and_continues_alike(
    tmp_path, world_size, engine, optimizer_name
):
    run_ranks(world_size, _save_destroy_load, str(tmp_path / "checkpoint"), engine, optimizer_name)


def _save(path: str, engine: str) -> list[float]:
    model, optimizer = build(engine, seed=0)
    train(model, optimizer, 2)
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    return _losses(model, optimizer)


def _load(path: str, engine: str) -> list[float]:
    model, optimizer = build(engine, seed=1)
    assert _losses(*build(engine, seed=1)) != _losses(*build(engine, seed=0))
    dcp.load({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    return _losses(model, optimizer)


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of two more steps, which weights and optimizer states both decide."""
    losses = []
    for number in range(3):
        losses.append(model(torch.ones(4, 5)).sum().item())
        train(model, optimizer, 1 if number < 2 else 0)
    return losses


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((2, FSDP2), (4, "optim_grads_params")),
        ((4, HFSDP), (2, FSDP2)),
        ((2, "no_shard"), (4, HSDP)),
        ((4, HSDP), (1, PLAIN)),
    ],
)
def test_what_one_engine_saves_another_loads_on_another_number_of_ranks(tmp_path, saving, loading):
    path = str(tmp_path / "checkpoint")
    saved, *others = run_ranks(saving[0], _save, path, saving[1])
    assert all(losses == saved for losses in others)
    for losses in run_ranks(loading[0], _load, path, loading[1]):
        assert losses == pytest.approx(saved, rel=1e-6)


def _weights_only(path: str, engine: str) -> None:
    model, optimizer = build(engine, seed=0)
    train(model, optimizer, 1)
    dcp.save({"app": DCPState(model)}, checkpoint_id=path)
    assert list(DCPState(model).state_dict()) == ["model"]
    fresh_model, fresh_optimizer = build(engine, seed=1)
    dcp.load({"app": DCPState(fresh_model)}, checkpoint_id=path)
    assert_same(
        local_tensors(DCPState(fresh_model).state_dict()),
        local_tensors(DCPState(model).state_dict()),
    )
    assert not fresh_optimizer.state
    with pytest.raises(CheckpointError, match=r"optimizer's state, got \['model'\]"):
        DCPState(fresh_model, fresh_optimizer).load_state_dict(DCPState(model).state_dict())


@pytest.mark.parametrize("engine", [FSDP2, "optim_grads_params"])
def test_without_an_optimizer_only_weights_travel(tmp_path, engine):
    run_ranks(2, _weights_only, str(tmp_path / "checkpoint"), engine)


def _saved_before_the_first_step(path: str, engine: str) -> None:
    model, optimizer = build(engine, seed=0)
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    train(model, optimizer, 2)
    untouched_model, untouched_optimizer = build(engine, seed=0)
    train(untouched_model, untouched_optimizer, 2)
    expected = local_tensors(DCPState(untouched_model, untouched_optimizer).state_dict())
    assert_same(local_tensors(DCPState(model, optimizer).state_dict()), expected)


@pytest.mark.parametrize("engine", [FSDP2, "optim_grads_params"])
def test_saving_before_the_first_step_has_no_effect(tmp_path, engine):
    """PyTorch's helper allocates the states by taking a step, which must not count."""
    run_ranks(2, _saved_before_the_first_step, str(tmp_path / "checkpoint"), engine)


@pytest.mark.parametrize("engine", [FSDP2, "optim_grads_params"])
@on_ranks(2)
def test_a_state_dict_gathers_and_copies_no_tensor(engine: str) -> None:
    model, optimizer = build(engine, seed=0)
    flat, _ = flatten_state_dict(DCPState(model, optimizer).state_dict())
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    assert "model.layers.0.weight" in tensors
    assert "optim.state.layers.0.weight.exp_avg" in tensors
    assert all(
        isinstance(value, DTensor) for key, value in tensors.items() if not key.endswith(".step")
    )
    model_weight = next(model.parameters())
    assert (
        tensors["model.layers.0.weight"].to_local().data_ptr() == model_weight.to_local().data_ptr()
    )
