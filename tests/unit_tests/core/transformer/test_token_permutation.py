"""Tokens by expert and back, with and without a bound of an expert's tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer.spec import DropPolicy
from megatron.core.transformer.token_permutation import (
    TokenOrder,
    combine_tokens,
    order_by_expert,
    order_within_capacity,
    permute_tokens,
)

NUM_EXPERTS, HIDDEN = 5, 6


def _choices(num_tokens: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts of each token, the tokens of each expert, weights."""
    generator = torch.Generator().manual_seed(seed)
    # Few are chosen often, so that some have many tokens and some none.
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator) + torch.arange(NUM_EXPERTS)
    experts = (scores**4).topk(top_k, dim=-1).indices
    if seed % 2:
        experts = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(top_k).indices
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    return experts, torch.bincount(experts.flatten(), minlength=NUM_EXPERTS), weights


def _expert_of(order: TokenOrder, experts: Tensor) -> list[int]:
    found: list[int] = experts.flatten()[order.choices].tolist()
    return found


@given(st.integers(0, 9), st.integers(1, NUM_EXPERTS), st.integers(0, 20))
def test_choices_are_sorted_by_expert_then_by_token(num_tokens: int, top_k: int, seed: int) -> None:
    experts, load, _ = _choices(num_tokens, top_k, seed)
    order = order_by_expert(experts, load)
    found = list(zip(_expert_of(order, experts), order.tokens.tolist(), strict=True))
    assert found == sorted(found)
    assert len(found) == num_tokens * top_k
    assert torch.equal(order.choices[order.places.flatten()], torch.arange(num_tokens * top_k))


@given(
    st.integers(0, 9),
    st.integers(1, NUM_EXPERTS),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from(DropPolicy),
    st.integers(0, 20),
)
def test_a_token_gets_the_weighted_sum_of_what_was_made_of_its_choices(
    num_tokens: int, top_k: int, capacity: int | None, policy: DropPolicy, seed: int
) -> None:
    experts, load, weights = _choices(num_tokens, top_k, seed)
    order = order_by_expert(experts, load)
    if capacity is not None:
        order = order_within_capacity(experts, load, capacity, policy, weights)
    scales = torch.linspace(1, 2, NUM_EXPERTS, dtype=torch.float64)
    tokens = torch.randn(num_tokens, HIDDEN, dtype=torch.float64)
    inputs = tokens.requires_grad_(), weights.requires_grad_()

    permuted = permute_tokens(tokens, order)
    outputs = permuted * scales[_expert_of(order, experts)][:, None]
    found = combine_tokens(outputs, weights, order)

    is_kept = torch.ones_like(weights) if order.is_kept is None else order.is_kept
    expected = ((weights * is_kept * scales[experts]).sum(1))[:, None] * tokens
    torch.testing.assert_close(found, expected)
    grad = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 20))
def test_an_expert_keeps_its_first_tokens_or_those_with_the_largest_weights(
    num_tokens: int, top_k: int, capacity: int, seed: int
) -> None:
    experts, load, weights = _choices(num_tokens, top_k, seed)
    for policy in DropPolicy:
        order = order_within_capacity(experts, load, capacity, policy, weights)
        assert order.is_kept is not None
        assert order.counts.tolist() == [min(count, capacity) for count in load.tolist()]
        assert _expert_of(order, experts) == sorted(_expert_of(order, experts))
        for expert in range(NUM_EXPERTS):
            tokens, slots = torch.where(experts == expert)
            if policy is DropPolicy.PROBS:
                tokens = tokens[weights[tokens, slots].argsort(descending=True)]
            kept = torch.where((experts == expert) & order.is_kept)[0]
            assert sorted(kept.tolist()) == sorted(tokens[:capacity].tolist())


def test_of_equal_weights_the_first_tokens_are_kept() -> None:
    experts = torch.zeros(4, 1, dtype=torch.int64)
    load = torch.tensor([4, 0])
    order = order_within_capacity(experts, load, 2, DropPolicy.PROBS, torch.ones(4, 1))
    assert sorted(order.choices.tolist()) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_narrow_rows_are_taken_in_fp32(dtype: torch.dtype) -> None:
    """One large row and many that would vanish if added to it one by one."""
    experts = torch.arange(5).expand(1, 5)
    order = order_by_expert(experts, torch.ones(5, dtype=torch.int64))
    step = torch.finfo(dtype).eps
    outputs = torch.tensor([[1.0]] + [[step * 0.5]] * 4, dtype=dtype)
    found = combine_tokens(outputs, torch.ones(1, 5), order)
    assert found.item() == 1 + 2 * step
    tokens = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    permute_tokens(tokens, order).backward(outputs)
    assert tokens.grad is not None
    assert tokens.grad.item() == 1 + 2 * step


def test_gradients_of_weights_are_in_their_own_dtype_and_summed_in_it() -> None:
    experts, load, weights = _choices(3, 2, seed=1)
    order = order_by_expert(experts, load)
    wide = weights.float().requires_grad_()
    outputs = torch.randn(6, 4000).bfloat16()
    grad = torch.randn(3, 4000).bfloat16()
    combine_tokens(outputs, wide, order).backward(grad)
    assert wide.grad is not None
    expected = (outputs.double()[order.places] * grad.double()[:, None]).sum(-1)
    # A product of two is rounded to bf16 once, and errors of many average out.
    torch.testing.assert_close(wide.grad.double(), expected, rtol=0, atol=4000**0.5 * 2**-7)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_dropped_choice_does_not_spread_what_is_not_finite(value: float) -> None:
    """The first of three tokens is not finite, and the last one has lost one of its choices."""
    experts = torch.tensor([[0, 1], [1, 2], [0, 1]])
    load = torch.tensor([2, 3, 1])
    order = order_within_capacity(experts, load, 2, DropPolicy.POSITION, torch.ones(3, 2))
    assert order.is_kept is not None
    assert order.is_kept.tolist() == [[True, True], [True, True], [True, False]]
    tokens = torch.ones(3, 2, requires_grad=True)
    outputs = torch.ones(5, 2)
    outputs[0] = value
    assert combine_tokens(outputs, torch.ones(3, 2), order)[1:].tolist() == [[2, 2], [1, 1]]

    permute_tokens(tokens, order).backward(outputs)
    assert tokens.grad is not None
    assert tokens.grad[1:].tolist() == [[2, 2], [1, 1]]
