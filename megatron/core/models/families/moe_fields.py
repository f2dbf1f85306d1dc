"""Fields of a config.json about mixtures of experts: how many, how a token gets its own, and which
layers have them.

Without a mixture nothing is written, so a family that has them never fits a model that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import REQUIRED, Field, mixture_of
from megatron.core.options import ConfigError
from megatron.core.transformer.spec import ModelSpec, MoeSpec, Scores


@dataclass(frozen=True)
class MoeValue(Field):
    """A field whose value is that of an option of mixtures.

    Attributes:
        option: of TransformerConfig, which checks the value.
        of: what is written; None is left out.
        absent: the value of a field that is null or missing.
        other_name: that some versions write. Either may be in a file, or both with one value.
    """

    name: str
    option: str
    of: Callable[[MoeSpec], Any]
    absent: Any = REQUIRED
    other_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.other_name is None else (self.name, self.other_name)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        given = {name: file.get(name) for name in self.names if file.get(name) is not None}
        if len(given) > 1 and given[self.names[0]] != given[self.names[1]]:
            raise file.error(
                self.names[1], f"{self.name}, {given[self.name]}", given[self.names[1]]
            )
        if not given:
            value = file.wanted(self.name) if self.absent is REQUIRED else self.absent
            return {self.option: value}
        return {self.option: next(iter(given.values()))}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        mixture = mixture_of(spec)
        value = None if mixture is None else self.of(mixture)
        return {} if value is None else {self.name: value}


def num_experts(name: str, other_name: str | None = None) -> Field:
    """The number of experts, of which a router chooses."""
    return MoeValue(name, "num_experts", lambda moe: moe.router.num_experts, other_name=other_name)


TOP_K: Field = MoeValue("num_experts_per_tok", "moe_router_topk", lambda moe: moe.router.top_k)
EXPERT_SIZE: Field = MoeValue(
    "moe_intermediate_size", "moe_ffn_hidden_size", lambda moe: moe.expert.size
)
# The library adds such a loss only where it is asked for, and then over all layers at once and
# `num_experts_per_tok` times as large. It concerns training alone, so a missing field is none.
AUX_LOSS: Field = MoeValue(
    "router_aux_loss_coef", "moe_aux_loss_coeff", lambda moe: moe.router.balance_coeff, 0.0
)
SHARED_SIZE: Field = MoeValue(
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    lambda moe: None if moe.shared is None else moe.shared.size,
)
ROUTED_SCALE: Field = MoeValue(
    "routed_scaling_factor", "moe_router_topk_scaling_factor", lambda moe: moe.router.scale
)


@dataclass(frozen=True)
class NumGroups(MoeValue):
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


NUM_GROUPS: Field = NumGroups("n_group", "moe_router_num_groups", lambda moe: moe.router.num_groups)
TOP_GROUPS: Field = MoeValue(
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

    name: str = "n_shared_experts"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

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
    """Our option for layers with experts. ConfigError if there are none."""
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

    @property
    def names(self) -> tuple[str, ...]:
        return ("decoder_sparse_step", "mlp_only_layers")

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
    """`first_k_dense_replace`: all layers but so many first ones have experts."""

    name: str = "first_k_dense_replace"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        first = file.wanted(self.name)
        if type(first) is not int or first < 0:
            raise file.error(self.name, "an integer >= 0", first)
        return _pattern(file, [number >= first for number in range(file.num_layers())])

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        has_experts = _expert_layers(spec)
        return {self.name: has_experts.index(True) if any(has_experts) else len(has_experts)}
