"""Resharding as TransformerEngine tests it: another number of ranks loads and continues a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed.fsdp import Placements, fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import SGD, Lion
from tests.helpers.ranks import run_ranks

DIM = 6
GLOBAL_BATCH = 8
NUM_STEPS = 4  # before the checkpoint
BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
FP8_MOMENTS = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16}


class Model(nn.Module):
    """Tensors whose rows neither 2 nor 4 ranks share evenly, and one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, 7)
        self.second = nn.Linear(7, 3)
        self.factor = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.factor


# {name: [(first row, rows)]}: what one rank holds
Held = dict[str, list[tuple[int, torch.Tensor]]]


def build(strategy: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with fully_shard_context("cpu"):
        for module in (model.first, model):
            fully_shard(module, mesh, Placements.for_strategy(strategy))
    make: Any = RuleOptimizer if "rule" in options else FusedAdam
    make = HybridDeviceOptimizer if "offload_fraction" in options else make
    return model, make(model.parameters(), weight_decay=0.1, **{"lr": 0.05, **options})


def batch(number: int) -> torch.Tensor:
    """[GLOBAL_BATCH, DIM], the same for any number of ranks."""
    return torch.randn(GLOBAL_BATCH, DIM, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        own = batch(number).chunk(dist.get_world_size())[dist.get_rank()]
        model(own).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Weights and states of this rank; the values of scaled states."""
    found: Held = {}
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize()
    for name, parameter in model.named_parameters():
        group = group_of(parameter)
        first_row = group.main_weight.chunk(group.index_of(parameter)).first_row
        states = {key: value for key, value in optimizer.state[parameter].items() if key != "step"}
        if isinstance(optimizer, RuleOptimizer):
            states = {key: optimizer.get_unscaled_state(parameter, key) for key in states}
        for key, tensor in {"weight": parameter, **states}.items():
            found[f"{name}.{key}"] = [(first_row, local_tensor(tensor).detach().float().clone())]
        found[f"{name}.step"] = [(0, optimizer.state[parameter]["step"].clone().view(1))]
    return found


def whole(ranks: list[Held]) -> dict[str, torch.Tensor]:
    """All ranks' rows put together. Every row is there, and alike wherever it is."""
    shapes = {name: parameter.shape for name, parameter in Model().named_parameters()}
    tensors = {}
    for name in ranks[0]:
        shape = (1,) if name.endswith(".step") else shapes[name.rpartition(".")[0]]
        tensor = torch.full(shape, torch.nan)
        for rank in ranks:
            for first_row, rows in rank[name]:
                place = tensor[first_row : first_row + len(rows)]
                assert (place.isnan() | (place == rows)).all(), name
                place.copy_(rows)
        assert not tensor.isnan().any(), name
        tensors[name] = tensor
    return tensors


def _train_and_save(path: str, strategy: str, options: dict[str, Any]) -> Held:
    model, optimizer = build(strategy, options)
    train(model, optimizer, 0, NUM_STEPS)
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    return held(model, optimizer)


def _load_and_go_on(
    path: str, strategy: str, options: dict[str, Any]
) -> tuple[Held, torch.Tensor, Held]:
    model, optimizer = build(strategy, options)
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).fill_(torch.nan)
    dcp.load({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    loaded = held(model, optimizer)
    output = model(batch(100)).detach()
    train(model, optimizer, NUM_STEPS, NUM_STEPS + 1)
    return loaded, output, held(model, optimizer)


def _uninterrupted(strategy: str, options: dict[str, Any]) -> tuple[torch.Tensor, Held]:
    model, optimizer = build(strategy, options)
    train(model, optimizer, 0, NUM_STEPS)
    output = model(batch(100)).detach()
    train(model, optimizer, NUM_STEPS, NUM_STEPS + 1)
    return output, held(model, optimizer)


@pytest.mark.parametrize("saving_fraction", [None, 0.5])
@pytest.mark.parametrize("loading", [1, 3])
@pytest.mark.parametrize("rule", [Lion(), SGD()], ids=["lion", "sgd"])
def test_states_of_other_rules_load_on_other_ranks_and_on_the_other_side(
    tmp_path, rule, loading, saving_fraction
):
    path, strategy = str(tmp_path / "checkpoint"), "optim_grads_params"
    on_device = {"rule": rule, "lr": 0.01}
    on_host = {**on_device, "offload_fraction": 0.5}
    saving_options = on_device if saving_fraction is None else on_host
    saved = whole(run_ranks(2, _train_and_save, path, strategy, saving_options))
    results = {
        name: run_ranks(loading, _load_and_go_on, path, strategy, options)
        for name, options in (("device", on_device), ("host", on_host))
    }
    for ranks in results.values():
        loaded = whole([rank[0] for rank in ranks])
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())

    finals = {name: whole([rank[2] for rank in ranks]) for name, ranks in results.items()}
    for name, tensor in finals["device"].items():
        assert torch.equal(tensor, finals["host"][name]), name
        assert not torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize(
    ("options", "tolerance", "is_exact"),
    [
        ({}, 1e-5, True),
        ({"offload_fraction": 0.5}, 1e-5, True),
        # Sums in another order may round the other way: one step of the format.
        (BF16_MOMENTS, 2**-7, True),
        # Every rank's rows have a separate scale, so other rows are rounded again.
        (FP8_MOMENTS, 2**-3, False),
    ],
    ids=["fp32", "half on the host", "bf16", "fp8"],
)
@pytest.mark.parametrize(
    ("strategy", "saving", "loading"),
    [
        ("optim_grads_params", 4, 2),
        pytest.param("optim_grads_params", 2, 4, marks=pytest.mark.wide),
        pytest.param("optim", 4, 2, marks=pytest.mark.wide),
        pytest.param("optim", 2, 4, marks=pytest.mark.wide),
    ],
)
def test_a_run_that_continues_with_other_ranks_agrees_with_one_that_always_had_them(
    tmp_path, saving, loading, strategy, options, tolerance, is_exact
):
    path = str(tmp_path / "checkpoint")
    saved = whole(run_ranks(saving, _train_and_save, path, strategy, options))
    results = run_ranks(loading, _load_and_go_on, path, strategy, options)
    loaded, final = (whole([result[place] for result in results]) for place in (0, 2))
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        # Magnitudes below the precision of the format for the largest value are not compared.
        least = 0.0 if is_exact else tolerance * float(tensor.abs().max())
        torch.testing.assert_close(
            loaded[name], tensor, rtol=0 if is_exact else tolerance, atol=least
        )

    references = run_ranks(loading, _uninterrupted, strategy, options)
    reference = whole([result[1] for result in references])
    for result, (output, _) in zip(results, references, strict=True):
        torch.testing.assert_close(result[1], output, rtol=tolerance, atol=tolerance)
    for name, tensor in reference.items():
        least = tolerance * float(tensor.abs().max())
        torch.testing.assert_close(
            final[name], tensor, rtol=tolerance, atol=least, msg=lambda m, n=name: f"{n}: {m}"
        )
        if name.endswith(".step"):
            assert final[name] == NUM_STEPS + 1
        else:
            # The last step was one: what would be compared if it had not been is something else.
            assert not torch.equal(final[name], loaded[name]), name
