"""The reference engine: PyTorch FSDP2 (`torch.distributed.fsdp.fully_shard`).

Parameters, gradients and optimizer states are DTensors, `Shard(0)` over the data-parallel mesh, in fp32. With bf16
compute the layers' inputs and gathered weights are bf16 and gradients are reduced in fp32.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron.core.distributed.units import sharding_units


def shard_model(model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """Shards `model` in place over `mesh`: one group for each layer, one for what remains (embedding, head).

    Args:
        model: on any device, meta included; its parameters must be fp32.
        mesh: one axis.
        compute_dtype: dtype of gathered weights and of activations; gradients are averaged over ranks in fp32.
        reshard_after_forward: free a layer's gathered weights between its forward and its backward.
    """
    if mesh.ndim != 1:
        raise ValueError(f"Expected a mesh with one axis, got {mesh.ndim} axes {mesh.mesh_dim_names}.")
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # The layers' inputs already have the compute dtype. What is fp32 among them (rotary angles) must stay so.
        cast_forward_inputs=False,
    )
    for unit in sharding_units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root's backward begins where its forward ends: freeing its weights in between would only gather them again.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Frees the whole weights of all groups: `model`'s parameters are the sharded ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
