"""`ShardPlan`: the units and parameter groups that `megatron_fsdp.shard_model` makes of a model.

Sizes follow from shapes, the settings and the number of ranks. The model may be on meta; no memory
is allocated, and no process group is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.distributed.fsdp.parameter_grouping import (
    check_parameters,
    owned_parameters,
    plan_groups,
)
from megatron.core.distributed.fsdp.precision import OffloadPolicy
from megatron.core.distributed.megatron_fsdp import policy_of, shardings_of
from megatron.core.distributed.units import units_of


@dataclass(frozen=True)
class UnitPlan:
    """A module that will gather its weights as one.

    Attributes:
        name: path of the module; THE_MODEL for the model itself, which has all other parameters.
        groups: in the order in which they are made.
    """

    name: str
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True)
class ShardPlan:
    """The units of a model, in the order in which they are sharded: the last is the model."""

    units: tuple[UnitPlan, ...]

    @property
    def groups(self) -> Iterator[GroupPlan]:
        """Of all units."""
        return (group for unit in self.units for group in unit.groups)


def plan_shards(
    model: nn.Module,
    world_size: int,
    config: DataParallelConfig,
    *,
    compute_dtype: torch.dtype,
    main_params_dtype: torch.dtype = torch.float32,
    offloaded: Collection[str] = (),
    is_accelerator: bool = False,
) -> ShardPlan:
    """Plans what `shard_model` does. Takes its arguments, for as many ranks, and whether their
    devices are accelerators.

    Raises:
        ValueError, TypeError: for parameters that it would reject.
    """
    shardings = shardings_of(model, config, world_size)
    policy = policy_of(config, compute_dtype, main_params_dtype)
    sharded: set[nn.Module] = set()
    units = []
    for unit in units_of(model):
        owned = owned_parameters([unit.module], sharded.__contains__)
        check_parameters([unit.module], owned)
        planned = plan_groups(
            owned,
            shardings.of(unit),
            lambda _: policy,
            OffloadPolicy(main_weights_on_host=unit.name in offloaded),
            shardings.tensor,
            is_accelerator=is_accelerator,
        )
        units.append(UnitPlan(unit.name, tuple(group for group, _ in planned)))
        sharded.add(unit.module)
    return ShardPlan(tuple(units))
