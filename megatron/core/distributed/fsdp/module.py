"""`FsdpModule`: a module whose parameters are sharded at rest and whole while it computes.

    forward     before: full weights, and those of the next module begin to come
                after: sharded again, unless reshard_after_forward is False and a backward will
                follow
    backward    before, when the gradient of an output is there: full weights, and those of the module before begin to
                come
                after, when the gradients of all inputs are there: sharded again, gradients begin to
                be reduced
    at the end  of the whole backward: whatever is left, and waiting for the last reductions

A module that is run again inside a backward, to recompute its activations, gets its full weights
and keeps them for its own backward.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.fsdp.context import FsdpContext, is_backward_running, reshard
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup

T = TypeVar("T")

# What an output may hold besides tensors without anybody wondering whether a tensor hides in it.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


class _Call:
    """One call of a module's forward. The hooks on its graph hold it."""

    def __init__(self, number_of_pass: int) -> None:
        self.number_of_pass = number_of_pass
        self.has_backward = False  # which has begun


class FsdpModule(nn.Module):
    """Mixed into the class of a module by `fully_shard`, never constructed.

    Attributes:
        context: shared with the other modules of the model.
        parameter_groups: the parameters of this module and of those in it that are not sharded
            themselves.
        phase: see `Phase`.
        reshard_after_forward: whether full weights are freed between forward and backward. May be
            changed.
    """

    class Phase(enum.Enum):
        """What a module is doing.

            phase          full weights              goes to
            RESTING        freed, with exceptions    FORWARD, CHECKPOINTING, BACKWARD
            CHECKPOINTED   freed, with exceptions    FORWARD, CHECKPOINTING, BACKWARD
            FORWARD        in use                    RESTING
            CHECKPOINTING  in use                    CHECKPOINTED
            BACKWARD       in use                    RESTING

        Exceptions are `reshard_after_forward=False` and a recomputation, whose weights are kept for
        the backward. A failed forward leads back to the phase before it, a failed backward to
        RESTING. A recomputation inside the module's own backward stays BACKWARD.

        CHECKPOINTING and CHECKPOINTED belong to reentrant checkpoints, which first run a module
        without building a graph, on inputs that have one. Its outputs have no hook that would
        announce a backward, so the phase does. It lasts until that backward begins.
        """

        RESTING = "resting"
        CHECKPOINTED = "checkpointed"
        FORWARD = "forward"
        CHECKPOINTING = "checkpointing"
        BACKWARD = "backward"

        @property
        def is_resting(self) -> bool:
            """Whether the module does nothing now."""
            return self in (FsdpModule.Phase.RESTING, FsdpModule.Phase.CHECKPOINTED)

        @property
        def is_forward(self) -> bool:
            """Whether the module's forward is running."""
            return self in (FsdpModule.Phase.FORWARD, FsdpModule.Phase.CHECKPOINTING)

        @property
        def awaits_recomputation(self) -> bool:
            """Whether the module's backward comes after a recomputation."""
            return self in (FsdpModule.Phase.CHECKPOINTED, FsdpModule.Phase.CHECKPOINTING)

        @property
        def at_rest(self) -> FsdpModule.Phase:
            """The phase in which a module comes to rest from this one."""
            phases = FsdpModule.Phase
            return phases.CHECKPOINTED if self.awaits_recomputation else phases.RESTING

    context: FsdpContext
    parameter_groups: list[FsdpParameterGroup]
    phase: FsdpModule.Phase
    reshard_after_forward: bool

    # Calls whose backward has not come yet; those whose graph is freed vanish.
    _fsdp_calls: weakref.WeakSet[_Call]
    _fsdp_call: _Call | None  # under way, where there will be a graph
    _fsdp_reduced_pass: int  # of the context, after which gradients have been reduced

    def is_root(self) -> bool:
        """Whether no sharded module of the same context contains this one."""
        return self.context.is_root(self)

    @property
    def is_resting(self) -> bool:
        return self.phase.is_resting

    @property
    def expects_backward(self) -> bool:
        """Whether a backward of this module is to be expected, since its last forward was one of
        training.
        """
        return len(self._fsdp_calls) > 0 or self.phase.awaits_recomputation

    def finish_backward(self) -> None:
        """Leaves nothing of a backward behind: neither whole weights nor gradients that were not
        reduced.
        """
        # A backward inside this module's forward, or, of a checkpoint, inside another backward that
        # has not come to this module yet.
        if self.phase.is_forward or self.phase.awaits_recomputation:
            return
        self._fsdp_rest()
        self._fsdp_reduce()
        self._fsdp_calls = weakref.WeakSet(
            call for call in self._fsdp_calls if not call.has_backward
        )

    def abandon_backward(self) -> None:
        """Forgets a backward that has failed, and its gradients."""
        self._fsdp_rest()
        for group in self.parameter_groups:
            group.forget_gradients()
        self._fsdp_calls = weakref.WeakSet()
        self.phase = FsdpModule.Phase.RESTING

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FsdpModule:
        """`.to()` and its like. Buffers follow; RuntimeError where parameters would change."""
        for module in self.modules():
            for group in module.parameter_groups if isinstance(module, FsdpModule) else ():
                # Where the compute weights are: main weights in host memory stay there whatever
                # happens.
                probe = torch.empty(
                    0, dtype=group.main_weight.dtype, device=group.model_weight.device
                )
                changed = fn(probe)
                if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                    raise RuntimeError(
                        "Expected dtype and device to be settled before fully_shard, got a change "
                        f"from {probe.dtype} "
                        f"on {probe.device} to {changed.dtype} on {changed.device}."
                    )
            for name, buffer in module._buffers.items() if recurse or module is self else ():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    def __deepcopy__(self, memo: Any) -> FsdpModule:
        raise NotImplementedError(
            f"Expected a copy to be made before fully_shard, got one of {type(self).__name__}."
        )

    def _fsdp_before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        is_recomputation = is_backward_running()
        if not is_recomputation:
            self.context.enter_forward(self)
        elif self.phase is FsdpModule.Phase.BACKWARD:
            return None  # recomputed inside its own backward, which has brought the weights
        before = self.phase
        self._fsdp_enter(self._fsdp_forward_phase(args, kwargs, is_recomputation))
        try:
            if is_recomputation:
                self.context.unshard_for_recomputation(self)
            else:
                self.context.unshard_for_forward(self)
            self._fsdp_show_full()
        except BaseException:
            self.phase = before
            self._fsdp_rest()
            raise

        if torch.is_grad_enabled():
            self._fsdp_call = _Call(self.context.num_passes)
            return self._fsdp_watch_inputs(args, kwargs, self._fsdp_call)
        self._fsdp_call = None
        return None

    def _fsdp_forward_phase(self, args: Any, kwargs: Any, is_recomputation: bool) -> Phase:
        is_checkpointed = self.phase.awaits_recomputation
        if not is_recomputation:
            has_graph = any(tensor.requires_grad for tensor in _tensors((args, kwargs)))
            is_checkpointed = has_graph and not torch.is_grad_enabled()
        phases = FsdpModule.Phase
        return phases.CHECKPOINTING if is_checkpointed else phases.FORWARD

    def _fsdp_after_forward(self, output: Any) -> None:
        """Also called after a forward that has raised, with None for its output."""
        if not self.phase.is_forward:
            return
        call, self._fsdp_call = self._fsdp_call, None
        self._fsdp_enter(self.phase.at_rest)
        for group in self.parameter_groups:
            group.show_sharded()
        if call is None:
            reshard(self)
            return
        outputs = [
            tensor for tensor in _tensors(output) if tensor.requires_grad and not tensor.is_leaf
        ]
        if outputs:
            # Who changes a view in place takes its hooks away, but not those of what it is a view
            # of.
            bases = [tensor._base for tensor in outputs if tensor._base is not None]
            watched = outputs + [base for base in bases if base.requires_grad and not base.is_leaf]
            register_multi_grad_hook(
                watched, _weakly(self, FsdpModule._fsdp_before_backward, call), mode="any"
            )
        if is_backward_running():
            self.context.keep_recomputed(self)
            return
        if outputs:
            self._fsdp_calls.add(call)
        # Where a tensor may hide, nothing would tell of its backward, which must find the weights.
        if not _is_opaque(output) and (self.reshard_after_forward or not outputs):
            reshard(self)
        self._fsdp_check_outputs(output)

    def _fsdp_check_outputs(self, output: Any) -> None:
        """RuntimeError if an output is one of the module's whole weights, or a view, whose memory
        goes and comes.
        """
        storages = {
            group.unsharded_weight.local_buffer.untyped_storage()._cdata
            for group in self.parameter_groups
            if group.is_gathered
        }
        if any(
            tensor.untyped_storage()._cdata in storages for tensor in _tensors(output) if storages
        ):
            raise RuntimeError(
                f"Expected outputs of {type(self).__name__} that have memory of their own, got one "
                "of its weights or a "
                "view of one, which is whole only while the module runs. Return a clone."
            )

    def _fsdp_watch_inputs(self, args: Any, kwargs: Any, call: _Call) -> tuple[Any, Any] | None:
        """Inputs that tell when their gradients are there: then this module's part of the backward
        is done.

        A view belongs to this call alone, while the tensor itself may have other uses whose
        gradients come later. Tensors in containers that somebody may go on filling stay themselves;
        they are watched where there is no other.
        """
        views: dict[int, torch.Tensor] = {}

        watched = (
            _viewed(args, views),
            {name: _viewed(value, views) for name, value in kwargs.items()},
        )
        inputs = list(views.values())
        if not inputs:
            inputs = [
                tensor
                for tensor in _tensors((args, kwargs))
                if tensor.requires_grad and not tensor.is_leaf
            ]
        if inputs:
            register_multi_grad_hook(
                inputs, _weakly(self, FsdpModule._fsdp_after_backward, call), mode="all"
            )
        return watched if views else None

    def _fsdp_before_backward(self, _: Any, call: _Call) -> None:
        self.context.enter_backward()
        call.has_backward = True
        if self.phase is FsdpModule.Phase.BACKWARD:
            return
        self._fsdp_enter(FsdpModule.Phase.BACKWARD)
        self.context.unshard_for_backward(self)
        self._fsdp_show_full()

    def _fsdp_after_backward(self, _: Any, call: _Call) -> None:
        self.context.enter_backward()
        self._fsdp_rest()
        self._fsdp_calls.discard(call)
        # Of other calls of the same pass gradients are still to come; those of another have a
        # backward of their own.
        if not any(other.number_of_pass == call.number_of_pass for other in self._fsdp_calls):
            self._fsdp_reduce()

    @torch.no_grad()
    def _fsdp_collect(self, _: Any, place: tuple[int, int]) -> None:
        """A full parameter, the one at `place` in which group, has got its gradient."""
        self.context.enter_backward()
        group_index, index = place
        group = self.parameter_groups[group_index]
        full = group.fsdp_parameters[index].full
        gradient, full.grad = full.grad, None
        if gradient is None or group.gradients is None:
            return
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"Expected a dense gradient for {group.names[index]}, got {gradient.layout}."
            )
        if not group.gradients.received:
            self.context.make_room(group)
        group.gradients.collect(index, gradient.detach())

    def _fsdp_reduce(self) -> None:
        """Begins to reduce what was collected. Once after each pass, ranks also tell each other
        that it is nothing.
        """
        for group in self.parameter_groups:
            if group.gradients is not None and (
                group.gradients.received or self._fsdp_reduced_pass != self.context.num_passes
            ):
                self.context.reduce(group)
        self._fsdp_reduced_pass = self.context.num_passes

    def _fsdp_rest(self) -> None:
        """At rest, from whatever phase: sharded parameters, no full weights."""
        self.phase = self.phase.at_rest
        for group in self.parameter_groups:
            group.show_sharded()
        reshard(self)

    def _fsdp_show_full(self) -> None:
        for group in self.parameter_groups:
            group.show_full()

    def _fsdp_enter(self, phase: Phase) -> None:
        # Between two phases of work lies rest, always.
        if self.phase.is_resting == phase.is_resting:
            raise RuntimeError(
                f"Expected {type(self).__name__} to come to {phase.value} from another phase, got "
                f"{self.phase.value}; "
                "a sharded module cannot run inside itself."
            )
        self.phase = phase


def attach(
    module: nn.Module,
    context: FsdpContext,
    groups: list[FsdpParameterGroup],
    reshard_after_forward: bool,
) -> FsdpModule:
    """Makes `module` an `FsdpModule`, in place and at rest."""
    module.__class__ = _sharded_class(type(module))
    assert isinstance(module, FsdpModule), "it has just become one"
    module.context = context
    module.parameter_groups = groups
    module.reshard_after_forward = reshard_after_forward
    module.phase = FsdpModule.Phase.RESTING
    module._fsdp_call = None
    module._fsdp_calls = weakref.WeakSet()
    module._fsdp_reduced_pass = 0
    for group_index, group in enumerate(groups):
        group.show_sharded()
        for parameter_index, parameter in enumerate(group.fsdp_parameters):
            if group.requires_grad:
                collect = _weakly(module, FsdpModule._fsdp_collect, (group_index, parameter_index))
                parameter.full.register_post_accumulate_grad_hook(collect)
    # Before any other, which are to find whole weights.
    module.register_forward_pre_hook(_before_forward, with_kwargs=True, prepend=True)
    module.register_forward_hook(_after_forward, always_call=True)
    return module


def names_taken(module: nn.Module) -> list[str]:
    """The attributes of a module that stand in the way of those that `attach` gives it."""
    return [
        name for name in (*FsdpModule.__annotations__, *vars(FsdpModule)) if _is_taken(module, name)
    ]


def _is_taken(module: nn.Module, name: str) -> bool:
    return not name.startswith("__") and not hasattr(nn.Module, name) and hasattr(module, name)


def _before_forward(module: FsdpModule, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    return module._fsdp_before_forward(args, kwargs)


def _after_forward(module: FsdpModule, _: Any, output: Any) -> None:
    module._fsdp_after_forward(output)


def _weakly(
    module: FsdpModule, method: Callable[[FsdpModule, Any, T], None], argument: T
) -> Callable[[Any], None]:
    """`method`, with an argument, of a module that autograd must not keep alive."""
    reference = weakref.ref(module)

    def call(gradient: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, gradient, argument)

    return call


# One for each class, so that sharded modules of one class are still of one class.
_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _sharded_classes:
        _sharded_classes[original] = type(f"Fsdp{original.__name__}", (FsdpModule, original), {})
    return _sharded_classes[original]


# A function within its user, calling itself, would be a cycle that keeps the views, and with them
# every layer's inputs, until Python looks for garbage.
def _viewed(value: Any, views: dict[int, torch.Tensor]) -> Any:
    """`value` with views in the place of tensors that require a gradient; one of each, which is
    left in `views`.
    """
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return views.setdefault(id(value), value.view_as(value))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [_viewed(item, views) for item in value]
        if any(item is not before for item, before in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """What nested containers and dataclasses hold."""
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _is_opaque(value: Any) -> bool:
    return not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in _leaves(value))
