"""The parameter groups that `megatron_fsdp.shard_model` will make of a model, before it does.

Their sizes follow from shapes, the settings and the number of ranks. The model may be on meta;
no memory is allocated, and no process group is asked.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.group_memory import GroupMemory
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.parameter_grouping import (
    check_parameters,
    check_rows,
    grouped,
    owned_parameters,
)
from megatron.core.distributed.megatron_fsdp import CutShape, cut_shapes, policy_of
from megatron.core.distributed.units import expert_units, sharding_units


class GroupPlan(NamedTuple):
    """A parameter group to be.

    Attributes:
        unit: the module whose parameters they are.
        parameters: in the order of the layout's tensors.
        memory: on each rank.
    """

    unit: nn.Module
    parameters: list[nn.Parameter]
    memory: GroupMemory


def plan_groups(
    model: nn.Module,
    world_size: int,
    config: DataParallelConfig,
    *,
    compute_dtype: torch.dtype,
    main_params_dtype: torch.dtype = torch.float32,
    offloaded: Collection[nn.Module] = (),
) -> list[GroupPlan]:
    """The groups in the order in which `shard_model` makes them; its arguments, for as many ranks.

    Raises:
        ValueError, TypeError: for parameters that it would reject.
    """
    cuts = cut_shapes(config, world_size)
    policy = policy_of(config, compute_dtype, main_params_dtype)
    sharded: set[nn.Module] = set()
    plans: list[GroupPlan] = []

    def plan(unit: nn.Module, cut: CutShape) -> None:
        num_blocks = cut.placements.num_blocks(cut.mesh_shape)
        owned = owned_parameters([unit], sharded.__contains__)
        check_parameters([unit], owned)
        check_rows(owned, cut.placements, cut.mesh_shape)
        for own_policy, own in grouped(owned, lambda _: policy):
            parameters = [parameter.original for parameter in own]
            shapes = [parameter.shape for parameter in parameters]
            requires_grad = parameters[0].requires_grad
            memory = GroupMemory(
                GlobalLayout.build(shapes, world_size, num_blocks),
                cut.placements,
                cut.mesh_shape,
                own_policy,
                requires_grad,
                is_on_host=requires_grad and unit in offloaded,
            )
            plans.append(GroupPlan(unit, parameters, memory))
        sharded.add(unit)

    # As in `shard_model`: experts before the layers they are in, and the rest last.
    for experts in expert_units(model):
        plan(experts, cuts.experts)
    for unit in sharding_units(model):
        plan(unit, cuts.dense)
    plan(model, cuts.dense)
    return plans
