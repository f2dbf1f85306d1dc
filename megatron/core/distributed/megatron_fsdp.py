"""The default engine: `fully_shard` on flat buffers, with the settings of a run.

Main weights are fp32 unless asked otherwise; weights in use have the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.context import divide_context
from megatron.core.distributed.experts import divide_experts
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.fully_shard import fully_shard, fully_shard_context, microbatch
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.parameter_grouping import Sharding, TensorSharding
from megatron.core.distributed.fsdp.placement import Flat, Placements
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.distributed.tensor import divide_tensor
from megatron.core.distributed.units import Unit, units_of
from megatron.core.dtypes import DTYPES
from megatron.core.host_keeper import KeptMemory
from megatron.core.mesh import (
    CONTEXT_AXIS,
    EXPERT_AXIS,
    INNER_AXIS,
    OUTER_AXIS,
    TENSOR_AXIS,
    build_context_mesh,
    build_expert_mesh,
    build_hybrid_mesh,
    build_tensor_mesh,
    expert_axes,
    hybrid_shape,
    tensor_axes,
)
from megatron.core.transformer.tensor_cut import tensor_cuts


class Shardings(NamedTuple):
    """How a model is sharded, how its experts are, and how parameters are that tensor parallelism
    divides; None: it divides none.
    """

    dense: Sharding
    experts: Sharding
    tensor: Sharding | None

    def of(self, unit: Unit) -> Sharding:
        """How this unit is sharded."""
        return self.experts if unit.has_experts else self.dense


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    device: Device,
    config: DataParallelConfig,
    *,
    compute_dtype: torch.dtype,
    reset_parameters: Callable[[nn.Module], None],
    main_params_dtype: torch.dtype = torch.float32,
    offloaded: Collection[str] = (),
    pins_main_weights: bool = False,
    kept: KeptMemory | None = None,
) -> None:
    """Shards `model` in place: one module for each mixture's experts, one for each layer without
    these, one for what remains (embedding, head). With expert parallelism, experts are divided over
    the ranks, and tokens travel to them: see experts.py. With context parallelism, each rank
    computes a part of each sequence. With tensor parallelism, each rank computes with its part of
    most weights: see tensor.py.

    Args:
        model: usually on meta. Real parameters become the main weights; buffers stay.
        mesh: one axis, over all ranks.
        compute_dtype: dtype of the weights and activations in forward and backward.
        reset_parameters: gives a module with parameters on meta its initial weights; see
            `fully_shard_context`.
        main_params_dtype: dtype of the main weights.
        offloaded: names of the units whose main weights are in host memory from the start; see
            `units_of`.
        pins_main_weights: whether those are in page-locked memory.
        kept: where their memory comes from, if it is to survive the process.
    """
    num_ranks = mesh.size()
    shardings = shardings_of(model, config, num_ranks)
    policy = policy_of(config, compute_dtype, main_params_dtype)
    expert_mesh = expert_mesh_of(config, mesh, device)
    tensor = None
    if shardings.tensor is not None:
        tensor_mesh = build_tensor_mesh(
            device.kind,
            num_ranks,
            config.tensor_model_parallel_size,
            config.num_distributed_optimizer_instances,
        )
        tensor = TensorSharding(tensor_mesh, shardings.tensor)
    context_mesh = None
    if config.context_parallel_size > 1:
        context_mesh = build_context_mesh(
            device.kind, num_ranks, config.context_parallel_size, config.tensor_model_parallel_size
        )
    if config.num_distributed_optimizer_instances > 1:
        mesh = build_hybrid_mesh(device.kind, num_ranks, config.num_distributed_optimizer_instances)

    with fully_shard_context(device.torch_device, reset_parameters=reset_parameters, tensor=tensor):
        for unit in units_of(model):
            sharding = shardings.of(unit)
            fully_shard(
                unit.module,
                mesh if expert_mesh is None or not unit.has_experts else expert_mesh,
                sharding.placements,
                policy,
                sharding.grad_divisor,
                # The backward of the model starts where its forward ends: weights freed in between
                # would only be gathered again.
                reshard_after_forward=(
                    config.megatron_fsdp_reshard_after_forward and unit.module is not model
                ),
                offload_policy=OffloadPolicy(unit.name in offloaded, pins_main_weights, kept),
            )

    if expert_mesh is not None:
        divide_experts(model, expert_mesh.get_group(EXPERT_AXIS), _recorder(model))
    if context_mesh is not None:
        group = context_mesh.get_group(CONTEXT_AXIS)
        tensor_size = config.tensor_model_parallel_size
        divide_context(model, group, config.cp_comm_type, _recorder(model), tensor_size)
    if tensor is not None:
        divide_tensor(model, tensor.mesh.get_group(TENSOR_AXIS), _recorder(model))


def _recorder(model: nn.Module) -> Callable[[nn.Module, bool], None]:
    """Returns a function that lets the next step detect ranks that do not exchange tokens for a
    module, or their gradients.
    """
    # A module of two units is in the inner one, which comes first.
    units = {
        part: unit.module for unit in reversed(units_of(model)) for part in unit.module.modules()
    }

    def record(module: nn.Module, is_backward: bool) -> None:
        unit = units[module]
        assert isinstance(unit, FsdpModule), "units are sharded"
        unit.parameter_groups[0].record_exchange(is_backward)

    return record


def policy_of(
    config: DataParallelConfig, compute_dtype: torch.dtype, main_params_dtype: torch.dtype
) -> MixedPrecisionPolicy:
    """The dtypes of a run's weights and gradients."""
    return MixedPrecisionPolicy(
        main_params_dtype=main_params_dtype,
        main_grads_dtype=DTYPES[config.main_grads_dtype],
        grad_comm_dtype=DTYPES.get(config.megatron_fsdp_grad_comm_dtype),
        compute_dtype=compute_dtype,
        gathers_codes=config.gathers_codes,
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


def shardings_of(model: nn.Module, config: DataParallelConfig, world_size: int) -> Shardings:
    """How `model` is sharded over so many ranks. Makes no mesh."""
    num_instances, expert_size = (
        config.num_distributed_optimizer_instances,
        config.expert_model_parallel_size,
    )
    shape: tuple[int, ...] = (world_size,)
    if num_instances > 1:
        shape = hybrid_shape(world_size, num_instances)
    # The ranks of a tensor-parallel group have sums over their own positions of the same samples.
    tensor_size = config.tensor_model_parallel_size
    dense = Sharding(shape, build_placements(config), grad_divisor=1 / tensor_size)

    def kept(axes: dict[str, int], grad_divisor: float) -> Sharding:
        *others, last = axes
        placements = dense.placements.with_kept_axis(last, others)
        return Sharding(tuple(axes.values()), placements, grad_divisor)

    experts, tensor = dense, None
    if expert_size > 1:
        # Each rank's gradients are sums over the tokens of `expert_size` ranks, and averages over
        # the groups of so many.
        axes = expert_axes(world_size, expert_size, num_instances)
        experts = kept(axes, expert_size / tensor_size)
    if tensor_size > 1:
        tensor = kept(tensor_axes(world_size, tensor_size, num_instances), 1)
        tensor = tensor._replace(cuts=tensor_cuts(model))
    return Shardings(dense, experts, tensor)


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
