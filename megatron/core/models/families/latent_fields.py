"""Fields of a config.json about multi-head latent attention: its sizes, and its rotary embedding.

[Note: mscale] YaRN lets positions reach `factor` times as far and makes products of queries and
keys larger, to sharpen the softmax over more of them. With m(x) = 1 + x log(factor) / 10, files
have two weights for it:

    the rotated channels of queries and keys    each times m(mscale) / m(mscale_all_dim)
    the scale of all products                   times m(mscale_all_dim)^2

A weight of zero, and one that is missing, turns its part off, but that a fraction without both
weights is m(1). A spec has the two results, from which the weights are found again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.fields import (
    LATENT_WITHOUT_EXPERTS,
    Field,
    Value,
    mixture_of,
    num_heads_of,
)
from megatron.core.models.families.rope import Rope
from megatron.core.options import ConfigError
from megatron.core.transformer.latent_config import yarn_mscale
from megatron.core.transformer.spec import LatentAttentionSpec, ModelSpec, YarnScaling

_MSCALES = ("mscale", "mscale_all_dim")
_MOST = 2**20  # of a weight or of YaRN's factor, far beyond any use
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
    """`q_lora_rank`, where null says that queries have no latent."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("q_lora_rank",)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        if "q_lora_rank" in file.content and file.get("q_lora_rank") is None:
            return {"q_lora_rank": None}
        return {"q_lora_rank": file.integer("q_lora_rank")}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        return {"q_lora_rank": latent_of(spec).query_rank}


@dataclass(frozen=True)
class AsManyKeyHeads(Field):
    """`num_key_value_heads`, which is the number of query heads, or null."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("num_key_value_heads",)

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
        # Neighbours are turned together in all versions, unless a file says otherwise; null, which
        # is not a missing field, is false.
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
