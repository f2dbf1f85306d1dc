"""StableLM without parallel branches and without norms of queries and keys, which are one for each
head there.
"""

from __future__ import annotations

from megatron.core.models.families.fields import (
    NO_BIASES,
    QKV_BIASES,
    SIZES,
    BiasFields,
    HiddenActivation,
    KeyValueHeads,
    TiedEmbeddings,
    norm_eps,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import ATTENTION, GATED_MLP, NORMS, Family

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
    norms=NORMS,
    attention=ATTENTION,
    dense=GATED_MLP,
)
