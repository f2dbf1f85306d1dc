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

An architecture with mixtures of experts adds the names of a mixture's modules, and those of the
experts' matrices, which files may have in several forms:

    Family(
        ...,
        mixture={"mlp.router": "mlp.gate"},
        experts=(EXPERTS, STACKED_EXPERTS),
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron.core.models.families.fields import Field
from megatron.core.models.families.row_map import RowMap
from megatron.core.transformer.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
)

_MixerT = TypeVar("_MixerT")

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
SHARED_EXPERTS = {
    "mlp.shared_experts.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up": "mlp.shared_experts.up_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}
PLAIN_MLP = {"mlp.linear_fc1": "mlp.up_proj", "mlp.linear_fc2": "mlp.down_proj"}

_EXPERTS = "mlp.experts."  # before an expert's number
_MOST_EXTRA_LAYERS = 2**10  # far beyond any use


@dataclass(frozen=True)
class ExpertMatrix:
    """Their names for one matrix of every expert.

    Attributes:
        name: of the module in one expert, whose number takes the place of `{}`. Without that, of
            one tensor [experts, rows, columns] of all experts, beside which `<name>_bias`
            [experts, rows] has their biases.
        part, num_parts: which of the equal parts of that tensor's rows are ours.
    """

    name: str
    part: int = 0
    num_parts: int = 1

    def rows(self, expert: int, kind: str, num_rows: int) -> RowMap:
        """Where our matrix, or its bias, of `num_rows` rows lies."""
        if "{}" in self.name:
            return RowMap(f"{self.name.format(expert)}.{kind}")
        start = (expert * self.num_parts + self.part) * num_rows
        name = self.name if kind == "weight" else f"{self.name}_{kind}"
        return RowMap(name, start, matrix_rows=self.num_parts * num_rows)


# As files of most architectures have them, and as the library does in memory. A folder has the
# latter if the library has read such a one.
EXPERTS = {
    "gate": ExpertMatrix("mlp.experts.{}.gate_proj"),
    "up": ExpertMatrix("mlp.experts.{}.up_proj"),
    "linear_fc2": ExpertMatrix("mlp.experts.{}.down_proj"),
}
STACKED_EXPERTS = {
    "gate": ExpertMatrix("mlp.experts.gate_up_proj", part=0, num_parts=2),
    "up": ExpertMatrix("mlp.experts.gate_up_proj", part=1, num_parts=2),
    "linear_fc2": ExpertMatrix("mlp.experts.down_proj"),
}


@dataclass(frozen=True)
class Family:
    """An architecture of the transformers library: a causal language model.

    Attributes:
        model_type: in config.json.
        class_name: of the model with its output layer.
        options: of ours, that all of its models have.
        fields: of config.json.
        norms, attention, latent_attention, delta_net, dense: its names of modules of a layer, by
            ours; a module that it does not have is missing. One of ours that is only some rows of
            one of theirs has a function of the mixer, whose result names their module.
        mixture: the same of a mixture's router and shared experts; a tensor of ours whose own name
            is another one there stands here by itself.
        experts: the forms in which files may have the matrices of experts, each by our names of
            them. The first is written.
        harmless: fields of its own that change nothing here.
        ignored: how the names of tensors begin that files may have besides and the library does not
            load either, with `{extra_layer}` in the place of the number of each layer that predicts
            further tokens.
        has_even_heads: whether the hidden size must be a multiple of the number of heads, though
            heads may be of another width.
    """

    model_type: str
    class_name: str
    options: Mapping[str, Any]
    fields: tuple[Field, ...]
    norms: Mapping[str, str]
    dense: Mapping[str, str]
    attention: Mapping[str, str | Callable[[AttentionSpec], RowMap]] = field(default_factory=dict)
    latent_attention: Mapping[str, str | Callable[[LatentAttentionSpec], RowMap]] = field(
        default_factory=dict
    )
    delta_net: Mapping[str, str | Callable[[GatedDeltaNetSpec], RowMap]] = field(
        default_factory=dict
    )
    mixture: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[Mapping[str, ExpertMatrix], ...] = ()
    harmless: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    has_even_heads: bool = False

    def as_in(self, names: Collection[str]) -> Family:
        """The family with one form of experts: that of files with tensors of these names, or, where
        they tell nothing, the one that is written.
        """
        for form in self.experts:
            firsts = tuple(f".{matrix.rows(0, 'weight', 1).name}" for matrix in form.values())
            if any(name.endswith(firsts) for name in names):
                return dataclasses.replace(self, experts=(form,))
        return dataclasses.replace(self, experts=self.experts[:1])

    def rows_of(self, own: str, num_rows: int, layers: tuple[LayerSpec, ...]) -> RowMap:
        """Where one of our tensors lies in theirs.

        Args:
            own: a parameter, a section of one, or a buffer, as our checkpoints name it without
                "model.".
            num_rows: of it.
            layers: of the model.

        Raises:
            KeyError: for a module that the family does not have.
        """
        module, _, kind = own.rpartition(".")
        if module in _OUTER_NAMES:
            return RowMap(f"{_OUTER_NAMES[module]}.{kind}")

        _, _, number, within = module.split(".", 3)  # decoder.layers.<number>.<within>
        prefix = f"model.layers.{number}."
        if within.startswith(_EXPERTS):
            expert, matrix = within.removeprefix(_EXPERTS).split(".")
            rows = self.experts[0][matrix].rows(int(expert), kind, num_rows)
        else:
            rows = self._module_rows(within, kind, layers[int(number)].mixer)
        return dataclasses.replace(rows, name=f"{prefix}{rows.name}")

    def ignored_prefixes(self, num_layers: int, content: Mapping[str, Any]) -> tuple[str, ...]:
        """How the names of tensors begin that the library does not load either.

        Args:
            content: of config.json, which may say how many extra layers there are. The library
                passes over one in any case.
        """
        extra = content.get("num_nextn_predict_layers")
        count = extra if type(extra) is int and 0 < extra <= _MOST_EXTRA_LAYERS else 1
        numbers = range(num_layers, num_layers + count)
        # Without a place for a number, all are the same.
        return tuple({p.format(extra_layer=n): None for n in numbers for p in self.ignored})

    def _module_rows(self, within: str, kind: str, mixer: Mixer) -> RowMap:
        """Where a tensor of a module lies; the name is without that of the layer."""
        if (tensor := f"{within}.{kind}") in self.mixture:
            return RowMap(self.mixture[tensor])

        place = self._module_place(within, mixer)
        return dataclasses.replace(place, name=f"{place.name}.{kind}")

    def _module_place(self, within: str, mixer: Mixer) -> RowMap:
        """Where a module of a layer lies; the name is that of their module."""
        for names in (self.norms, self.dense, self.mixture):
            if within in names:
                return RowMap(names[within])

        if isinstance(mixer, AttentionSpec):
            return _place(self.attention[within], mixer)
        if isinstance(mixer, LatentAttentionSpec):
            return _place(self.latent_attention[within], mixer)
        return _place(self.delta_net[within], mixer)


def _place(place: str | Callable[[_MixerT], RowMap], mixer: _MixerT) -> RowMap:
    return RowMap(place) if isinstance(place, str) else place(mixer)
