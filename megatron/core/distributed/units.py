"""Which modules of a model gather their weights as one."""

from __future__ import annotations

from torch import nn


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The entries of the model's outermost module lists: its layers."""
    units: list[nn.Module] = []
    for child in model.children():
        units += list(child) if isinstance(child, nn.ModuleList) else sharding_units(child)
    return units
