"""RMSNorm and LayerNorm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.core.transformer.norms import LayerNorm, RMSNorm


def _reference(norm: RMSNorm | LayerNorm, x: Tensor) -> Tensor:
    """The textbook formula in fp64."""
    x, weight = x.double(), norm.weight.double()
    if isinstance(norm, RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    centered = x - x.mean(-1, keepdim=True)
    return (
        centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
        + norm.bias.double()
    )


def _random_norm(kind: type[RMSNorm] | type[LayerNorm]) -> RMSNorm | LayerNorm:
    torch.manual_seed(1)
    norm = kind(64, 1e-5)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_follows_its_formula(kind: type[RMSNorm] | type[LayerNorm]) -> None:
    norm = _random_norm(kind)
    x = torch.randn(2, 5, 64) * 3 + 1
    torch.testing.assert_close(norm(x).double(), _reference(norm, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_bf16_input_is_rounded_only_once(
    kind: type[RMSNorm] | type[LayerNorm], weight_dtype: torch.dtype
) -> None:
    norm = _random_norm(kind).to(weight_dtype)
    x = (torch.randn(64, 64) * 3 + 1).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    expected = _reference(norm, x)
    # One rounding to the 8 bits of bf16 errs by at most 2^-8 of the value; arithmetic in bf16
    # rounds several times.
    error = (y.double() - expected).abs() / expected.abs().clamp_min(1e-2)
    assert error.max() <= 2.0**-8 * 1.01


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_centred_weight_is_one_less_than_the_scale(
    kind: type[RMSNorm] | type[LayerNorm], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain, centred = kind(16, 1e-5), kind(16, 1e-5, True)
    assert centred.weight.eq(0).all()
    offset = torch.randn(16).to(dtype)
    with torch.no_grad():
        plain.weight.copy_(offset.float() + 1)
        centred.weight.copy_(offset)
    x = torch.randn(4, 16).to(dtype)
    # The sum is fp32, so the centred norm in 16 bits is the plain one in fp32.
    expected = plain(x)
    assert torch.equal(centred.to(dtype)(x), expected)
    assert not torch.equal(kind(16, 1e-5)(x), expected)
