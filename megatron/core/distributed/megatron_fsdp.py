"""The default engine: `fully_shard` on flat buffers, with the settings of a run.

Main weights are fp32 unless asked otherwise; weights in use have the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.fully_shard import fully_shard, fully_shard_context, microbatch
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.placement import Flat, Placements
from megatron.core.distributed.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.distributed.units import sharding_units
from megatron.core.dtypes import DTYPES
from megatron.core.mesh import INNER_AXIS, OUTER_AXIS, build_hybrid_mesh


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
    """Shards `model` in place: one module for each layer, one for what remains (embedding, head).

    Args:
        model: usually on meta. Real parameters become the main weights; buffers stay.
        mesh: one axis, over all ranks.
        compute_dtype: dtype of the weights and activations in forward and backward.
        reset_parameters: gives a module with parameters on meta its initial weights; see
            `fully_shard_context`.
        main_params_dtype: dtype of the main weights.
        offloaded: the units, `model` for what remains, whose main weights are in host memory from
            the start.
    """
    if config.num_distributed_optimizer_instances > 1:
        mesh = build_hybrid_mesh(
            device.kind, mesh.size(), config.num_distributed_optimizer_instances
        )

    placements = build_placements(config, mesh)
    policy = MixedPrecisionPolicy(
        main_params_dtype=main_params_dtype,
        main_grads_dtype=main_grads_dtype(config, compute_dtype),
        grad_comm_dtype=DTYPES.get(config.megatron_fsdp_grad_comm_dtype),
        compute_dtype=compute_dtype,
    )

    with fully_shard_context(device.torch_device, reset_parameters=reset_parameters):
        for unit in sharding_units(model):
            fully_shard(
                unit,
                mesh,
                placements,
                policy,
                reshard_after_forward=config.megatron_fsdp_reshard_after_forward,
                offload_policy=OffloadPolicy(main_weights_on_host=unit in offloaded),
            )

        fully_shard(
            model,
            mesh,
            placements,
            policy,
            # Its backward begins where its forward ends: weights freed in between would only be
            # gathered again.
            reshard_after_forward=False,
            offload_policy=OffloadPolicy(main_weights_on_host=model in offloaded),
        )


def main_grads_dtype(config: DataParallelConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the gradients that the optimizer reads."""
    # "auto" is no dtype by name, so it gives the compute dtype.
    return DTYPES.get(config.megatron_fsdp_main_grads_dtype or "fp32", compute_dtype)


def build_placements(config: DataParallelConfig, mesh: DeviceMesh) -> Placements:
    """The placements of the strategies that `config` names."""
    if mesh.ndim == 1:
        return Placements.for_strategy(config.data_parallel_sharding_strategy)

    # With several instances the strategy is optim_grads_params: DataParallelConfig checks it.
    outer = Flat() if config.outer_dp_sharding_strategy == "optim" else Replicate()
    return Placements(
        dp_axes=(OUTER_AXIS, INNER_AXIS),
        parameter=(Replicate(), Flat()),
        gradient=(Partial("avg"), Flat()),
        optimizer=(outer, Flat()),
    )


def microbatch_of(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """The scope of one microbatch's forward and backward, for a model of any engine."""
    return microbatch(model.context, is_last) if isinstance(model, FsdpModule) else nullcontext()


def context_of(model: nn.Module) -> FsdpContext | None:
    """The context of a model of this engine; None for any other."""
    return model.context if isinstance(model, FsdpModule) else None
