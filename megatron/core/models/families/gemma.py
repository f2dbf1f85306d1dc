"""The text part of Gemma 3."""

from __future__ import annotations

from megatron.core.models.families.fields import (
    NO_BIASES,
    SIZES,
    BiasFields,
    HeadDim,
    HiddenActivation,
    KeyValueHeads,
    QueryScalar,
    ScaledEmbeddings,
    TiedEmbeddings,
    Value,
    norm_eps,
)
from megatron.core.models.families.layer_fields import AllButEveryNth, SlidingLayers
from megatron.core.models.families.rope import RopeByKind
from megatron.core.models.families.table import ATTENTION, GATED_MLP, QK_NORMS, Family

_WINDOWS = SlidingLayers(AllButEveryNth("sliding_window_pattern", "_sliding_window_pattern"))

# `attn_logit_softcapping` is no field: the library keeps it, and no version applies it to Gemma 3.
# A file that gives it is refused, since it is not clear what its author computed.
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
        _WINDOWS,
        # Not YaRN: the library does not read `truncate` where layers differ.
        RopeByKind(_WINDOWS, kinds=("default", "linear", "llama3")),
    ),
    norms={
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    attention=ATTENTION | QK_NORMS,
    dense=GATED_MLP,
    has_even_heads=True,
)
