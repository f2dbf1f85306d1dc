from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import FsdpModule, Placements, fully_shard, fully_shard_context
from megatron.core.distributed.megatron_fsdp import shard_model
from megatron.core.distributed.units import units_of
from megatron.core.dtensors import local_tensor
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer,
    build_optimizer,
    plan_offload,
)
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from tests.helpers.ranks import on_ranks, run_ranks

OFFLOAD = {"optimizer_cpu_offload": True}


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, device=device) for _ in range(3))
        self.head = nn.Linear(6, 1, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def backward(model: nn.Module, number: int = 0, factor: float = 1.0) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    ((model(x) - 1).square().mean() * factor).backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local_tensor(value).detach().clone() for value in model.state_dict().values()]


# Choices


@pytest.mark.parametrize(
    ("settings", "cls"),
    [
        ({}, RuleOptimizer),
        ({"gpu_optimizer": "native"}, RuleOptimizer),
        ({"gpu_optimizer": "torch"}, torch.optim.AdamW),
        ({"optimizer": "sgd"}, RuleOptimizer),
        ({"optimizer": "lion"}, RuleOptimizer),
        ({"optimizer": "sgd", "gpu_optimizer": "torch"}, torch.optim.SGD),
        (OFFLOAD, HybridDeviceOptimizer),
        ({**OFFLOAD, "optimizer": "sgd"}, HybridDeviceOptimizer),
    ],
)
def test_the_settings_select_the_wrapped_optimizer(settings, cls):
    built = build_optimizer(Model(), OptimizerConfig(**settings), lr=0.3, num_local_ranks=1)
    assert type(built.optimizer) is cls
    assert (built.plan is not None) == (cls is HybridDeviceOptimizer)
    assert [(group["lr"], group["weight_decay"]) for group in built.param_groups] == [
        (0.3, 0.01),
        (0.3, 0.0),
    ]
    assert [len(group["params"]) for group in built.param_groups] == [4, 4], "matrices, and biases"


def test_hyperparameters_are_passed_to_both_sides():
    constants = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.7,
        "adam_eps": 1e-5,
        "weight_decay": 0.3,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    }
    config = OptimizerConfig(**OFFLOAD, optimizer_offload_fraction=0.5, **constants)
    model = Model()
    built = build_optimizer(model, config, lr=0.5, num_local_ranks=1)
    assert 0 < built.plan.host_numel < built.plan.total_numel
    group = built.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.7), 1e-5, 0.3)
    built.optimizer.init_state()
    states = built.optimizer.state
    assert len(states) == 8
    assert {
        state[name].dtype for state in states.values() for name in ("exp_avg", "exp_avg_sq")
    } == {torch.bfloat16}
    expected = Model()
    other = build_optimizer(expected, OptimizerConfig(**constants), lr=0.5, num_local_ranks=1)
    for number in range(3):
        for each, optimizer in ((model, built), (expected, other)):
            backward(each, number)
            assert optimizer.step(float(optimizer.grad_norm()))
            optimizer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(weights(model), weights(expected), strict=True))


@pytest.mark.parametrize("choice", ["te", "apex"])
def test_external_implementations_are_rejected_on_the_cpu_and_if_not_installed(choice, monkeypatch):
    config = OptimizerConfig(gpu_optimizer=choice)
    with pytest.raises(
        ConfigError, match=f"expected auto, native or torch on the CPU, got {choice}"
    ):
        build_optimizer(Model(), config, lr=0.1, num_local_ranks=1)
    for name in ("TEFusedAdam", "ApexFusedAdam"):
        monkeypatch.setattr(f"megatron.core.optimizer.distrib_optimizer.{name}", None)
    # Not on the CPU, at least.
    with pytest.raises(ConfigError, match=f"to be installed for {choice}, got no such package"):
        build_optimizer(Model("meta"), config, lr=0.1, num_local_ranks=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_offload_fraction": 0.5},
        {"overlap_cpu_optimizer_d2h_h2d": True},
        {"pin_cpu_grads": False},
        {**OFFLOAD, "overlap_optimizer_with_forward": True},
        {**OFFLOAD, "gpu_optimizer": "te"},
        {**OFFLOAD, "optimizer_offload_fraction": 1.5},
        {**OFFLOAD, "optimizer_offload_fraction": math.nan},
        {"optimizer": "sgd", "gpu_optimizer": "te"},
        {"optimizer": "lion", "gpu_optimizer": "torch"},
        {"optimizer": "lion", "exp_avg_sq_dtype": "bf16"},
        {**OFFLOAD, "optimizer": "lion", "exp_avg_dtype": "fp16"},
        {"gpu_optimizer": "torch", "exp_avg_sq_dtype": "bf16"},
        {
            **OFFLOAD,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "optimizer": "muon",
            "optimizer_update_on_device": 0.5,
        },
        {
            **OFFLOAD,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "optimizer": "muon",
            "optimizer_update_on_device": "auto",
        },
        {
            **OFFLOAD,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "optimizer": "muon",
            "optimizer_early_update_gib": 1.0,
        },
        {**OFFLOAD, "optimizer": "muon", "exp_avg_dtype": "bf16"},
        {"optimizer": "muon", "gpu_optimizer": "torch"},
        {"optimizer": "muon", "gpu_optimizer": "te"},
        {"optimizer": "muon", "exp_avg_dtype": "fp16"},
        {"optimizer": "muon", "exp_avg_dtype": "fp8"},
        {"optimizer": "muon", "muon_scale_mode": "unit_rms_norm"},
        {"optimizer": "muon", "muon_num_ns_steps": 0},
        {"muon_momentum": 0.9},
        {"muon_nesterov": False},
        {"muon_split_heads": True},
    ],
    ids=str,
)
def test_settings_without_effect_are_rejected(settings):
    with pytest.raises(ConfigError, match="--"):
        OptimizerConfig(**settings)


# Clipping


def shard(model: nn.Module) -> None:
    with fully_shard_context("cpu"):
        for module in (*model.layers, model):
            fully_shard(
                module,
                build_mesh("cpu", dist.get_world_size()),
                Placements.for_strategy("optim_grads_params"),
            )


CONFIGS = [
    {},
    {"gpu_optimizer": "torch"},
    {"optimizer": "sgd"},
    {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True, "overlap_optimizer_with_forward": True},
    {**OFFLOAD, "optimizer_offload_fraction": 0.5},
    {**OFFLOAD, "optimizer_offload_fraction": 0.5, "optimizer": "sgd"},
]


def _clips(settings: dict[str, Any], is_sharded: bool) -> None:
    def run(clip_grad: float, own: bool) -> list[torch.Tensor]:
        model = Model()
        if is_sharded:
            shard(model)
        config = {
            name: value
            for name, value in settings.items()
            if own or name in ("optimizer", "gpu_optimizer")
        }
        optimizer = build_optimizer(
            model, OptimizerConfig(**config, clip_grad=clip_grad), lr=0.1, num_local_ranks=1
        )
        for number in range(4):
            backward(model, number, factor=10.0)
            norm = optimizer.grad_norm()
            if own:
                assert optimizer.step(float(norm))
            else:
                total = torch.nn.utils.clip_grad_norm_(
                    model.parameters(), clip_grad or math.inf, foreach=False
                )
                total = total.full_tensor() if is_sharded else total
                torch.testing.assert_close(total.double(), norm, rtol=1e-6, atol=0)
                optimizer.optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    for clip_grad in (0.05, 0.0):
        for mine, theirs in zip(run(clip_grad, own=True), run(clip_grad, own=False), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    pairs = zip(run(0.05, own=True), run(0.0, own=True), strict=True)
    if settings.get("optimizer") == "sgd":
        assert not any(torch.allclose(*pair) for pair in pairs if pair[0].numel()), (
            "clipping matters"
        )


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_clipping_matches_torch(settings):
    _clips(settings, is_sharded=False)


@pytest.mark.parametrize(
    "settings",
    [
        one if one in (CONFIGS[1], CONFIGS[-2]) else pytest.param(one, marks=pytest.mark.wide)
        for one in CONFIGS
    ],
    ids=str,
)
def test_clipping_of_a_sharded_model_matches_torch(settings):
    run_ranks(2, _clips, settings, True)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_a_non_finite_norm_skips_the_step(settings, norm):
    model = Model()
    optimizer = build_optimizer(model, OptimizerConfig(**settings), lr=0.1, num_local_ranks=1)
    before = weights(model)
    backward(model)
    assert optimizer.step(norm) is False
    optimizer.synchronize()
    assert all(torch.equal(*pair) for pair in zip(weights(model), before, strict=True))
    assert {
        float(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state
    } <= {0.0}
    assert optimizer.step(1.0) is True
    assert not any(torch.equal(*pair) for pair in zip(weights(model), before, strict=True))


def test_a_non_finite_gradient_makes_the_norm_non_finite():
    model = Model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    backward(model)
    assert math.isfinite(float(optimizer.grad_norm()))
    model.head.weight.grad[0, 3] = math.inf
    assert not math.isfinite(float(optimizer.grad_norm()))


# Planning ahead


PLANNED = [
    config for config in CONFIGS if "optimizer" not in config and "gpu_optimizer" not in config
]


def _steps(settings: dict[str, Any], is_planned: bool) -> list[torch.Tensor]:
    model = Model()
    shard(model)
    optimizer = build_optimizer(
        model, OptimizerConfig(**settings, clip_grad=0.05), lr=0.1, num_local_ranks=1
    )
    for number in range(3):
        backward(model, number, factor=10.0)
        if number == 1:
            model.head.bias.grad = None
        norm = optimizer.grad_norm()
        planned = optimizer.plan_step() if is_planned else None
        assert (planned is not None) == is_planned
        optimizer.step(float(norm), planned)
        optimizer.zero_grad()
    optimizer.synchronize()
    return weights(model)


@pytest.mark.parametrize("settings", PLANNED, ids=str)
@on_ranks(2)
def test_a_planned_step_is_bit_equal(settings: dict[str, Any]) -> None:
    pairs = zip(_steps(settings, is_planned=True), _steps(settings, is_planned=False), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("settings", PLANNED, ids=str)
def test_an_unused_plan_has_no_effect(settings):
    model = Model()
    optimizer = build_optimizer(model, OptimizerConfig(**settings), lr=0.1, num_local_ranks=1)
    before = weights(model)
    backward(model)
    assert optimizer.step(math.nan, optimizer.plan_step()) is False
    optimizer.synchronize()
    assert all(torch.equal(*pair) for pair in zip(weights(model), before, strict=True))
    for state in optimizer.optimizer.state.values():
        assert not any(state[name].any() for name in ("step", "exp_avg", "exp_avg_sq"))


def _replace_gradient(optimizer: DistributedOptimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = parameter.grad * 3


def _drop_gradient(optimizer: DistributedOptimizer) -> None:
    optimizer.param_groups[1]["params"][0].grad = None


def _write_to_gradient(optimizer: DistributedOptimizer) -> None:
    optimizer.param_groups[0]["params"][1].grad.mul_(3)


def _change_rate(optimizer: DistributedOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


@pytest.mark.parametrize("settings", PLANNED, ids=str)
@pytest.mark.parametrize(
    "change", [_replace_gradient, _drop_gradient, _write_to_gradient, _change_rate]
)
@pytest.mark.parametrize("is_hook", [False, True])
def test_changes_between_plan_and_step_take_effect(settings, change, is_hook):
    found = []
    for is_planned in (False, True):
        model = Model()
        optimizer = build_optimizer(model, OptimizerConfig(**settings), lr=0.1, num_local_ranks=1)
        for number in range(2):
            backward(model, number)
            planned = optimizer.plan_step() if is_planned else None
            if number == 1 and is_hook:
                optimizer.optimizer.register_step_pre_hook(lambda *_, own=optimizer: change(own))
            elif number == 1:
                change(optimizer)
            optimizer.step(1.0, planned)
            optimizer.zero_grad()
        optimizer.synchronize()
        found.append(weights(model))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_other_optimizers_do_not_plan_steps():
    optimizer = build_optimizer(
        Model(), OptimizerConfig(gpu_optimizer="torch"), lr=0.1, num_local_ranks=1
    )
    assert optimizer.plan_step() is None


def test_planning_rejects_unsupported_gradients():
    for settings in PLANNED:
        model = Model()
        optimizer = build_optimizer(model, OptimizerConfig(**settings), lr=0.1, num_local_ranks=1)
        model.head.weight.main_grad = torch.zeros_like(model.head.weight)
        with pytest.raises(ValueError, match="main_grad"):
            optimizer.plan_step()


# Offload plans, before and after sharding


def gpt(num_layers: int, **changes: Any) -> GPTModel:
    dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    with torch.device("meta"):
        return GPTModel(
            TransformerConfig(num_layers, 16, 2, ffn_hidden_size=24, **dropout, **changes), 40
        )


FRACTIONS = (0.0, 0.3, 0.8, 1.0)


def _plan_holds(is_untied: bool) -> list[list[bool]]:
    """Checks that the plan before sharding equals the plan of the optimizer after it."""
    plans = []
    for fraction in FRACTIONS:
        config = OptimizerConfig(**OFFLOAD, optimizer_offload_fraction=fraction)
        model = gpt(3, untie_embeddings_and_output_weights=is_untied)
        planned = plan_offload(model, config)
        assert planned is not None
        offloaded = {unit.module for unit in units_of(model) if unit.name in planned.names_on_host}
        shard_model(
            model,
            build_mesh("cpu", dist.get_world_size()),
            Device("cpu"),
            DataParallelConfig(),
            compute_dtype=torch.bfloat16,
            reset_parameters=seeded_reset(model, "cpu", seed=3),
            offloaded=planned.names_on_host,
        )
        modules = [module for module in model.modules() if isinstance(module, FsdpModule)]
        from_the_start = {
            module for module in modules if all(g.is_on_host for g in module.parameter_groups)
        }
        assert from_the_start == offloaded
        plan = build_optimizer(model, config, lr=0.1, num_local_ranks=1).plan
        assert plan == planned
        assert {module for module in modules if module.parameter_groups[0].is_on_host} == offloaded
        assert sum(group.is_on_host for group in plan.groups) == len(offloaded)
        plans.append([group.is_on_host for group in plan.groups])
    return plans


@pytest.mark.parametrize("is_untied", [False, True])
def test_the_offload_plan_before_sharding_equals_the_optimizers_plan(is_untied):
    plans, *others = run_ranks(2, _plan_holds, is_untied)
    assert others == [plans]
    assert plans[0] == [False] * 4
    assert plans[-1] == [True] * 4
    assert len({sum(plan) for plan in plans}) >= 3, "fractions in between do something else"
    assert run_ranks(1, _plan_holds, is_untied) == [plans]


def test_nothing_is_offloaded_by_default():
    assert plan_offload(gpt(2), OptimizerConfig()) is None
