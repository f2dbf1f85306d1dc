"""Qwen2 (and 2.5), Qwen3, and the text part of Qwen3-VL and of the dense Qwen3.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.models.families.fields import (
    NO_BIASES,
    QKV_BIASES,
    SIZES,
    Always,
    BiasFields,
    Field,
    HeadDim,
    HiddenActivation,
    KeyValueHeads,
    TiedEmbeddings,
    norm_eps,
)
from megatron.core.models.families.layer_fields import (
    AllButEveryNth,
    DeltaNetLayers,
    FromLayer,
    SlidingLayers,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.families.table import ATTENTION, GATED_MLP, NORMS, QK_NORMS, Family
from megatron.core.transformer.spec import Activation, AttentionSpec, GatedDeltaNetSpec

_FIELDS = (*SIZES, norm_eps("rms_norm_eps"), TiedEmbeddings())
_WINDOWS = SlidingLayers(FromLayer("max_window_layers"), switch="use_sliding_window")

QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(
        *_FIELDS,
        KeyValueHeads(may_be_null=True),
        # Its files have no such field, but the library reads it.
        HeadDim(may_be_absent=True),
        HiddenActivation(),
        BiasFields({QKV_BIASES: {}}),
        _WINDOWS,
        Rope(),
    ),
    norms=NORMS,
    attention=ATTENTION,
    dense=GATED_MLP,
)

QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    options={"normalization": "RMSNorm", "qk_layernorm": True},
    fields=(
        *_FIELDS,
        KeyValueHeads(may_be_null=True),
        HeadDim(),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        _WINDOWS,
        Rope(),
    ),
    norms=NORMS,
    attention=ATTENTION | QK_NORMS,
    dense=GATED_MLP,
)


# The decoder of Qwen3-VL. Text has one position for each token, of which the three sections of
# `mrope` are three copies.
MROPE = frozenset({"mrope_section", "mrope_interleaved"})
QWEN3_VL = dataclasses.replace(
    QWEN3,
    model_type="qwen3_vl_text",
    class_name="Qwen3VLTextModel",
    fields=(
        *_FIELDS,
        KeyValueHeads(may_be_null=True),
        HeadDim(),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        Rope(ignored=MROPE),
    ),
)


def _query(mixer: AttentionSpec) -> RowMap:
    """Each head's query is followed by its gate."""
    return RowMap("self_attn.q_proj", block=mixer.head_dim, stride=2 * mixer.head_dim)


def _gate(mixer: AttentionSpec) -> RowMap:
    width = mixer.head_dim
    return RowMap("self_attn.q_proj", start=width, block=width, stride=2 * width)


def _delta_net_key(mixer: GatedDeltaNetSpec) -> RowMap:
    return RowMap("linear_attn.in_proj_qkv", start=mixer.key_size)


def _delta_net_value(mixer: GatedDeltaNetSpec) -> RowMap:
    return RowMap("linear_attn.in_proj_qkv", start=2 * mixer.key_size)


# What Qwen3-Next and Qwen3.5 have alike.
GATED_ATTENTION_OPTIONS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
GATED_ATTENTION: dict[str, str | Callable[[AttentionSpec], RowMap]] = {
    **ATTENTION,
    **QK_NORMS,
    "self_attention.query": _query,
    "self_attention.gate": _gate,
}
DELTA_NET: dict[str, str | Callable[[GatedDeltaNetSpec], RowMap]] = {
    "self_attention.query": "linear_attn.in_proj_qkv",
    "self_attention.key": _delta_net_key,
    "self_attention.value": _delta_net_value,
    "self_attention.z": "linear_attn.in_proj_z",
    "self_attention.beta": "linear_attn.in_proj_b",
    "self_attention.alpha": "linear_attn.in_proj_a",
    "self_attention.conv1d": "linear_attn.conv1d",
    "self_attention.decay": "linear_attn",
    "self_attention.out_norm": "linear_attn.norm",
    "self_attention.out_proj": "linear_attn.out_proj",
}
GATED_ATTENTION_FIELDS: tuple[Field, ...] = (
    norm_eps("rms_norm_eps"),
    TiedEmbeddings(),
    KeyValueHeads(),
    HeadDim(),
    # The delta net's convolution has the same activation, which is this one here.
    HiddenActivation(only=Activation.SILU),
    BiasFields({NO_BIASES: {"attention_bias": False}}),
    Always("attn_output_gate", True),
    DeltaNetLayers(AllButEveryNth("full_attention_interval")),
    # The library takes a quarter in all versions.
    Rope(absent_share=0.25, ignored=MROPE),
)
# Extra layers that predict further tokens, and the dtype of the delta net's state.
GATED_ATTENTION_HARMLESS = frozenset(
    {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    options=GATED_ATTENTION_OPTIONS,
    fields=(*SIZES, *GATED_ATTENTION_FIELDS),
    norms=NORMS,
    attention=GATED_ATTENTION,
    delta_net=DELTA_NET,
    dense=GATED_MLP,
    harmless=GATED_ATTENTION_HARMLESS,
    ignored=("mtp.",),
)
