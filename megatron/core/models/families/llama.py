"""Llama (1 to 3.x) and Arcee, which has its layers with another MLP."""

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
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import ATTENTION, GATED_MLP, NORMS, PLAIN_MLP, Family

_FIELDS = (
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
    fields=(*_FIELDS, HiddenActivation()),
    norms=NORMS,
    attention=ATTENTION,
    dense=GATED_MLP,
    has_even_heads=True,
)

ARCEE = Family(
    model_type="arcee",
    class_name="ArceeForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(*_FIELDS, HiddenActivation(is_gated=False)),
    norms=NORMS,
    attention=ATTENTION,
    dense=PLAIN_MLP,
    has_even_heads=True,
)
