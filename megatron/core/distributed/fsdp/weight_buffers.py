"""`WeightBuffers`: the buffers of a parameter group's weights.

    buffer                 placements    contents
    main                   optimizer     updated by the optimizer, on the device or in host memory
    model                  parameter     compute weights between uses
    post_optimizer_model   optimizer     the part of `model` that this rank's main weights become,
                                         a view of it
    unsharded              in_use        compute weights in use: all rows, or, where axes are kept,
                                         this rank's block of them

Buffers that would hold the same are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from megatron.core.device import Device
from megatron.core.distributed.fsdp.aliases import apart
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.host_memory import HostSlab


class WeightBuffers(NamedTuple):
    """The buffers of a parameter group's weights."""

    main: DBuffer
    model: DBuffer
    post_optimizer_model: DBuffer
    unsharded: DBuffer

    @classmethod
    def make(cls, plan: GroupPlan, mesh: DeviceMesh, device: Device) -> WeightBuffers:
        """Allocates them, uninitialised."""
        placements, layout, dtype = plan.placements, plan.layout, plan.dtype

        def allocate(where: Sequence[Placement], dtype: torch.dtype) -> DBuffer:
            return DBuffer(mesh, where, layout, dtype, device.torch_device)

        model = post_optimizer_model = allocate(placements.parameter, dtype)
        if placements.optimizer != placements.parameter:
            post_optimizer_model = model.view(placements.optimizer)

        main = post_optimizer_model
        if plan.is_on_host:
            main = _host_buffer(plan, mesh, device)
        elif plan.has_own_main:
            main = allocate(placements.optimizer, plan.main_dtype)
        elif main is not model:
            # Gathering the rest of the model weights is no change of the main weights.
            part = apart(main.local_buffer)
            main = DBuffer.from_local(part, mesh, placements.optimizer, layout)
            post_optimizer_model = main

        unsharded = allocate(placements.in_use, dtype) if plan.is_gathered else model
        return cls(main, model, post_optimizer_model, unsharded)


def _host_buffer(plan: GroupPlan, mesh: DeviceMesh, device: Device) -> DBuffer:
    # Not pinned, since the main weights themselves never travel.
    slab = HostSlab(plan.main_nbytes, device, is_pinned=False, purpose="main weights")
    flat = slab.tensor(0, plan.optimizer_numel, plan.main_dtype)
    return DBuffer.from_local(flat, mesh, plan.placements.optimizer, plan.layout)
