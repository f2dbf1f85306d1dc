"""FusedWeight and the linear layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear, fused_weights

QKV = FusedWeight((("query", 8), ("key", 4), ("value", 4)))


def test_sections_lie_one_after_the_other() -> None:
    assert QKV.num_rows == 16
    assert QKV.names == ("query", "key", "value")
    assert QKV.sizes == (8, 4, 4)
    assert [QKV.row_range(name) for name in QKV.names] == [(0, 8), (8, 12), (12, 16)]


def test_bad_sections_are_rejected() -> None:
    with pytest.raises(ValueError, match="different names"):
        FusedWeight((("gate", 4), ("gate", 4)))
    with pytest.raises(ValueError, match="at least one row in section 'up', got 0"):
        FusedWeight((("gate", 4), ("up", 0)))
    with pytest.raises(ValueError, match="at least one section"):
        FusedWeight(())
    with pytest.raises(ValueError, match=r"one of the sections .* got 'bias'"):
        QKV.row_range("bias")


def test_split_gives_what_separate_layers_with_the_sections_rows_give() -> None:
    torch.manual_seed(0)
    layer = FusedLinear(6, QKV, bias=True)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 6)
    for name, output in zip(QKV.names, layer.split(layer(x)), strict=True):
        rows = slice(*QKV.row_range(name))
        torch.testing.assert_close(
            output, nn.functional.linear(x, layer.weight[rows], layer.bias[rows])
        )


def test_fused_weights_lists_weights_and_biases_of_fused_layers_only() -> None:
    gated = FusedWeight((("gate", 3), ("up", 3)))
    model = nn.ModuleDict(
        {
            "a": FusedLinear(4, QKV, bias=True),
            "b": FusedLinear(4, gated, bias=False),
            "c": Linear(4, 4),
        }
    )
    assert fused_weights(model) == {"a.weight": QKV, "a.bias": QKV, "b.weight": gated}
    assert fused_weights(FusedLinear(4, gated, bias=False)) == {"weight": gated}


@pytest.mark.parametrize(
    "make", [lambda: Linear(200, 300, init_std=0.5), lambda: FusedLinear(600, QKV, init_std=0.5)]
)
def test_weights_start_normal_with_the_given_deviation_and_biases_at_zero(
    make: Callable[[], Linear],
) -> None:
    torch.manual_seed(0)
    layer = make()
    assert layer.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert layer.weight.mean().item() == pytest.approx(0.0, abs=0.02)
    assert layer.bias.eq(0).all()
