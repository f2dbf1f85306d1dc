"""DeepSeek-V3, and others of its architecture: R1, Moonlight."""

from __future__ import annotations

from megatron.core.models.families.fields import (
    SIZES,
    Always,
    HiddenActivation,
    TiedEmbeddings,
    norm_eps,
)
from megatron.core.models.families.latent_fields import LATENT_SIZES, LatentRope
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
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.families.table import (
    EXPERTS,
    GATED_MLP,
    NORMS,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    Family,
)
from megatron.core.transformer.spec import LatentAttentionSpec, Scores


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
    norms=NORMS,
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
    dense=GATED_MLP,
    mixture={
        "mlp.router": "mlp.gate",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    experts=(EXPERTS, STACKED_EXPERTS),
    # Of training with expert parallelism and auxiliary losses, of extra layers that predict further
    # tokens, and widths that follow from others.
    harmless=frozenset(
        """
        ep_size aux_loss_alpha seq_aux num_nextn_predict_layers num_mtp_layers qk_head_dim head_dim
        """.split()
    ),
    ignored=("model.layers.{extra_layer}.",),
)
