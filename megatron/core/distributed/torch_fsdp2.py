"""The reference engine: PyTorch FSDP2 (`torch.distributed.fsdp.fully_shard`).

Parameters, gradients and optimizer states are DTensors, `Shard(0)` over the data-parallel mesh, in
fp32. With bf16 compute the layers' inputs and gathered weights are bf16 and gradients are reduced
in fp32.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from megatron.core.distributed.units import sharding_units
from megatron.core.fp32_module import Fp32Module
from megatron.core.issued_collectives import issuing


def shard_model(
    model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shards `model` in place: one group for each layer, one for what remains (embedding, head).
    With 16-bit compute, each `Fp32Module` is a group as well.

    Args:
        model: on any device, meta included; its parameters must be fp32.
        mesh: one axis.
        compute_dtype: dtype of gathered weights and of activations; gradients are averaged over
            ranks in fp32.
        reshard_after_forward: free a layer's gathered weights between its forward and its backward.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"Expected a mesh with one axis, got {mesh.ndim} axes {mesh.mesh_dim_names}."
        )

    # The layers' inputs already have the compute dtype, except inputs that must stay fp32 (rotary
    # angles).
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if compute_dtype.itemsize < torch.float32.itemsize:
        _shard_fp32_modules(model, mesh)
    for unit in sharding_units(model):
        if not isinstance(unit, FSDPModule):
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
    # The root's backward starts where its forward ends: freeing its weights in between would only
    # gather them again.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_RecordedAllGather())
            module.set_custom_reduce_scatter(_RecordedReduceScatter())


def _shard_fp32_modules(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes each `Fp32Module` a group, before the layers that contain them: a group of FSDP2 has
    one compute dtype, and takes the parameters that inner groups have left.

    NotImplementedError for one with parameters of inner modules, which would be fp32 too.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for name, module in model.named_modules():
        if not isinstance(module, Fp32Module):
            continue

        own = list(module.parameters(recurse=False))
        if len(list(module.parameters())) > len(own):
            raise NotImplementedError(
                f"Expected Fp32Modules without parameters of inner modules with FSDP2, got {name}."
            )
        if own:
            # They are few: keeping them for the backward costs less than a gather.
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Frees the full weights of all groups; `model` has its sharded parameters again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# PyTorch issues these collectives itself, and the watchdog has to see them too.


class _RecordedAllGather(DefaultAllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with issuing(f"all-gather of {output_tensor.numel()} elements", output_tensor):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _RecordedReduceScatter(DefaultReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        with issuing(f"reduce-scatter of {input_tensor.numel()} elements", input_tensor):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
