"""Families: the arithmetic and the names of architectures of the transformers library.

A family is a value. A new architecture is a new table, as long as its parts exist here:

    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        options={"normalization": "RMSNorm"},
        fields=(*SIZES, norm_eps("rms_norm_eps"), Rope(absent_base=10000.0), ...),
    )

It adds the names of modules that differ from most architectures', such as
`attention={"self_attention.query": "self_attn.q_proj", ...}`, and with mixtures of experts
`mixture={"mlp.router": "mlp.gate"}`.
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

# Names outside of layers, the same in all of these architectures.
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

_EXPERTS = "mlp.experts."  # followed by an expert's number
_MOST_EXTRA_LAYERS = 2**10  # far above any model's


@dataclass(frozen=True)
class ExpertMatrix:
    """The library's name for one matrix of every expert.

    Attributes:
        name: name of the module in one expert, with `{}` for the expert's number. Without `{}`, it
            is the name of one tensor [experts, rows, columns] of all experts, whose biases are in
            `<name>_bias` [experts, rows].
        part, num_parts: our part of the tensor's rows, which has parts of equal size.
    """

    name: str
    part: int = 0
    num_parts: int = 1

    def rows(self, expert: int, kind: str, num_rows: int) -> RowMap:
        """Returns the rows of our matrix or its bias, which has `num_rows` rows."""
        if "{}" in self.name:
            return RowMap(f"{self.name.format(expert)}.{kind}")
        start = (expert * self.num_parts + self.part) * num_rows
        name = self.name if kind == "weight" else f"{self.name}_{kind}"
        return RowMap(name, start, matrix_rows=self.num_parts * num_rows)


# The form in the files of most architectures, and the library's form in memory, in which it saves
# models that it loaded from that form.
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
        model_type: `model_type` in config.json.
        class_name: class of the model with its output layer.
        options: our options that all of its models share.
        fields: fields of config.json.
        norms, attention, latent_attention, delta_net, dense: the library's names of a layer's
            modules, by our names; the default suits most architectures. For a module that is
            only some rows of one of the library's, a function of the mixer returns the rows, named
            after the module.
        mixture: the same for a mixture's router and shared experts. A tensor whose last name
            differs has a separate item.
        experts: the forms in which files may contain the experts' matrices, by our names of the
            matrices. The first form is written.
        harmless: fields specific to the architecture that have no effect here.
        ignored: prefixes of tensors that the library does not load either. `{extra_layer}`
            represents the number of each layer that predicts further tokens.
        has_even_heads: whether the hidden size must be a multiple of the number of heads, although
            heads may have another width.
    """

    model_type: str
    class_name: str
    options: Mapping[str, Any]
    fields: tuple[Field, ...]
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    dense: Mapping[str, str] = field(default_factory=lambda: GATED_MLP)
    attention: Mapping[str, str | Callable[[AttentionSpec], RowMap]] = field(
        default_factory=lambda: ATTENTION
    )
    latent_attention: Mapping[str, str | Callable[[LatentAttentionSpec], RowMap]] = field(
        default_factory=dict
    )
    delta_net: Mapping[str, str | Callable[[GatedDeltaNetSpec], RowMap]] = field(
        default_factory=dict
    )
    mixture: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[Mapping[str, ExpertMatrix], ...] = (EXPERTS, STACKED_EXPERTS)
    harmless: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    has_even_heads: bool = False

    def as_in(self, names: Collection[str]) -> Family:
        """Returns the family with one form of experts: the form of files with these tensors or, by
        default, the form that is written.
        """
        for form in self.experts:
            firsts = tuple(f".{matrix.rows(0, 'weight', 1).name}" for matrix in form.values())
            if any(name.endswith(firsts) for name in names):
                return dataclasses.replace(self, experts=(form,))
        return dataclasses.replace(self, experts=self.experts[:1])

    def rows_of(self, own: str, num_rows: int, layers: tuple[LayerSpec, ...]) -> RowMap:
        """Returns the rows of one of this project's tensors in the library's.

        Args:
            own: name of a parameter, a section of one, or a buffer in our checkpoints, without
                "model.".
            num_rows: number of rows of the tensor.
            layers: layers of the model.

        Raises:
            KeyError: for a module that the family lacks.
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
        """Returns the prefixes of tensors that the library does not load either.

        Args:
            content: content of config.json, which may have the number of extra layers. The library
                always ignores at least one.
        """
        extra = content.get("num_nextn_predict_layers")
        count = extra if type(extra) is int and 0 < extra <= _MOST_EXTRA_LAYERS else 1
        numbers = range(num_layers, num_layers + count)
        # Prefixes without a number are the same for all layers.
        return tuple({p.format(extra_layer=n): None for n in numbers for p in self.ignored})

    def _module_rows(self, within: str, kind: str, mixer: Mixer) -> RowMap:
        """Returns the rows of a module's tensor; the name lacks the layer's prefix."""
        if (tensor := f"{within}.{kind}") in self.mixture:
            return RowMap(self.mixture[tensor])

        place = self._module_place(within, mixer)
        return dataclasses.replace(place, name=f"{place.name}.{kind}")

    def _module_place(self, within: str, mixer: Mixer) -> RowMap:
        """Returns the rows of a module of a layer, named after their module."""
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
