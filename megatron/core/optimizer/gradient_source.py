"""Which attribute of a parameter an optimizer reads its gradient from.

    grad             autograd's: it has the parameter's dtype
    decoupled_grad   with `use_decoupled_grad`, as in TransformerEngine: the caller's, of any dtype

A parameter without a gradient is not stepped. One whose gradient lies in an attribute that the
optimizer does not read would not be stepped either, and nothing would say so; it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.core.dtensors import local_tensor

# `main_grad` is where Megatron's DistributedDataParallel adds gradients up.
_ATTRIBUTES = ("grad", "decoupled_grad", "main_grad")


def gradient_of(parameter: torch.Tensor, use_decoupled_grad: bool) -> torch.Tensor | None:
    """The gradient that an optimizer reads; None if there is none."""
    found: torch.Tensor | None = getattr(parameter, _attribute(use_decoupled_grad), None)
    return found


def check_not_elsewhere(parameter: torch.Tensor, use_decoupled_grad: bool, place: str) -> None:
    """ValueError for a parameter whose gradient is in an attribute that is not read.

    Args:
        place: the parameter, for the message.
    """
    read = _attribute(use_decoupled_grad)
    if gradient_of(parameter, use_decoupled_grad) is not None:
        return
    for name in _ATTRIBUTES:
        if getattr(parameter, name, None) is not None:
            raise ValueError(
                f"Expected the gradient of {place} in .{read}, as use_decoupled_grad="
                f"{use_decoupled_grad} says, got one in .{name} alone."
            )


def clear_gradients(
    parameters: Iterable[torch.Tensor],
    use_decoupled_grad: bool,
    set_to_none: bool,
) -> None:
    """Clears what an optimizer reads: to None, or in place to zero."""
    for parameter in parameters:
        gradient = gradient_of(parameter, use_decoupled_grad)
        if gradient is None:
            continue
        if set_to_none:
            setattr(parameter, _attribute(use_decoupled_grad), None)
        else:
            local_tensor(gradient).detach().zero_()


def _attribute(use_decoupled_grad: bool) -> str:
    return "decoupled_grad" if use_decoupled_grad else "grad"
