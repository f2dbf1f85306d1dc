"""Architectures with mixtures of experts: Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, OLMoE, DeepSeek-V3,
GLM-4.5 and GPT-OSS.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.models.families.dense import (
    DELTA_NET,
    GATED_ATTENTION,
    GATED_ATTENTION_FIELDS,
    GATED_ATTENTION_HARMLESS,
    GATED_ATTENTION_OPTIONS,
)
from megatron.core.models.families.family import (
    ATTENTION,
    QK_NORMS,
    SHARED_EXPERTS,
    ExpertMatrix,
    Family,
)
from megatron.core.models.families.fields import (
    ALL_BIASES,
    NO_BIASES,
    QKV_BIASES,
    SIZES,
    SIZES_BUT_MLP,
    Always,
    BiasFields,
    HeadDim,
    HiddenActivation,
    KeyValueHeads,
    TiedEmbeddings,
    Value,
    attention_of,
    dense_of,
    norm_eps,
)
from megatron.core.models.families.layer_fields import (
    AUX_LOSS,
    EXPERT_SIZE,
    NUM_GROUPS,
    ROUTED_SCALE,
    SHARED_SIZE,
    TOP_GROUPS,
    TOP_K,
    FirstLayersDense,
    LayerRule,
    NormalizedTopK,
    SharedExperts,
    SlidingLayers,
    SparseLayers,
    WindowEverywhere,
    num_experts,
)
from megatron.core.models.families.rope import LATENT_SIZES, LatentRope, Rope
from megatron.core.models.families.row_map import RowMap
from megatron.core.transformer.spec import (
    Activation,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Scores,
)

_EXPERT_FIELDS = (TOP_K, EXPERT_SIZE, AUX_LOSS)
_ROUTER = {"mlp.router": "mlp.gate"}
_ROUTER_AND_SHARED = {
    **_ROUTER,
    "mlp.shared_experts.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared_experts.up": "mlp.shared_expert.up_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    options={"normalization": "RMSNorm", "qk_layernorm": True},
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        TiedEmbeddings(),
        KeyValueHeads(),
        # Its files have it, but the library computes one where it is missing.
        HeadDim(may_be_absent=True),
        HiddenActivation(),
        BiasFields({NO_BIASES: {"attention_bias": False}}),
        WindowEverywhere(switch="use_sliding_window"),
        Rope(),
        # Version 5 writes the other name.
        num_experts("num_experts", "num_local_experts"),
        *_EXPERT_FIELDS,
        NormalizedTopK(Scores.SOFTMAX),
        SparseLayers(),
    ),
    attention=ATTENTION | QK_NORMS,
    mixture=_ROUTER,
    # As in Qwen3, but here a window is in all layers.
    harmless=frozenset({"max_window_layers"}),
)


def _qkvz(part: str) -> Callable[[GatedDeltaNetSpec], RowMap]:
    """Rows of a projection that has, for each key head, its query, its key, and the values and
    gates of the value heads that read it.
    """

    def rows(mixer: GatedDeltaNetSpec) -> RowMap:
        key, value = mixer.key_head_dim, mixer.value_size // mixer.num_key_heads
        starts = {"query": 0, "key": key, "value": 2 * key, "z": 2 * key + value}
        block = key if part in ("query", "key") else value
        stride = 2 * (key + value)
        return RowMap("linear_attn.in_proj_qkvz", starts[part], block, stride)

    return rows


def _beta(mixer: GatedDeltaNetSpec) -> RowMap:
    """For each key head, the betas of the value heads that read it are followed by the alphas."""
    heads = mixer.num_value_heads // mixer.num_key_heads
    return RowMap("linear_attn.in_proj_ba", 0, heads, 2 * heads)


def _alpha(mixer: GatedDeltaNetSpec) -> RowMap:
    heads = mixer.num_value_heads // mixer.num_key_heads
    return RowMap("linear_attn.in_proj_ba", heads, heads, 2 * heads)


_GATED_MIXTURE_OPTIONS = {**GATED_ATTENTION_OPTIONS, "moe_shared_expert_gate": True}
_GATED_MIXTURE_FIELDS = (
    *GATED_ATTENTION_FIELDS,
    num_experts("num_experts"),
    *_EXPERT_FIELDS,
    SHARED_SIZE,
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    options=_GATED_MIXTURE_OPTIONS,
    fields=(
        *SIZES,
        *_GATED_MIXTURE_FIELDS,
        NormalizedTopK(Scores.SOFTMAX),
        SparseLayers(),
    ),
    attention=GATED_ATTENTION,
    delta_net={
        **DELTA_NET,
        **{f"self_attention.{part}": _qkvz(part) for part in ("query", "key", "value", "z")},
        "self_attention.beta": _beta,
        "self_attention.alpha": _alpha,
    },
    mixture=_ROUTER_AND_SHARED,
    ignored=("mtp.",),
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    options=_GATED_MIXTURE_OPTIONS,
    fields=(
        *SIZES_BUT_MLP,
        *_GATED_MIXTURE_FIELDS,
        NormalizedTopK(Scores.SOFTMAX, always=True),
    ),
    attention=GATED_ATTENTION,
    delta_net=DELTA_NET,
    mixture=_ROUTER_AND_SHARED,
    # All layers have experts, so the width of an MLP is unused.
    harmless=GATED_ATTENTION_HARMLESS | {"intermediate_size"},
    ignored=("mtp.",),
)


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
    attention=ATTENTION | QK_NORMS,
    mixture={"mlp.router": "mlp.gate"},
    has_even_heads=True,
)


def _key_rotary(mixer: LatentAttentionSpec) -> RowMap:
    return RowMap("self_attn.kv_a_proj_with_mqa", start=mixer.key_value_rank)


def _key(mixer: LatentAttentionSpec) -> RowMap:
    """Each head's key is followed by its value."""
    stride = mixer.content_dim + mixer.value_dim
    return RowMap("self_attn.kv_b_proj", block=mixer.content_dim, stride=stride)


def _value(mixer: LatentAttentionSpec) -> RowMap:
    start, width = mixer.content_dim, mixer.value_dim
    return RowMap("self_attn.kv_b_proj", start=start, block=width, stride=start + width)


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    options={
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        # Whatever the other norms have.
        "latent_norm_epsilon": 1e-6,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        TiedEmbeddings(),
        HiddenActivation(),
        Always("attention_bias", False),
        *LATENT_SIZES,
        LatentRope(),
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
        Always("scoring_func", "sigmoid"),
        Always("topk_method", "noaux_tc"),
        Always("moe_layer_freq", 1),
    ),
    latent_attention={
        "self_attention.linear_q_proj": "self_attn.q_proj",
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm",
        "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
        "self_attention.kv_latent": "self_attn.kv_a_proj_with_mqa",
        "self_attention.key_rotary": _key_rotary,
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.key": _key,
        "self_attention.value": _value,
        "self_attention.linear_proj": "self_attn.o_proj",
    },
    mixture={
        "mlp.router": "mlp.gate",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    # Of training with expert parallelism and auxiliary losses, of extra layers that predict further
    # tokens, and widths that follow from others.
    harmless=frozenset(
        """
        ep_size aux_loss_alpha seq_aux num_nextn_predict_layers num_mtp_layers qk_head_dim head_dim
        """.split()
    ),
    ignored=("model.layers.{extra_layer}.",),
)


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
    attention=ATTENTION | QK_NORMS,
    mixture={
        "mlp.router": "mlp.gate",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    # Of extra layers that predict further tokens.
    harmless=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
    ignored=("model.layers.{extra_layer}.",),
)


_LIMIT = 7.0


# The first layer has a window, the second one does not, and so on; no field specifies it.
_EVERY_OTHER = LayerRule((), lambda file: [n % 2 == 0 for n in range(file.num_layers())])

GPT_OSS = Family(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    options={
        "normalization": "RMSNorm",
        "softmax_type": "learnable",
        "gated_linear_unit": True,
        "activation_func": Activation.QUICK_GELU.value,
        "glu_linear_offset": 1.0,
        "moe_expert_rows": "inputs",
    },
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        TiedEmbeddings(),
        KeyValueHeads(may_be_null=True),
        HeadDim(),
        # Biases everywhere are the default of all versions.
        BiasFields({ALL_BIASES: {"attention_bias": True}}, absent=True),
        # The experts' activation has other fields, with one value in all versions.
        Always("hidden_act", "silu"),
        Always("swiglu_alpha", 1.702),
        Value(
            "swiglu_limit",
            "activation_func_clamp_value",
            lambda spec: dense_of(spec).clamp,
            absent=_LIMIT,
        ),
        SlidingLayers(_EVERY_OTHER),
        # The library takes a file without a section for one with YaRN.
        Rope(needs_section=True),
        num_experts("num_local_experts", "num_experts"),
        TOP_K,
    ),
    attention={**ATTENTION, "self_attention": "self_attn"},
    mixture={"mlp.router": "mlp.router"},
    # Rows are input channels, and gate and up alternate in the columns: one matrix here as there.
    experts=(
        {
            "linear_fc1": ExpertMatrix("mlp.experts.gate_up_proj"),
            "linear_fc2": ExpertMatrix("mlp.experts.down_proj"),
        },
    ),
    # Other names of fields; and a loss that is added only on a caller's request.
    harmless=frozenset({"experts_per_token", "initial_context_length", "router_aux_loss_coef"}),
)
