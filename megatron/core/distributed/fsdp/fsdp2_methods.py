"""`Fsdp2Methods`: the methods of `torch.distributed.fsdp.FSDPModule` on this engine.

Programs look for `isinstance(module, FSDPModule)` and call these methods. Each one either has the
effect that it has in FSDP2 or raises an error that names an alternative; none is inherited, since
FSDP2's implementations read its private state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from megatron.core.distributed.fsdp.uneven_dtensor import SUMS_GRADIENTS
from megatron.core.dtensors import is_partial

# Read at import: programs replace it later.
_FSDP2_FULLY_SHARD = fsdp2.fully_shard.__wrapped__  # type: ignore[attr-defined]


def _rejected(name: str, instead: str) -> Callable[..., None]:
    """A method that raises NotImplementedError, except for calls that disable a feature."""

    def method(_: nn.Module, *arguments: Any, recurse: bool = True, **options: Any) -> None:
        del recurse
        if [*arguments, *options.values()] != [False]:
            _not_offered(name, instead)

    return method


class Fsdp2Methods(nn.Module, FSDPModule):
    """The interface that `FsdpModule` shares with FSDP2."""

    # Where `FSDPModule.__new__` finds the class that was sharded: slices of a sharded
    # `nn.Sequential` are plain again.
    _orig_cls_mro_index = 3

    # Weights

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the full weights and puts them into the module as plain parameters.

        They stay until `reshard`, until a forward that frees its weights, or until the end of a
        backward. Not recursive.

        Args:
            async_op: return a handle at once. Its `wait` puts the parameters in place; the module's
                forward does without.
        """
        unit = _unit_of(self)
        handle = _Unsharding(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the full weights and puts the sharded parameters back. Not recursive.

        RuntimeError inside the module's forward or backward, and if full weights were written to
        after `unshard`: the sharded parameters do not have the new values.
        """
        unit = _unit_of(self)
        if not unit.activity.is_resting:
            raise RuntimeError(
                f"reshard() of a {type(self).__name__} inside its {unit.activity.value} would free "
                "weights that are in use. Call it after that."
            )
        unit._fsdp_rest()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether full weights are freed between forward and backward.

        ValueError for a value that is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"Expected True or False, got {reshard_after_forward!r}.")
        for unit in _units(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether full weights are freed after a backward; if not, the next forward uses them
        unless they have changed.
        """
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether a backward gathers the full weights. False is for modules whose backward
        reads no weight, such as embeddings. Not recursive.
        """
        _unit_of(self).unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules whose weights are gathered while this one computes; default, and for an
        empty list: the next one in the order of registration.
        """
        unit = _unit_of(self)
        unit.forward_prefetch = _references(unit, modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same for the backward."""
        unit = _unit_of(self)
        unit.backward_prefetch = _references(unit, modules)

    # Gradients

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides gradients by `factor` instead of the number of ranks; 1.0 gives sums over the
        ranks. `grad_divisor` still divides the result. Not recursive.

        ValueError for a factor that is not positive.
        """
        if not factor > 0:
            raise ValueError(f"Expected a positive factor, got {factor}.")
        for group in _unit_of(self).parameter_groups:
            if group.gradients is not None:
                group.gradients.divide_sums_by(factor)
            for parameter in group.fsdp_parameters:
                setattr(parameter.sharded, SUMS_GRADIENTS, factor != group.mesh.size())

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether the backwards from here on are a step's last, as `microbatch` does for all
        modules of a context.

        Gradients are reduced in every backward all the same, except on axes on which they are
        Partial: with ZeRO-3 they stay sharded. Sums are kept in the dtype of the main gradients,
        under FSDP2's policy the parameters' own. If that is fp32, sums are equal to FSDP2's; of
        16-bit parameters FSDP2 sums in `reduce_dtype`. Our policy with
        `main_grads_dtype=torch.float32` keeps such sums in fp32 too.
        """
        for unit in _units(self, recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """The same as `set_requires_gradient_sync`, which defers no reduce-scatter of ZeRO-3 and
        HSDP.
        """
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether a step's last backward comes next. Every backward waits for its reductions
        all the same. Recursive.
        """
        for unit in _units(self, recurse=True):
            unit.is_last_backward = is_last_backward

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Not offered on accelerators, whose backend averages, except for False. On the CPU
        gradients are always added up and divided afterwards.
        """
        if enable and _unit_of(self).context.device.is_accelerator:
            _not_offered(
                "set_force_sum_reduction_for_comms(True)",
                "Placements(gradient=[Partial('sum'), ...]) adds up without dividing.",
            )

    # The order of work

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Has the current stream wait for `event`, and with it every gather that comes next."""
        if _unit_of(self).context.device.is_accelerator:
            event.wait()

    def reset_iter_state(self) -> None:
        """Drops full weights, gradients that are not reduced, and partial sums after a forward or
        backward that failed. Without this call, the next forward recovers but keeps partial sums.

        RuntimeError for a module inside another one of the context.
        """
        unit = _unit_of(self)
        if unit.context.is_finalized and not unit.is_root():
            raise RuntimeError(
                f"Expected the outermost sharded module, got a {type(self).__name__} inside it."
            )
        for module in unit.context.forward_order:
            for group in module.parameter_groups:
                group.drop_partial_sums()
        unit.context.abandon_backward()

    # Methods that have no meaning here

    set_custom_all_gather = _rejected(
        "set_custom_all_gather", "Collectives belong to the engine; remove the call."
    )
    set_custom_reduce_scatter = _rejected(
        "set_custom_reduce_scatter", "Collectives belong to the engine; remove the call."
    )
    set_all_reduce_hook = _rejected(
        "set_all_reduce_hook",
        "Pass a mesh of two axes for HSDP, or change parameter.grad between backward and step.",
    )
    set_reduce_scatter_unused_params = _rejected(
        "set_reduce_scatter_unused_params",
        "Add 0.0 * parameter.sum() of parameters that only some ranks use to the loss.",
    )
    set_reduce_scatter_max_input_buffers = _rejected(
        "set_reduce_scatter_max_input_buffers",
        "At most two reductions are in flight; remove the call.",
    )
    set_separate_reduce_scatter_group = _rejected(
        "set_separate_reduce_scatter_group",
        "Reductions between machines have a separate process group anyway; remove the call.",
    )
    set_allocate_memory_from_process_group_for_comm = _rejected(
        "set_allocate_memory_from_process_group_for_comm",
        "Staging buffers are ordinary memory; remove the call.",
    )
    set_symm_mem_for_comm = _rejected(
        "set_symm_mem_for_comm", "Staging buffers are ordinary memory; remove the call."
    )
    _set_unshard_async_op = _rejected(
        "_set_unshard_async_op", "Gathers always run on a lane; remove the call."
    )

    def _get_fsdp_state(self) -> Any:
        # `register_fsdp_forward_method` calls this.
        return _Fsdp2State(_unit_of(self))


class _Unsharding(UnshardHandle):
    """A gather that `unshard` has started."""

    def __init__(self, unit: Any) -> None:
        self._unit: Any = unit
        if unit.activity.is_resting:
            unit._fsdp_gather()

    def wait(self) -> None:
        """Puts the full parameters into the module, unless its forward has used them already."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.activity.is_resting and unit.is_unsharded:
            unit._fsdp_hold()


def add_fsdp2_state(module: Any) -> None:
    """Sets the attributes that PyTorch's pipelining reads from
    `torch.distributed.fsdp.fully_shard.state(module)`. RuntimeError, by PyTorch, if that
    `fully_shard` is applied to the module later.
    """
    states = vars(module).setdefault(STATE_KEY, {})
    states[_FSDP2_FULLY_SHARD] = _Fsdp2State(weakref.proxy(module._fsdp_unit))


class _Fsdp2State:
    """The parts of a module's FSDP2 state that PyTorch's functions use: the two hooks that
    `register_fsdp_forward_method` puts around a method, and the method that
    `torch.distributed.pipelining` calls after the backward of the last microbatch.
    """

    def __init__(self, unit: Any) -> None:
        self._unit = unit
        # Pipelining calls `post_backward` of their parameter groups, which is part of the callback.
        self._state_ctx = SimpleNamespace(all_states=())

    def _root_post_backward_final_callback(self) -> None:
        """Reduces gradients over the axes that earlier backwards have left out, and frees the full
        weights.
        """
        context = self._unit.context
        for module in context.backward_order:
            groups = [
                group
                for group in module.parameter_groups
                if any(is_partial(own.sharded.grad) for own in group.fsdp_parameters)
            ]
            context.reduce(groups, module.requires_gradient_sync)
        context.finish_backward()

    @_disable_dynamo  # as the hooks of forwards are
    def _pre_forward(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = self._unit._fsdp_pre_method(args, kwargs)
        return args, kwargs

    @_disable_dynamo
    def _post_forward(self, _: nn.Module, __: Any, output: Any) -> Any:
        return self._unit._fsdp_post_method(output)

    def __getattr__(self, name: str) -> NoReturn:
        _not_offered(
            f"FSDP2's private {name}",
            "Functions of PyTorch that read FSDP2's state, share_comm_ctx and FSDPMemTracker among "
            "them, do not work on modules of this project.",
        )


def _not_offered(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not offered by megatron.core's fully_shard. {instead}")


def _unit_of(module: Fsdp2Methods) -> Any:
    """The `FsdpModule` that has the state of the module's unit."""
    return module._fsdp_unit


def _units(module: Fsdp2Methods, recurse: bool) -> Iterator[Any]:
    """The unit of the module, then the units of the modules inside it."""
    for other in module.modules() if recurse else (module,):
        if isinstance(other, Fsdp2Methods):
            yield _unit_of(other)


def _references(unit: Any, modules: list[FSDPModule]) -> list[weakref.ref[Any]]:
    """ValueError for a module of another context, or one that is not sharded."""
    units = []
    for module in modules:
        if not isinstance(module, Fsdp2Methods) or _unit_of(module).context is not unit.context:
            raise ValueError(
                f"Expected modules of the same sharded model, got a {type(module).__name__} "
                "outside it."
            )
        units.append(weakref.ref(_unit_of(module)))
    return units
