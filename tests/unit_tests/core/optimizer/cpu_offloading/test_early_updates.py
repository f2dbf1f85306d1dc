"""Updates that begin before the norm is known never change a run by one bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.rules import SGD, Lion
from tests.helpers.ranks import random_delays, rank_device, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.test_bits import (
    ALL,
    DIM,
    OPTIONS,
    Model,
    Setting,
    backward,
    shard,
)

SETTING = Setting(num_microbatches=2)
BF16 = torch.bfloat16
ROOM = 1 << 30
RULES: dict[str, dict[str, Any]] = {
    "fp32 moments": OPTIONS,
    "bf16 moments": {**OPTIONS, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "Lion": {"rule": Lion(BF16), "lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"rule": SGD(), "lr": 1e-2, "weight_decay": 0.1},
}
# Factors of the gradients of each step; None: the step is skipped.
FACTORS: dict[str, list[float | None]] = {
    "inactive": [1.0] * 4,
    "active": [0.5, 0.25, 0.5, 0.5],
    "mixed": [1.0, 1.0, 0.5, 1.0, 1.0, 0.5],
    "not finite": [1.0, 1.0, None, 1.0, 1.0],
}


class Trained:
    """A model whose states are all in host memory, and its optimizer."""

    def __init__(self, room: int = ROOM, setting: Setting = SETTING, **settings: Any) -> None:
        self.setting = setting
        self.model = Model(setting.dtype).to(rank_device())
        self.context = shard(self.model, setting, [*self.model.layers, self.model])
        settings = {**ALL, **(settings or OPTIONS)}
        self.optimizer = HybridDeviceOptimizer(
            self.model.parameters(), 1.0, early_update_bytes=room, records_timings=True, **settings
        )

    @property
    def side(self) -> Any:
        return self.optimizer._sides.host_side

    @property
    def early(self) -> list[Any]:
        """The early updates that are under way."""
        return [bucket.early for bucket in self.side.buckets if bucket.early is not None]

    def backward(self, number: int, *, waits: bool = True) -> float:
        """Returns the loss. Early updates that have begun are over, unless told otherwise."""
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] / (number + 1)
        loss = backward(self.model, self.context, self.setting, number)
        for early in self.early if waits else ():
            early.done.synchronize()
        return loss

    def step(self, factor: float | None = 1.0) -> None:
        if factor is not None:
            self.optimizer.step(grad_scale=factor)
        self.optimizer.zero_grad()

    def share(self) -> float:
        """The share of the last steps' updates that was early."""
        self.optimizer.synchronize()
        self.side.timings.end()
        found = self.optimizer.timings()
        return 0.0 if found is None else found.early_share

    def values(self) -> list[torch.Tensor]:
        """Weights, and states with their counts of steps."""
        self.optimizer.synchronize()
        state, weights = self.optimizer.state, self.model.state_dict().values()
        states = [value for p in self.model.parameters() for value in state[p].values()]
        return [local_tensor(value).detach().clone() for value in (*weights, *states)]


class Course(NamedTuple):
    losses: list[float]
    values: list[torch.Tensor]
    shares: list[float]


def assert_same(course: Course, other: Course) -> None:
    assert course.losses == other.losses
    assert all(map(torch.equal, course.values, other.values))


Between = Callable[[Trained, int], object]
Change = Callable[[Trained], object]


def course(
    trained: Trained,
    factors: Sequence[float | None] = FACTORS["inactive"],
    *,
    between: Between = lambda *_: None,
    seed: int | None = None,
) -> Course:
    """Trains; `between` is called between backward and step, and a seed delays all lanes."""
    losses, shares = [], []
    with nullcontext() if seed is None else random_delays(seed):
        for number, factor in enumerate(factors):
            losses.append(trained.backward(number, waits=seed is None))
            between(trained, number)
            trained.step(factor)
            if seed is None:
                shares.append(trained.share())
        return Course(losses, trained.values(), shares)


def _factors(setting: Setting, rules: Sequence[str]) -> None:
    for options in map(RULES.__getitem__, rules):
        for factors in FACTORS.values():
            expected = course(Trained(0, setting, **options), factors)
            assert expected.shares == [0.0] * len(factors)
            found = course(Trained(ROOM, setting, **options), factors)
            assert_same(found, expected)
            if factors is FACTORS["inactive"]:
                assert found.shares == [0.0, 1.0, 1.0, 1.0]
            for seed in (1, 2):
                again = course(Trained(ROOM, setting, **options), factors, seed=seed)
                assert_same(again, expected)


@pytest.mark.parametrize(
    ("world_size", "dtype", "rules"),
    [
        (1, torch.float32, ["fp32 moments", "SGD"]),
        (1, BF16, ["bf16 moments", "Lion"]),
        (2, BF16, ["fp32 moments", "Lion"]),
        pytest.param(2, torch.float32, ["bf16 moments", "SGD"], marks=pytest.mark.wide),
        pytest.param(4, torch.float16, list(RULES), marks=pytest.mark.wide),
    ],
)
def test_whatever_the_norm_says_the_bits_are_those_of_a_step_after_it(world_size, dtype, rules):
    run_ranks(world_size, _factors, SETTING._replace(dtype=dtype), rules, timeout=300)


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([local_tensor(each).detach().reshape(-1) for each in tensors])


def _unit(trained: Trained) -> torch.Tensor:
    units = trained.optimizer.state_units()
    for unit in units:
        unit.updated.synchronize()
    return _flat(p for unit in units for p in unit.parameters)


def _reloaded(trained: Trained) -> torch.Tensor:
    """Compute weights that are made anew from the main weights, for a forward."""
    trained.optimizer.reload_parameters()
    with torch.no_grad():
        return trained.model(torch.ones(1, DIM, dtype=trained.setting.dtype))


def _state(name: str) -> Callable[[Trained], torch.Tensor]:
    def read(trained: Trained) -> torch.Tensor:
        state = trained.optimizer.state
        return _flat(state[parameter][name] for parameter in trained.model.parameters())

    return read


READS: dict[str, Callable[[Trained], torch.Tensor]] = {
    "state": _state("exp_avg"),
    "state dict": lambda trained: _flat(
        state["exp_avg_sq"] for state in trained.optimizer.state_dict()["state"].values()
    ),
    "weights": lambda trained: _flat(trained.model.state_dict().values()),
    "whole weights": lambda trained: _flat(p.full_tensor() for p in trained.model.parameters()),
    "operators": lambda trained: _flat(p * 2 for p in trained.model.parameters()),
    "optimizers": lambda trained: _flat(
        group["params"][0]
        for optimizer in trained.optimizer.cpu_optimizers
        for group in optimizer.param_groups
    ),
    "units": _unit,
    "compute weights": _reloaded,
}


def _reads() -> None:
    for name, read in READS.items():
        seen: list[torch.Tensor] = []

        def between(trained: Trained, number: int, seen: Any = seen, read: Any = read) -> None:
            if number == 2:
                assert len(trained.early) == (4 if trained.side.early_nbytes else 0)
                seen.append(read(trained).clone())
                assert not trained.early

        expected = course(Trained(0), between=between)
        found = course(Trained(), between=between)
        assert seen[0].any()
        assert torch.equal(*seen), name
        assert_same(found, expected)
        assert found.shares == [0.0, 1.0, 0.0, 1.0]


def test_readers_between_backward_and_step_see_the_values_before_it():
    run_ranks(2, _reads, timeout=300)


def _changes(changes: Mapping[str, Change], share: float) -> None:
    for name, change in changes.items():

        def between(trained: Trained, number: int, change: Change = change) -> None:
            if number == 2:
                change(trained)

        expected = course(Trained(0), between=between)
        found = course(Trained(), between=between)
        assert_same(found, expected)
        assert found.shares[1] == found.shares[3] == 1.0
        assert 0 <= found.shares[2] <= share, name
        assert_same(course(Trained(), between=between, seed=3), expected)


def _gradients(trained: Trained) -> list[torch.Tensor]:
    return [parameter.grad for parameter in trained.model.parameters()]


def _drop(trained: Trained) -> None:
    for layer in trained.model.layers:
        layer.first.weight.grad = None


def _assign(trained: Trained) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = parameter.grad.clone()


def _write(trained: Trained) -> None:
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(1.5)


def _load(trained: Trained) -> None:
    states = copy.deepcopy(trained.optimizer.state_dict())
    for state in states["state"].values():
        state["exp_avg"].mul_(0.5)
        state["step"].add_(3)
    trained.optimizer.load_state_dict(states)


def _options(**values: Any) -> Change:
    return lambda trained: [group.update(values) for group in trained.optimizer.param_groups]


def _regroup(trained: Trained) -> None:
    (group,) = trained.optimizer.param_groups
    first, *others = group["params"]
    trained.optimizer.param_groups[:] = [
        {**group, "params": [first], "lr": 1e-4},
        {**group, "params": others},
    ]


def _another_backward(trained: Trained) -> None:
    trained.backward(7)


def _skip(trained: Trained) -> None:
    trained.optimizer.zero_grad()
    trained.backward(7)


def _another_step(trained: Trained) -> None:
    trained.optimizer.step()


REPEATED: dict[str, Change] = {
    "scaled gradients": lambda trained: [gradient.mul_(0.5) for gradient in _gradients(trained)],
    "gradients zeroed in place": lambda trained: trained.optimizer.zero_grad(set_to_none=False),
    "assigned gradients": _assign,
    "rate": _options(lr=3e-3),
    "betas": _options(betas=(0.8, 0.9)),
    "loaded states": _load,
    "written weights": _write,
    "a second backward": _another_backward,
    "a skipped step": _skip,
}
PARTS: dict[str, Change] = {
    "missing gradients": _drop,
    "groups": _regroup,
    "a second step": _another_step,
}


def test_what_changes_between_backward_and_step_counts():
    run_ranks(2, _changes, REPEATED, 0.3, timeout=500)


def test_what_changes_for_a_part_repeats_that_part():
    run_ranks(2, _changes, PARTS, 1.0, timeout=300)
