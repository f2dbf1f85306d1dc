"""GLM-4.5 and its successors of the same architecture."""

from __future__ import annotations

from megatron.core.models.families.fields import (
    NO_BIASES,
    QKV_BIASES,
    SIZES,
    BiasFields,
    HeadDim,
    HiddenActivation,
    KeyValueHeads,
    TiedEmbeddings,
    Value,
    attention_of,
    norm_eps,
)
from megatron.core.models.families.moe_fields import (
    EXPERT_SIZE,
    NUM_GROUPS,
    ROUTED_SCALE,
    TOP_GROUPS,
    TOP_K,
    FirstLayersDense,
    NormalizedTopK,
    SharedExperts,
    num_experts,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import (
    ATTENTION,
    EXPERTS,
    GATED_MLP,
    NORMS,
    QK_NORMS,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    Family,
)
from megatron.core.transformer.spec import Scores

GLM4_MOE = Family(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    options={
        "normalization": "RMSNorm",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        TiedEmbeddings(),
        KeyValueHeads(),
        # Its files have it, but the library computes one where it is missing.
        HeadDim(may_be_absent=True),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}, QKV_BIASES: {"attention_bias": True}}),
        # No norms is the default of all versions.
        Value(
            "use_qk_norm",
            "qk_layernorm",
            lambda spec: attention_of(spec).qk_norm is not None,
            absent=False,
        ),
        # Half of each head is the default of all versions.
        Rope(absent_share=0.5),
        # Version 5 writes the other name, too.
        num_experts("n_routed_experts", "num_local_experts"),
        TOP_K,
        EXPERT_SIZE,
        ROUTED_SCALE,
        NUM_GROUPS,
        TOP_GROUPS,
        NormalizedTopK(Scores.SIGMOID),
        SharedExperts(),
        FirstLayersDense(),
    ),
    norms=NORMS,
    attention=ATTENTION | QK_NORMS,
    dense=GATED_MLP,
    mixture={
        "mlp.router": "mlp.gate",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    experts=(EXPERTS, STACKED_EXPERTS),
    # Of extra layers that predict further tokens.
    harmless=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
    ignored=("model.layers.{extra_layer}.",),
)
