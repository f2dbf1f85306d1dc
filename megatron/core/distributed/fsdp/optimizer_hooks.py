"""What every optimizer's step does with sharded parameters, before it and after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.uneven_rows import UnevenRows, recut

# Left on an optimizer that `fully_shard_optimizer` has prepared.
CASTS_GRADIENTS = "_fsdp_casts_gradients"
# The attribute of classes of optimizers that cut loaded states as their parameters themselves.
RECUTS_ON_LOAD = "recuts_states_on_load"


def follow_optimizers() -> tuple[RemovableHandle, RemovableHandle]:
    """Registers the hooks on all optimizers there are and will be; they do nothing for plain
    parameters.
    """
    return register_optimizer_step_pre_hook(_recut_states), register_optimizer_step_post_hook(
        _mark_updated
    )


def _recut_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before any optimizer's step: states that PyTorch's helpers have loaded lie on the ranks as
    their parameters do.

    `set_optimizer_state_dict(full_state_dict=True)` distributes states evenly. Steps would be right
    even so, but every one of them would gather every state.
    """
    _check_gradient_dtypes(optimizer)

    if getattr(type(optimizer), RECUTS_ON_LOAD, False):
        # between the scalars of a step and its first kernel there is no time to look at every state
        return

    # Not by the attribute, which waits for updates under way where an optimizer is offloaded. Such
    # a one does this when it loads.
    states = vars(optimizer).get("state", {})
    for parameter, values in states.items():
        if isinstance(parameter, UnevenRows) and isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, DTensor):
                    values[name] = recut(value, parameter)


def _check_gradient_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """RuntimeError where torch's own optimizers would fail on gradients of another dtype, with a
    word of what to do.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or CASTS_GRADIENTS in vars(
        optimizer
    ):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if (
                gradient is not None
                and gradient.dtype != parameter.dtype
                and group_of(parameter) is not None
            ):
                raise RuntimeError(
                    f"Expected gradients in {parameter.dtype}, as the main weights, got "
                    f"{gradient.dtype}: call "
                    "fully_shard_optimizer(optimizer), or choose MixedPrecisionPolicy's dtypes "
                    "alike."
                )


def _mark_updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """After any optimizer's step: the compute weights of what it has stepped are out of date, or
    will be delivered.
    """
    for group in {id(group): group for group in _groups_of(optimizer)}.values():
        if not group.delivery.is_claimed_by(optimizer):
            group.mark_updated()


def _groups_of(optimizer: torch.optim.Optimizer) -> Iterator[FsdpParameterGroup]:
    for parameter_group in optimizer.param_groups:
        for parameter in parameter_group["params"]:
            group = group_of(parameter)
            if group is not None:
                yield group
