"""StarCoder2."""

from __future__ import annotations

from megatron.core.models.families.fields import (
    ALL_BIASES,
    NO_BIASES,
    SIZES,
    BiasFields,
    HeadDim,
    HiddenActivation,
    KeyValueHeads,
    TiedEmbeddings,
    norm_eps,
)
from megatron.core.models.families.layer_fields import WindowEverywhere
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import ATTENTION, NORMS, Family

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
    norms=NORMS,
    attention=ATTENTION,
    dense={"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"},
    # Names of the norm and the MLP, and second names of other values, in files of before
    # transformers 5. The library reads none of them.
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
