"""LatentAttention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.materialize import materialize
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.rotary import RotaryAngles, rotary_angles
from megatron.core.transformer.spec import LatentAttentionSpec, NormKind, NormSpec, RotarySpec

HIDDEN, HEADS = 32, 3
NORM = NormSpec(NormKind.RMS_NORM, 1e-5)
SPEC = LatentAttentionSpec(
    num_heads=HEADS,
    query_rank=9,
    key_value_rank=11,
    content_dim=10,
    rotary_dim=6,
    value_dim=7,
    scale=0.3,
    rotary=RotarySpec(dim=6, base=100.0, is_interleaved=True),
    latent_norm=NORM,
    has_output_bias=True,
)
DIRECT = replace(SPEC, query_rank=None)
WIDE_VALUES = replace(SPEC, value_dim=20, rotary=RotarySpec(dim=6, base=100.0))
BARE = replace(SPEC, rotary=None, latent_norm=None, has_output_bias=False)


def _attention(spec: LatentAttentionSpec) -> LatentAttention:
    """With weights large enough for the scores to matter."""
    torch.manual_seed(0)
    attention = LatentAttention(spec, HIDDEN, init_std=0.02, output_init_std=0.01)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def _angles(spec: LatentAttentionSpec, seq_length: int) -> RotaryAngles | None:
    if spec.rotary is None:
        return None
    return rotary_angles(spec.rotary, torch.arange(seq_length))


def _normed(latent: Tensor, norm: nn.Module | None) -> Tensor:
    if norm is None:
        return latent
    weight = norm.get_parameter("weight")
    return latent / (latent.square().mean(-1, keepdim=True) + NORM.eps).sqrt() * weight


def _turned(channels: Tensor, position: int, spec: LatentAttentionSpec) -> Tensor:
    """One position's rotary channels [rotary_dim], turned plane by plane with complex numbers."""
    if spec.rotary is None:
        return channels
    half = spec.rotary_dim // 2
    planes = channels.view(half, 2) if spec.rotary.is_interleaved else channels.view(2, half).T
    frequencies = spec.rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(half, dtype=torch.float64), position * frequencies)
    turned = torch.view_as_real(torch.view_as_complex(planes.double().contiguous()) * turns)
    return (turned if spec.rotary.is_interleaved else turned.T).reshape(-1).to(channels.dtype)


def _reference(attention: LatentAttention, hidden: Tensor) -> Tensor:
    """The formulas of the paper, one sequence, position, head and pair at a time."""
    spec, weights = attention.spec, dict(attention.named_parameters())
    down, up = weights["linear_kv_down_proj.weight"], weights["linear_kv_up_proj.weight"]
    to_keys, to_values = up[: HEADS * spec.content_dim], up[HEADS * spec.content_dim :]
    rank = spec.key_value_rank

    outputs = []
    for sequence in hidden:
        if spec.query_rank is None:
            queries = sequence @ weights["linear_q_proj.weight"].T
        else:
            latent = _normed(
                sequence @ weights["linear_q_down_proj.weight"].T, attention.q_layernorm
            )
            queries = latent @ weights["linear_q_up_proj.weight"].T
        latent = _normed(sequence @ down[:rank].T, attention.kv_layernorm)
        shared = [_turned(one, place, spec) for place, one in enumerate(sequence @ down[rank:].T)]
        keys = (latent @ to_keys.T).unflatten(-1, (HEADS, -1))
        values = (latent @ to_values.T).unflatten(-1, (HEADS, -1))

        for place, query in enumerate(queries.unflatten(-1, (HEADS, -1))):
            heads = []
            for head, one in enumerate(query):
                turned = _turned(one[spec.content_dim :], place, spec)
                logits = [
                    one[: spec.content_dim] @ keys[other, head] + turned @ shared[other]
                    for other in range(place + 1)
                ]
                weight = (torch.stack(logits) * spec.scale).softmax(0)
                heads.append(weight @ values[: place + 1, head])
            outputs.append(torch.cat(heads) @ weights["linear_proj.weight"].T)
    output = torch.stack(outputs).view_as(hidden)
    return output + weights["linear_proj.bias"] if spec.has_output_bias else output


@pytest.mark.parametrize(
    "spec",
    [SPEC, DIRECT, WIDE_VALUES, BARE],
    ids=["small", "queries without a latent", "wide values, halves", "no norms, no rotation"],
)
def test_output_and_gradients_match_the_formulas_written_out(
    spec: LatentAttentionSpec,
) -> None:
    attention = _attention(spec)
    hidden = torch.randn(2, 7, HIDDEN, requires_grad=True)
    output, expected = attention(hidden, _angles(spec, 7)), _reference(attention, hidden)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)

    inputs = [hidden, *attention.parameters()]
    got = torch.autograd.grad(output.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max() + 1))


def test_weights_are_drawn_on_meta_and_off_alike() -> None:
    models = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            models.append(LatentAttention(DIRECT, HIDDEN, init_std=0.5, output_init_std=0.1))
        materialize(models[-1], "cpu", seed=3)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])

    drawn = states[0]
    assert math.isclose(float(drawn["linear_q_proj.weight"].std()), 0.5, rel_tol=0.1)
    assert math.isclose(float(drawn["linear_proj.weight"].std()), 0.1, rel_tol=0.1)
    assert torch.equal(drawn["kv_layernorm.weight"], torch.ones(11))
