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


def _build(spec: AttentionSpec, granularity: str | None = None) -> SelfAttention:
    return SelfAttention(
        spec, HIDDEN, init_std=0.02, output_init_std=0.01, recompute_granularity=granularity
    )


def _attention(spec: AttentionSpec, granularity: str | None = None) -> SelfAttention:
    """With weights large enough for the scores to matter."""
    torch.manual_seed(0)
    attention = _build(spec, granularity)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention


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
    for granularity in (None, "selective"):
        attention = _attention(replace(spec, dropout=0.3), granularity)
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
    attention.eval()(hidden).sum().backward()
    assert len(count) == 3, "not again in evaluation"


def test_learned_sinks_start_as_weights_do() -> None:
    spec = replace(SINKS, num_heads=4096, num_key_value_heads=1, head_dim=1, rotary=None)
    with torch.device("meta"):
        attention = SelfAttention(spec, 1, init_std=0.1, output_init_std=0.01)
    materialize(attention, "cpu", seed=1)
    assert attention.sinks is not None
    assert attention.sinks.mean().item() == pytest.approx(0.0, abs=0.01)
    assert attention.sinks.std().item() == pytest.approx(0.1, rel=0.1)
