"""Which modules of a model gather their weights as one."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.transformer.experts import Experts


class Unit(NamedTuple):
    """A module that Megatron-FSDP shards as one.

    Attributes:
        name: path of the module, the first of several; THE_MODEL for the model itself.
        has_experts: whether it is the experts of a mixture, which may be on another mesh.
    """

    name: str
    module: nn.Module
    has_experts: bool


def units_of(model: nn.Module) -> list[Unit]:
    """The units in the order in which they are sharded: experts before the layers they are in,
    since a unit takes the parameters that units inside it have left, and the model last.
    """
    names = {module: name for name, module in model.named_modules()}
    experts, layers = expert_units(model), sharding_units(model)
    return [
        *(Unit(names[module], module, True) for module in experts),
        *(Unit(names[module], module, False) for module in layers),
        Unit(THE_MODEL, model, False),
    ]


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
