"""The MLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec import LayerSpec


def _mlp(spec: LayerSpec) -> MLP:
    """An MLP for 32 channels, of weights that are drawn anew each time in the same way."""
    mlp = MLP(spec.feed_forward, 32, init_std=0.02, output_init_std=0.02)
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mlp


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
        (
            "gelu_tanh",
            lambda x: x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        ),
        ("quick_gelu", lambda x: x / (1 + torch.exp(-1.702 * x))),
        ("silu", lambda x: x * torch.sigmoid(x)),
        ("squared_relu", lambda x: torch.where(x > 0, x * x, 0)),
    ],
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_activation_stands_with_and_without_a_gate(
    make_spec: Any, name: str, expected: Any, is_gated: bool
) -> None:
    mlp = _mlp(make_spec(activation_func=name, gated_linear_unit=is_gated, add_bias_linear=False))
    x = torch.randn(2, 3, 32)
    inner = F.linear(x, mlp.linear_fc1.weight)
    inner = expected(inner[..., :48]) * inner[..., 48:] if is_gated else expected(inner)
    torch.testing.assert_close(mlp(x), F.linear(inner, mlp.linear_fc2.weight), rtol=1e-4, atol=1e-5)


def test_a_clamped_gate_is_bounded_above_and_the_other_half_on_both_sides(make_spec: Any) -> None:
    spec = make_spec(swiglu=True, activation_func_clamp_value=0.5, glu_linear_offset=1.0)
    mlp = _mlp(spec)
    x = torch.randn(2, 30, 32)
    gate, up = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias).chunk(2, dim=-1)
    assert (gate > 0.5).any()
    assert (gate < -0.5).any()
    assert (up.abs() > 0.5).any()

    gate = torch.minimum(gate, torch.tensor(0.5))
    up = torch.minimum(torch.maximum(up, torch.tensor(-0.5)), torch.tensor(0.5))
    expected = F.linear(F.silu(gate) * (up + 1), mlp.linear_fc2.weight, mlp.linear_fc2.bias)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)
