"""Architectures whose layers have one MLP: Llama, Arcee, Qwen2 to Qwen3.5, Gemma 3, SmolLM3,
StableLM and StarCoder2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.models.families.family import (
    ATTENTION,
    PLAIN_MLP,
    QK_NORMS,
    Family,
)
from megatron.core.models.families.fields import (
    ALL_BIASES,
    NO_BIASES,
    QKV_BIASES,
    SIZES,
    Always,
    BiasFields,
    Field,
    HeadDim,
    HiddenActivation,
    KeyValueHeads,
    QueryScalar,
    ScaledEmbeddings,
    TiedEmbeddings,
    Value,
    norm_eps,
)
from megatron.core.models.families.layer_fields import (
    DeltaNetLayers,
    LayerRule,
    SlidingLayers,
    UnrotatedLayers,
    WindowEverywhere,
    all_but_every_nth,
    from_layer,
)
from megatron.core.models.families.rope import Rope, RopeByKind
from megatron.core.models.families.row_map import RowMap
from megatron.core.transformer.spec import Activation, AttentionSpec, GatedDeltaNetSpec

_LLAMA_FIELDS = (
    *SIZES,
    norm_eps("rms_norm_eps"),
    TiedEmbeddings(),
    # Files of before grouped queries have one key head for each query head; heads of another width
    # than hidden size / heads came later still.
    KeyValueHeads(may_be_null=True, may_be_absent=True),
    HeadDim(may_be_absent=True),
    BiasFields(
        {
            NO_BIASES: {"attention_bias": False, "mlp_bias": False},
            ALL_BIASES: {"attention_bias": True, "mlp_bias": True},
        }
    ),
    # Llama 1 and 2 were trained with this base when files could not name another.
    Rope(absent_base=10000.0),
)

LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(*_LLAMA_FIELDS, HiddenActivation()),
    has_even_heads=True,
)

ARCEE = Family(
    model_type="arcee",
    class_name="ArceeForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(*_LLAMA_FIELDS, HiddenActivation(is_gated=False)),
    dense=PLAIN_MLP,
    has_even_heads=True,
)


_QWEN_FIELDS = (*SIZES, norm_eps("rms_norm_eps"), TiedEmbeddings())
_QWEN_WINDOWS = SlidingLayers(from_layer("max_window_layers"), switch="use_sliding_window")

QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(
        *_QWEN_FIELDS,
        KeyValueHeads(may_be_null=True),
        # Its files have no such field, but the library reads it.
        HeadDim(may_be_absent=True),
        HiddenActivation(),
        BiasFields({QKV_BIASES: {}}),
        _QWEN_WINDOWS,
        Rope(),
    ),
)

QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    options={"normalization": "RMSNorm", "qk_layernorm": True},
    fields=(
        *_QWEN_FIELDS,
        KeyValueHeads(may_be_null=True),
        HeadDim(),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        _QWEN_WINDOWS,
        Rope(),
    ),
    attention=ATTENTION | QK_NORMS,
)


# The decoder of Qwen3-VL. Text has one position for each token, of which the three sections of
# `mrope` are three copies.
MROPE = frozenset({"mrope_section", "mrope_interleaved"})
QWEN3_VL = dataclasses.replace(
    QWEN3,
    model_type="qwen3_vl_text",
    class_name="Qwen3VLTextModel",
    fields=(
        *_QWEN_FIELDS,
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
    DeltaNetLayers(all_but_every_nth("full_attention_interval")),
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
    attention=GATED_ATTENTION,
    delta_net=DELTA_NET,
    harmless=GATED_ATTENTION_HARMLESS,
    ignored=("mtp.",),
)


_GEMMA_WINDOWS = SlidingLayers(
    all_but_every_nth("sliding_window_pattern", "_sliding_window_pattern")
)

# `attn_logit_softcapping` is no field: the library keeps it, and no version applies it to Gemma 3.
# A file that gives it is rejected, since its author's formula is unknown.
GEMMA3 = Family(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    options={
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "post_norm": True,
        "qk_layernorm": True,
    },
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        # True is the default of all versions, which leave defaults out of their files.
        TiedEmbeddings(absent=True),
        KeyValueHeads(),
        HeadDim(),
        HiddenActivation("hidden_activation"),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        QueryScalar(),
        ScaledEmbeddings(),
        # Gemma 2 had it; null or missing, it has been off in all versions.
        Value(
            "final_logit_softcapping",
            "final_logit_softcapping",
            lambda spec: spec.logit_softcap,
            absent=None,
        ),
        _GEMMA_WINDOWS,
        # Not YaRN: the library does not read `truncate` where layers differ.
        RopeByKind(_GEMMA_WINDOWS, kinds=("default", "linear", "llama3")),
    ),
    norms={
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    attention=ATTENTION | QK_NORMS,
    has_even_heads=True,
)


_UNROTATED = UnrotatedLayers()

SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        # True is the default of all versions, which leave defaults out of their files.
        TiedEmbeddings(absent=True),
        KeyValueHeads(may_be_null=True),
        # Its files have no such field, but the library reads it.
        HeadDim(may_be_absent=True),
        HiddenActivation(),
        BiasFields(
            {
                NO_BIASES: {"attention_bias": False, "mlp_bias": False},
                ALL_BIASES: {"attention_bias": True, "mlp_bias": True},
            }
        ),
        _UNROTATED,
        SlidingLayers(LayerRule(_UNROTATED.names, _UNROTATED.layers), switch="use_sliding_window"),
        Rope(),
    ),
    # From Qwen2's files, the origin of these; the library does not read it here.
    harmless=frozenset({"max_window_layers"}),
)


STABLELM = Family(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    options={"normalization": "LayerNorm"},
    fields=(
        *SIZES,
        norm_eps("layer_norm_eps"),
        TiedEmbeddings(),
        KeyValueHeads(),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"use_qkv_bias": False}, QKV_BIASES: {"use_qkv_bias": True}}),
        # A quarter of each head is the default of all versions.
        Rope(absent_share=0.25),
    ),
)


STARCODER2 = Family(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    options={"normalization": "LayerNorm"},
    fields=(
        *SIZES,
        norm_eps("norm_epsilon"),
        # True is the default of all versions, which leave defaults out of their files.
        TiedEmbeddings(absent=True),
        KeyValueHeads(),
        # Its files have no such field, but the library reads it.
        HeadDim(may_be_absent=True),
        HiddenActivation(is_gated=False),
        BiasFields(
            {NO_BIASES: {"use_bias": False}, ALL_BIASES: {"use_bias": True}},
            absent=None,
        ),
        WindowEverywhere(),
        Rope(),
    ),
    dense={"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"},
    # Names of the norm and the MLP, and second names of other values, in files of before
    # transformers 5. The library does not read them.
    harmless=frozenset(
        {
            "norm_type",
            "mlp_type",
            "activation_function",
            "layer_norm_epsilon",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        }
    ),
)
