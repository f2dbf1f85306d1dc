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
from megatron.core.distributed.fsdp.group_memory import has_own_main, is_gathered
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import Placements
from megatron.core.host_memory import HostSlab


class WeightBuffers(NamedTuple):
    """The buffers of a parameter group's weights."""

    main: DBuffer
    model: DBuffer
    post_optimizer_model: DBuffer
    unsharded: DBuffer

    @classmethod
    def make(
        cls,
        mesh: DeviceMesh,
        placements: Placements,
        layout: GlobalLayout,
        main_dtype: torch.dtype,
        dtype: torch.dtype,
        device: Device,
        is_on_host: bool,
    ) -> WeightBuffers:
        """Allocates them, uninitialised.

        Args:
            main_dtype: of the main weights.
            dtype: of the compute weights.
            is_on_host: whether the main weights are in host memory, apart from compute weights.
        """

        def allocate(where: Sequence[Placement], dtype: torch.dtype) -> DBuffer:
            return DBuffer(mesh, where, layout, dtype, device.torch_device)

        model = post_optimizer_model = allocate(placements.parameter, dtype)
        if placements.optimizer != placements.parameter:
            post_optimizer_model = model.view(placements.optimizer)

        main = post_optimizer_model
        if is_on_host:
            main = _host_buffer(mesh, placements.optimizer, layout, main_dtype, device)
        elif has_own_main(main_dtype, dtype, is_on_host=is_on_host):
            main = allocate(placements.optimizer, main_dtype)
        elif main is not model:
            # Gathering the rest of the model weights is no change of the main weights.
            part = apart(main.local_buffer)
            main = DBuffer.from_local(part, mesh, placements.optimizer, layout)
            post_optimizer_model = main

        unsharded = model
        if is_gathered(layout, model.range.numel):
            unsharded = allocate(placements.in_use, dtype)
        return cls(main, model, post_optimizer_model, unsharded)


def _host_buffer(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    layout: GlobalLayout,
    dtype: torch.dtype,
    device: Device,
) -> DBuffer:
    numel = DBuffer(mesh, placements, layout, dtype, "meta").range.numel
    # Not pinned, since the main weights themselves never travel.
    slab = HostSlab(numel * dtype.itemsize, device, is_pinned=False, purpose="main weights")
    return DBuffer.from_local(slab.tensor(0, numel, dtype), mesh, placements, layout)
