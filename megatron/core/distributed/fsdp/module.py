"""`FsdpModule`: a module whose parameters are sharded at rest and whole while it computes.

    forward     before  gathers its full weights, and begins to gather the next module's
                after   frees them, unless reshard_after_forward is False and a backward will follow
    backward    before  when an output has its gradient: as before a forward; the next module is the
                        one whose backward is expected next
                after   when all inputs have their gradients: frees the full weights and begins to
                        reduce gradients
    at the end  of the whole backward: finishes whatever is left, the last reductions above all

A module that runs again inside a backward, to recompute its activations, gathers its full weights
and keeps them for its own backward.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from megatron.core.distributed.fsdp.context import FsdpContext, is_backward_running, reshard
from megatron.core.distributed.fsdp.nested_tensors import is_opaque, tensors_in, with_views
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup

T = TypeVar("T")


class _Call:
    """One call of a module's forward, kept alive by the hooks on its graph."""

    def __init__(self, number_of_pass: int) -> None:
        self.number_of_pass = number_of_pass
        self.has_backward = False  # whether its backward has begun


class FsdpModule(nn.Module):
    """Mixed into the class of a module by `fully_shard`, never constructed.

    Attributes:
        context: shared with the other modules of the model.
        parameter_groups: the parameters of this module and of those in it that are not sharded
            themselves.
        phase: see `Phase`.
        reshard_after_forward: whether full weights are freed between forward and backward. May be
            changed. None, until all modules are known: unless no module contains this one.
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
    reshard_after_forward: bool | None

    # Calls whose backward has not come yet; those whose graph is freed vanish.
    _fsdp_calls: weakref.WeakSet[_Call]
    _fsdp_call: _Call | None  # under way, where there will be a graph
    _fsdp_reduced_pass: int  # of the context, after which gradients have been reduced

    def is_root(self) -> bool:
        """Whether no sharded module of the same context contains this one."""
        return self.context.is_root(self)

    # Named as in FSDP2

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets `reshard_after_forward` of this module, and of those in it."""
        for module in self.modules() if recurse else (self,):
            if isinstance(module, FsdpModule):
                module.reshard_after_forward = reshard_after_forward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, recurse: bool = True
    ) -> None:
        """Tells whether the forwards and backwards from here on are a step's last, as `microbatch`
        does for those inside it. To be called on the outermost module.

        Gradients are reduced in every backward all the same, but for the axes on which they are
        Partial: with ZeRO-3 they stay sharded. Sums are kept in the dtype of the main gradients,
        under FSDP2's policy the parameters' own. If that is fp32, sums are those that FSDP2 gives;
        of 16-bit parameters FSDP2 sums in `reduce_dtype`. Our policy with
        `main_grads_dtype=torch.float32` keeps such sums in fp32 too.

        RuntimeError for a module inside another one of the context, and for `recurse=False`.
        """
        if not recurse:
            raise RuntimeError(
                "Expected recurse=True: microbatches are those of the whole model, got False."
            )
        if self.context.is_finalized and not self.is_root():
            raise RuntimeError(
                f"Expected the outermost sharded module, got a {type(self).__name__} inside it: "
                "microbatches are those of the whole model."
            )
        self.context.is_last_microbatch = requires_gradient_sync

    @property
    def is_resting(self) -> bool:
        return self.phase.is_resting

    @property
    def expects_backward(self) -> bool:
        """Whether a forward of this module has left a graph, or a recomputation will build one."""
        return len(self._fsdp_calls) > 0 or self.phase.awaits_recomputation

    def finish_backward(self) -> None:
        """Frees full weights that a backward has left, and reduces its gradients."""
        # The backward that has ended ran inside this module's forward, or inside a larger one that
        # has yet to recompute this module: reentrant checkpoints run a backward in a backward.
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
                # On the compute weights' device: main weights in host memory never move.
                probe = torch.empty(
                    0, dtype=group.main_weight.dtype, device=group.model_weight.device
                )
                changed = fn(probe)
                if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                    raise RuntimeError(
                        "Expected dtype and device to be settled before fully_shard, got a change "
                        f"from {probe.dtype} on {probe.device} to {changed.dtype} on "
                        f"{changed.device}."
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
            return None  # recomputed inside its own backward, which has gathered the weights

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
            has_graph = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
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
            tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf
        ]
        if outputs:
            # Writing to a view in place drops the view's hooks, but not those of its base.
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
        # A tensor that hides in the output has no hook that gathers the weights for its backward,
        # so they must stay.
        if not is_opaque(output) and (self.reshard_after_forward or not outputs):
            reshard(self)
        self._fsdp_check_outputs(output)

    def _fsdp_check_outputs(self, output: Any) -> None:
        """RuntimeError if an output is a full weight or a view of one, whose memory is freed."""
        storages = {
            group.unsharded_weight.local_buffer.untyped_storage()._cdata
            for group in self.parameter_groups
            if group.is_gathered
        }
        if any(
            tensor.untyped_storage()._cdata in storages for tensor in tensors_in(output) if storages
        ):
            raise RuntimeError(
                f"Expected outputs of {type(self).__name__} that have memory of their own, got one "
                "of its weights or a view of one, which is whole only while the module runs. "
                "Return a clone."
            )

    def _fsdp_watch_inputs(self, args: Any, kwargs: Any, call: _Call) -> tuple[Any, Any] | None:
        """Has the inputs' gradients end this module's part of the backward. Returns inputs to use
        instead, or None.

        A view belongs to this call alone, while the tensor itself may have other uses, whose
        gradients come later. Tensors for which there is no view are watched only if nothing else
        can be.
        """
        views: dict[int, torch.Tensor] = {}
        watched = (
            with_views(args, views),
            {name: with_views(value, views) for name, value in kwargs.items()},
        )

        inputs = list(views.values())
        if not inputs:
            inputs = [
                tensor
                for tensor in tensors_in((args, kwargs))
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
        # Other calls of the same pass still have gradients to come; those of another pass have a
        # backward of their own.
        if not any(other.number_of_pass == call.number_of_pass for other in self._fsdp_calls):
            self._fsdp_reduce()

    @torch.no_grad()
    def _fsdp_collect(self, _: Any, place: tuple[int, int]) -> None:
        """Takes the gradient of a full parameter; `place` is (group, index in the group)."""
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
        # The first gradient of a group takes memory for all of them.
        if not group.gradients.received:
            self.context.make_room(group)
        group.gradients.collect(index, gradient.detach())

    def _fsdp_reduce(self) -> None:
        """Begins to reduce what was collected.

        Once in each pass, groups without gradients take part too: other ranks may have some.
        """
        for group in self.parameter_groups:
            if group.gradients is not None and (
                group.gradients.received or self._fsdp_reduced_pass != self.context.num_passes
            ):
                self.context.reduce(group)
        self._fsdp_reduced_pass = self.context.num_passes

    def _fsdp_rest(self) -> None:
        """Comes to rest from any phase, with sharded parameters and no full weights."""
        self.phase = self.phase.at_rest
        for group in self.parameter_groups:
            group.show_sharded()
        reshard(self)

    def _fsdp_show_full(self) -> None:
        for group in self.parameter_groups:
            group.show_full()

    def _fsdp_enter(self, phase: Phase) -> None:
        # From rest to work or back, never from work to work.
        if self.phase.is_resting == phase.is_resting:
            raise RuntimeError(
                f"Expected {type(self).__name__} to come to {phase.value} from another phase, got "
                f"{self.phase.value}; a sharded module cannot run inside itself."
            )
        self.phase = phase


def attach(
    module: nn.Module,
    context: FsdpContext,
    groups: list[FsdpParameterGroup],
    reshard_after_forward: bool | None,
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

    # Before all other hooks, which may use the full weights.
    module.register_forward_pre_hook(_before_forward, with_kwargs=True, prepend=True)
    module.register_forward_hook(_after_forward, always_call=True)
    return module


def names_taken(module: nn.Module) -> list[str]:
    """The module's own attributes that have the names of those that `attach` gives it."""
    return [
        name for name in (*FsdpModule.__annotations__, *vars(FsdpModule)) if _is_taken(module, name)
    ]


def _is_taken(module: nn.Module, name: str) -> bool:
    return not name.startswith("__") and not hasattr(nn.Module, name) and hasattr(module, name)


# Excluded from torch.compile, as FSDP2's hooks are: they communicate, and exchange parameters.
# `torch.compiler.disable` would import the compiler with this file; this imports it at first use.
@torch._disable_dynamo
def _before_forward(module: FsdpModule, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    return module._fsdp_before_forward(args, kwargs)


@torch._disable_dynamo
def _after_forward(module: FsdpModule, _: Any, output: Any) -> None:
    module._fsdp_after_forward(output)


def _weakly(
    module: FsdpModule, method: Callable[[FsdpModule, Any, T], None], argument: T
) -> Callable[[Any], None]:
    """`method` with its argument, as a hook that does not keep the module alive."""
    reference = weakref.ref(module)

    @torch._disable_dynamo
    def call(gradient: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, gradient, argument)

    return call


# One for each class: sharded modules of one class stay of one class.
_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _sharded_classes:
        _sharded_classes[original] = type(f"Fsdp{original.__name__}", (FsdpModule, original), {})
    return _sharded_classes[original]
