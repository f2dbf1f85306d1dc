"""The rotary embedding in a config.json.

Version 5 of the transformers library writes one section,

    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, ...}

with an inner section per kind of layer where these differ (Gemma 3). Earlier versions wrote
`rope_theta`, `partial_rotary_factor` and, for layers with a window, `rope_local_base_freq` at the
top level, and a section `rope_scaling`, whose `rope_type` was first named `type`. Both forms are
read and written. A file whose forms contradict each other is rejected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import Field, attention_of
from megatron.core.models.families.layer_fields import windows_of
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.spec import (
    GatedDeltaNetSpec,
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
        absent_share: the share of each head's channels that is rotated where a file says nothing;
            None: always all of them.
        ignored: parameters that change nothing for text.
        needs_section: whether a file must have one of the sections.
    """

    absent_base: float | None = None
    absent_share: float | None = None
    ignored: frozenset[str] = frozenset()
    needs_section: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*_SECTIONS, *_TOP_NAMES)

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
    """One rotary embedding for layers without a window, and an unscaled one for those with one.

    Attributes:
        windows: the field of the layers with a window.
        kinds: the kinds of scaling there are for layers without a window.
    """

    windows: Field
    kinds: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*_SECTIONS, "rope_theta", "rope_local_base_freq")

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
