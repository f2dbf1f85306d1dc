"""FusedWeight and the linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear, fused_weights

QKV = FusedWeight((("query", 8), ("key", 4), ("value", 4)))


def test_sections_lie_one_after_the_other() -> None:
    assert QKV.num_rows == 16
    assert QKV.names == ("query", "key", "value")
    assert QKV.sizes == (8, 4, 4)
    assert [QKV.row_range(name) for name in QKV.names] == [(0, 8), (8, 12), (12, 16)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_row_ranges_tile_the_weight_whatever_the_sizes(sizes: list[int]) -> None:
    fused = FusedWeight([(f"section{i}", size) for i, size in enumerate(sizes)])
    rows = [row for name in fused.names for row in range(*fused.row_range(name))]
    assert rows == list(range(fused.num_rows))


def test_equal_sections_make_equal_and_hashable_values() -> None:
    again = FusedWeight([("query", 8), ("key", 4), ("value", 4)])
    assert again == QKV
    assert hash(again) == hash(QKV)
    assert FusedWeight((("query", 4), ("key", 8), ("value", 4))) != QKV


def test_bad_sections_are_refused() -> None:
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


def test_split_copies_nothing() -> None:
    output = FusedLinear(6, QKV)(torch.randn(2, 6))
    parts = FusedLinear(6, QKV).split(output)
    assert {part.untyped_storage().data_ptr() for part in parts} == {
        output.untyped_storage().data_ptr()
    }


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


def test_reset_parameters_draws_from_the_default_generator() -> None:
    layer = Linear(8, 8)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    assert torch.equal(layer.weight, torch.empty(8, 8).normal_(0.0, 0.02))


@pytest.mark.parametrize(("kind", "out"), [(Linear, 16), (FusedLinear, QKV)])
def test_device_and_dtype_reach_the_parameters_by_name_only(kind: Any, out: Any) -> None:
    layer = kind(4, out, True, device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta
    assert layer.bias.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="positional"):
        kind(4, out, True, "meta", torch.bfloat16)
