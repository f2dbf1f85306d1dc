"""Fields of a config.json that say which layers are of a kind: windowed, linear, unrotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import Field, delta_net_of
from megatron.core.transformer.layer_pattern import layer_pattern
from megatron.core.transformer.spec import AttentionSpec, GatedDeltaNetSpec, ModelSpec

_FULL, _WINDOWED, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_DELTA_NET: Mapping[str, Callable[[GatedDeltaNetSpec], int]] = {
    "linear_conv_kernel_dim": lambda net: net.conv_kernel,
    "linear_key_head_dim": lambda net: net.key_head_dim,
    "linear_value_head_dim": lambda net: net.value_head_dim,
    "linear_num_key_heads": lambda net: net.num_key_heads,
    "linear_num_value_heads": lambda net: net.num_value_heads,
}  # by field; our options have the same names


def pattern_of(kinds: Sequence[bool], *, every_nth: bool) -> str:
    """A text that `layer_pattern` turns into these kinds: a number if there is one, else a list."""
    kinds = tuple(kinds)
    if every_nth in kinds:
        text = str(kinds.index(every_nth) + 1)
        if layer_pattern("", text, len(kinds), every_nth=every_nth) == kinds:
            return text
    return f"[{','.join(str(int(kind)) for kind in kinds)}]"


def _interval_of(kinds: Sequence[bool]) -> int | None:
    """N if every N-th layer, and only those, is not of the kind."""
    text = pattern_of(kinds, every_nth=False)
    return int(text) if text.isdecimal() else None


def _by_layer_types(file: ConfigFile, kind: str) -> list[bool] | None:
    """Whether each layer is of a kind, the others having full attention. None if the file does not
    list the layers.
    """
    types = file.get("layer_types")
    if types is None:
        return None
    count, admitted = file.num_layers(), (kind, _FULL)
    if (
        not isinstance(types, list)
        or len(types) != count
        or any(one not in admitted for one in types)
    ):
        raise file.error("layer_types", f"{count} times {kind} or {_FULL}", types)
    return [one == kind for one in types]


def _layer_types(kinds: Sequence[bool], kind: str) -> dict[str, Any]:
    return {"layer_types": [kind if is_kind else _FULL for is_kind in kinds]}


class LayerRule(Protocol):
    """How files without `layer_types` say which layers are windowed or linear."""

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read."""

    def layers(self, file: ConfigFile) -> list[bool]:
        """Whether each layer is of the kind."""

    def write(self, kinds: Sequence[bool]) -> dict[str, Any]:
        """The fields, for versions of the transformers library that know no `layer_types`."""


@dataclass(frozen=True)
class FromLayer:
    """All layers from one on are of the kind."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def layers(self, file: ConfigFile) -> list[bool]:
        first = file.wanted(self.name)
        if type(first) is not int or first < 0:
            raise file.error(self.name, "an integer >= 0", first)
        return [number >= first for number in range(file.num_layers())]

    def write(self, kinds: Sequence[bool]) -> dict[str, Any]:
        return {self.name: list(kinds).index(True) if any(kinds) else len(kinds)}


@dataclass(frozen=True)
class AllButEveryNth:
    """All layers but every N-th one are of the kind."""

    name: str
    other_name: str | None = None  # that some versions wrote

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *([] if self.other_name is None else [self.other_name]))

    def layers(self, file: ConfigFile) -> list[bool]:
        given = [name for name in self.names if file.get(name) is not None]
        interval = file.integer(given[0] if given else self.name)
        return [(number + 1) % interval != 0 for number in range(file.num_layers())]

    def write(self, kinds: Sequence[bool]) -> dict[str, Any]:
        interval = _interval_of(kinds)
        return {} if interval is None else {self.name: interval}


@dataclass(frozen=True)
class SlidingLayers(Field):
    """The layers whose attention has a window.

    Attributes:
        rule: for files that do not list them.
        switch: the field without which there are no windows; a missing one is off in all versions.
    """

    rule: LayerRule
    switch: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        switch = () if self.switch is None else (self.switch,)
        return ("sliding_window", "layer_types", *switch, *self.rule.names)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        listed = _by_layer_types(file, _WINDOWED)
        is_on = self.switch is None or file.boolean(self.switch, absent=False)
        if not is_on or file.get("sliding_window") is None:
            if listed is not None and any(listed):
                missing = self.switch if not is_on and self.switch else "sliding_window"
                raise file.error(missing, f"given where layer_types has {_WINDOWED}", None)
            if is_on and listed is None and self.switch is None:
                file.wanted("sliding_window")
            return {}

        windowed = self.rule.layers(file) if listed is None else listed
        return window_options(file.integer("sliding_window"), windowed)

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        windows = windows_of(spec)
        windowed = [window is not None for window in windows]
        content: dict[str, Any] = {
            "sliding_window": next((window for window in windows if window is not None), None),
            **_layer_types(windowed, _WINDOWED),
            **self.rule.write(windowed),
        }
        return content if self.switch is None else {self.switch: any(windowed), **content}


@dataclass(frozen=True)
class WindowEverywhere(Field):
    """A window in all layers, or in none. A missing field is none in all versions.

    Attributes:
        switch: the field without which there is none; a missing one is off in all versions.
    """

    switch: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("sliding_window",) if self.switch is None else ("sliding_window", self.switch)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        is_on = self.switch is None or file.boolean(self.switch, absent=False)
        if not is_on or file.get("sliding_window") is None:
            return {}
        return window_options(file.integer("sliding_window"), [True] * file.num_layers())

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        window = windows_of(spec)[0]
        switch = {} if self.switch is None else {self.switch: window is not None}
        return {**switch, "sliding_window": window}


def windows_of(spec: ModelSpec) -> list[int | None]:
    """The window of each layer's attention."""
    mixers = [layer.mixer for layer in spec.layers]
    return [mixer.window if isinstance(mixer, AttentionSpec) else None for mixer in mixers]


def window_options(window: int, windowed: Sequence[bool]) -> dict[str, Any]:
    """Our options for layers with a window of so many positions, each one's own included."""
    if not any(windowed):
        return {}
    options: dict[str, Any] = {"window_size": (window - 1, 0)}
    if not all(windowed):
        options["window_attn_skip_freq"] = pattern_of(windowed, every_nth=False)
    return options


@dataclass(frozen=True)
class DeltaNetLayers(Field):
    """The layers that have a gated delta net, and its sizes.

    Attributes:
        rule: for files that do not list the layers.
    """

    rule: LayerRule

    @property
    def names(self) -> tuple[str, ...]:
        return ("layer_types", *self.rule.names, *_DELTA_NET)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        listed = _by_layer_types(file, _LINEAR)
        linear = self.rule.layers(file) if listed is None else listed
        if not any(linear):
            return {}
        sizes = {name: file.integer(name) for name in _DELTA_NET}
        return {"linear_attention_freq": pattern_of(linear, every_nth=False), **sizes}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        linear = [not isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
        net = delta_net_of(spec)
        sizes = {} if net is None else {name: of(net) for name, of in _DELTA_NET.items()}
        return {**_layer_types(linear, _LINEAR), **self.rule.write(linear), **sizes}


@dataclass(frozen=True)
class UnrotatedLayers(Field):
    """The layers that leave queries and keys as they are: `no_rope_layers` is 1 for each layer that
    is rotated, or `no_rope_layer_interval` is N where every N-th is not.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return ("no_rope_layers", "no_rope_layer_interval")

    def layers(self, file: ConfigFile) -> list[bool]:
        """Whether each layer is unrotated."""
        rotated = file.get("no_rope_layers")
        if rotated is None:
            interval = file.integer("no_rope_layer_interval")
            return [(number + 1) % interval == 0 for number in range(file.num_layers())]

        # The list may be longer than the stack.
        count = file.num_layers()
        if (
            not isinstance(rotated, list)
            or len(rotated) < count
            or any(type(one) is not int or one not in (0, 1) for one in rotated)
        ):
            raise file.error("no_rope_layers", f"0 or 1 for each of {count} layers", rotated)
        return [one == 0 for one in rotated[:count]]

    def read(self, file: ConfigFile) -> dict[str, Any]:
        unrotated = self.layers(file)
        if all(unrotated):
            return {"position_embedding_type": "none"}
        return {"no_rope_freq": pattern_of(unrotated, every_nth=True)} if any(unrotated) else {}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        mixers = [layer.mixer for layer in spec.layers]
        rotated = [isinstance(one, AttentionSpec) and one.rotary is not None for one in mixers]
        return {"no_rope_layers": [int(is_rotated) for is_rotated in rotated]}


@dataclass(frozen=True)
class WhereUnrotated:
    """The unrotated layers are of the kind."""

    unrotated: UnrotatedLayers

    @property
    def names(self) -> tuple[str, ...]:
        return self.unrotated.names

    def layers(self, file: ConfigFile) -> list[bool]:
        return self.unrotated.layers(file)

    def write(self, kinds: Sequence[bool]) -> dict[str, Any]:  # noqa: ARG002  a Rule's signature
        return {}
