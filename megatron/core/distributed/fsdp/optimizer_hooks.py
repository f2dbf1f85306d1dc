"""Hooks that run before and after every optimizer's step over sharded parameters."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.fsdp.collective_history import compare, is_any_uncompared
from megatron.core.distributed.fsdp.group_weights import REPLACED, WHOLE
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.uneven_rows import UnevenRows, recut
from megatron.core.dtensors import check_whole

# Left on an optimizer that `fully_shard_optimizer` has prepared.
_CASTS_GRADIENTS = "_fsdp_casts_gradients"
# The attribute of classes of optimizers that cut loaded states as their parameters themselves.
RECUTS_ON_LOAD = "recuts_states_on_load"


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, *, precision_aware: bool = False
) -> None:
    """Lets an optimizer over sharded parameters take gradients of another dtype, and
    reject partial sums.

    Gradients are cast to the parameters' dtype for the time of a step. Compute weights need no
    call: they follow the main weights when they are used next, once for each group.

    Args:
        optimizer: over the parameters that `fully_shard` has made.
        precision_aware: the optimizer takes gradients in their dtype, as `FusedAdam` does. They
            are not cast then.

    Raises:
        TypeError: for anything but a `torch.optim.Optimizer`.
        ValueError: if it has no sharded parameters, or some that `fully_shard` has replaced.

    Later, by `optimizer.step()`:
        RuntimeError: for gradients whose last microbatch is still to come.
        NotImplementedError: for a closure, where gradients have to be cast.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")

    _check_replaced(optimizer, ValueError)
    if not any(group_of(parameter) for parameter in _parameters(optimizer)):
        raise ValueError(
            "Expected an optimizer over sharded parameters, got none among its parameters."
        )

    if precision_aware:
        optimizer.register_step_pre_hook(_refuse_partial_sums)
        return
    vars(optimizer)[_CASTS_GRADIENTS] = True
    casts = _GradientCasts()
    optimizer.register_step_pre_hook(casts.before_step)
    optimizer.register_step_post_hook(casts.after_step)


@_disable_dynamo
def _refuse_partial_sums(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    check_whole(gradient for _, gradient in _with_gradient(optimizer))


class _Cast(NamedTuple):
    """A parameter whose gradient has been cast for the time of a step."""

    parameter: nn.Parameter
    original: torch.Tensor
    gradient: torch.Tensor | None


class _GradientCasts:
    """Casts gradients to their parameters' dtype before a step, and puts them back after it."""

    def __init__(self) -> None:
        self._uncast: list[_Cast] = []

    @_disable_dynamo
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A step may run inside another, a subclass's, and a step that raised leaves its casts
        # behind: casts still in place are put back later, the rest is stale.
        self._uncast = [cast for cast in self._uncast if cast.parameter.grad is cast.gradient]
        with_gradient = _with_gradient(optimizer)
        check_whole(gradient for _, gradient in with_gradient)

        to_cast = [
            (parameter, gradient)
            for parameter, gradient in with_gradient
            if gradient.dtype != parameter.dtype
        ]
        # The first argument of a hook is the optimizer.
        if to_cast and any(closure is not None for closure in (*args[1:], *kwargs.values())):
            raise NotImplementedError(
                "Expected step without a closure, got one: gradients are cast from "
                f"{to_cast[0][1].dtype} to {to_cast[0][0].dtype} before step, not after a closure."
            )
        for parameter, gradient in to_cast:
            parameter.grad = gradient.to(parameter.dtype)
            self._uncast.append(_Cast(parameter, gradient, parameter.grad))

    @_disable_dynamo
    def after_step(self, *_: Any) -> None:
        while self._uncast:
            cast = self._uncast.pop()
            cast.parameter.grad = cast.original


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
                    register_optimizer_step_pre_hook(_pre_step),
                    register_optimizer_step_post_hook(_post_step),
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
    for as long as `context` lives. Ignores plain parameters.
    """
    _hooks.follow(context)


@_disable_dynamo  # `step()` may be called inside of a compiled function
def _pre_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _check_agreement(optimizer)
    _check_gradient_dtypes(optimizer)
    _recut_states(optimizer)
    # The backward of a closure is still to come.
    return (
        (args[0], *(_compared(optimizer, value) for value in args[1:])),
        {name: _compared(optimizer, value) for name, value in kwargs.items()},
    )


def _compared(optimizer: torch.optim.Optimizer, value: Any) -> Any:
    """A closure that compares the ranks after the gradients have been computed; any other argument
    of a step as it is.
    """
    if not callable(value):
        return value

    @functools.wraps(value)
    def closure() -> Any:
        loss = value()
        _check_agreement(optimizer)
        return loss

    return closure


def _check_agreement(optimizer: torch.optim.Optimizer) -> None:
    """RuntimeError, on all ranks, if they have not done the same since the last step."""
    # After `train_step`, which has compared: there is no time to look at every parameter.
    if not is_any_uncompared():
        return
    groups = _groups(optimizer)
    updated = {
        id(each)
        for each in _parameters(optimizer)
        if each.grad is not None or getattr(each, "decoupled_grad", None) is not None
    }
    for group in groups:
        group.record_ready(updated)
    compare(history for group in groups for history in group.histories)


def _recut_states(optimizer: torch.optim.Optimizer) -> None:
    """Distributes loaded states over the ranks as their parameters are.

    `set_optimizer_state_dict(full_state_dict=True)` distributes states evenly. Steps would be right
    even so, but every one of them would gather every state.
    """
    # Between the scalars of a step and its first kernel there is no time to look at every state.
    if getattr(type(optimizer), RECUTS_ON_LOAD, False):
        return

    # `optimizer.state` would wait for pending updates if the optimizer is offloaded.
    states = vars(optimizer).get("state", {})
    for parameter, values in states.items():
        if isinstance(parameter, UnevenRows) and isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, DTensor):
                    values[name] = recut(value, parameter)


def _check_sharded(optimizer: torch.optim.Optimizer) -> None:
    """RuntimeError for an optimizer over whole weights, or over weights from before
    `fully_shard`.
    """
    _check_replaced(optimizer, RuntimeError)
    num_whole = sum(WHOLE in vars(parameter) for parameter in _parameters(optimizer))
    if num_whole:
        raise RuntimeError(
            f"The optimizer has {num_whole} whole weights, which are in a sharded module for a "
            "time: after a forward with reshard_after_forward=False or after unshard(). It "
            "cannot train them. Build it before the first forward, or call reshard() on the "
            "modules first."
        )


def _check_replaced(
    optimizer: torch.optim.Optimizer, error: type[ValueError | RuntimeError]
) -> None:
    """Raises `error` for an optimizer over weights from before `fully_shard`, which never get a
    gradient.
    """
    replaced = [REPLACED in vars(parameter) for parameter in _parameters(optimizer)]
    if any(replaced):
        raise error(
            f"fully_shard replaced {sum(replaced)} of the optimizer's {len(replaced)} parameters "
            "after it was built, so they will never have a gradient. Build the optimizer after "
            "sharding, or put the sharded parameters into its param_groups."
        )


def _check_gradient_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """RuntimeError with advice where torch's own optimizers would fail on gradients of
    another dtype.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or _CASTS_GRADIENTS in vars(
        optimizer
    ):
        return
    for parameter in _parameters(optimizer):
        gradient = parameter.grad
        if (
            gradient is not None
            and gradient.dtype != parameter.dtype
            and group_of(parameter) is not None
        ):
            raise RuntimeError(
                f"Expected gradients in {parameter.dtype}, as the main weights, got "
                f"{gradient.dtype}: call fully_shard_optimizer(optimizer), or choose "
                "MixedPrecisionPolicy's dtypes alike."
            )


@_disable_dynamo
def _post_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # After the step, before which there is no time to look at every parameter.
    _check_sharded(optimizer)
    _mark_updated(optimizer)


def _mark_updated(optimizer: torch.optim.Optimizer) -> None:
    """Records an optimizer's step, and marks the compute weights as stale, unless the optimizer
    delivers them itself.
    """
    for group in _groups(optimizer):
        group.record_step()
        if not group.delivery.is_claimed_by(optimizer):
            group.mark_updated()


def _groups(optimizer: torch.optim.Optimizer) -> list[FsdpParameterGroup]:
    """The parameter groups of an optimizer's sharded parameters, in their order."""
    found = (group_of(parameter) for parameter in _parameters(optimizer))
    return list({id(group): group for group in found if group is not None}.values())


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _with_gradient(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """The sharded parameters that have a gradient, with it."""
    return [
        (parameter, parameter.grad)
        for parameter in _parameters(optimizer)
        if parameter.grad is not None and group_of(parameter) is not None
    ]
