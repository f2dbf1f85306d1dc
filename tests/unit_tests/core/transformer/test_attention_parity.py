"""SelfAttention against the attention of published architectures in the transformers library."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.rotary import rotary_angles
from megatron.core.transformer.spec import (
    AttentionSpec,
    NormKind,
    NormSpec,
    RotarySpec,
    Sinks,
)

transformers = pytest.importorskip("transformers")

SEQ, HIDDEN = 40, 32
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "sliding_window": 12,
    "attention_dropout": 0.0,
}
QWEN = AttentionSpec(
    num_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    scale=0.25,
    rotary=RotarySpec(dim=8, base=10000.0),
    qk_norm=NormSpec(NormKind.RMS_NORM, 1e-6, is_zero_centered=True),
    has_output_gate=True,
)
GPT_OSS = AttentionSpec(
    num_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    scale=0.25,
    rotary=RotarySpec(dim=16, base=10000.0),
    window=12,
    sinks=Sinks.LEARNED,
    has_qkv_bias=True,
    has_output_bias=True,
)
GEMMA = AttentionSpec(
    num_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    scale=24**-0.5,
    rotary=RotarySpec(dim=16, base=10000.0),
    window=12,
    softcap=1.5,
)


def _theirs(family: str, attention: str, config: str, **changes: Any) -> nn.Module:
    """The attention of layer 0, which has the window where only some layers have one."""
    module = vars(importlib.import_module(f"transformers.models.{family}.modeling_{family}"))
    settings = module[config](
        **{**SIZES, "layer_types": ["sliding_attention", "full_attention"], **changes}
    )
    settings._attn_implementation = "eager"
    torch.manual_seed(0)
    built: nn.Module = module[attention](settings, layer_idx=0).eval()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.4)
    return built


def _ours(spec: AttentionSpec, theirs: Any) -> SelfAttention:
    """With the weights of `theirs`."""
    attention = SelfAttention(spec, HIDDEN, init_std=0.02, output_init_std=0.02).eval()
    sections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    weights = [layer.weight for layer in sections]
    if spec.has_output_gate:
        # For each head its queries, then its gate.
        heads = theirs.q_proj.weight.view(4, 2, 16, HIDDEN)
        weights[:1] = heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)

    with torch.no_grad():
        attention.linear_qkv.weight.copy_(torch.cat(weights))
        attention.linear_proj.weight.copy_(theirs.o_proj.weight)
        if spec.has_qkv_bias:
            attention.linear_qkv.bias.copy_(torch.cat([layer.bias for layer in sections]))
            attention.linear_proj.bias.copy_(theirs.o_proj.bias)
        if attention.sinks is not None:
            attention.sinks.copy_(theirs.sinks)
        if attention.q_layernorm is not None and attention.k_layernorm is not None:
            attention.q_layernorm.weight.copy_(theirs.q_norm.weight)
            attention.k_layernorm.weight.copy_(theirs.k_norm.weight)
    return attention


def _mask(window: int | None) -> Tensor:
    """What is added to the scores: [1, 1, seq, seq]."""
    visible = torch.ones(SEQ, SEQ).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    return torch.zeros(SEQ, SEQ).masked_fill(visible == 0, -torch.inf)[None, None]


QWEN_NAMES = ("qwen3_5", "Qwen3_5Attention", "Qwen3_5TextConfig")
GPT_OSS_NAMES = ("gpt_oss", "GptOssAttention", "GptOssConfig")
GEMMA_NAMES = ("gemma2", "Gemma2Attention", "Gemma2Config")


@pytest.mark.parametrize(
    ("names", "spec", "changes", "halves"),
    [
        (QWEN_NAMES, QWEN, {}, 2),
        (GPT_OSS_NAMES, GPT_OSS, {"attention_bias": True}, 1),
        (GEMMA_NAMES, GEMMA, {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5}, 2),
    ],
)
def test_output_is_that_of_the_published_architecture(
    names: tuple[str, str, str], spec: AttentionSpec, changes: dict[str, Any], halves: int
) -> None:
    theirs = _theirs(*names, **changes)
    ours = _ours(spec, theirs)
    assert spec.rotary is not None
    hidden = torch.randn(2, SEQ, HIDDEN)

    # Some families take one cosine for each plane, others one for each rotated channel.
    angles = rotary_angles(spec.rotary, torch.arange(SEQ, device=hidden.device))
    cos, sin = (torch.cat([part] * halves, dim=-1)[None] for part in (angles.cos, angles.sin))
    expected, _ = theirs(
        hidden_states=hidden,
        position_embeddings=(cos, sin),
        attention_mask=_mask(spec.window),
    )
    torch.testing.assert_close(ours(hidden, angles), expected, rtol=1e-4, atol=1e-4)
