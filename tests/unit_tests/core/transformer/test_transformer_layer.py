"""TransformerLayer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.rotary import rotary_angles
from megatron.core.transformer.spec import RotarySpec


def _layer(config: TransformerConfig) -> TransformerLayer:
    """The first layer of a model, with the same weights each time."""
    torch.manual_seed(0)
    return TransformerLayer(
        model_spec(config).layers[0],
        config.hidden_size,
        init_std=0.02,
        output_init_std=0.02,
        recompute_granularity=config.recompute_granularity,
    )


def _run(config: Any, hidden: Tensor, train: bool = True) -> tuple[list[Tensor], int]:
    """Output and gradients of a layer with fixed weights, and how often its MLP ran."""
    layer = _layer(config).train(train)
    runs: list[int] = []
    layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    torch.manual_seed(7)
    hidden = hidden.clone().requires_grad_()
    output = layer(
        hidden,
        rotary_angles(RotarySpec(8, 10000.0), torch.arange(hidden.shape[1], device=hidden.device)),
    )
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in (hidden, *layer.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [output, *gradients], len(runs)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("granularity", "mlp_runs"), [("full", 2), ("selective", 1)])
def test_recompute_changes_no_bit(
    make_config: Any, dropout: float, granularity: str, mlp_runs: int
) -> None:
    hidden = torch.randn(2, 8, 32)
    changes = {"hidden_dropout": dropout, "attention_dropout": dropout, "swiglu": True}
    plain, runs = _run(make_config(**changes), hidden)
    recomputed, runs_recomputed = _run(
        make_config(**changes, recompute_granularity=granularity), hidden
    )
    assert (runs, runs_recomputed) == (1, mlp_runs)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_full_recompute_keeps_module_hooks_outside_what_is_rerun(make_config: Any) -> None:
    layer = _layer(make_config(recompute_granularity="full"))
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    layer.register_forward_hook(lambda *_: calls.append("post"))
    layer(torch.randn(1, 4, 32)).sum().backward()
    assert calls == ["pre", "post"]


def test_nothing_is_recomputed_in_evaluation_or_without_grad(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("checkpointed")

    monkeypatch.setattr("megatron.core.transformer.layer.checkpoint", refuse)
    layer = _layer(make_config(recompute_granularity="full"))
    hidden = torch.randn(1, 4, 32)
    with pytest.raises(AssertionError, match="checkpointed"):
        layer(hidden)
    with torch.no_grad():
        layer(hidden)
    layer.eval()(hidden)


def test_hidden_dropout_acts_on_both_branches_in_training_only(make_config: Any) -> None:
    layer = _layer(make_config(hidden_dropout=0.5))
    for branch in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
        torch.nn.init.zeros_(branch.weight)
        torch.nn.init.ones_(branch.bias)
    hidden = torch.zeros(8, 16, 32)
    # Each branch adds 0 or 2: both kept, one of them, or none.
    assert set(layer(hidden).unique().tolist()) == {0.0, 2.0, 4.0}
    assert layer.eval()(hidden).unique().tolist() == [2.0]


def test_post_norms_normalize_what_is_added_to_the_residual_stream(make_config: Any) -> None:
    layer = _layer(make_config(post_norm=True, normalization="RMSNorm"))
    torch.nn.init.normal_(layer.self_attention.linear_proj.weight)  # beside which epsilon is small
    torch.nn.init.zeros_(layer.mlp.linear_fc2.weight)
    hidden = torch.randn(2, 4, 32)
    added = layer(hidden) - hidden
    torch.testing.assert_close(added.square().mean(-1), torch.ones(2, 4), rtol=1e-2, atol=0)

    # Without them the branch is as small as its projection's initial weights make it.
    plain = _layer(make_config(normalization="RMSNorm"))
    assert (plain(hidden) - hidden).square().mean() < 0.1
