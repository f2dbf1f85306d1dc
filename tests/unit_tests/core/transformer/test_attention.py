"""SelfAttention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.materialize import materialize
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary, rotary_angles
from megatron.core.transformer.spec import AttentionSpec, NormKind, NormSpec, RotarySpec, Sinks

HIDDEN = 32
BIASED = AttentionSpec(
    num_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    scale=1 / math.sqrt(8),
    rotary=RotarySpec(dim=8, base=10000.0),
    has_qkv_bias=True,
    has_output_bias=True,
)
GROUPED = replace(BIASED, num_key_value_heads=2)
GATED = replace(
    GROUPED,
    scale=0.5,
    qk_norm=NormSpec(NormKind.RMS_NORM, 1e-6),
    has_output_gate=True,
    has_qkv_bias=False,
)
SINKS = replace(GROUPED, sinks=Sinks.LEARNED)


def _build(spec: AttentionSpec, recomputes_core: bool = False) -> SelfAttention:
    return SelfAttention(
        spec, HIDDEN, init_std=0.02, output_init_std=0.01, recomputes_core=recomputes_core
    )


def _attention(spec: AttentionSpec, recomputes_core: bool = False) -> SelfAttention:
    """With weights large enough for the scores to matter."""
    torch.manual_seed(0)
    attention = _build(spec, recomputes_core)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention


def _angles(spec: AttentionSpec, seq_length: int) -> RotaryAngles | None:
    if spec.rotary is None:
        return None
    return rotary_angles(spec.rotary, torch.arange(seq_length))


def _reference(attention: SelfAttention, hidden: Tensor) -> Tensor:
    """Attention written out, with keys and values repeated for each query head."""
    spec = attention.spec
    batch, seq_length, _ = hidden.shape
    rows = attention.linear_qkv.fused.row_range
    fused = attention.linear_qkv(hidden)
    query, key, value = (
        fused[..., slice(*rows(name))].view(batch, seq_length, -1, spec.head_dim)
        for name in ("query", "key", "value")
    )
    if attention.q_layernorm is not None and attention.k_layernorm is not None:
        query, key = attention.q_layernorm(query), attention.k_layernorm(key)
    angles = _angles(spec, seq_length)
    if angles is not None:
        query, key = (apply_rotary(part, angles.cos, angles.sin) for part in (query, key))

    repeats = spec.num_heads // spec.num_key_value_heads
    key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * spec.scale
    scores = scores.masked_fill(torch.ones(seq_length, seq_length).triu(1).bool(), -math.inf)
    if attention.sinks is not None:
        column = attention.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :seq_length], value)
    context = context.flatten(2)
    if spec.has_output_gate:
        context = context / (1 + torch.exp(-fused[..., slice(*rows("gate"))]))
    return attention.linear_proj(context)


@pytest.mark.parametrize(
    "spec",
    [
        BIASED,
        GROUPED,
        replace(GROUPED, head_dim=16, rotary=RotarySpec(dim=8, base=500.0)),
        replace(BIASED, qk_norm=NormSpec(NormKind.LAYER_NORM, 1e-5)),
        replace(BIASED, num_key_value_heads=1, has_qkv_bias=False, has_output_bias=False),
        GATED,
        SINKS,
    ],
)
def test_attention_equals_the_written_out_sum_with_repeated_keys_and_values(
    spec: AttentionSpec,
) -> None:
    attention = _attention(spec)
    hidden = torch.randn(2, 7, HIDDEN)
    output, expected = attention(hidden, _angles(spec, 7)), _reference(attention, hidden)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)

    parameters = list(attention.parameters())
    got = torch.autograd.grad(output.square().sum(), parameters)
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max() + 1))


def test_qkv_rows_are_queries_then_the_gate_then_keys_then_values() -> None:
    plain, gated = (_build(spec).linear_qkv.fused.sections for spec in (GROUPED, GATED))
    assert plain == (("query", 32), ("key", 16), ("value", 16))
    assert gated == (("query", 32), ("gate", 32), ("key", 16), ("value", 16))


@pytest.mark.parametrize(
    "spec", [GROUPED, replace(SINKS, window=3), replace(SINKS, window=3, softcap=2.0)]
)
def test_recomputing_the_core_runs_it_twice_and_changes_no_bit(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(2, 8, HIDDEN)
    results, calls = [], []
    core = SelfAttention._core_attention
    for recomputes_core in (False, True):
        attention = _attention(replace(spec, dropout=0.3), recomputes_core)
        count: list[int] = []

        def counted(*args: Any, count: list[int] = count) -> Tensor:
            count.append(1)
            return core(*args)

        monkeypatch.setattr(SelfAttention, "_core_attention", counted)
        torch.manual_seed(5)
        output = attention(hidden)
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in attention.parameters())])
        calls.append(len(count))
    assert calls == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_learned_sinks_start_as_weights_do() -> None:
    spec = replace(SINKS, num_heads=4096, num_key_value_heads=1, head_dim=1, rotary=None)
    with torch.device("meta"):
        attention = SelfAttention(spec, 1, init_std=0.1, output_init_std=0.01)
    materialize(attention, "cpu", seed=1)
    assert attention.sinks is not None
    assert attention.sinks.mean().item() == pytest.approx(0.0, abs=0.01)
    assert attention.sinks.std().item() == pytest.approx(0.1, rel=0.1)
