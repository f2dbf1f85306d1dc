"""Qwen's mixtures of experts: Qwen3-MoE, Qwen3-Next, and the text part of Qwen3.5-MoE."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.models.families.fields import (
    NO_BIASES,
    SIZES,
    SIZES_BUT_MLP,
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
    SHARED_SIZE,
    TOP_K,
    NormalizedTopK,
    SparseLayers,
    num_experts,
)
from megatron.core.models.families.qwen import (
    DELTA_NET,
    GATED_ATTENTION,
    GATED_ATTENTION_FIELDS,
    GATED_ATTENTION_HARMLESS,
    GATED_ATTENTION_OPTIONS,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.families.table import (
    ATTENTION,
    EXPERTS,
    GATED_MLP,
    NORMS,
    QK_NORMS,
    STACKED_EXPERTS,
    Family,
)
from megatron.core.transformer.spec import GatedDeltaNetSpec, Scores

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
    norms=NORMS,
    attention=ATTENTION | QK_NORMS,
    dense=GATED_MLP,
    mixture=_ROUTER,
    experts=(EXPERTS, STACKED_EXPERTS),
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


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    options={**GATED_ATTENTION_OPTIONS, "moe_shared_expert_gate": True},
    fields=(
        *SIZES,
        *GATED_ATTENTION_FIELDS,
        num_experts("num_experts"),
        *_EXPERT_FIELDS,
        SHARED_SIZE,
        NormalizedTopK(Scores.SOFTMAX),
        SparseLayers(),
    ),
    norms=NORMS,
    attention=GATED_ATTENTION,
    delta_net={
        **DELTA_NET,
        **{f"self_attention.{part}": _qkvz(part) for part in ("query", "key", "value", "z")},
        "self_attention.beta": _beta,
        "self_attention.alpha": _alpha,
    },
    dense=GATED_MLP,
    mixture=_ROUTER_AND_SHARED,
    experts=(EXPERTS, STACKED_EXPERTS),
    ignored=("mtp.",),
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    options={**GATED_ATTENTION_OPTIONS, "moe_shared_expert_gate": True},
    fields=(
        *SIZES_BUT_MLP,
        *GATED_ATTENTION_FIELDS,
        num_experts("num_experts"),
        *_EXPERT_FIELDS,
        SHARED_SIZE,
        NormalizedTopK(Scores.SOFTMAX, always=True),
    ),
    norms=NORMS,
    attention=GATED_ATTENTION,
    delta_net=DELTA_NET,
    dense={},
    mixture=_ROUTER_AND_SHARED,
    experts=(EXPERTS, STACKED_EXPERTS),
    # All layers have experts, so nothing has the width of an MLP.
    harmless=GATED_ATTENTION_HARMLESS | {"intermediate_size"},
    ignored=("mtp.",),
)
