"""What happens to sharded parameters before and after every optimizer's step."""

from __future__ import annotations

import threading
import weakref
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


class _OptimizerHooks:
    """The hooks that torch runs around every optimizer's step, registered while a context lives.

    They look at an optimizer's parameters only, so one pair serves all contexts: a pair for each
    would repeat the same work in every step.
    """

    def __init__(self) -> None:
        self._contexts: set[object] = set()  # a token for each that lives
        self._handles: list[RemovableHandle] = []
        # Reentrant, since a garbage collection inside it may end a context.
        self._lock = threading.RLock()

    def follow(self, context: object) -> None:
        """Keeps the hooks registered as long as `context` lives."""
        token = object()
        with self._lock:
            self._contexts.add(token)
            weakref.finalize(context, self._leave, token).atexit = False
            if not self._handles:
                self._handles = [
                    register_optimizer_step_pre_hook(_before_step),
                    register_optimizer_step_post_hook(_mark_updated),
                ]

    def _leave(self, token: object) -> None:
        with self._lock:
            self._contexts.discard(token)
            if not self._contexts:
                for handle in self._handles:
                    handle.remove()
                self._handles = []


# One for the process, as are torch's own tables of these hooks.
_hooks = _OptimizerHooks()


def follow_optimizers(context: object) -> None:
    """Has every optimizer's step, of optimizers yet to be made too, keep sharded parameters right
    for as long as `context` lives. Does nothing for plain parameters.
    """
    _hooks.follow(context)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _check_gradient_dtypes(optimizer)
    _recut_states(optimizer)


def _recut_states(optimizer: torch.optim.Optimizer) -> None:
    """Distributes loaded states over the ranks as their parameters are.

    `set_optimizer_state_dict(full_state_dict=True)` distributes states evenly. Steps would be right
    even so, but every one of them would gather every state.
    """
    # Between the scalars of a step and its first kernel there is no time to look at every state.
    if getattr(type(optimizer), RECUTS_ON_LOAD, False):
        return

    # `optimizer.state` would wait for updates under way if the optimizer is offloaded.
    states = vars(optimizer).get("state", {})
    for parameter, values in states.items():
        if isinstance(parameter, UnevenRows) and isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, DTensor):
                    values[name] = recut(value, parameter)


def _check_gradient_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """RuntimeError that says what to do, where torch's own optimizers would fail on gradients of
    another dtype.
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
    """Marks the compute weights of what an optimizer has stepped as stale, unless it delivers
    them itself.
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
