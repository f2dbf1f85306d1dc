"""Where fp16's range or digits would not do, the arithmetic is fp32: the results are those of fp32,
rounded.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.norms import LayerNorm, RMSNorm
from megatron.core.transformer.rotary import apply_rotary, rotary_angles
from megatron.core.transformer.spec import AttentionSpec, RotarySpec

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float16).max


def noise(*shape: int, scale: float) -> torch.Tensor:
    """In fp16, and so that fp32 has the same values."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).half()


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_add_up_squares_that_fp16_cannot_hold(kind):
    norm, x = kind(64, 1e-5), noise(4, 64, scale=3000.0)
    assert not x.square().isfinite().all(), "in fp16 they overflow"
    torch.testing.assert_close(
        norm.half()(x).float(), norm.float()(x.float()), rtol=2e-3, atol=1e-4
    )


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_takes_scores_that_fp16_cannot_hold(dropout, grouped):
    spec = AttentionSpec(4, 2 if grouped else 4, head_dim=8, scale=8**-0.5, dropout=dropout)
    attention = SelfAttention(spec, 32, init_std=0.02, output_init_std=0.02).train()
    query, key, value = noise(3, 2, 4, 16, 8, scale=200.0).unbind()
    key, value = key[:, : spec.num_key_value_heads], value[:, : spec.num_key_value_heads]
    scores = query.double() @ key.double().repeat_interleave(4 // key.shape[1], dim=1).transpose(
        -1, -2
    )
    assert scores.abs().max() > LARGEST
    wide = attention._core_attention(query.float(), key.float(), value.float(), None)
    narrow = attention._core_attention(query, key, value, None)
    assert narrow.dtype == torch.float16
    torch.testing.assert_close(narrow.float(), wide, rtol=5e-3, atol=2.0)


def test_rotary_angles_turn_fp16_in_fp32():
    angles = rotary_angles(RotarySpec(dim=16, base=10000.0), torch.arange(3000))
    x = noise(1, 3000, 2, 16, scale=1.0)
    turned = apply_rotary(x, angles.cos, angles.sin)
    assert turned.dtype == torch.float16
    assert torch.equal(turned, apply_rotary(x.float(), angles.cos, angles.sin).half())
