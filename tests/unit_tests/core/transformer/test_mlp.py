"""The MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.transformer.fused_weight import fused_weights
from megatron.core.transformer.mlp import MLP


def _randomized(mlp: MLP) -> MLP:
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mlp


def test_plain_mlp_is_exact_gelu_between_two_linears(make_config: Any) -> None:
    mlp = _randomized(MLP(make_config()))
    x = torch.randn(2, 3, 32)
    inner = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    gelu = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    torch.testing.assert_close(
        mlp(x), F.linear(gelu, mlp.linear_fc2.weight, mlp.linear_fc2.bias), rtol=1e-4, atol=1e-5
    )
    assert fused_weights(mlp) == {}


def test_swiglu_gates_with_the_first_half_of_the_rows(make_config: Any) -> None:
    mlp = _randomized(MLP(make_config(swiglu=True, add_bias_linear=False)))
    assert [tuple(parameter.shape) for parameter in mlp.parameters()] == [(96, 32), (32, 48)]
    x = torch.randn(2, 3, 32)
    gate, up = F.linear(x, mlp.linear_fc1.weight[:48]), F.linear(x, mlp.linear_fc1.weight[48:])
    expected = F.linear(gate * torch.sigmoid(gate) * up, mlp.linear_fc2.weight)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)
    assert fused_weights(mlp)["linear_fc1.weight"].sections == (("gate", 48), ("up", 48))
