"""OLMoE: a mixture of experts in every layer, and norms over the channels of all heads."""

from __future__ import annotations

from megatron.core.models.families.fields import (
    NO_BIASES,
    SIZES,
    Always,
    BiasFields,
    HiddenActivation,
    KeyValueHeads,
    TiedEmbeddings,
    norm_eps,
)
from megatron.core.models.families.moe_fields import (
    AUX_LOSS,
    TOP_K,
    NormalizedTopK,
    num_experts,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import (
    ATTENTION,
    EXPERTS,
    NORMS,
    QK_NORMS,
    STACKED_EXPERTS,
    Family,
)
from megatron.core.transformer.spec import Scores

OLMOE = Family(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    options={
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    },
    fields=(
        # An expert has the width that is an MLP's in others.
        *SIZES,
        norm_eps("rms_norm_eps"),
        TiedEmbeddings(),
        KeyValueHeads(may_be_null=True, may_be_absent=True),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        # A bound of queries, keys and values, which no attention here has; zero is one, too.
        Always("clip_qkv", None),
        Rope(),
        num_experts("num_experts"),
        TOP_K,
        NormalizedTopK(Scores.SOFTMAX),
        AUX_LOSS,
    ),
    norms=NORMS,
    attention=ATTENTION | QK_NORMS,
    dense={},
    mixture={"mlp.router": "mlp.gate"},
    experts=(EXPERTS, STACKED_EXPERTS),
    has_even_heads=True,
)
