"""A mixture of experts is the weighted sum of the results of each token's experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.core.materialize import materialize
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.spec import (
    Activation,
    Balancing,
    DenseSpec,
    DropPolicy,
    MoeSpec,
    RouterSpec,
    Scores,
)

HIDDEN = 8
DENSE = DenseSpec(6, Activation.SILU, is_gated=True, has_bias=True)


def _router_spec(num_experts: int, top_k: int, **changes: Any) -> RouterSpec:
    fields = {"scores": Scores.SOFTMAX, "is_scored_first": True, "is_normalized": False}
    return RouterSpec(num_experts, top_k, **{**fields, **changes})


def _layer(router: RouterSpec, dtype: torch.dtype = torch.float64, **changes: Any) -> MoELayer:
    layer = MoELayer(MoeSpec(router, DENSE, **changes), HIDDEN, init_std=1, output_init_std=1)
    generator = torch.Generator().manual_seed(router.num_experts)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer.to(dtype)


def _hidden(batch: int = 2, seq: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, seq, HIDDEN, generator=generator, dtype=dtype).requires_grad_()


def _densely(layer: MoELayer, hidden: Tensor) -> Tensor:
    """Every token through every expert, of which the weights of experts not chosen or without room
    are zeros.
    """
    spec, routing = layer.spec, layer.router(hidden)
    num_experts, top_k = spec.router.num_experts, spec.router.top_k
    tokens = hidden.flatten(0, 1)
    weights = tokens.new_zeros(len(tokens), num_experts)
    weights = weights.scatter(1, routing.experts, routing.weights.to(tokens.dtype))

    if spec.capacity_factor is not None:
        capacity = max(1, math.ceil(len(tokens) * top_k / num_experts * spec.capacity_factor))
        is_chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(1, routing.experts, True)
        for expert in range(num_experts):
            rows = torch.where(is_chosen[:, expert])[0]
            if spec.drop_policy is DropPolicy.PROBS:
                rows = rows[weights[rows, expert].argsort(descending=True, stable=True)]
            mask = torch.ones_like(weights)
            mask[rows[capacity:], expert] = 0
            weights = weights * mask

    alone = torch.eye(num_experts, dtype=torch.int64) * len(tokens)
    by_expert = torch.stack([layer.experts(tokens, counts) for counts in alone], dim=1)
    return (by_expert * weights[..., None]).sum(1).view_as(hidden)


def _assert_same(layer: MoELayer, found: Tensor, expected: Tensor, hidden: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    inputs = (hidden, *layer.parameters())
    grad = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad, retain_graph=True, materialize_grads=True),
        torch.autograd.grad(expected, inputs, grad, retain_graph=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@given(
    sizes=st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 2), (16, 5)]),
    capacity_factor=st.sampled_from([None, 0.01, 0.5, 1.0, 1.3, 100.0]),
    drop_policy=st.sampled_from(DropPolicy),
    rows_are_inputs=st.booleans(),
)
def test_a_mixture_is_the_weighted_sum_over_all_experts(
    sizes: tuple[int, int],
    capacity_factor: float | None,
    drop_policy: DropPolicy,
    rows_are_inputs: bool,
) -> None:
    layer = _layer(
        _router_spec(*sizes, dtype="fp64"),
        capacity_factor=capacity_factor,
        drop_policy=drop_policy,
        rows_are_inputs=rows_are_inputs,
    )
    hidden = _hidden()
    found, _ = layer(hidden)
    _assert_same(layer, found, _densely(layer, hidden), hidden)


def test_a_token_without_room_anywhere_gets_zeros_and_the_others_keep_their_weights() -> None:
    layer = _layer(_router_spec(4, 1), capacity_factor=0.5, drop_policy=DropPolicy.POSITION)
    one = _hidden(1, 1).detach()
    hidden = one.expand(1, 8, HIDDEN)  # all choose the same expert, which has room for one
    unbounded = _layer(_router_spec(4, 1))
    found, report = layer(hidden)
    torch.testing.assert_close(found[:, :1], unbounded(one)[0])
    assert not found[:, 1:].any()
    assert sorted(report.load.tolist()) == [0, 0, 0, 8]


def test_dropped_tokens_are_not_computed() -> None:
    layer = _layer(_router_spec(4, 2), capacity_factor=0.5)
    seen: list[int] = []
    layer.experts.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    _, report = layer(_hidden(2, 8))
    assert seen == [int(report.load.clamp(max=4).sum())]
    assert seen[0] < 32


@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_experts_compute_every_token(has_gate: bool) -> None:
    layer = _layer(_router_spec(4, 2), shared=DENSE, has_shared_gate=has_gate)
    hidden = _hidden()
    assert layer.shared_experts is not None
    shared = layer.shared_experts(hidden)
    if has_gate:
        assert layer.shared_gate is not None
        assert layer.shared_gate.weight.shape == (1, HIDDEN)
        shared = torch.sigmoid(hidden @ layer.shared_gate.weight.T) * shared
    else:
        assert layer.shared_gate is None
    _assert_same(layer, layer(hidden)[0], _densely(layer, hidden) + shared, hidden)


@pytest.mark.parametrize("balancing", [Balancing.MICROBATCH, Balancing.SEQUENCE])
@pytest.mark.parametrize("capacity_factor", [None, 0.75])
def test_padding_is_as_if_it_were_not_there(
    balancing: Balancing, capacity_factor: float | None
) -> None:
    """Rows that have 7, 3 and 5 real tokens, each of which is a microbatch by itself."""
    router = _router_spec(4, 2, dtype="fp64", balancing=balancing, balance_coeff=0.5, z_coeff=0.3)
    layer = _layer(router, capacity_factor=capacity_factor, shared=DENSE)
    rows, padding = _hidden(3, 7), (0, 4, 2)
    documents = Documents((7, 3, 4, 2, 3, 2), padding)
    seen: list[int] = []
    layer.experts.register_forward_hook(lambda _, __, output: seen.append(len(output)))
    found, report = layer(rows, documents)

    real = [row[: 7 - length] for row, length in zip(rows, padding, strict=True)]
    expected, alone = layer(torch.cat(real)[None])
    assert seen[0] == seen[1] <= 15 * 2
    assert torch.equal(report.load, alone.load)
    assert report.load.sum() == 15 * 2
    torch.testing.assert_close(report.z_loss, alone.z_loss)
    balance = alone.balance_loss
    if balancing is Balancing.SEQUENCE:
        balance = torch.stack([layer(row[None])[1].balance_loss for row in real]).mean()
    torch.testing.assert_close(report.balance_loss, balance)

    for row, length in zip(found, padding, strict=True):
        assert not row[7 - length :].any()
    kept = torch.cat([row[: 7 - length] for row, length in zip(found, padding, strict=True)])
    for ours, theirs in ((kept, expected[0]), (report.balance_loss, balance)):
        _assert_same(layer, ours, theirs, rows)


# The mixture in a model.

CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "swiglu": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": "[0,1]",
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _model(**changes: Any) -> GPTModel:
    with torch.device("meta"):
        model = GPTModel(TransformerConfig(**{**CONFIG, **changes}), 64)
    materialize(model, "cpu", seed=1)
    return model


def _trained_once(model: GPTModel) -> tuple[list[Tensor], Any]:
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    losses, report = model(tokens[:, :-1], tokens[:, 1:], with_routing=True)
    (losses.mean() + report.balance_loss + report.z_loss).backward()
    return [losses.detach(), *(p.grad for p in model.parameters())], report


def test_a_model_built_on_meta_gets_all_its_weights() -> None:
    model = _model()
    mixture = model.decoder.layers[1].mlp
    assert isinstance(mixture, MoELayer)
    assert not isinstance(model.decoder.layers[0].mlp, MoELayer)
    assert mixture.router.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert mixture.experts.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert mixture.experts.linear_fc2.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not mixture.experts.linear_fc2.bias.any()
    assert torch.equal(mixture.router.expert_bias, torch.zeros(4))
    # No expert has the weights of another.
    assert len({row.sum().item() for row in mixture.experts.linear_fc1.weight.chunk(4)}) == 4


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_no_bit_and_counts_no_token_twice(granularity: str) -> None:
    calls: list[int] = []
    kept, recomputed = _model(), _model(recompute_granularity=granularity)
    recomputed.decoder.layers[1].mlp.router.register_forward_hook(lambda *_: calls.append(1))
    (expected, report), (found, repeated) = (_trained_once(m) for m in (kept, recomputed))
    assert len(calls) == (2 if granularity == "full" else 1)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, repeated, report))
    assert report.load.sum().item() == 16 * 2


def test_evaluation_reports_loads_and_no_losses() -> None:
    _, report = _trained_once(_model())
    assert report.balance_loss.item() > 0
    tokens = torch.randint(64, (2, 8))
    _, evaluated = _model().eval()(tokens, with_routing=True)
    assert (evaluated.balance_loss.item(), evaluated.z_loss.item()) == (0.0, 0.0)
    assert evaluated.load.tolist() == [evaluated.load[0].tolist()]
    assert evaluated.load.sum().item() == 16 * 2


def test_autocast_computes_a_mixture_in_its_dtype(
    make_config: Callable[..., TransformerConfig],
) -> None:
    config = make_config(num_experts=4, moe_router_dtype="fp32", swiglu=True)
    torch.manual_seed(0)
    model = GPTModel(config, 64)
    tokens = torch.randint(64, (2, 8))
    expected = model(tokens)
    inside: list[torch.dtype] = []
    mixture = model.decoder.layers[0].mlp
    mixture.experts.register_forward_hook(lambda _, __, output: inside.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens)
    assert inside == [torch.bfloat16]
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02)
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
