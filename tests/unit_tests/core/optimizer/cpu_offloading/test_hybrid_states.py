"""`HybridDeviceOptimizer`'s state dicts: runs resume at any other fraction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    BF16,
    CLASSES,
    SGD,
    SHARDINGS,
    Net,
    fsdp,
    same,
    same_states,
    states,
    train,
    weights,
)


def _round_trips(sharding: str, name: str) -> None:
    cls, options = CLASSES[name]

    def make(fraction: float, seed: int) -> tuple[Net, HybridDeviceOptimizer]:
        model = Net(seed)
        SHARDINGS[sharding](model)
        return model, HybridDeviceOptimizer(
            model.parameters(), fraction, cls, cls, **options, **ALL
        )

    for saving, loading in ((1.0, 0.5), (0.5, 0.0), (0.0, 1.0), (0.5, 0.5)):
        model, optimizer = make(saving, 0)
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.007
        saved = copy.deepcopy(optimizer.state_dict())
        saved_weights = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(4, 8))

        other, fresh = make(loading, 1)
        train(other, fresh, range(20, 22))
        addresses = [local_tensor(v).data_ptr() for s in fresh.state.values() for v in s.values()]
        other.load_state_dict(saved_weights)
        fresh.load_state_dict(saved)
        assert addresses == [
            local_tensor(v).data_ptr() for s in fresh.state.values() for v in s.values()
        ]
        assert fresh.param_groups[0]["lr"] == 0.007

        loaded = states(fresh)
        train(other, fresh, range(4, 8))
        assert same(weights(other), weights(model))
        assert same_states(states(fresh), states(optimizer))
        assert not same_states(states(fresh), loaded)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_what_is_saved_at_one_fraction_continues_bit_for_bit_at_any(name):
    _round_trips("plain", name)


@pytest.mark.parametrize("sharding", ["groups", pytest.param("fsdp2", marks=pytest.mark.wide)])
def test_what_is_saved_of_a_sharded_module_continues_bit_for_bit_at_any_fraction(sharding):
    run_ranks(2, _round_trips, sharding, "AdamW")


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_run_that_has_not_stepped_is_loaded_as_one(name, fraction):
    cls, options = CLASSES[name]
    model, fresh = Net(), Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, **options)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer)
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    train(model, optimizer, range(2))
    train(
        fresh,
        other := HybridDeviceOptimizer(fresh.parameters(), fraction, cls, cls, **options),
        range(2),
    )
    assert same(weights(model), weights(fresh))
    assert same_states(states(optimizer), states(other))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_states_of_all_are_loaded_where_some_had_none(fraction):
    first, second = Net(), Net(seed=1)
    one = HybridDeviceOptimizer(first.parameters(), fraction, SGD, SGD, lr=0.1, momentum=0.9)
    other = HybridDeviceOptimizer(second.parameters(), fraction, SGD, SGD, lr=0.1, momentum=0.9)
    train(first, one)
    for parameter in (second.layers[0].weight, second.head.weight):
        parameter.grad = torch.ones_like(parameter)
    other.step()
    other.zero_grad()
    other.load_state_dict(one.state_dict())
    assert same_states(states(other), states(one))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("number", [0, 7])
def test_states_that_do_not_fit_are_rejected_and_nothing_is_changed(name, fraction, number):
    cls, options = CLASSES[name]
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, **options)
    train(model, optimizer)
    before, groups = states(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])

    def refuses(change: Callable[[dict[str, Any]], None]) -> None:
        bad = copy.deepcopy(optimizer.state_dict())
        for state in bad["state"].values():
            for value in state.values():
                value.fill_(7)
        bad["param_groups"][0]["lr"] = 123.0
        change(bad)
        with pytest.raises(ValueError, match="Expected"):
            optimizer.load_state_dict(bad)
        assert same_states(states(optimizer), before)
        shown = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        assert [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ] == shown

    exp_avg = optimizer.state_dict()["state"][number]["exp_avg"]
    refuses(lambda bad: bad["state"][number].update(exp_avg=torch.zeros(2, 2)))
    refuses(lambda bad: bad["state"][number].update(exp_avg=exp_avg.to(BF16)))
    refuses(lambda bad: bad["state"][number].update(exp_avg=exp_avg.double()))
    refuses(lambda bad: bad["state"][number].pop("exp_avg_sq"))
    refuses(lambda bad: bad["state"][number].update(more=exp_avg))
    refuses(lambda bad: bad["param_groups"][0]["params"].pop())
    refuses(lambda bad: bad["param_groups"].append({"params": [], "lr": 0.1}))
    refuses(lambda bad: bad["state"].update({99: {}}))


# PyTorch's state-dict helpers, which call `step` at a rate of zero to initialize states


def _resumes_through_helpers(
    make: Callable[[int, float], tuple[Net, HybridDeviceOptimizer]],
    saving: float,
    loading: float,
    path: str | None = None,
) -> None:
    model, optimizer = make(0, saving)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, range(3, 6))

    other, fresh = make(1, loading)
    before = weights(other)
    wanted = get_state_dict(other, fresh)
    assert same(weights(other), before)
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert all(float(own.get("step", 0)) == 0 for own in fresh.state.values())
    for name, own in saved[1]["state"].items():
        assert wanted[1]["state"][name].keys() == own.keys()
    if path is not None:
        dcp.save(dict(enumerate(saved)), checkpoint_id=path)
        dcp.load(dict(enumerate(wanted)), checkpoint_id=path)
        saved = wanted

    set_state_dict(other, fresh, model_state_dict=saved[0], optim_state_dict=saved[1])
    train(other, fresh, range(3, 6))
    assert same(weights(other), weights(model))
    assert same_states(states(fresh), states(optimizer))


RESUMED = {
    **{name: CLASSES[name] for name in ("AdamW", "Adam", "SGD")},
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1}),
}


def _resumes_every_class(sharding: str) -> None:
    fractions = [(0.0, 1.0), (1.0, 0.5), (0.5, 0.0), (0.5, 0.5)]
    for (cls, options), (saving, loading) in zip(RESUMED.values(), fractions, strict=True):

        def make(
            seed: int, fraction: float, cls: Any = cls, options: Any = options
        ) -> tuple[Net, HybridDeviceOptimizer]:
            model = Net(seed)
            SHARDINGS[sharding](model)
            return model, HybridDeviceOptimizer(
                model.parameters(), fraction, cls, cls, **options, **ALL
            )

        _resumes_through_helpers(make, saving, loading)


def test_pytorchs_state_dict_helpers_resume_every_class_over_a_plain_module() -> None:
    _resumes_every_class("plain")


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_pytorchs_state_dict_helpers_resume_every_class_over_a_sharded_module(
    sharding: str,
) -> None:
    _resumes_every_class(sharding)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@on_ranks(2)
def test_dcp_and_pytorchs_state_dict_helpers_resume_with_gradients_in_bf16(
    name: str, tmp_path: Path
) -> None:
    """The helpers' gradients of zeros have the dtype of the parameters, fp32 main weights."""
    cls, options = CLASSES[name]

    def make(seed: int, fraction: float) -> tuple[Net, HybridDeviceOptimizer]:
        model = Net(seed)
        fsdp(model, main_grads_dtype=BF16)
        return model, HybridDeviceOptimizer(
            model.parameters(), fraction, cls, cls, **options, **ALL
        )

    _resumes_through_helpers(make, 0.5, 1.0, str(tmp_path))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@on_ranks(2)
def test_a_first_step_at_a_rate_of_zero_counts(fraction: float) -> None:
    """A schedule that warms up over a low-rank adapter. The gradients of its first matrix are zero
    in the first step, and one rank has that matrix only.
    """

    def run(make: Callable[..., torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
        nn.init.zeros_(model[1].weight)
        fully_shard(model)
        optimizer = make(model.parameters(), lr=0.0)
        train(model, optimizer, range(1))
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, range(1, 3))
        return weights(model), states(optimizer)

    found = run(lambda own, **options: HybridDeviceOptimizer(own, fraction, **options))
    expected = run(FusedAdam)
    assert same(found[0], expected[0])
    assert same_states(found[1], expected[1])


def test_pytorchs_state_dict_helpers_resume_decoupled_gradients() -> None:
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, use_decoupled_grad=True, lr=0.1)
    state, optim = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.decoupled_grad = torch.ones_like(parameter)
    optimizer.step()
    assert {float(own["step"]) for own in optimizer.state.values()} == {1.0}
