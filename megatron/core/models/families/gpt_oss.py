"""GPT-OSS, in 16 or 32 bits: its files in MXFP4 must be dequantized first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import (
    ALL_BIASES,
    SIZES,
    Always,
    BiasFields,
    HeadDim,
    KeyValueHeads,
    TiedEmbeddings,
    Value,
    dense_of,
    norm_eps,
)
from megatron.core.models.families.layer_fields import SlidingLayers
from megatron.core.models.families.moe_fields import TOP_K, num_experts
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import ATTENTION, NORMS, ExpertMatrix, Family
from megatron.core.transformer.spec import Activation

_LIMIT = 7.0


@dataclass(frozen=True)
class _EveryOther:
    """The first layer has a window, the second one not, and so on; no field says so."""

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def layers(self, file: ConfigFile) -> list[bool]:
        return [number % 2 == 0 for number in range(file.num_layers())]

    def write(self, kinds: Sequence[bool]) -> dict[str, Any]:  # noqa: ARG002  a Rule's signature
        return {}


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
        SlidingLayers(_EveryOther()),
        # The library takes a file without a section for one with YaRN.
        Rope(needs_section=True),
        num_experts("num_local_experts", "num_experts"),
        TOP_K,
    ),
    norms=NORMS,
    attention={**ATTENTION, "self_attention": "self_attn"},
    dense={},
    mixture={"mlp.router": "mlp.router"},
    # Rows are input channels, and gate and up alternate in the columns: one matrix here as there.
    experts=(
        {
            "linear_fc1": ExpertMatrix("mlp.experts.gate_up_proj"),
            "linear_fc2": ExpertMatrix("mlp.experts.down_proj"),
        },
    ),
    # Other names of fields; and a loss that is added only where a caller asks for it.
    harmless=frozenset({"experts_per_token", "initial_context_length", "router_aux_loss_coef"}),
)
