"""Parts of a model: parameters by the beginnings of their names.

A module may name its parts in `parts`, as a model that reads images does:

    parts = {"vision": ("vision_model.",), "decoder": ("language_model.",)}

Any other name is the beginning of names itself: "decoder.layers.0" is all of the first layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.core.options import ConfigError

if TYPE_CHECKING:
    from torch import nn  # the optimizer's flags are read by `parse_factors`


def split_names(given: Sequence[str]) -> list[str]:
    """The words of an option that may have spaces or commas between them."""
    return [word for one in given for word in one.split(",") if word]


def parse_factors(given: Sequence[str] | None, flag: str) -> dict[str, float]:
    """The factors of parts, given as NAME=FACTOR. ConfigError for anything else."""
    found: dict[str, float] = {}
    for word in split_names(given or ()):
        name, equals, text = word.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not name or not equals or not 0 <= factor < math.inf:
            raise ConfigError(f"{flag}: expected NAME=FACTOR with a factor >= 0, got {word}.")
        if name in found:
            raise ConfigError(f"{flag}: expected one factor of {name}, got two.")
        found[name] = factor
    return found


def factors_of(
    model: nn.Module, factors: Mapping[str, float], flag: str
) -> dict[nn.Parameter, float]:
    """The factor of each parameter that is in a part; of several, the one named last counts.

    Raises:
        ConfigError: for a part without parameters.
    """
    found: dict[nn.Parameter, float] = {}
    for name, factor in factors.items():
        for _, parameter in _parameters_of(model, name, flag):
            found[parameter] = factor
    return found


def freeze(model: nn.Module, names: Sequence[str], flag: str) -> None:
    """Takes the gradients from all parameters of parts: they are neither trained nor have states.

    Raises:
        ConfigError: for a part without parameters, or if no parameter is left to train.
    """
    for name in names:
        for _, parameter in _parameters_of(model, name, flag):
            parameter.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{flag}: expected something left to train, got {' '.join(names)}.")


def _parameters_of(model: nn.Module, name: str, flag: str) -> Iterator[tuple[str, nn.Parameter]]:
    parts: Mapping[str, tuple[str, ...]] = getattr(model, "parts", {})
    beginnings = parts.get(name, (name, f"{name}."))
    found = [
        (own, parameter)
        for own, parameter in model.named_parameters()
        if own == beginnings[0] or own.startswith(beginnings if name in parts else beginnings[1:])
    ]
    if not found:
        known = ", ".join(parts) or "the beginnings of parameters' names"
        raise ConfigError(f"{flag}: expected parts of the model ({known}), got {name}.")
    yield from found
