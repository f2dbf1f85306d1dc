"""Where the optimizer's states live never changes a run by one bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import SGD, Lion, UpdateRule
from tests.helpers.ranks import random_delays, rank_device, run_ranks

# so that every rank's part of every tensor is a multiple of 64 elements, on 1, 2 and 4 ranks
DIM = 32
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 6
AVG = Partial("avg")
ON_TWO_AXES = {  # of two ranks each
    "hsdp": Placements((0, 1), (Replicate(), Flat()), (AVG, Flat()), (Replicate(), Flat())),
    "hfsdp": Placements((0, 1), (Replicate(), Flat()), (AVG, Flat()), (Flat(), Flat())),
}


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 2 * DIM, bias=False, dtype=dtype)
        self.second = nn.Linear(2 * DIM, DIM, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """Three layers, and matrices before and behind them, which the root has."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(DIM, DIM, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(3))
        self.behind = nn.Linear(DIM, DIM, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


class Setting(NamedTuple):
    """A model's, without its optimizer."""

    strategy: str = "optim_grads_params"
    dtype: torch.dtype = torch.float32
    num_microbatches: int = 1
    steps: int = STEPS


class Run(NamedTuple):
    """Results of a run on one rank."""

    losses: list[float]
    weights: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]


def shard(model: nn.Module, setting: Setting, offloaded: Sequence[nn.Module] = ()) -> FsdpContext:
    device = rank_device()
    if setting.strategy in ON_TWO_AXES:
        mesh, placements = init_device_mesh(device.type, (2, 2)), ON_TWO_AXES[setting.strategy]
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        placements = Placements.for_strategy(setting.strategy)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    with fully_shard_context(device) as context:
        for module in (*model.layers, model):
            offload = OffloadPolicy(main_weights_on_host=module in offloaded)
            fully_shard(module, mesh, placements, policy, offload_policy=offload)
    return context


Step = Callable[[torch.optim.Optimizer], object]


def train(
    setting: Setting,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int | None = None,
    step: Step = lambda optimizer: optimizer.step(),
    offloaded: Callable[[nn.Module], Sequence[nn.Module]] = lambda _: (),
) -> Run:
    """Trains each rank on separate batches; with a seed, under random delays on every lane."""
    model = Model(setting.dtype).to(rank_device())
    context = shard(model, setting, offloaded(model))
    optimizer = make(model)
    losses = []
    with nullcontext() if seed is None else random_delays(seed):
        for number in range(setting.steps):
            losses.append(backward(model, context, setting, number))
            for group in optimizer.param_groups:
                group["lr"] = OPTIONS["lr"] / (number + 1)
            step(optimizer)
            optimizer.zero_grad()
        state = model.state_dict()  # waits for pending updates
    states = [
        {name: local_tensor(value).clone() for name, value in optimizer.state[parameter].items()}
        for parameter in model.parameters()
    ]
    return Run(
        losses, [local_tensor(state[name]).clone() for name, _ in model.named_parameters()], states
    )


def backward(model: nn.Module, context: FsdpContext, setting: Setting, step: int) -> float:
    """All microbatches of a step; their losses' sum."""
    total = 0.0
    for number in range(setting.num_microbatches):
        generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + number)
        x = torch.randn(4, DIM, generator=generator).to(rank_device(), setting.dtype)
        with microbatch(context, is_last=number == setting.num_microbatches - 1):
            loss = (model(x).float() - 1).square().mean()
            loss.backward()
        total += loss.item()
    return total


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return FusedAdam(model.parameters(), **OPTIONS)


def torch_fused(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    fully_shard_optimizer(optimizer)
    return optimizer


def hybrid(fraction: float, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **settings, **OPTIONS)
        wanted = {0.0: 0, 0.5: 2, 1.0: 4}[fraction]
        assert sum(group.is_on_host for group in optimizer.plan.groups) == wanted
        assert sum(group_of(layer.first.weight).is_on_host for layer in model.layers) == min(
            wanted, 3
        )
        return optimizer

    return make


def assert_same(run: Run, other: Run) -> None:
    assert run.losses == other.losses
    for own, theirs in zip(run.weights, other.weights, strict=True):
        assert torch.equal(own, theirs)
    for mine, others in zip(run.states, other.states, strict=True):
        assert mine.keys() == others.keys() > {"step"}
        assert all(torch.equal(mine[name], others[name]) for name in mine)


def scaled(factor: float) -> Step:
    def step(optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, (RuleOptimizer, HybridDeviceOptimizer)):
            optimizer.step(grad_scale=factor)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(factor)
        optimizer.step()

    return step


OVERLAPS = {
    "in order": {"overlap_cpu_optimizer_d2h_h2d": False},
    "overlapping": {},
    "overlapping the forward": {"overlap_step_with_forward": True},
    "overlapping all": {"overlap_step_with_forward": True, "fetch_during_backward": True},
}
ALL = OVERLAPS["overlapping all"]
FRACTIONS = (0.0, 0.5, 1.0)


def _all_settings(setting: Setting, cases: Sequence[tuple[float, dict[str, Any]]]) -> None:
    expected = train(setting, fused)
    assert all(state["exp_avg"].any() for state in expected.states if state["exp_avg"].numel())
    if rank_device().type != "cuda":  # where torch's kernel rounds in other places
        assert_same(train(setting, torch_fused), expected)
    for fraction, settings in cases:
        assert_same(train(setting, hybrid(fraction, **settings)), expected)


ALL_CASES = list(itertools.product(FRACTIONS, OVERLAPS.values()))
FEW_CASES = [(0.5, OVERLAPS["overlapping"]), (1.0, ALL)]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, ALL_CASES, id="1-all"),
        pytest.param(2, FEW_CASES[:1], id="2-one"),
        *(
            pytest.param(size, ALL_CASES, id=f"{size}-all", marks=pytest.mark.wide)
            for size in (2, 4)
        ),
    ],
)
def test_offloaded_steps_are_bit_equal_to_those_of_the_device_and_of_torch(world_size, cases):
    run_ranks(world_size, _all_settings, Setting(), cases, timeout=600)


@pytest.mark.parametrize("cases", [FEW_CASES[1:], pytest.param(ALL_CASES, marks=pytest.mark.wide)])
def test_offloaded_steps_are_bit_equal_on_an_accelerator(accelerator, cases):
    run_ranks(2, _all_settings, Setting(steps=4), cases, timeout=600, device=accelerator)


def _delayed(setting: Setting, fraction: float, seeds: Sequence[int]) -> None:
    make = hybrid(fraction, **ALL)
    expected = train(setting, make)
    assert_same(train(setting, fused), expected)
    assert expected.losses != train(setting._replace(num_microbatches=1), make).losses
    for seed in seeds:
        assert_same(train(setting, make, seed), expected)


DELAYED = Setting(num_microbatches=2, steps=2)
# One of them by default.
DELAYED_CASES = pytest.mark.parametrize(
    ("world_size", "strategy", "fraction"),
    [
        (2, "optim_grads_params", 1.0),
        *(
            pytest.param(world_size, strategy, fraction, marks=pytest.mark.wide)
            for world_size, strategy, fraction in itertools.product(
                (1, 2), SHARDING_STRATEGIES, (0.5, 1.0)
            )
            if (world_size, strategy, fraction) != (2, "optim_grads_params", 1.0)
        ),
    ],
)


@DELAYED_CASES
def test_random_delays_on_every_lane_change_no_bit(world_size, strategy, fraction):
    run_ranks(world_size, _delayed, DELAYED._replace(strategy=strategy), fraction, range(4))


@DELAYED_CASES
def test_random_delays_on_every_stream_of_an_accelerator_change_no_bit(
    accelerator, world_size, strategy, fraction
):
    setting = DELAYED._replace(strategy=strategy)
    run_ranks(world_size, _delayed, setting, fraction, range(3), timeout=300, device=accelerator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_delays_change_no_bit_of_16_bit_weights_that_travel_in_their_gradients_memory(dtype):
    run_ranks(2, _delayed, DELAYED._replace(strategy="optim_grads", dtype=dtype), 1.0, range(4, 6))


def _rules(setting: Setting, rule: UpdateRule) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1}
    expected = train(setting, lambda model: RuleOptimizer(model.parameters(), rule, **options))
    assert len(set(expected.losses)) == setting.steps
    for fraction in (0.5, 1.0):

        def make(model: nn.Module, fraction: float = fraction) -> torch.optim.Optimizer:
            own = model.parameters()
            return HybridDeviceOptimizer(own, fraction, rule=rule, **ALL, **options)

        assert_same(train(setting, make), expected)


@pytest.mark.parametrize("rule", [Lion(torch.bfloat16), SGD()], ids=["lion", "sgd"])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "optim_grads_params"), (2, "optim_grads_params"), (2, "optim"), (4, "hfsdp")],
)
def test_offloaded_steps_of_other_rules_are_bit_equal(world_size, strategy, rule):
    run_ranks(world_size, _rules, Setting(strategy, torch.bfloat16, steps=3), rule)


@pytest.mark.parametrize("rule", [Lion(), SGD()], ids=["lion", "sgd"])
def test_offloaded_steps_of_other_rules_are_bit_equal_on_an_accelerator(accelerator, rule):
    setting = Setting("optim_grads_params", torch.bfloat16, steps=3)
    run_ranks(2, _rules, setting, rule, device=accelerator)


def _fractions(setting: Setting, seed: int | None = None) -> None:
    expected = train(setting, fused)
    assert len(set(expected.losses)) == setting.steps
    for fraction in FRACTIONS:
        assert_same(train(setting, hybrid(fraction, **ALL), seed), expected)
    if setting.dtype != torch.float32:
        weights = [
            parameter for layer in Model(setting.dtype).layers for parameter in layer.parameters()
        ]
        assert all(weight.dtype == setting.dtype for weight in weights)
        assert all(weight.dtype == torch.float32 for weight in expected.weights)


@pytest.mark.wide
@pytest.mark.parametrize("strategy", SHARDING_STRATEGIES)
def test_bf16_weights_train_alike_on_an_accelerator_regardless_of_the_fraction(
    accelerator, strategy
):
    setting = Setting(strategy, torch.bfloat16, 3, steps=4)
    run_ranks(2, _fractions, setting, 7, device=accelerator, timeout=600)


@pytest.mark.wide
@pytest.mark.parametrize("strategy", list(ON_TWO_AXES))
def test_bf16_weights_train_alike_on_accelerators_in_two_axes_regardless_of_the_fraction(
    accelerator, strategy
):
    setting = Setting(strategy, torch.bfloat16, 3, steps=4)
    run_ranks(4, _fractions, setting, 7, device=accelerator, timeout=600)


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        *((2, strategy) for strategy in SHARDING_STRATEGIES),
        (4, "hfsdp"),
        pytest.param(4, "hsdp", marks=pytest.mark.wide),
    ],
)
def test_bf16_weights_and_gradients_train_alike_regardless_of_the_fraction(
    world_size, strategy, num_microbatches
):
    run_ranks(world_size, _fractions, Setting(strategy, torch.bfloat16, num_microbatches, steps=2))


def _scaled(setting: Setting) -> None:
    expected = train(setting, fused, step=scaled(0.37))
    assert expected.losses != train(setting, fused).losses
    if setting.dtype == torch.float32:
        assert_same(train(setting, torch_fused, step=scaled(0.37)), expected)
    for settings in (OVERLAPS["in order"], ALL):
        assert_same(train(setting, hybrid(0.5, **settings), step=scaled(0.37)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_coefficient_for_all_gradients_gives_the_same_bits_on_both_sides(dtype):
    run_ranks(2, _scaled, Setting(dtype=dtype, steps=2))


def _on_host_from_the_start(setting: Setting) -> None:
    expected = train(setting, fused)
    layers = {0.5: slice(1, None), 1.0: slice(None)}
    for fraction, settings in itertools.product(layers, (OVERLAPS["in order"], ALL)):

        def offloaded(model: nn.Module, fraction: float = fraction) -> list[nn.Module]:
            rest = [model] if fraction == 1 else []
            return [*model.layers[layers[fraction]], *rest]

        assert_same(train(setting, hybrid(fraction, **settings), offloaded=offloaded), expected)


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("no_shard", torch.float32),
        pytest.param("optim", torch.bfloat16, marks=pytest.mark.wide),
        ("optim_grads_params", torch.bfloat16),
    ],
)
def test_main_weights_that_are_on_the_host_from_the_start_make_no_difference(strategy, dtype):
    run_ranks(2, _on_host_from_the_start, Setting(strategy, dtype, num_microbatches=2, steps=2))


def _all_on_host(model: nn.Module) -> torch.optim.Optimizer:
    return HybridDeviceOptimizer(model.parameters(), 1.0, **ALL, **OPTIONS)


def _constructed(
    strategy: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> dict[bool, int]:
    """How many DTensors a steady step of two microbatches constructs, by whether gradients are
    cleared to None.
    """
    setting = Setting(strategy, torch.bfloat16, num_microbatches=2)
    model = Model(setting.dtype)
    context = shard(model, setting)
    optimizer = make(model)
    count, real = 0, DTensor.__new__

    def counting(cls: type[DTensor], *args: Any, **kwargs: Any) -> DTensor:
        nonlocal count
        count += 1
        return real(cls, *args, **kwargs)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "__new__", counting)
        for set_to_none in (True, False):
            for number in range(4):
                count = 0
                backward(model, context, setting, number)
                step = optimizer.plan_step()
                optimizer.step(grad_scale=0.5, planned=step)
                optimizer.zero_grad(set_to_none=set_to_none)
            found[set_to_none] = count
        count = 0
        torch.zeros_like(next(model.parameters()))
        assert count == 1, "this one is seen"
    return found


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params", "hsdp"])
@pytest.mark.parametrize("make", [fused, _all_on_host], ids=["device", "host"])
def test_a_steady_step_constructs_dtensors_only_for_gradients_that_were_cleared(strategy, make):
    # One for each parameter and step, as FSDP2: a program may keep a gradient that is cleared to
    # None, with its values, so the next one is another object. Each takes 10 us.
    num_parameters = len([*Model().parameters()])
    world_size = 4 if strategy == "hsdp" else 2
    for counts in run_ranks(world_size, _constructed, strategy, make):
        assert counts == {True: num_parameters, False: 0}
