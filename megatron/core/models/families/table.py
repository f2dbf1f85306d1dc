"""Family: what an architecture of the transformers library computes, and its names for it.

A family is a value. One more architecture is one more table, as long as its parts exist here:

    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        options={"normalization": "RMSNorm"},
        fields=(*SIZES, norm_eps("rms_norm_eps"), Rope(absent_base=10000.0), ...),
        norms={"input_layernorm": "input_layernorm", ...},
        attention={"self_attention.query": "self_attn.q_proj", ...},
        dense={"mlp.gate": "mlp.gate_proj", ...},
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.families.fields import Field
from megatron.core.models.families.row_map import RowMap
from megatron.core.transformer.spec import AttentionSpec, GatedDeltaNetSpec, LayerSpec, Mixer

# Names that all of these architectures have for what is in no layer.
_OUTER_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}

NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
ATTENTION = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
}
QK_NORMS = {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
GATED_MLP = {
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
PLAIN_MLP = {"mlp.linear_fc1": "mlp.up_proj", "mlp.linear_fc2": "mlp.down_proj"}


@dataclass(frozen=True)
class Family:
    """An architecture of the transformers library: a causal language model.

    Attributes:
        model_type: in config.json.
        class_name: of the model with its output layer.
        options: of ours, that all of its models have.
        fields: of config.json.
        norms, attention, delta_net, dense: its names of modules of a layer, by ours; a module that
            it does not have is missing. One of ours that is only some rows of one of theirs has a
            function of the mixer, whose result names their module.
        harmless: fields of its own that change nothing here.
        has_even_heads: whether the hidden size must be a multiple of the number of heads, though
            heads may be of another width.
    """

    model_type: str
    class_name: str
    options: Mapping[str, Any]
    fields: tuple[Field, ...]
    norms: Mapping[str, str]
    attention: Mapping[str, str | Callable[[AttentionSpec], RowMap]]
    dense: Mapping[str, str]
    delta_net: Mapping[str, str | Callable[[GatedDeltaNetSpec], RowMap]] = field(
        default_factory=dict
    )
    harmless: frozenset[str] = frozenset()
    has_even_heads: bool = False

    def rows_of(self, own: str, layers: tuple[LayerSpec, ...]) -> RowMap:
        """Where one of our tensors lies in theirs.

        Args:
            own: a parameter, or a section of one, as our checkpoints name it without "model.".
            layers: of the model.

        Raises:
            KeyError: for a module that the family does not have.
        """
        module, _, kind = own.rpartition(".")
        if module in _OUTER_NAMES:
            return RowMap(f"{_OUTER_NAMES[module]}.{kind}")

        _, _, number, within = module.split(".", 3)  # decoder.layers.<number>.<within>
        prefix = f"model.layers.{number}."
        rows = self._module_rows(within, layers[int(number)].mixer)
        return dataclasses.replace(rows, name=f"{prefix}{rows.name}.{kind}")

    def _module_rows(self, within: str, mixer: Mixer) -> RowMap:
        """Where a module of a layer lies; the name is that of their module."""
        for names in (self.norms, self.dense):
            if within in names:
                return RowMap(names[within])

        if isinstance(mixer, AttentionSpec):
            found = self.attention[within]
            return RowMap(found) if isinstance(found, str) else found(mixer)
        place = self.delta_net[within]
        return RowMap(place) if isinstance(place, str) else place(mixer)
