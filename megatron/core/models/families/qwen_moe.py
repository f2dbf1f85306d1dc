"""Qwen3-MoE."""

from __future__ import annotations

from megatron.core.models.families.fields import (
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
from megatron.core.models.families.moe_fields import (
    AUX_LOSS,
    EXPERT_SIZE,
    TOP_K,
    NormalizedTopK,
    SparseLayers,
    num_experts,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import (
    ATTENTION,
    EXPERTS,
    GATED_MLP,
    NORMS,
    QK_NORMS,
    STACKED_EXPERTS,
    Family,
)
from megatron.core.transformer.spec import Scores

_ROUTER = {"mlp.router": "mlp.gate"}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    options={"normalization": "RMSNorm", "qk_layernorm": True},
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        TiedEmbeddings(),
        KeyValueHeads(),
        HeadDim(),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        WindowEverywhere(switch="use_sliding_window"),
        Rope(),
        # Version 5 writes the other name.
        num_experts("num_experts", "num_local_experts"),
        TOP_K,
        EXPERT_SIZE,
        NormalizedTopK(Scores.SOFTMAX),
        SparseLayers(),
        AUX_LOSS,
    ),
    norms=NORMS,
    attention=ATTENTION | QK_NORMS,
    dense=GATED_MLP,
    mixture=_ROUTER,
    experts=(EXPERTS, STACKED_EXPERTS),
    # As in Qwen3, but here a window is in all layers.
    harmless=frozenset({"max_window_layers"}),
)
