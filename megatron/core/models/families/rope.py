"""The rotary embedding in a config.json.

Version 5 of the transformers library writes one section,

    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, ...}

with an inner section per kind of layer where these differ (Gemma 3). Earlier versions wrote
`rope_theta`, `partial_rotary_factor` and, for layers with a window, `rope_local_base_freq` at the
top level, and a section `rope_scaling`, whose `rope_type` was first named `type`. Both forms are
read and written. A file whose forms contradict each other is rejected.

[Note: mscale] YaRN extends the range of positions by `factor`, and makes the products of queries
and keys larger, which sharpens the softmax over more positions. Files with multi-head latent
attention have two weights for this, `mscale` and `mscale_all_dim`. With
m(x) = 1 + x log(factor) / 10, they multiply

    the rotated channels of queries and keys    each by m(mscale) / m(mscale_all_dim)
    the scale of all products                   by m(mscale_all_dim)^2

A weight that is zero or missing turns its part off. With one exception: if the two are not both
given, the fraction is m(1). A spec has the two results, from which the weights are calculated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import (
    LATENT_WITHOUT_EXPERTS,
    Field,
    Value,
    attention_of,
    mixture_of,
    num_heads_of,
)
from megatron.core.models.families.layer_fields import windows_of
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.latent_config import yarn_mscale
from megatron.core.transformer.spec import (
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RotarySpec,
    YarnScaling,
)

_DEFAULT_BASE = 10000.0
_TOP_NAMES = ("rope_theta", "partial_rotary_factor")
_SECTIONS = ("rope_parameters", "rope_scaling")
_FULL, _WINDOWED = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class _Scaling:
    """A `rope_type`.

    Attributes:
        options: our options, by their names in the section.
        given: options that follow from the kind.
        may_be_absent: names for which null or absence means our default in all versions.
        of: returns the section's parameters for the scaling of a spec.
    """

    options: Mapping[str, str]
    given: Mapping[str, Any] = field(default_factory=dict)
    may_be_absent: frozenset[str] = frozenset()
    of: Callable[[Any], dict[str, Any]] = lambda _: {}


_SCALINGS = {
    "default": _Scaling({}),
    "linear": _Scaling(
        {"factor": "rotary_seq_len_interpolation_factor"},
        of=lambda scaling: {"factor": scaling.factor},
    ),
    "llama3": _Scaling(
        {
            "factor": "rope_scaling_factor",
            "low_freq_factor": "rope_scaling_low_freq_factor",
            "high_freq_factor": "rope_scaling_high_freq_factor",
            "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
        },
        given={"use_rope_scaling": True},
        of=lambda scaling: {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        },
    ),
    "yarn": _Scaling(
        {
            "factor": "yarn_rotary_scaling_factor",
            "original_max_position_embeddings": "yarn_original_max_position_embeddings",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
            "attention_factor": "yarn_attention_factor",
            "truncate": "yarn_correction_range_round_to_int",
        },
        given={"position_embedding_type": "yarn"},
        may_be_absent=frozenset({"beta_fast", "beta_slow", "attention_factor", "truncate"}),
        of=lambda scaling: {
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.rounds_range,
        },
    ),
}
_TYPES: dict[type, str] = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}


def _gathered(file: ConfigFile, places: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the parameters of all places, without null. ConfigError where they differ."""
    found: dict[str, Any] = {}
    for place, parameters in places.items():
        for theirs, value in parameters.items():
            name = "rope_type" if theirs == "type" else theirs
            if value is None:
                continue
            if name in found and found[name] != value:
                raise file.error(
                    f"{theirs} in {place}", f"{shown(found[name])} as elsewhere", value
                )
            found[name] = value
    return found


def _scaling_options(
    file: ConfigFile, parameters: dict[str, Any], kinds: tuple[str, ...], ignored: frozenset[str]
) -> dict[str, Any]:
    """Returns our options for a section's kind and its numbers, and removes these from
    `parameters`.
    """
    kind = parameters.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in kinds:
        raise file.error("rope_type", f"one of {', '.join(kinds)}", kind)

    scaling = _SCALINGS[kind]
    options = dict(scaling.given)
    for name, option in scaling.options.items():
        if name in parameters:
            options[option] = parameters.pop(name)
        elif name not in scaling.may_be_absent:
            raise ConfigError(
                f"Expected {name} of a rotary embedding of type {kind} in {file.source}, got none."
            )

    file.refuse_others(parameters, ignored, f"rotary embeddings of type {kind}")
    return options


def _written(rotary: RotarySpec, **more: Any) -> dict[str, Any]:
    """Returns the section for one kind of layer."""
    kind = _type_of(rotary)
    numbers = _SCALINGS[kind].of(rotary.scaling)
    return {"rope_type": kind, "rope_theta": rotary.base, **more, **numbers}


def _legacy_scaling(rotary: RotarySpec) -> dict[str, Any]:
    """Returns the section `rope_scaling` of versions before 5."""
    kind = _type_of(rotary)
    if kind == "default":
        return {}
    return {"rope_scaling": {"rope_type": kind, **_SCALINGS[kind].of(rotary.scaling)}}


def _type_of(rotary: RotarySpec) -> str:
    return "default" if rotary.scaling is None else _TYPES[type(rotary.scaling)]


def _rotaries(spec: ModelSpec) -> list[tuple[RotarySpec, bool]]:
    """Returns (rotation, whether the layer has a window) for each rotated layer."""
    return [
        (layer.mixer.rotary, window is not None)
        for layer, window in zip(spec.layers, windows_of(spec), strict=True)
        if not isinstance(layer.mixer, GatedDeltaNetSpec) and layer.mixer.rotary is not None
    ]


@dataclass(frozen=True)
class Rope(Field):
    """One rotary embedding for all layers that have one.

    Attributes:
        absent_base: the base of a file without one; None if it is required.
        absent_share: the share of each head's channels that is rotated if a file does not specify
            it; None: always all channels.
        ignored: parameters without effect on text.
        needs_section: whether a file must have one of the sections.
    """

    absent_base: float | None = None
    absent_share: float | None = None
    ignored: frozenset[str] = frozenset()
    needs_section: bool = False

    names = (*_SECTIONS, *_TOP_NAMES)

    def parameters(self, file: ConfigFile) -> dict[str, Any]:
        """Returns the parameters in all places of a file. ConfigError where they differ."""
        places = {name: file.section(name) for name in _SECTIONS}
        top = {name: file.get(name) for name in _TOP_NAMES}
        return _gathered(file, {**places, "the file": top})

    def read(self, file: ConfigFile) -> dict[str, Any]:
        if self.needs_section and not any(file.section(name) for name in _SECTIONS):
            raise ConfigError(f"Expected {' or '.join(_SECTIONS)} in {file.source}, got none.")
        parameters = self.parameters(file)
        base = parameters.pop("rope_theta", self.absent_base)
        if base is None:
            raise ConfigError(f"Expected rope_theta in {file.source}, got none.")
        options = {"rotary_base": base}

        share = parameters.pop("partial_rotary_factor", self.absent_share)
        if self.absent_share is not None:
            options["rotary_percent"] = share
        elif isinstance(share, bool) or share not in (None, 1):
            raise file.error("partial_rotary_factor", "1.0", share)

        return options | _scaling_options(file, parameters, tuple(_SCALINGS), self.ignored)

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        rotaries = _rotaries(spec)
        # The field is required even if no layer is rotated.
        rotary = rotaries[0][0] if rotaries else RotarySpec(0, _DEFAULT_BASE)
        top: dict[str, Any] = {"rope_theta": rotary.base}
        if self.absent_share is not None:
            top["partial_rotary_factor"] = _share(rotary.dim, attention_of(spec).head_dim)
        section = _written(rotary, **top)
        return {"rope_parameters": section, **top, **_legacy_scaling(rotary)}


def _share(dim: int, head_dim: int) -> float:
    """Returns the share of `head_dim` channels whose product, truncated, is `dim`."""
    if dim == 0:  # no channel is rotated, and the share is not used
        return 1.0
    share = dim / head_dim
    return share if int(head_dim * share) == dim else math.nextafter(share, 1.0)


@dataclass(frozen=True)
class RopeByKind(Field):
    """One rotary embedding for layers without a window, and an unscaled one for layers with a
    window.

    Attributes:
        windows: the field of the layers with a window.
        kinds: the kinds of scaling there are for layers without a window.
    """

    windows: Field
    kinds: tuple[str, ...]

    names = (*_SECTIONS, "rope_theta", "rope_local_base_freq")

    def read(self, file: ConfigFile) -> dict[str, Any]:
        sections = dict(file.section("rope_parameters"))
        by_kind = {name: sections.pop(name, None) or {} for name in (_FULL, _WINDOWED)}
        file.refuse_others(sections, (), "rope_parameters by kind of layer")
        for name, section in by_kind.items():
            if not isinstance(section, Mapping):
                raise file.error(f"{name} in rope_parameters", "an object", section)

        options = {}
        legacy = {_FULL: "rope_theta", _WINDOWED: "rope_local_base_freq"}
        kinds = {_FULL: self.kinds, _WINDOWED: ("default",)}
        names = {_FULL: "rotary_base", _WINDOWED: "window_rotary_base"}
        for kind, top in legacy.items():
            places = {
                f"{kind} in rope_parameters": by_kind[kind],
                "the file": {"rope_theta": file.get(top)},
                "rope_scaling": file.section("rope_scaling") if kind == _FULL else {},
            }
            parameters = _gathered(file, places)
            if "rope_theta" not in parameters:
                raise ConfigError(
                    f"Expected {top}, or rope_theta of {kind}, in {file.source}, got none."
                )
            options[names[kind]] = parameters.pop("rope_theta")
            options |= _scaling_options(file, parameters, kinds[kind], frozenset())

        # Without windows the second base is unused.
        if "window_size" not in self.windows.read(file):
            del options["window_rotary_base"]
        return options

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        rotaries = _rotaries(spec)
        # If all layers are of one kind, the other kind gets the same base.
        anyone = rotaries[0][0] if rotaries else RotarySpec(0, _DEFAULT_BASE)
        full = next((one for one, has_window in rotaries if not has_window), anyone)
        windowed = next((one for one, has_window in rotaries if has_window), anyone)
        windowed = dataclasses.replace(windowed, scaling=None)
        if _type_of(full) not in self.kinds:
            full = dataclasses.replace(full, scaling=None)
        return {
            "rope_parameters": {_FULL: _written(full), _WINDOWED: _written(windowed)},
            "rope_theta": full.base,
            "rope_local_base_freq": windowed.base,
            **_legacy_scaling(full),
        }


_MSCALES = ("mscale", "mscale_all_dim")
_MOST = 2**20  # upper limit of YaRN's factor and weights, far beyond any use
_MOST_DIGITS = 17  # behind the point, of a weight that is found again


def latent_of(spec: ModelSpec) -> LatentAttentionSpec:
    """The latent attention of the first layer that has one. ConfigError if none has, or if no layer
    has experts.
    """
    if mixture_of(spec) is None:
        raise ConfigError(LATENT_WITHOUT_EXPERTS)
    for layer in spec.layers:
        if isinstance(layer.mixer, LatentAttentionSpec):
            return layer.mixer
    raise ConfigError("--multi-latent-attention: expected at least one layer with it, got none.")


@dataclass(frozen=True)
class QueryRank(Field):
    """`q_lora_rank`, where null means that queries have no latent."""

    names = ("q_lora_rank",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        if "q_lora_rank" in file.content and file.get("q_lora_rank") is None:
            return {"q_lora_rank": None}
        return {"q_lora_rank": file.integer("q_lora_rank")}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return {"q_lora_rank": latent_of(spec).query_rank}


@dataclass(frozen=True)
class AsManyKeyHeads(Field):
    """`num_key_value_heads`, which is the number of query heads, or null."""

    names = ("num_key_value_heads",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        got, heads = file.get("num_key_value_heads"), file.integer("num_attention_heads")
        if got not in (None, heads):
            raise file.error("num_key_value_heads", f"num_attention_heads, {heads}", got)
        return {}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return {"num_key_value_heads": num_heads_of(spec)}


LATENT_SIZES: tuple[Field, ...] = (
    QueryRank(),
    AsManyKeyHeads(),
    Value("kv_lora_rank", "kv_lora_rank", lambda spec: latent_of(spec).key_value_rank),
    Value("qk_nope_head_dim", "qk_head_dim", lambda spec: latent_of(spec).content_dim),
    Value("qk_rope_head_dim", "qk_pos_emb_head_dim", lambda spec: latent_of(spec).rotary_dim),
    Value("v_head_dim", "v_head_dim", lambda spec: latent_of(spec).value_dim),
)


@dataclass(frozen=True)
class LatentRope(Field):
    """The rotary embedding of the rotary channels, with YaRN's mscale: see [Note: mscale]."""

    rope: Rope = Rope(ignored=frozenset(_MSCALES))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.rope.names, "rope_interleave")

    def read(self, file: ConfigFile) -> dict[str, Any]:
        options = self.rope.read(file)
        # Neighbours are turned together in all versions, unless a file specifies otherwise; null,
        # which is not a missing field, is false.
        is_missing = "rope_interleave" not in file.content
        options["rotary_interleaved"] = file.boolean("rope_interleave", absent=is_missing)

        mscale, all_dim = (self._number(file, name) for name in _MSCALES)
        if options.get("position_embedding_type") != "yarn":
            for name, weight in zip(_MSCALES, (mscale, all_dim), strict=True):
                if weight:
                    raise file.error(name, "missing where rope_type is not yarn", weight)
            return options

        options["mscale_all_dim"] = all_dim
        if mscale and all_dim:
            options["mscale"] = mscale
        elif all_dim and "yarn_attention_factor" not in options:
            factor = max(self._number(file, "factor"), 1.0)
            options["yarn_attention_factor"] = yarn_mscale(factor, 1.0)
        return options

    def _number(self, file: ConfigFile, name: str) -> float:
        """A parameter of the rotary embedding; zero if it is null or missing."""
        value = self.rope.parameters(file).get(name)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise file.error(name, "a number", value)
        if not 0 <= value <= _MOST:
            raise file.error(name, f"a number >= 0 and <= {_MOST}", value)
        return float(value)

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        content = {**self.rope.write(spec), **_interleaved(spec)}
        mixer = latent_of(spec)
        if mixer.rotary is None or not isinstance(mixer.rotary.scaling, YarnScaling):
            return content

        weights = _weights(mixer, mixer.rotary.scaling)
        for name in ("rope_parameters", "rope_scaling"):
            content[name] = {**content[name], **weights}
            if len(weights) == len(_MSCALES) and _is_implied(weights, mixer.rotary.scaling):
                # The code that was published with DeepSeek-V3 reads the weights alone.
                del content[name]["attention_factor"]
        return content


def _interleaved(spec: ModelSpec) -> dict[str, Any]:
    rotary = latent_of(spec).rotary
    return {"rope_interleave": rotary is None or rotary.is_interleaved}


def _weights(mixer: LatentAttentionSpec, scaling: YarnScaling) -> dict[str, float]:
    """The weights that give a spec's scale and factor, as far as there are any."""
    if scaling.factor <= 1.0:
        return {}
    plain_scale = 1 / math.sqrt(mixer.head_dim)
    all_dim = _weight(
        math.sqrt(mixer.scale / plain_scale),
        scaling.factor,
        lambda weight: plain_scale * yarn_mscale(scaling.factor, weight) ** 2 == mixer.scale,
    )
    if all_dim <= 0.0:
        return {}
    mscale = _weight(
        scaling.attention_factor * yarn_mscale(scaling.factor, all_dim),
        scaling.factor,
        lambda weight: _is_implied({"mscale": weight, "mscale_all_dim": all_dim}, scaling),
    )
    return {"mscale_all_dim": all_dim} | ({"mscale": mscale} if mscale > 0.0 else {})


def _weight(value: float, factor: float, is_exact: Callable[[float], bool]) -> float:
    """The x for which m(x) is `value`, rounded to the fewest digits that still give it exactly."""
    weight = (value - 1.0) / (yarn_mscale(factor, 1.0) - 1.0)
    rounded = (round(weight, digits) for digits in range(_MOST_DIGITS))
    return next((one for one in rounded if is_exact(one)), weight)


def _is_implied(weights: Mapping[str, float], scaling: YarnScaling) -> bool:
    """Whether both weights give exactly the factor of a spec."""
    ratio = [yarn_mscale(scaling.factor, weights[name]) for name in _MSCALES]
    return ratio[0] / ratio[1] == scaling.attention_factor
