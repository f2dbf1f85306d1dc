"""What engine, optimizer and checkpoints ask of a DTensor: its local part, and partial sums."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Partial


def local_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    """A DTensor's local tensor itself; any other tensor as it is."""
    assert tensor is not None, "asked of what has a gradient"
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
