"""SelfAttention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import megatron.core.transformer.attention as attention_module
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.rotary import apply_rotary, rotary_angles

GQA: dict[str, Any] = {"group_query_attention": True, "num_query_groups": 2}


def _attention(config: TransformerConfig, seed: int = 0) -> SelfAttention:
    """With weights large enough for the scores to matter."""
    torch.manual_seed(seed)
    attention = SelfAttention(config)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention


def _reference(attention: SelfAttention, hidden: Tensor) -> Tensor:
    """Attention written out, with keys and values repeated for each query head."""
    config = attention.config
    batch, seq_length, _ = hidden.shape
    angles = rotary_angles(config, seq_length, hidden.device)
    query, key, value = (
        part.view(batch, seq_length, -1, config.head_dim)
        for part in attention.linear_qkv.split(attention.linear_qkv(hidden))
    )
    if attention.q_layernorm is not None and attention.k_layernorm is not None:
        query, key = attention.q_layernorm(query), attention.k_layernorm(key)
    query, key = (
        apply_rotary(query, angles.cos, angles.sin),
        apply_rotary(key, angles.cos, angles.sin),
    )
    repeats = config.num_attention_heads // config.num_key_value_heads
    key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
    scores = scores.masked_fill(torch.ones(seq_length, seq_length).triu(1).bool(), -math.inf)
    context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
    return attention.linear_proj(context.flatten(2))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        GQA,
        {"kv_channels": 16, "rotary_percent": 0.5, **GQA},
        {"qk_layernorm": True, "normalization": "RMSNorm"},
        {"group_query_attention": True, "num_query_groups": 1, "add_bias_linear": False},
    ],
)
def test_attention_equals_the_written_out_sum_with_repeated_keys_and_values(
    make_config: Any, changes: dict[str, Any]
) -> None:
    attention = _attention(make_config(**changes))
    hidden = torch.randn(2, 7, 32)
    angles = rotary_angles(attention.config, 7, hidden.device)
    torch.testing.assert_close(
        attention(hidden, angles), _reference(attention, hidden), rtol=1e-4, atol=1e-5
    )


def test_gqa_gradients_equal_those_of_an_explicit_repeat(make_config: Any) -> None:
    attention = _attention(make_config(**GQA))
    hidden = torch.randn(2, 7, 32)
    attention(hidden, rotary_angles(attention.config, 7, hidden.device)).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in attention.parameters()]
    attention.zero_grad()
    _reference(attention, hidden).square().sum().backward()
    for got, parameter in zip(gradients, attention.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-4)


class AttentionCalls(TorchFunctionMode):
    """Remembers the number of key heads of each call of PyTorch's attention, and whether queries
    are grouped in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.seen.append((args[1].shape[1], kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("meta", torch.float32, (4, False)),
        ("meta", torch.bfloat16, (2, True)),
        ("meta", torch.float16, (2, True)),
        ("cpu", torch.float32, (2, True)),
        ("cpu", torch.bfloat16, (2, True)),
    ],
)
def test_keys_are_repeated_only_where_no_fused_kernel_takes_grouped_queries(
    make_config: Any, device: str, dtype: torch.dtype, expected: tuple[int, bool]
) -> None:
    """Meta tensors stand for an accelerator's: they are not on the CPU, and nothing else tells them
    apart here.
    """
    attention = _attention(make_config(**GQA)).to(device=device, dtype=dtype)
    with AttentionCalls() as calls:
        attention(torch.ones(2, 7, 32, device=device, dtype=dtype))
    assert calls.seen == [expected]


def test_repeated_keys_give_what_grouped_queries_give(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = _attention(make_config(**GQA))
    hidden = torch.randn(2, 7, 32)
    results = []
    for has_grouped_kernel in (True, False):
        monkeypatch.setattr(
            attention_module, "_has_grouped_kernel", lambda _, answer=has_grouped_kernel: answer
        )
        attention.zero_grad()
        output = attention(hidden)
        output.square().sum().backward()
        results.append(
            [output.detach(), *(parameter.grad.clone() for parameter in attention.parameters())]
        )

    grouped, repeated = results
    assert torch.equal(repeated[0], grouped[0])
    for got, expected in zip(repeated[1:], grouped[1:], strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())
        )


def test_attention_on_the_cpu_holds_no_scores_of_all_pairs_of_positions(make_config: Any) -> None:
    query, key = torch.randn(1, 4, 8, 16, requires_grad=True), torch.randn(1, 2, 8, 16)
    output = _attention(make_config(**GQA))._core_attention(query, key, key)
    assert "FlashAttention" in type(output.grad_fn).__name__


def test_without_rotation_positions_enter_only_through_the_mask(make_config: Any) -> None:
    attention = _attention(make_config())
    hidden = torch.randn(1, 1, 32).expand(1, 6, 32)
    plain = attention(hidden)
    torch.testing.assert_close(plain, plain[:, :1].expand_as(plain))


@pytest.mark.parametrize(
    ("changes", "qkv", "proj"),
    [
        ({}, True, True),
        ({"add_bias_linear": False}, False, False),
        ({"add_bias_linear": False, "add_qkv_bias": True}, True, False),
    ],
)
def test_biases_follow_the_flags(
    make_config: Any, changes: dict[str, Any], qkv: bool, proj: bool
) -> None:
    attention = SelfAttention(make_config(**changes))
    assert (attention.linear_qkv.bias is not None, attention.linear_proj.bias is not None) == (
        qkv,
        proj,
    )


def test_qkv_rows_are_queries_then_keys_then_values(make_config: Any) -> None:
    attention = SelfAttention(make_config(**GQA))
    assert attention.linear_qkv.fused.sections == (("query", 32), ("key", 16), ("value", 16))


def test_attention_dropout_acts_in_training_only(make_config: Any) -> None:
    attention = _attention(make_config(attention_dropout=0.5))
    hidden = torch.randn(1, 8, 32)
    assert not torch.equal(attention(hidden), attention(hidden))
    attention.eval()
    assert torch.equal(attention(hidden), attention(hidden))


def test_selective_recompute_runs_the_core_twice_and_changes_no_bit(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(2, 8, 32)
    results, calls = [], []
    core = SelfAttention._core_attention
    for granularity in (None, "selective"):
        attention = _attention(
            make_config(attention_dropout=0.3, recompute_granularity=granularity, **GQA)
        )
        count: list[int] = []
        monkeypatch.setattr(
            SelfAttention,
            "_core_attention",
            lambda *args, count=count: (count.append(1), core(*args))[1],
        )
        torch.manual_seed(5)
        output = attention(hidden)
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in attention.parameters())])
        calls.append(len(count))
    assert calls == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
