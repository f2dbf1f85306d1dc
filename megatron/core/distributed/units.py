"""Which modules of a model gather their weights as one."""

from __future__ import annotations

from torch import nn

from megatron.core.transformer.experts import Experts


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The entries of the model's outermost module lists: its layers."""
    units: list[nn.Module] = []
    for child in model.children():
        units += list(child) if isinstance(child, nn.ModuleList) else sharding_units(child)
    return units


def expert_units(model: nn.Module) -> list[Experts]:
    """The experts of the model's mixtures, which Megatron-FSDP keeps apart from their layers: they
    may be on another mesh, and hold most of a layer's bytes.
    """
    return [module for module in model.modules() if isinstance(module, Experts)]
