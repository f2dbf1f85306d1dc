"""SmolLM3."""

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
from megatron.core.models.families.layer_fields import (
    SlidingLayers,
    UnrotatedLayers,
    WhereUnrotated,
)
from megatron.core.models.families.rope import Rope
from megatron.core.models.families.table import ATTENTION, GATED_MLP, NORMS, Family

_UNROTATED = UnrotatedLayers()

SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    options={"normalization": "RMSNorm"},
    fields=(
        *SIZES,
        norm_eps("rms_norm_eps"),
        # True is the default of all versions, which leave defaults out of their files.
        TiedEmbeddings(absent=True),
        KeyValueHeads(may_be_null=True),
        # Its files have no such field, but the library reads it.
        HeadDim(may_be_absent=True),
        HiddenActivation(),
        BiasFields(
            {
                NO_BIASES: {"attention_bias": False, "mlp_bias": False},
                ALL_BIASES: {"attention_bias": True, "mlp_bias": True},
            }
        ),
        _UNROTATED,
        SlidingLayers(WhereUnrotated(_UNROTATED), switch="use_sliding_window"),
        Rope(),
    ),
    norms=NORMS,
    attention=ATTENTION,
    dense=GATED_MLP,
    # Of Qwen2's files, from which these were made; the library does not read it here.
    harmless=frozenset({"max_window_layers"}),
)
