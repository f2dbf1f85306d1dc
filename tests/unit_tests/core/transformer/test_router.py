"""The router chooses and weighs as the published models do, and its losses are as defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron.core.transformer.router import Router, Routing
from megatron.core.transformer.spec import Balancing, RouterSpec, Scores

HIDDEN, EXPERTS = 32, 16
SOFTMAX_FIRST = {"scores": Scores.SOFTMAX, "is_scored_first": True, "is_normalized": False}
SOFTMAX_LAST = {"scores": Scores.SOFTMAX, "is_scored_first": False, "is_normalized": False}
SIGMOID = {"scores": Scores.SIGMOID, "is_scored_first": True, "is_normalized": True}


def _router(num_experts: int = EXPERTS, top_k: int = 4, **changes: Any) -> Router:
    spec = RouterSpec(num_experts, top_k, **{**SOFTMAX_LAST, **changes})
    torch.manual_seed(0)
    router = Router(spec, HIDDEN, init_std=0.3)
    for parameter in router.parameters():
        nn.init.normal_(parameter, std=0.3)
    return router


def _hidden(batch: int = 3, seq: int = 20, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, seq, HIDDEN, generator=generator)


def _dense_weights(experts: Tensor, weights: Tensor, num_experts: int = EXPERTS) -> Tensor:
    """[tokens, experts], zeros where an expert is not chosen."""
    zeros = torch.zeros(len(experts), num_experts, dtype=weights.dtype)
    return zeros.scatter(1, experts, weights)


def _theirs_of(
    kind: type[nn.Module], config: Any, ours: Router, dtype: torch.dtype = torch.float32
) -> nn.Module:
    theirs = kind(config)
    state = {"weight": ours.weight, "bias": ours.bias, "e_score_correction_bias": ours.expert_bias}
    theirs.load_state_dict({name: state[name] for name in theirs.state_dict()})
    return theirs.to(dtype)


def _assert_equal_choices(ours: Router, theirs: nn.Module, hidden: Tensor) -> None:
    routing = ours(hidden)
    _, weights, experts = theirs(hidden.flatten(0, 1))
    assert torch.equal(routing.experts.sort(-1).values, experts.sort(-1).values)
    torch.testing.assert_close(
        _dense_weights(routing.experts, routing.weights),
        _dense_weights(experts, weights.to(routing.weights.dtype)),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(
    ("kind", "config"),
    [(Qwen3MoeTopKRouter, Qwen3MoeConfig), (OlmoeTopKRouter, OlmoeConfig)],
)
def test_choices_and_weights_of_a_softmax_over_all_match_transformers(
    kind: type[nn.Module], config: Any, is_normalized: bool
) -> None:
    ours = _router(**{**SOFTMAX_FIRST, "is_normalized": is_normalized})
    theirs = config(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        norm_topk_prob=is_normalized,
    )
    _assert_equal_choices(ours, _theirs_of(kind, theirs, ours), _hidden())


def test_choices_and_weights_of_a_softmax_over_the_chosen_match_transformers() -> None:
    ours = _router(has_bias=True)
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)
    _assert_equal_choices(ours, _theirs_of(GptOssTopKRouter, config, ours), _hidden())


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "config"),
    [(DeepseekV3TopkRouter, DeepseekV3Config), (Glm4MoeTopkRouter, Glm4MoeConfig)],
)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_choices_and_weights_of_sigmoids_in_groups_match_transformers(
    kind: type[nn.Module], config: Any, num_groups: int, is_normalized: bool
) -> None:
    ours = _router(
        **{**SIGMOID, "is_normalized": is_normalized},
        num_groups=num_groups,
        top_groups=max(1, num_groups // 2),
        scale=2.5,
        has_expert_bias=True,
        dtype="fp32",
    )
    assert ours.expert_bias is not None
    # All scores are below zero with it: a group left out must not come back as a zero.
    ours.expert_bias.copy_(torch.linspace(-3.0, -1.5, EXPERTS))
    theirs = config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=max(1, num_groups // 2),
        norm_topk_prob=is_normalized,
        routed_scaling_factor=2.5,
    )
    hidden = _hidden()
    _assert_equal_choices(ours, _theirs_of(kind, theirs, ours), hidden)

    unbiased = ours(hidden).experts
    ours.expert_bias.zero_()
    assert not torch.equal(ours(hidden).experts, unbiased)


def test_the_expert_bias_counts_in_the_choice_only() -> None:
    ours = _router(**SIGMOID, top_k=EXPERTS, has_expert_bias=True)
    hidden = _hidden()
    before = ours(hidden)
    assert ours.expert_bias is not None
    ours.expert_bias.copy_(torch.randn(EXPERTS))
    after = ours(hidden)
    assert not torch.equal(before.experts, after.experts)
    torch.testing.assert_close(
        _dense_weights(before.experts, before.weights), _dense_weights(after.experts, after.weights)
    )
    assert [name for name, _ in ours.named_parameters()] == ["weight"]
    assert "expert_bias" in ours.state_dict()


def test_tied_scores_still_choose_different_experts() -> None:
    ours = _router(**SIGMOID, num_groups=4, top_groups=2, has_expert_bias=True)
    nn.init.zeros_(ours.weight)
    routing = ours(_hidden())
    assert all(len(set(row)) == 4 for row in routing.experts.tolist())
    assert torch.equal(routing.experts, ours(_hidden()).experts)
    torch.testing.assert_close(routing.weights, torch.full_like(routing.weights, 0.25))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, torch.float32), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_a_router_computes_in_its_own_dtype_under_autocast_and_in_bf16(
    dtype: str | None, expected: torch.dtype
) -> None:
    ours = _router(**SIGMOID, dtype=dtype, has_bias=True, balance_coeff=1.0, z_coeff=1.0)
    hidden = _hidden()
    wide = expected if dtype is not None else torch.bfloat16
    bias = ours.bias
    assert bias is not None

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(hidden)
    logits = hidden.flatten(0, 1).to(wide) @ ours.weight.to(wide).T + bias.to(wide)
    scores = logits.to(expected).sigmoid()
    weights = scores.gather(1, found.experts)
    assert found.weights.dtype is expected
    tolerance = 1e-6 if dtype is not None else 1e-2
    torch.testing.assert_close(
        found.weights, weights / weights.sum(-1, keepdim=True), rtol=0, atol=tolerance
    )
    assert found.report.balance_loss.dtype is found.report.z_loss.dtype is torch.float32

    narrow = ours.bfloat16()(hidden.bfloat16())
    assert narrow.weights.dtype is expected


def _reference_balance(
    scores: Tensor, num_sequences: int, top_k: int, experts: Tensor | None = None
) -> Tensor:
    """Expert by expert, as Fedus et al. define it."""
    losses = []
    chosen = scores.topk(top_k, dim=-1).indices if experts is None else experts
    for part, own in zip(scores.chunk(num_sequences), chosen.chunk(num_sequences), strict=True):
        terms = [
            (own == expert).sum() / own.numel() * part[:, expert].mean()
            for expert in range(scores.shape[1])
        ]
        losses.append(scores.shape[1] * torch.stack(terms).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("balancing", [Balancing.MICROBATCH, Balancing.SEQUENCE])
@pytest.mark.parametrize("order", [SOFTMAX_LAST, SIGMOID])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_auxiliary_loss_is_as_defined_and_so_is_its_gradient(
    balancing: Balancing, order: dict[str, Any], has_bias: bool
) -> None:
    ours = _router(**order, balancing=balancing, balance_coeff=0.5, has_expert_bias=has_bias)
    if ours.expert_bias is not None:
        ours.expert_bias.copy_(torch.randn(EXPERTS))
    hidden = _hidden()
    loss = ours(hidden).report.balance_loss

    logits = hidden.flatten(0, 1) @ ours.weight.T
    scores = logits.softmax(-1)
    if order is SIGMOID:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    num_parts = 3 if balancing is Balancing.SEQUENCE else 1
    expected = 0.5 * _reference_balance(scores, num_parts, 4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, ours.weight)[0] for one in (loss, expected)),
        rtol=1e-4,
        atol=1e-6,
    )


def test_the_loss_of_sequences_does_not_depend_on_their_microbatches() -> None:
    ours = _router(balancing=Balancing.SEQUENCE, balance_coeff=1.0)
    hidden = _hidden(batch=4)
    together = ours(hidden).report.balance_loss
    apart = torch.stack([ours(part).report.balance_loss for part in hidden.split(2)]).mean()
    torch.testing.assert_close(together, apart)

    over_all = _router(balancing=Balancing.MICROBATCH, balance_coeff=1.0)
    assert not torch.isclose(over_all(hidden).report.balance_loss, together)


def test_the_z_loss_is_the_mean_square_of_the_log_sum_exp() -> None:
    ours = _router(z_coeff=0.25)
    hidden = _hidden()
    logits = (hidden.flatten(0, 1) @ ours.weight.T).double()
    expected = 0.25 * logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(ours(hidden).report.z_loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("balancing", [Balancing.MICROBATCH, Balancing.SEQUENCE])
@pytest.mark.parametrize(("batch", "seq"), [(0, 5), (2, 0)])
def test_a_microbatch_without_tokens_has_losses_of_zero(
    balancing: Balancing, batch: int, seq: int
) -> None:
    ours = _router(balancing=balancing, balance_coeff=1.0, z_coeff=1.0)
    routing: Routing = ours(_hidden(batch, seq))
    assert routing.experts.shape == routing.weights.shape == (0, 4)
    assert (routing.report.balance_loss.item(), routing.report.z_loss.item()) == (0.0, 0.0)
    assert routing.report.load.tolist() == [0] * EXPERTS
