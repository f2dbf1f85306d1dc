from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from megatron.core.transformer.expert_bias import update_expert_bias
from megatron.core.transformer.router import Router
from megatron.core.transformer.spec import RouterSpec, Scores


def router(*, has_bias: bool = True, rate: float = 0.25) -> Router:
    torch.manual_seed(0)
    return Router(
        RouterSpec(
            num_experts=4,
            top_k=1,
            scores=Scores.SIGMOID,
            is_scored_first=True,
            is_normalized=False,
            has_expert_bias=has_bias,
            bias_update_rate=rate,
        ),
        hidden_size=8,
        init_std=0.02,
    )


def biases(model: nn.Module) -> list[list[float] | None]:
    found = [module.expert_bias for module in model.modules() if isinstance(module, Router)]
    return [None if bias is None else bias.tolist() for bias in found]


def test_experts_below_the_mean_gain_the_rate_and_those_above_lose_it_layer_by_layer():
    model = nn.Sequential(router(), router(rate=0.5))
    update_expert_bias(model, torch.tensor([[1, 2, 3, 2], [8, 0, 0, 0]]))
    assert biases(model) == [[0.25, 0.0, -0.25, 0.0], [-0.5, 0.5, 0.5, 0.5]]
    update_expert_bias(model, torch.tensor([[2, 2, 2, 2], [0, 0, 0, 8]]))
    assert biases(model) == [[0.25, 0.0, -0.25, 0.0], [0.0, 1.0, 1.0, 0.0]]


def test_a_load_next_to_a_mean_that_no_float_holds_counts():
    model = nn.Sequential(router())
    least = 2**53
    update_expert_bias(model, torch.tensor([[least, least, least, least + 1]]))
    assert biases(model) == [[0.25, 0.25, 0.25, -0.25]]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), router(has_bias=False)], ids=type)
def test_a_model_without_such_biases_takes_any_loads_and_stays_as_it_is(model: nn.Module):
    before = [parameter.clone() for parameter in model.parameters()]
    update_expert_bias(model, torch.tensor([[1]]))
    after = list(model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("load", "got"),
    [
        (torch.ones(1, 4, dtype=torch.int64), "torch.int64 (1, 4)"),
        (torch.ones(2, 3, dtype=torch.int64), "torch.int64 (2, 3)"),
        (torch.ones(2, 4), "torch.float32 (2, 4)"),
    ],
    ids=str,
)
def test_loads_of_another_model_are_rejected_and_move_nothing(load: torch.Tensor, got: str):
    model = nn.Sequential(router(), router())
    with pytest.raises(
        ValueError,
        match=re.escape(f"Expected int64 loads of shape (2, 4), a row for each router, got {got}."),
    ):
        update_expert_bias(model, load)
    assert biases(model) == [[0.0] * 4] * 2


def test_a_raised_bias_brings_tokens_and_changes_no_weight_of_those_already_there():
    chooser = router(rate=5e-4)
    hidden = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    before = chooser(hidden)
    for _ in range(60):
        update_expert_bias(chooser, chooser(hidden).report.load[None])
    after = chooser(hidden)
    assert after.report.load.double().std() < 0.5 * before.report.load.double().std()
    stays = after.experts == before.experts
    assert 0 < stays.sum() < len(stays)
    assert torch.equal(after.weights[stays], before.weights[stays])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_dtype_keeps_its_biases_and_their_steps(dtype: torch.dtype):
    model = nn.Sequential(router(rate=1e-3))
    load = torch.tensor([[1, 2, 3, 2]])
    for _ in range(300):
        update_expert_bias(model, load)
    before = biases(model)
    model.to(dtype)
    assert model[0].weight.dtype is dtype
    assert biases(model) == before, "nothing is rounded"
    assert model[0].expert_bias.dtype is torch.float32
    assert model.state_dict()["0.expert_bias"] is not None
    for _ in range(700):
        update_expert_bias(model, load)
    assert biases(model)[0] == pytest.approx([1.0, 0.0, -1.0, 0.0], rel=1e-4)


def test_a_row_is_of_the_router_of_its_layer_also_where_others_have_no_bias():
    model = nn.Sequential(router(has_bias=False), router())
    update_expert_bias(model, torch.tensor([[9, 0, 0, 0], [0, 0, 0, 9]]))
    assert biases(model) == [None, [0.25, 0.25, 0.25, -0.25]]
