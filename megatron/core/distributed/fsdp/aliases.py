"""Tensors and DTensors over memory that is there already."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.dtensors import dtensor_over


def dtensor_like(other: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over local rows of any dtype, distributed and shaped as another one.

    Args:
        local: shaped as the other one's local tensor.
    """
    meta = other._spec.tensor_meta
    assert meta is not None, "every DTensor that holds data has one"
    if isinstance(other, UnevenDTensor):
        return UnevenDTensor.over(
            local, other.device_mesh, other.placements, meta.shape, meta.stride
        )
    return dtensor_over(local, replace(other._spec, tensor_meta=meta._replace(dtype=local.dtype)))


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory with a separate version counter: autograd does not take
    writes to one for changes of the other.
    """
    # A view, or what `detach` returns, would share the counter.
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
