"""Fields of a config.json, each with the options of TransformerConfig that correspond to it.

`Field.read` converts a file to options, and `Field.write` converts a spec to fields. `write` may
drop values that a field cannot express: `config_json.py` reads every file back and compares the
specs before it is used.

A field that affects the arithmetic must be in the file, since defaults differ between versions of
the transformers library. `absent` is for fields whose default is the same in all versions; the
tables give the reason.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    ModelSpec,
    MoeSpec,
)

REQUIRED = object()  # the value of `absent` for a field that must be in the file

LATENT_WITHOUT_EXPERTS = (
    "--multi-latent-attention: expected --num-experts too, as in every supported architecture of "
    "the transformers library with latent attention, got none."
)
# Several names of the library are the same formula; the first one is written.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "relu2": Activation.SQUARED_RELU,
}


class Field(abc.ABC):
    """Some fields of a config.json and the options that correspond to them."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the fields that are read."""

    @abc.abstractmethod
    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Returns options of TransformerConfig. ConfigError for values without an option."""

    @abc.abstractmethod
    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Returns the fields of a file that describes a spec as closely as possible."""


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """Returns the first layer's attention. ConfigError for a model without attention."""
    for layer in spec.layers:
        if isinstance(layer.mixer, AttentionSpec):
            return layer.mixer
    if any(isinstance(layer.mixer, LatentAttentionSpec) for layer in spec.layers):
        raise ConfigError(LATENT_WITHOUT_EXPERTS)
    raise ConfigError(
        "--linear-attention-freq: expected at least one layer with attention, as in every "
        "architecture of the transformers library, got none."
    )


def num_heads_of(spec: ModelSpec) -> int:
    """Returns the number of query heads. ConfigError for a model without attention."""
    for layer in spec.layers:
        if isinstance(layer.mixer, LatentAttentionSpec):
            return layer.mixer.num_heads
    return attention_of(spec).num_heads


def delta_net_of(spec: ModelSpec) -> GatedDeltaNetSpec | None:
    """Returns the first gated delta net of the layers, if any."""
    for layer in spec.layers:
        if isinstance(layer.mixer, GatedDeltaNetSpec):
            return layer.mixer
    return None


def mixture_of(spec: ModelSpec) -> MoeSpec | None:
    """Returns the first mixture of experts of the layers, if any."""
    for layer in spec.layers:
        if isinstance(layer.feed_forward, MoeSpec):
            return layer.feed_forward
    return None


def dense_of(spec: ModelSpec) -> DenseSpec:
    """Returns the first dense network of the layers, or an expert if all layers have experts."""
    for layer in spec.layers:
        if isinstance(layer.feed_forward, DenseSpec):
            return layer.feed_forward
    mixture = mixture_of(spec)
    assert mixture is not None, "each layer has either"
    return mixture.expert


@dataclass(frozen=True)
class NamedField(Field):
    """One field of a config.json."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Value(Field):
    """A field with the value of an option.

    Attributes:
        option: the option of TransformerConfig, which checks the value.
        of: returns the value to write for a spec; None omits the field.
        absent: the value of a field that is null or missing.
        other_name: name in some versions. A file may have either name, or both with one value.
    """

    name: str
    option: str
    of: Callable[[ModelSpec], Any]
    absent: Any = REQUIRED
    other_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.other_name is None else (self.name, self.other_name)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        given = [(name, file.get(name)) for name in self.names if file.get(name) is not None]
        if not given:
            value = file.wanted(self.name) if self.absent is REQUIRED else self.absent
            return {self.option: value}
        (_, value), (last, other) = given[0], given[-1]
        if value != other:
            raise file.error(last, f"{self.name}, {value}", other)
        return {self.option: value}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        value = self.of(spec)
        return {} if value is None else {self.name: value}


SIZES_BUT_MLP: tuple[Field, ...] = (
    Value("hidden_size", "hidden_size", lambda spec: spec.hidden_size),
    Value("num_hidden_layers", "num_layers", lambda spec: len(spec.layers)),
    Value("num_attention_heads", "num_attention_heads", num_heads_of),
    # These two do not affect the arithmetic.
    Value("max_position_embeddings", "max_position_embeddings", lambda s: s.max_length, None),
    Value("initializer_range", "init_method_std", lambda spec: spec.init_std, 0.02),
)
SIZES: tuple[Field, ...] = (
    *SIZES_BUT_MLP,
    Value("intermediate_size", "ffn_hidden_size", lambda spec: dense_of(spec).size),
)


def norm_eps(name: str) -> Field:
    """Returns the field of the epsilon of all norms."""
    return Value(name, "norm_epsilon", lambda spec: spec.final_norm.eps)


@dataclass(frozen=True)
class KeyValueHeads(Field):
    """The number of key and value heads.

    Attributes:
        may_be_null, may_be_absent: whether null or a missing field means the number of query heads.
    """

    may_be_null: bool = False
    may_be_absent: bool = False

    names = ("num_key_value_heads",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        is_there = "num_key_value_heads" in file.content
        may_be_none = self.may_be_null if is_there else self.may_be_absent
        value = file.get("num_key_value_heads")
        if value is None:
            name = "num_attention_heads" if may_be_none else "num_key_value_heads"
            value = file.wanted(name)
        return {"group_query_attention": True, "num_query_groups": value}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return {"num_key_value_heads": attention_of(spec).num_key_value_heads}


@dataclass(frozen=True)
class HeadDim(Field):
    """The width of a head.

    Attributes:
        may_be_absent: whether a field that is null or missing means the hidden size divided by the
            number of heads.
    """

    may_be_absent: bool = False

    names = ("head_dim",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {
            "kv_channels": file.get("head_dim") if self.may_be_absent else file.wanted("head_dim")
        }

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return {"head_dim": attention_of(spec).head_dim}


@dataclass(frozen=True)
class TiedEmbeddings(Field):
    """Whether the output layer reads the embedding's weight.

    Attributes:
        absent: the value of a missing field; None if the field is required.
    """

    absent: bool | None = None

    names = ("tie_word_embeddings",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        is_tied = file.boolean("tie_word_embeddings", self.absent)
        return {"untie_embeddings_and_output_weights": not is_tied}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return {"tie_word_embeddings": spec.is_tied}


@dataclass(frozen=True)
class HiddenActivation(NamedField):
    """The feed-forward network's activation.

    Attributes:
        is_gated: whether the network is gated, for which the file has no field.
        only: the only activation that is accepted; None accepts all.
    """

    name: str = "hidden_act"
    is_gated: bool = True
    only: Activation | None = None

    def read(self, file: ConfigFile) -> dict[str, Any]:
        got = file.wanted(self.name)
        admitted = {name: kind for name, kind in ACTIVATIONS.items() if self.only in (None, kind)}
        if not isinstance(got, str) or got not in admitted:
            raise file.error(self.name, f"one of {', '.join(admitted)}", got)

        kind = admitted[got]
        if self.is_gated and kind is Activation.SILU:
            return {"swiglu": True}
        return {"gated_linear_unit": self.is_gated, "activation_func": kind.value}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        wanted = self.only or dense_of(spec).activation
        return {self.name: next(name for name, kind in ACTIVATIONS.items() if kind is wanted)}


class Biases(NamedTuple):
    """The linear layers that have biases, as options of TransformerConfig."""

    add_bias_linear: bool
    add_qkv_bias: bool


NO_BIASES = Biases(add_bias_linear=False, add_qkv_bias=False)
QKV_BIASES = Biases(add_bias_linear=False, add_qkv_bias=True)
ALL_BIASES = Biases(add_bias_linear=True, add_qkv_bias=False)

_BIASED = {NO_BIASES: "none", QKV_BIASES: "in the QKV projection", ALL_BIASES: "everywhere"}


@dataclass(frozen=True)
class BiasFields(Field):
    """Which linear layers have biases.

    Attributes:
        choices: the fields of the file for each combination that it can express.
        absent: the value of a missing field; None if the fields are required.
    """

    choices: Mapping[Biases, Mapping[str, bool]]
    absent: bool | None = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple({name: None for fields in self.choices.values() for name in fields})

    def read(self, file: ConfigFile) -> dict[str, Any]:
        got = {name: file.boolean(name, self.absent) for name in self.names}
        for biases, fields in self.choices.items():
            if got == dict(fields):
                return biases._asdict()

        expected = " or ".join(_BIASED[biases] for biases in self.choices)
        found = ", ".join(f"{name} {shown(value)}" for name, value in got.items())
        raise ConfigError(f"Expected biases {expected} in {file.source}, got {found}.")

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        attention, has_mlp_bias = attention_of(spec), dense_of(spec).has_bias
        wanted = (attention.has_qkv_bias, attention.has_output_bias, has_mlp_bias)

        def num_others(biases: Biases) -> int:
            everywhere = biases.add_bias_linear
            has = (everywhere or biases.add_qkv_bias, everywhere, everywhere)
            return sum(one is not other for one, other in zip(has, wanted, strict=True))

        return dict(self.choices[min(self.choices, key=num_others)])


@dataclass(frozen=True)
class ScaledEmbeddings(Field):
    """Embeddings multiplied by the root of the hidden size, for which the file has no field."""

    names = ()

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {"embedding_multiplier": math.sqrt(file.integer("hidden_size"))}

    def write(self, spec: ModelSpec) -> dict[str, Any]:  # noqa: ARG002
        return {}


@dataclass(frozen=True)
class QueryScalar(NamedField):
    """The number whose square root divides the products of queries and keys."""

    name: str = "query_pre_attn_scalar"

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {"softmax_scale": 1 / math.sqrt(file.positive(self.name))}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        # transformers takes whole numbers only.
        return {self.name: max(1, round(attention_of(spec).scale ** -2))}


@dataclass(frozen=True)
class Always(NamedField):
    """A field that is missing or has this value. It is not written."""

    value: Any

    def read(self, file: ConfigFile) -> dict[str, Any]:
        got = file.get(self.name)
        if got is not None and got != self.value:
            raise file.error(self.name, shown(self.value), got)
        return {}

    def write(self, spec: ModelSpec) -> dict[str, Any]:  # noqa: ARG002
        return {}
