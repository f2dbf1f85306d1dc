"""Fields of a config.json about the kinds of layers: windowed, linear, unrotated, with experts.

Without a mixture no field of mixtures is written, so a family with experts never fits a model
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import (
    REQUIRED,
    Field,
    Value,
    delta_net_of,
    mixture_of,
)
from megatron.core.options import ConfigError
from megatron.core.transformer.layer_pattern import layer_pattern
from megatron.core.transformer.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    ModelSpec,
    MoeSpec,
    Scores,
)

_FULL, _WINDOWED, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_DELTA_NET: Mapping[str, Callable[[GatedDeltaNetSpec], int]] = {
    "linear_conv_kernel_dim": lambda net: net.conv_kernel,
    "linear_key_head_dim": lambda net: net.key_head_dim,
    "linear_value_head_dim": lambda net: net.value_head_dim,
    "linear_num_key_heads": lambda net: net.num_key_heads,
    "linear_num_value_heads": lambda net: net.num_value_heads,
}  # by field; our options have the same names


def pattern_of(kinds: Sequence[bool], *, every_nth: bool) -> str:
    """A text that `layer_pattern` turns into these kinds: a number if possible, else a list."""
    kinds = tuple(kinds)
    if every_nth in kinds:
        text = str(kinds.index(every_nth) + 1)
        if layer_pattern("", text, len(kinds), every_nth=every_nth) == kinds:
            return text
    return f"[{','.join(str(int(kind)) for kind in kinds)}]"


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


@dataclass(frozen=True)
class LayerRule:
    """How files without `layer_types` define the layers of a kind.

    Attributes:
        names: the fields that are read.
        layers: returns for each layer whether it is of the kind.
        write: returns the fields, for versions of the transformers library without `layer_types`.
    """

    names: tuple[str, ...]
    layers: Callable[[ConfigFile], list[bool]]
    write: Callable[[Sequence[bool]], dict[str, Any]] = lambda _: {}


def from_layer(name: str) -> LayerRule:
    """Returns the rule that all layers from one on are of the kind."""

    def layers(file: ConfigFile) -> list[bool]:
        first = file.wanted(name)
        if type(first) is not int or first < 0:
            raise file.error(name, "an integer >= 0", first)
        return [number >= first for number in range(file.num_layers())]

    def write(kinds: Sequence[bool]) -> dict[str, Any]:
        return {name: list(kinds).index(True) if any(kinds) else len(kinds)}

    return LayerRule((name,), layers, write)


def all_but_every_nth(name: str, *other_names: str) -> LayerRule:
    """Returns the rule that all layers but every N-th one are of the kind.

    Args:
        other_names: names of the field in some versions.
    """
    names = (name, *other_names)

    def layers(file: ConfigFile) -> list[bool]:
        given = [one for one in names if file.get(one) is not None]
        interval = file.integer(given[0] if given else name)
        return [(number + 1) % interval != 0 for number in range(file.num_layers())]

    def write(kinds: Sequence[bool]) -> dict[str, Any]:
        interval = pattern_of(kinds, every_nth=False)
        return {name: int(interval)} if interval.isdecimal() else {}

    return LayerRule(names, layers, write)


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
        switch: the field without which no layer has a window; a missing one is off in all versions.
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

    names = ("no_rope_layers", "no_rope_layer_interval")

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


def _of_mixture(
    name: str,
    option: str,
    of: Callable[[MoeSpec], Any],
    absent: Any = REQUIRED,
    other_name: str | None = None,
) -> Value:
    """Returns a field with the value of an option of mixtures; see `Value`."""
    return Value(name, option, _in_mixture(of), absent, other_name)


def _in_mixture(of: Callable[[MoeSpec], Any]) -> Callable[[ModelSpec], Any]:
    def value(spec: ModelSpec) -> Any:
        mixture = mixture_of(spec)
        return None if mixture is None else of(mixture)

    return value


def num_experts(name: str, other_name: str | None = None) -> Field:
    """The number of experts, of which a router chooses."""
    return _of_mixture(
        name, "num_experts", lambda moe: moe.router.num_experts, other_name=other_name
    )


TOP_K: Field = _of_mixture("num_experts_per_tok", "moe_router_topk", lambda moe: moe.router.top_k)
EXPERT_SIZE: Field = _of_mixture(
    "moe_intermediate_size", "moe_ffn_hidden_size", lambda moe: moe.expert.size
)
# The library adds such a loss only where it is asked for, and then over all layers at once and
# `num_experts_per_tok` times as large. It concerns training alone, so a missing field is none.
AUX_LOSS: Field = _of_mixture(
    "router_aux_loss_coef", "moe_aux_loss_coeff", lambda moe: moe.router.balance_coeff, 0.0
)
SHARED_SIZE: Field = _of_mixture(
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    lambda moe: None if moe.shared is None else moe.shared.size,
)
ROUTED_SCALE: Field = _of_mixture(
    "routed_scaling_factor", "moe_router_topk_scaling_factor", lambda moe: moe.router.scale
)


@dataclass(frozen=True)
class NumGroups(Value):
    """The number of groups of experts, each of which must have two: the library sums the two best
    scores of each.
    """

    def read(self, file: ConfigFile) -> dict[str, Any]:
        options = super().read(file)
        num_groups = file.integer(self.name)
        # Either name: see `num_experts`.
        given = [file.get(name) for name in ("n_routed_experts", "num_local_experts")]
        for total in given:
            if type(total) is int and total < 2 * num_groups:
                raise file.error(self.name, f"at most half of {total} experts", num_groups)
        return options


NUM_GROUPS: Field = NumGroups(
    "n_group", "moe_router_num_groups", _in_mixture(lambda moe: moe.router.num_groups)
)
TOP_GROUPS: Field = _of_mixture(
    "topk_group", "moe_router_group_topk", lambda moe: moe.router.top_groups
)


@dataclass(frozen=True)
class NormalizedTopK(Field):
    """Whether a token's weights are divided by their sum: `norm_topk_prob`.

    The library takes scores over all experts. A softmax over all, divided by the sum of the chosen
    ones, is a softmax over the chosen ones, which is how it is computed here.

    Attributes:
        scores: of the family's routers.
        always: whether there is no such field, and weights are always divided.
    """

    scores: Scores
    always: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.always else ("norm_topk_prob",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        is_normalized = self.always or file.boolean("norm_topk_prob")
        return {
            "moe_router_score_function": self.scores.value,
            "moe_router_norm_topk": is_normalized,
            "moe_router_pre_softmax": self.scores is Scores.SOFTMAX and not is_normalized,
        }

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        mixture = mixture_of(spec)
        if self.always or mixture is None:
            return {}
        router = mixture.router
        return {"norm_topk_prob": router.is_normalized or not router.is_scored_first}


@dataclass(frozen=True)
class SharedExperts(Field):
    """`n_shared_experts`: experts that compute every token, as one network of their widths
    together. Zero and null are none. `moe_intermediate_size` is the width of one.
    """

    name = "n_shared_experts"
    names = (name,)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        # Missing it is one in the library, which is easily taken for none.
        if self.name not in file.content:
            file.wanted(self.name)
        if file.get(self.name) in (None, 0):
            return {}
        width = file.integer("moe_intermediate_size")
        return {"moe_shared_expert_intermediate_size": file.integer(self.name) * width}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        mixture = mixture_of(spec)
        if mixture is None:
            return {}
        # A width that is no multiple comes back as another one, and does not fit.
        return {
            self.name: 0 if mixture.shared is None else mixture.shared.size // mixture.expert.size
        }


def _pattern(file: ConfigFile, has_experts: list[bool]) -> dict[str, Any]:
    """Our option for layers with experts. ConfigError without any."""
    if not any(has_experts):
        raise ConfigError(f"Expected at least one layer with experts in {file.source}, got none.")
    if all(has_experts):
        return {}
    return {"moe_layer_freq": f"[{','.join(str(int(one)) for one in has_experts)}]"}


def _expert_layers(spec: ModelSpec) -> list[bool]:
    return [isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers]


@dataclass(frozen=True)
class SparseLayers(Field):
    """The layers with experts: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`.
    Missing fields have meant all layers in all versions. Written is the list alone.
    """

    names = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, file: ConfigFile) -> dict[str, Any]:
        step = 1 if file.get("decoder_sparse_step") is None else file.integer("decoder_sparse_step")
        dense = file.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(one) is not int for one in dense):
            raise file.error("mlp_only_layers", "a list of numbers of layers", dense)
        is_dense = frozenset(dense)
        return _pattern(
            file,
            [
                number not in is_dense and (number + 1) % step == 0
                for number in range(file.num_layers())
            ],
        )

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        dense = [number for number, has in enumerate(_expert_layers(spec)) if not has]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class FirstLayersDense(Field):
    """`first_k_dense_replace`: all layers but the first ones have experts."""

    rule: LayerRule = from_layer("first_k_dense_replace")
    names = ("first_k_dense_replace",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return _pattern(file, self.rule.layers(file))

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return self.rule.write(_expert_layers(spec))
