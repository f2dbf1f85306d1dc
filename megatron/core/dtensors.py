"""Access of engine, optimizer and checkpoints to a DTensor: its local part, and partial sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def local_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    """A DTensor's local tensor itself; any other tensor as it is."""
    assert tensor is not None, "callers pass tensors with a gradient only"
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_partial(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is a sum that has still to be reduced."""
    return isinstance(gradient, DTensor) and any(
        isinstance(placement, Partial) for placement in gradient.placements
    )


def check_whole(gradients: Iterable[torch.Tensor | None]) -> None:
    """RuntimeError if one of the gradients that an optimizer is about to read is a partial sum."""
    if any(is_partial(gradient) for gradient in gradients):
        raise RuntimeError(
            "Expected the gradients of a whole step, got partial sums: the last microbatch has to "
            "run in microbatch(context, is_last=True)."
        )


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


def deep_copied(tensor: DTensor, memo: dict[int, Any]) -> Any:
    """What `__deepcopy__` of a DTensor's subclass returns: a copy of the data alone.

    The default would copy attributes too, but a copy belongs to no parameter group.

    Raises:
        RuntimeError: for a tensor with a graph, as torch.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Expected a leaf to deep-copy, got a tensor with a graph. Detach it first."
        )

    copied: Any = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        copied.requires_grad_()
    memo[id(tensor)] = copied

    return copied
