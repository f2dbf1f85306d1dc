"""The experts of a mixture are dense networks whose weights share a parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.core.transformer.experts import Experts
from megatron.core.transformer.fused_weight import fused_weights
from megatron.core.transformer.spec import (
    Activation,
    DenseSpec,
    MoeSpec,
    RouterSpec,
    Scores,
)

HIDDEN, SIZE = 6, 4


def _experts(
    num_experts: int,
    *,
    rows_are_inputs: bool = False,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Experts:
    fields = {"activation": Activation.SILU, "is_gated": True, "has_bias": True, **changes}
    router = RouterSpec(num_experts, 1, Scores.SOFTMAX, is_scored_first=False, is_normalized=False)
    spec = MoeSpec(router, DenseSpec(SIZE, **fields), rows_are_inputs=rows_are_inputs)
    experts = Experts(spec, HIDDEN, init_std=0.02, output_init_std=0.02).to(dtype)
    generator = torch.Generator().manual_seed(num_experts)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return experts


def _one_expert(experts: Experts, index: int, tokens: Tensor) -> Tensor:
    """What one expert makes of tokens, by its rows of the parameters."""
    num_experts, spec = experts.spec.router.num_experts, experts.spec.expert
    first, second = experts.linear_fc1, experts.linear_fc2
    weights = [layer.weight.chunk(num_experts)[index] for layer in (first, second)]
    biases = [
        None if layer.bias is None else layer.bias.chunk(num_experts)[index]
        for layer in (first, second)
    ]
    if experts.spec.rows_are_inputs:
        weights = [weight.T for weight in weights]
    inner = F.linear(tokens, weights[0], biases[0])
    if spec.is_gated and experts.spec.rows_are_inputs:
        inner = F.silu(inner[:, 0::2]) * inner[:, 1::2]
    elif spec.is_gated:
        inner = F.silu(inner[:, :SIZE]) * inner[:, SIZE:]
    else:
        inner = F.silu(inner)
    return F.linear(inner, weights[1], biases[1])


@given(
    counts=st.lists(st.sampled_from([0, 1, 5]), min_size=1, max_size=4),
    rows_are_inputs=st.booleans(),
    is_gated=st.booleans(),
    has_bias=st.booleans(),
)
def test_each_expert_computes_its_own_tokens(
    counts: list[int], rows_are_inputs: bool, is_gated: bool, has_bias: bool
) -> None:
    experts = _experts(
        len(counts), rows_are_inputs=rows_are_inputs, is_gated=is_gated, has_bias=has_bias
    )
    tokens = torch.randn(sum(counts), HIDDEN, dtype=torch.float64, requires_grad=True)
    found = experts(tokens, torch.tensor(counts))
    expected = torch.cat(
        [_one_expert(experts, i, part) for i, part in enumerate(tokens.split(counts))]
    )
    torch.testing.assert_close(found, expected)

    inputs = (tokens, *experts.parameters())
    grad = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_weights_have_their_rows_and_sections_by_expert() -> None:
    by_outputs = _experts(2)
    assert {name: tuple(p.shape) for name, p in by_outputs.named_parameters()} == {
        "linear_fc1.weight": (2 * 2 * SIZE, HIDDEN),
        "linear_fc1.bias": (2 * 2 * SIZE,),
        "linear_fc2.weight": (2 * HIDDEN, SIZE),
        "linear_fc2.bias": (2 * HIDDEN,),
    }
    sections = {name: fused.sections for name, fused in fused_weights(by_outputs).items()}
    gates = (("0.gate", SIZE), ("0.up", SIZE), ("1.gate", SIZE), ("1.up", SIZE))
    downs = (("0.linear_fc2", HIDDEN), ("1.linear_fc2", HIDDEN))
    assert sections == {
        "linear_fc1.weight": gates,
        "linear_fc1.bias": gates,
        "linear_fc2.weight": downs,
        "linear_fc2.bias": downs,
    }

    by_inputs = _experts(2, rows_are_inputs=True)
    assert {name: tuple(p.shape) for name, p in by_inputs.named_parameters()} == {
        "linear_fc1.weight": (2 * HIDDEN, 2 * SIZE),
        "linear_fc1.bias": (2 * 2 * SIZE,),
        "linear_fc2.weight": (2 * SIZE, HIDDEN),
        "linear_fc2.bias": (2 * HIDDEN,),
    }
    sections = {name: fused.sections for name, fused in fused_weights(by_inputs).items()}
    assert sections == {
        "linear_fc1.weight": (("0.linear_fc1", HIDDEN), ("1.linear_fc1", HIDDEN)),
        "linear_fc1.bias": (("0.linear_fc1", 2 * SIZE), ("1.linear_fc1", 2 * SIZE)),
        "linear_fc2.weight": (("0.linear_fc2", SIZE), ("1.linear_fc2", SIZE)),
        "linear_fc2.bias": downs,
    }
