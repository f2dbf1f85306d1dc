"""The weights that sharded modules compute with follow their main weights however those change."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, Gather
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DTYPES,
    STRATEGIES,
    ZERO_3,
    Stack,
    assert_resting,
    clear_gradients,
    compute_weights,
    groups_of,
    loss_of,
    outcome_of,
    own_batch,
    settle,
    shard,
    whole_weights,
    write_weights,
)

# After steps and writes


def _train(
    model: Stack, dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], prepares: bool
) -> None:
    clear_gradients(model)
    optimizer = make(model.parameters())
    if prepares:
        fully_shard_optimizer(optimizer)
    loss_of(model(own_batch(dtype=dtype))).backward()
    optimizer.step()


def _load(model: Stack) -> None:
    with torch.no_grad():
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _follows(strategy: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    model = Stack(dtype=dtype)
    shard(
        *model.layers,
        strategy=strategy,
        policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    states = [compute_weights(model)]
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    ):
        for prepares in (False, True):
            _train(model, dtype, make, prepares)
            states.append(compute_weights(model))
    _load(model)
    states.append(compute_weights(model))
    for way in ("copy_", "local tensor", "detached", "buffer", "list", "scaler's kernel"):
        write_weights(model, way)
        states.append(compute_weights(model))
    for before, after in itertools.pairwise(states):
        assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_weights_follow_whatever_has_changed_the_main_weights(strategy, dtype):
    first, second = run_ranks(2, _follows, strategy, dtype)
    for own, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_optimizer_of_fp32_main_weights_takes_bf16_gradients(strategy: str) -> None:
    model = Stack(dtype=torch.bfloat16)
    shard(*model.layers, strategy=strategy)
    before = compute_weights(model)
    _train(
        model,
        torch.bfloat16,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        prepares=True,
    )
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}, (
        "back after the step"
    )
    assert not any(
        torch.equal(old, new) for old, new in zip(before, compute_weights(model), strict=True)
    )


def _keeps_whole_weights(strategy: str, dtype: torch.dtype, is_skipped: bool) -> str:
    """Weights that were brought, and stay for a backward that never comes or for a module that is
    skipped.
    """
    model = Stack(dtype=dtype)
    context = shard(*model.layers, strategy=strategy, reshard_after_forward=is_skipped)
    if is_skipped:
        model.used = [0]
    with torch.set_grad_enabled(not is_skipped):
        model(own_batch(dtype=dtype))
    settle(context)
    if strategy == ZERO_3:
        stayed = model.layers[1:2] if is_skipped else model.layers
        assert list(whole_weights(model)) == groups_of(*stayed)
    write_weights(model, "local tensor")
    model.used = [1, 2]
    return outcome_of(lambda: compute_weights(model) and None)


@pytest.mark.parametrize("is_skipped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_weights_that_have_stayed_follow_too(strategy, dtype, is_skipped):
    assert run_ranks(2, _keeps_whole_weights, strategy, dtype, is_skipped) == ["None"] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_compute_weights_are_refreshed_once_for_each_group_and_step(strategy: str) -> None:
    model = Stack(dtype=torch.bfloat16)
    context = shard(*model.layers, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    groups = groups_of(model)
    refreshed: list[int] = []
    original = FsdpParameterGroup._prepare_gather

    def counting(group: FsdpParameterGroup) -> Gather | None:
        gather = original(group)
        if gather is not None and (gather.is_copied or gather.is_scattered):
            refreshed.append(groups.index(group))
        return gather

    FsdpParameterGroup._prepare_gather = counting
    try:
        for _ in range(3):
            for number in range(2):
                with microbatch(context, is_last=number == 1):
                    loss_of(model(own_batch(number, torch.bfloat16))).backward()
            with torch.no_grad():
                model(own_batch(dtype=torch.bfloat16))
            assert refreshed == [0, 1, 2]
            refreshed.clear()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        FsdpParameterGroup._prepare_gather = original


# State dicts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_state_dicts_go_round_and_are_not_assigned(strategy: str, dtype: torch.dtype) -> None:
    model = Stack(dtype=dtype)
    names = list(model.state_dict())
    shard(*model.layers, strategy=strategy)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == names
    assert all(isinstance(value, DTensor) for value in state.values())
    x = own_batch(dtype=dtype)
    before = model(x).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(x).any()
    parameters = list(model.parameters())
    assert not any(model.load_state_dict(state))
    assert all(own is other for own, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x), before)
    for target in (model, model.layers[1]):
        with pytest.raises(RuntimeError, match="assign=True"):
            target.load_state_dict(target.state_dict(), assign=True)
    assert_resting(model)
    assert torch.equal(model(x), before)
