"""Tensors and DTensors over memory that is there already."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor


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


def dtensor_over(
    local: torch.Tensor,
    spec: DTensorSpec,
    device: torch.device | None = None,
    cls: type[DTensor] = DTensor,
) -> DTensor:
    """A DTensor over a local tensor, which may start anywhere in its storage. No communication.

    Args:
        device: the DTensor's reported device; default: the device of `local`.
    """
    # A DTensor made over `local` itself would take over its offset in the storage, and code that
    # copies tensors (`copy.deepcopy`) would take it for one with a separate storage.
    placeholder = torch.empty(0, dtype=local.dtype, device=device or local.device)
    dtensor = cls(placeholder, spec, requires_grad=False)
    dtensor._local_tensor = local
    return dtensor


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory with a separate version counter: autograd does not take
    writes to one for changes of the other.
    """
    # A view, or what `detach` returns, would share the counter.
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
