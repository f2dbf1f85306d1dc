"""The default engine: `fully_shard` on flat buffers, with the settings of a run.

Main weights are fp32 unless asked otherwise; weights in use have the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.experts import divide_experts
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.fully_shard import fully_shard, fully_shard_context, microbatch
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.placement import Flat, Placements
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.distributed.units import expert_units, sharding_units
from megatron.core.dtypes import DTYPES
from megatron.core.mesh import (
    EXPERT_AXIS,
    INNER_AXIS,
    OUTER_AXIS,
    build_expert_mesh,
    build_hybrid_mesh,
    expert_axes,
    hybrid_shape,
)


class _Cut(NamedTuple):
    """Over which mesh a module is sharded, and how."""

    mesh: DeviceMesh
    placements: Placements


class CutShape(NamedTuple):
    """The same without a mesh: ranks along each axis of the placements."""

    mesh_shape: tuple[int, ...]
    placements: Placements


class CutShapes(NamedTuple):
    """How a model is sharded, and how its experts are."""

    dense: CutShape
    experts: CutShape


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    device: Device,
    config: DataParallelConfig,
    *,
    compute_dtype: torch.dtype,
    reset_parameters: Callable[[nn.Module], None],
    main_params_dtype: torch.dtype = torch.float32,
    offloaded: Collection[nn.Module] = (),
) -> None:
    """Shards `model` in place: one module for each mixture's experts, one for each layer without
    these, one for what remains (embedding, head). With expert parallelism, experts are divided over
    the ranks, and tokens travel to them: see experts.py.

    Args:
        model: usually on meta. Real parameters become the main weights; buffers stay.
        mesh: one axis, over all ranks.
        compute_dtype: dtype of the weights and activations in forward and backward.
        reset_parameters: gives a module with parameters on meta its initial weights; see
            `fully_shard_context`.
        main_params_dtype: dtype of the main weights.
        offloaded: the modules, `model` for what remains, whose main weights are in host memory from
            the start.
    """
    dense, experts = _cuts(config, mesh, device)
    policy = policy_of(config, compute_dtype, main_params_dtype)

    def shard(module: nn.Module, cut: _Cut, **how: Any) -> None:
        offload_policy = OffloadPolicy(main_weights_on_host=module in offloaded)
        fully_shard(module, *cut, policy, offload_policy=offload_policy, **how)

    reshard_after_forward = config.megatron_fsdp_reshard_after_forward
    with fully_shard_context(device.torch_device, reset_parameters=reset_parameters):
        # Experts before the layers they are in: a module takes the parameters that modules inside
        # it have left.
        for mixture in expert_units(model):
            shard(
                mixture,
                experts,
                # Each rank's gradients are sums over the tokens of `expert_model_parallel_size`
                # ranks, and averages over the groups of so many.
                grad_divisor=config.expert_model_parallel_size,
                reshard_after_forward=reshard_after_forward,
            )
        for unit in sharding_units(model):
            shard(unit, dense, reshard_after_forward=reshard_after_forward)
        # Its backward starts where its forward ends: weights freed in between would only be
        # gathered again.
        shard(model, dense, reshard_after_forward=False)

    if experts.placements.kept_axes:
        divide_experts(model, experts.mesh.get_group(EXPERT_AXIS), _record_exchange)


def _record_exchange(experts: nn.Module, is_backward: bool) -> None:
    """Lets the next step detect ranks that do not exchange tokens for these experts."""
    assert isinstance(experts, FsdpModule), "divided experts are separate units"
    experts.parameter_groups[0].record_exchange(is_backward)


def policy_of(
    config: DataParallelConfig, compute_dtype: torch.dtype, main_params_dtype: torch.dtype
) -> MixedPrecisionPolicy:
    """The dtypes of a run's weights and gradients."""
    return MixedPrecisionPolicy(
        main_params_dtype=main_params_dtype,
        main_grads_dtype=DTYPES[config.main_grads_dtype],
        grad_comm_dtype=DTYPES.get(config.megatron_fsdp_grad_comm_dtype),
        compute_dtype=compute_dtype,
    )


def build_placements(config: DataParallelConfig) -> Placements:
    """The placements of the strategies that `config` names."""
    if config.num_distributed_optimizer_instances == 1:
        return Placements.for_strategy(config.data_parallel_sharding_strategy)

    # With several instances the strategy is optim_grads_params: DataParallelConfig checks it.
    outer = Flat() if config.outer_dp_sharding_strategy == "optim" else Replicate()
    return Placements(
        dp_axes=(OUTER_AXIS, INNER_AXIS),
        parameter=(Replicate(), Flat()),
        gradient=(Partial("avg"), Flat()),
        optimizer=(outer, Flat()),
    )


def cut_shapes(config: DataParallelConfig, world_size: int) -> CutShapes:
    """How a model is sharded over so many ranks. Makes no mesh."""
    num_instances, expert_size = (
        config.num_distributed_optimizer_instances,
        config.expert_model_parallel_size,
    )
    shape: tuple[int, ...] = (world_size,)
    if num_instances > 1:
        shape = hybrid_shape(world_size, num_instances)
    dense = CutShape(shape, build_placements(config))
    if expert_size == 1:
        return CutShapes(dense, dense)

    axes = expert_axes(world_size, expert_size, num_instances)
    placements = dense.placements.with_kept_axis(EXPERT_AXIS, [*axes][:-1])
    return CutShapes(dense, CutShape(tuple(axes.values()), placements))


def _cuts(config: DataParallelConfig, mesh: DeviceMesh, device: Device) -> tuple[_Cut, _Cut]:
    """How the model is sharded, and how its experts are."""
    shapes, expert_mesh = cut_shapes(config, mesh.size()), expert_mesh_of(config, mesh, device)
    num_instances = config.num_distributed_optimizer_instances
    if num_instances > 1:
        mesh = build_hybrid_mesh(device.kind, mesh.size(), num_instances)

    dense = _Cut(mesh, shapes.dense.placements)
    if expert_mesh is None:
        return dense, dense
    return dense, _Cut(expert_mesh, shapes.experts.placements)


def expert_mesh_of(
    config: DataParallelConfig, mesh: DeviceMesh, device: Device
) -> DeviceMesh | None:
    """The mesh of experts that are divided over ranks; None if they are not.

    Args:
        mesh: one axis, over all ranks.
    """
    if config.expert_model_parallel_size == 1:
        return None
    return build_expert_mesh(
        device.kind,
        mesh.size(),
        config.expert_model_parallel_size,
        config.num_distributed_optimizer_instances,
    )


def microbatch_of(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """The scope of one microbatch's forward and backward, for a model of any engine."""
    return microbatch(model.context, is_last) if isinstance(model, FsdpModule) else nullcontext()


def context_of(model: nn.Module) -> FsdpContext | None:
    """The context of a model of this engine; None for any other."""
    return model.context if isinstance(model, FsdpModule) else None
