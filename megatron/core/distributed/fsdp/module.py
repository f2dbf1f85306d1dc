"""`FsdpModule`: a module whose parameters are sharded at rest and whole while it computes.

    pre_forward      gathers its full weights, and starts to gather the next module's
    post_forward     frees them, or leaves them in place if reshard_after_forward is False
    pre_backward     when an output has its gradient: as pre_forward; the next module is the one
                     whose backward is expected next
    post_backward    when all inputs have their gradients: frees the full weights and starts to
                     reduce gradients
    finish_backward  at the end of the whole backward: finishes the rest, mainly the last
                     reductions

A module that runs again inside a backward, to recompute its activations, gathers its full weights
and keeps them for its own backward.

Modules that were sharded together, as a list, are one unit. The first of them has the unit's
parameter groups and state, and the hooks of all of them lead there: to the unit they are several
calls of one module. Between the first call and the last its weights stay whole.
"""

from __future__ import annotations

import enum
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

from megatron.core.distributed.fsdp.context import FsdpContext, is_backward_running, reshard
from megatron.core.distributed.fsdp.fsdp2_arguments import PrecisionPolicies
from megatron.core.distributed.fsdp.fsdp2_methods import Fsdp2Methods, add_fsdp2_state
from megatron.core.distributed.fsdp.group_weights import WHOLE
from megatron.core.distributed.fsdp.nested_tensors import is_opaque, tensors_in, with_views
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.dtensors import is_partial, local_tensor

R = TypeVar("R")
T = TypeVar("T")


class _Call:
    """One call of a module's forward, kept alive by the hooks on its graph."""

    def __init__(self, number_of_pass: int) -> None:
        self.number_of_pass = number_of_pass
        self.has_backward = False  # whether its backward has started
        self.input_nodes: list[Node] = []  # of the inputs whose gradients end its backward


class FsdpModule(Fsdp2Methods):
    """Mixed into the class of a module by `fully_shard`, never constructed.

    Attributes:
        context: shared with the other modules of the model.
        parameter_groups: the parameters of this module and of inner modules that are not sharded
            themselves; of the whole unit if this is its first module, else none.
        activity: see `Activity`.
        reshard_after_forward: whether full weights are freed between forward and backward. May be
            changed. None, until all modules are known: unless no module contains this one.
        reshard_after_backward: whether full weights are freed after a backward.
        unshard_in_backward: whether a backward gathers the full weights.
        is_last_backward: False if a program runs the backwards of a step itself, as
            `torch.distributed.pipelining` does, and others follow.
        requires_gradient_sync: whether gradients are reduced over deferred axes too, in a last
            microbatch of the context.
        forward_prefetch, backward_prefetch: modules whose weights are gathered while this one
            computes; none: the one that is expected next.
    """

    class Activity(enum.Enum):
        """The current activity of a module.

            activity       full weights              goes to
            RESTING        freed, with exceptions    FORWARD, CHECKPOINTING, BACKWARD
            CHECKPOINTED   freed, with exceptions    FORWARD, CHECKPOINTING, BACKWARD
            FORWARD        in use                    RESTING
            CHECKPOINTING  in use                    CHECKPOINTED
            BACKWARD       in use                    RESTING

        Exceptions are `reshard_after_forward=False` and a recomputation, whose weights are kept for
        the backward. A failed forward leads back to the activity before it, a failed backward to
        RESTING. A recomputation inside the module's own backward stays BACKWARD.

        CHECKPOINTING and CHECKPOINTED belong to reentrant checkpoints, which first run a module
        without building a graph, on inputs that have one. Its outputs have no hook that would
        announce a backward, so the activity does. It lasts until that backward starts.
        """

        RESTING = "resting"
        CHECKPOINTED = "checkpointed"
        FORWARD = "forward"
        CHECKPOINTING = "checkpointing"
        BACKWARD = "backward"

        @property
        def is_resting(self) -> bool:
            """Whether the module is idle."""
            return self in (FsdpModule.Activity.RESTING, FsdpModule.Activity.CHECKPOINTED)

        @property
        def is_forward(self) -> bool:
            """Whether the module's forward is running."""
            return self in (FsdpModule.Activity.FORWARD, FsdpModule.Activity.CHECKPOINTING)

        @property
        def awaits_recomputation(self) -> bool:
            """Whether the module's backward comes after a recomputation."""
            return self in (FsdpModule.Activity.CHECKPOINTED, FsdpModule.Activity.CHECKPOINTING)

        @property
        def at_rest(self) -> FsdpModule.Activity:
            """The activity in which a module comes to rest from this one."""
            activities = FsdpModule.Activity
            return activities.CHECKPOINTED if self.awaits_recomputation else activities.RESTING

    context: FsdpContext
    parameter_groups: tuple[FsdpParameterGroup, ...]
    activity: FsdpModule.Activity
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    unshard_in_backward: bool
    is_last_backward: bool
    requires_gradient_sync: bool
    forward_prefetch: list[weakref.ref[FsdpModule]]
    backward_prefetch: list[weakref.ref[FsdpModule]]

    # Calls whose backward has not come yet; calls whose graph is freed vanish.
    _fsdp_calls: weakref.WeakSet[_Call]
    _fsdp_call: _Call | None  # running, if it will have a graph
    _fsdp_reduced_backward: int  # of the context, at whose end gradients have been reduced

    _fsdp_first: FsdpModule | None  # the module that has the unit's state; None: this one
    _fsdp_is_last: bool  # of the modules of its unit
    _fsdp_policies: PrecisionPolicies
    _fsdp_is_filled: bool  # whether all weights and buffers are known to have values
    _fsdp_is_held: bool  # whether the module has its full parameters though it is at rest
    _fsdp_held_versions: int  # of the full parameters when the hold started
    _fsdp_awaits_unit: bool  # whether they are held for other modules of the unit
    # Registered methods that run now; one that has raised counts until the next rest.
    _fsdp_num_methods: int

    def is_root(self) -> bool:
        """Whether no sharded module of the same context contains this one."""
        return self.context.is_root(self)

    @property
    def _fsdp_unit(self) -> FsdpModule:
        """The first of the modules that were sharded together; usually this one."""
        return self if self._fsdp_first is None else self._fsdp_first

    @property
    def is_resting(self) -> bool:
        """Whether the full weights are unused now."""
        return self.activity.is_resting and not (self._fsdp_is_held or self._fsdp_num_methods)

    @property
    def is_unsharded(self) -> bool:
        """Whether the full weights have been gathered, or are being gathered."""
        return all(group.is_unsharded for group in self.parameter_groups)

    @property
    def expects_backward(self) -> bool:
        """Whether a forward of this module has left a graph, or a recomputation will build one."""
        return len(self._fsdp_calls) > 0 or self.activity.awaits_recomputation

    def finish_backward(self) -> None:
        """Frees full weights that a backward has left, and reduces its gradients."""
        # The backward that has ended ran inside this module's forward, or inside a larger one that
        # has yet to recompute this module: reentrant checkpoints run a backward in a backward.
        if self.activity.is_forward or self.activity.awaits_recomputation:
            return

        for call in [call for call in self._fsdp_calls if call.has_backward]:
            self._fsdp_calls.discard(call)
        self._fsdp_leave_backward()
        self._fsdp_reduce()

    def abandon_backward(self) -> None:
        """Forgets a backward that has failed, and its gradients."""
        self._fsdp_is_held = False
        self._fsdp_rest()
        for group in self.parameter_groups:
            group.forget_gradients()
        self._fsdp_calls = weakref.WeakSet()
        self.activity = FsdpModule.Activity.RESTING

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FsdpModule:
        """`.to()` and its like. Buffers follow; RuntimeError where parameters would change.

        After `to_empty`, parameters are the same views of the same memory.
        """
        for module in self.modules():
            if isinstance(module, FsdpModule):
                module._fsdp_unit._fsdp_let_go()
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Clears the gradients of sharded parameters while the module has full ones."""
        held = [
            module
            for module in self.modules()
            if isinstance(module, FsdpModule)
            if module._fsdp_is_held
        ]
        for module in held:
            for group in module.parameter_groups:
                group.show_sharded()
        super().zero_grad(set_to_none)
        for module in held:
            module._fsdp_show_full()

    def __deepcopy__(self, memo: Any) -> FsdpModule:
        raise NotImplementedError(
            f"A sharded module cannot be copied ({type(self).__name__}). Copy it before "
            "fully_shard and shard the copy in the same way. For AveragedModel: averaged = "
            "AveragedModel(model), then shard model and averaged.module."
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # DistributedDataParallel reads this first. It would then broadcast the parameters.
        raise RuntimeError(
            f"DistributedDataParallel cannot wrap a sharded module ({type(self).__name__}), which "
            "reduces its gradients itself. Use the module without it, or shard it by "
            "Placements.for_strategy('no_shard') to replicate the parameters."
        )

    # Weights outside of the hooks

    def _fsdp_gather(self) -> None:
        """Starts to gather the full weights, outside of the module's forward and backward."""
        if not is_backward_running():
            self.context.require_complete()
        self._fsdp_check_filled()
        self._fsdp_check_unwritten()
        self.context.gather(self.parameter_groups)

    def _fsdp_hold(self) -> None:
        """Puts the full parameters, which are being gathered, into the resting module."""
        for group in self.parameter_groups:
            group.wait_unsharded()
        self._fsdp_show_full()
        self._fsdp_is_held = True
        self._fsdp_held_versions = self._fsdp_full_versions()

    def _fsdp_rest(self, frees: bool = True) -> None:
        """Returns to rest from any activity: puts the sharded parameters into the module and, with
        `frees`, frees the full weights.

        RuntimeError, at rest, if full weights were written to while they were held.
        """
        self._fsdp_set(activity=self.activity.at_rest)
        try:
            self._fsdp_check_unwritten()
        finally:
            self._fsdp_set(_fsdp_is_held=False, _fsdp_awaits_unit=False, _fsdp_num_methods=0)
            for group in self.parameter_groups:
                group.show_sharded()
            if frees:
                reshard(self)

    def _fsdp_let_go(self) -> None:
        """Puts the sharded parameters into the module if it has full ones at rest."""
        if self.activity.is_resting and not self.is_resting:
            # Graphs outside of the module may have saved the full ones.
            self._fsdp_rest(frees=not self.expects_backward)

    def _fsdp_full_versions(self) -> int:
        return sum(
            parameter.full._version
            for group in self.parameter_groups
            for parameter in group.fsdp_parameters
        )

    def _fsdp_check_unwritten(self) -> None:
        """RuntimeError if full weights have been written to while they were held."""
        if self._fsdp_is_held and self._fsdp_held_versions != self._fsdp_full_versions():
            names = [name for group in self.parameter_groups for name in group.names]
            raise RuntimeError(
                f"Some of the full weights {names} were written to after unshard(), or after a "
                "forward with reshard_after_forward=False. The sharded "
                "parameters do not have the new values, and the next gather replaces them. Write "
                "to the parameters after reshard(); parameter.copy_(whole) takes a whole tensor."
            )

    def _fsdp_check_filled(self) -> None:
        """RuntimeError, on all ranks, if parameters or buffers that were sharded on meta have no
        values yet; ValueError if replicas have different ones.
        """
        if self._fsdp_is_filled:
            return
        parameters = [
            name
            for group in self.parameter_groups
            for name in group.names_without_values(self.context.gather_lane)
        ]
        buffers = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        if parameters or buffers:
            raise RuntimeError(
                f"{type(self).__name__} was sharded on meta, and its parameters {parameters} and "
                f"buffers {buffers} have no values yet. Call model.to_empty(device=...), "
                "then initialise or load all of them."
            )
        self.context.check_replicas(self.parameter_groups)
        self._fsdp_is_filled = True

    # Methods registered by `register_fsdp_forward_method`. The module stays at rest with full
    # weights: its forward may run inside the method, and there is no hook after an exception.

    def _fsdp_pre_method(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gathers the full weights for a method and watches its inputs, as before a forward."""
        args, kwargs = self._fsdp_policies.inputs(args), self._fsdp_policies.inputs(kwargs)
        if not self.activity.is_resting:
            return args, kwargs
        if not is_backward_running():
            self.context.enter_forward(self)
        self._fsdp_gather()
        for group in self.parameter_groups:
            group.wait_unsharded()
        self._fsdp_show_full()
        self._fsdp_num_methods += 1
        if self._fsdp_num_methods == 1 and torch.is_grad_enabled():
            self._fsdp_call = call = _Call(self.context.num_passes)
            args, kwargs = self._fsdp_watch_inputs(args, kwargs, call) or (args, kwargs)
        return args, kwargs

    def _fsdp_post_method(self, output: Any) -> Any:
        """Watches a method's outputs and frees the full weights, as after a forward."""
        if self.activity.is_resting:
            self._fsdp_num_methods = max(self._fsdp_num_methods - 1, 0)
            if not self._fsdp_num_methods:
                self._fsdp_end_call(output, is_last=True)
        return self._fsdp_policies.outputs(output)

    # Hooks

    def _fsdp_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        is_recomputation = is_backward_running()
        if not is_recomputation:
            self.context.enter_forward(self)
        elif self.activity is FsdpModule.Activity.BACKWARD:
            return None  # recomputed inside its own backward, which has gathered the weights
        self._fsdp_check_filled()
        self._fsdp_check_unwritten()

        before = self.activity
        self._fsdp_enter(self._fsdp_forward_activity(args, kwargs, is_recomputation))
        try:
            if is_recomputation:
                self.context.unshard_for_recomputation(self)
            else:
                self.context.unshard_for_forward(self)
                for group in self.parameter_groups:
                    group.free_unused_main_grad()
            self._fsdp_show_full()
        except BaseException:
            self.activity = before
            self._fsdp_rest()
            raise
        if self._fsdp_awaits_unit:
            self._fsdp_is_held = self._fsdp_awaits_unit = False
        if self._fsdp_is_held:
            # They may have been gathered anew.
            self._fsdp_held_versions = self._fsdp_full_versions()

        # This forward is a part of the method's call.
        if self._fsdp_num_methods:
            return None
        if torch.is_grad_enabled():
            call = _Call(self.context.num_passes)
            self._fsdp_set(_fsdp_call=call)
            return self._fsdp_watch_inputs(args, kwargs, call)
        self._fsdp_set(_fsdp_call=None)
        return None

    def _fsdp_forward_activity(self, args: Any, kwargs: Any, is_recomputation: bool) -> Activity:
        is_checkpointed = self.activity.awaits_recomputation
        if not is_recomputation:
            has_graph = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
            is_checkpointed = has_graph and not torch.is_grad_enabled()
        activities = FsdpModule.Activity
        return activities.CHECKPOINTING if is_checkpointed else activities.FORWARD

    def _fsdp_post_forward(self, output: Any, is_last: bool) -> None:
        """Also called after a forward that has raised, with None for its output."""
        if not self.activity.is_forward:
            return
        self._fsdp_enter(self.activity.at_rest)
        if not self._fsdp_num_methods:
            self._fsdp_end_call(output, is_last)

    def _fsdp_end_call(self, output: Any, is_last: bool) -> None:
        """Watches the outputs of a forward or a method, and frees the full weights.

        Args:
            is_last: whether no module of the unit is expected to run right after this one.
        """
        call = self._fsdp_call
        self._fsdp_set(_fsdp_call=None)
        outputs = [] if call is None else self._fsdp_watch_outputs(output, call)
        if call is not None and is_backward_running():
            self._fsdp_rest(frees=False)
            self.context.keep_recomputed(self)
        else:
            self._fsdp_leave(output, call, outputs, is_last)
        # A program may take the weight of another module of the unit instead of its forward, as
        # TRL's trainers take that of the head. As a DTensor it would have this rank's gradient.
        if not is_last and output is not None and not self._fsdp_is_held:
            self._fsdp_hold()
            self._fsdp_awaits_unit = True

    def _fsdp_leave(
        self, output: Any, call: _Call | None, outputs: Sequence[torch.Tensor], is_last: bool
    ) -> None:
        """Frees the full weights, or keeps them, after a forward that was no recomputation."""
        if call is not None and outputs:
            self._fsdp_calls.add(call)
        # A tensor that hides in the output has no hook that gathers the weights for its backward,
        # so they must stay.
        is_hidden = call is not None and is_opaque(output)
        if not self.reshard_after_forward:
            # As in FSDP2, programs use such weights in a loss outside of the module.
            self._fsdp_hold()
        elif not is_hidden:
            self._fsdp_rest(frees=is_last)
            if not is_last:
                self.context.keep_for_next(self)
        elif not self._fsdp_is_held:
            self._fsdp_rest(frees=False)
        if call is not None:
            self._fsdp_check_outputs(output)

    def _fsdp_watch_outputs(self, output: Any, call: _Call) -> list[torch.Tensor]:
        """Starts the module's backward at the outputs' gradients. Returns these outputs."""
        outputs = [
            tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf
        ]
        if outputs:
            # Writing to a view in place drops the view's hooks, but not the hooks of its base.
            bases = [tensor._base for tensor in outputs if tensor._base is not None]
            watched = outputs + [base for base in bases if base.requires_grad and not base.is_leaf]
            register_multi_grad_hook(
                watched, _weakly(self, FsdpModule._fsdp_pre_backward, call), mode="any"
            )
        return outputs

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
                f"Expected outputs of {type(self).__name__} that have separate memory, got one "
                "of its weights or a view of one, which is whole only while the module runs. "
                "Return a clone."
            )

    def _fsdp_watch_inputs(self, args: Any, kwargs: Any, call: _Call) -> tuple[Any, Any] | None:
        """Has the inputs' gradients end this module's part of the backward. Returns inputs to use
        instead, or None.

        A view belongs to this call alone, while the tensor itself may have other uses, whose
        gradients come later. Tensors for which there is no view are watched only if no other tensor
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
            _watch_gradients(self, inputs, call)
        return watched if views else None

    def _fsdp_pre_backward(self, _: Any, call: _Call) -> None:
        self.context.enter_backward()
        call.has_backward = True
        if self.activity is FsdpModule.Activity.BACKWARD:
            return
        if not self.is_last_backward:
            self._fsdp_check_not_split()
        self._fsdp_check_unwritten()
        self._fsdp_set(_fsdp_is_held=False, _fsdp_awaits_unit=False)
        self._fsdp_enter(FsdpModule.Activity.BACKWARD)
        self.context.unshard_for_backward(self)
        if self.unshard_in_backward:
            self._fsdp_show_full()

    def _fsdp_check_not_split(self) -> None:
        """NotImplementedError in a backward that leaves the weights' gradients to a later one."""
        nodes = [
            get_gradient_edge(parameter.full).node
            for group in self.parameter_groups
            for parameter in group.fsdp_parameters
            if parameter.full.requires_grad
        ]
        if nodes and not any(torch._C._will_engine_execute_node(node) for node in nodes):
            raise NotImplementedError(
                f"The backward of a {type(self).__name__} was split in two, for inputs and for "
                "weights, as zero-bubble schedules of torch.distributed.pipelining do. Gradients "
                "of weights would be lost. Use a schedule with whole backwards: GPipe, 1F1B, "
                "Interleaved1F1B or LoopedBFS."
            )

    def _fsdp_post_backward(self, _: Any, call: _Call) -> None:
        self.context.enter_backward()
        self._fsdp_calls.discard(call)
        # Other calls of the same pass still have gradients to come; calls of another pass have a
        # separate backward.
        is_done = not any(other.number_of_pass == call.number_of_pass for other in self._fsdp_calls)
        # The other modules of a unit run their backward next, on the same weights.
        if is_done or self._fsdp_is_last:
            self._fsdp_leave_backward()
        if is_done:
            self._fsdp_reduce()

    def _fsdp_leave_backward(self) -> None:
        """Comes to rest after a backward."""
        # Graphs outside of the module may have saved the weights that its other calls have left.
        is_saved = len(self._fsdp_calls) > 0 and not self.reshard_after_forward
        self._fsdp_rest(frees=self.reshard_after_backward and not is_saved)

    def _fsdp_pre_accumulate(
        self, gradient: torch.Tensor, place: tuple[int, int]
    ) -> torch.Tensor | None:
        """Before autograd adds to the gradient of a sharded parameter that a loss has used: waits
        for a reduction that writes to the same memory. `place` is (group, index in the group).
        """
        group_index, index = place
        group = self.parameter_groups[group_index]
        self.context.make_room(group)

        total = group.fsdp_parameters[index].sharded.grad
        if not is_partial(total):
            return None
        if isinstance(total, UnevenDTensor):
            # Equal on the ranks over which the sum is averaged later, so it joins the sum.
            return total.with_local(local_tensor(gradient))
        raise NotImplementedError(
            f"A loss has used the sharded {group.names[index]} between microbatches whose whole "
            "gradients are summed up before they are reduced. Use the whole weight, which "
            "unshard() or reshard_after_forward=False leave in the module."
        )

    @torch.no_grad()
    def _fsdp_post_accumulate(self, _: Any, place: tuple[int, int]) -> None:
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
        """Starts to reduce the collected gradients.

        Once in each backward, groups without gradients take part too: other ranks may have some.
        """
        is_first = self._fsdp_reduced_backward != self.context.num_backwards
        groups = [
            group
            for group in self.parameter_groups
            if group.gradients is not None and (group.gradients.received or is_first)
        ]
        self.context.reduce(groups, self.requires_gradient_sync)
        self._fsdp_set(_fsdp_reduced_backward=self.context.num_backwards)

    def _fsdp_show_full(self) -> None:
        for group in self.parameter_groups:
            group.show_full()

    def _fsdp_enter(self, activity: Activity) -> None:
        # From rest to work or back, never from work to work.
        if self.activity.is_resting == activity.is_resting:
            raise RuntimeError(
                f"Expected {type(self).__name__} to come to {activity.value} from another "
                f"activity, got {self.activity.value}; a sharded module cannot run inside itself."
            )
        self._fsdp_set(activity=activity)

    def _fsdp_set(self, **state: Any) -> None:
        """Sets attributes of this class, a dozen times a step. `nn.Module.__setattr__` would look
        for parameters, buffers and submodules of these names first.
        """
        vars(self).update(state)


def attach(
    modules: Sequence[nn.Module],
    context: FsdpContext,
    groups: list[FsdpParameterGroup],
    reshard_after_forward: bool | None,
    policies: PrecisionPolicies,
    is_filled: bool,
) -> None:
    """Makes one unit of `modules`, in place and at rest: each becomes an `FsdpModule`."""
    for module in modules:
        module.__class__ = _sharded_class(type(module))
        assert isinstance(module, FsdpModule), "it has just become one"
        # Not as a submodule.
        vars(module)["_fsdp_first"] = None if module is modules[0] else modules[0]
        module.context = context
        module.parameter_groups = tuple(groups) if module is modules[0] else ()
        module.reshard_after_forward = reshard_after_forward
        module.reshard_after_backward = module.unshard_in_backward = True
        module.is_last_backward = module.requires_gradient_sync = True
        module.forward_prefetch, module.backward_prefetch = [], []
        module.activity = FsdpModule.Activity.RESTING
        module._fsdp_call = None
        module._fsdp_calls = weakref.WeakSet()
        module._fsdp_reduced_backward = 0
        module._fsdp_is_last = module is modules[-1]
        module._fsdp_policies = policies
        module._fsdp_is_filled = is_filled
        module._fsdp_is_held = module._fsdp_awaits_unit = False
        module._fsdp_held_versions = 0
        module._fsdp_num_methods = 0

        add_fsdp2_state(module)
        # Before all other hooks, which may use the full weights.
        module.register_forward_pre_hook(_pre_forward, with_kwargs=True, prepend=True)
        module.register_forward_hook(_post_forward, always_call=True)

    first = modules[0]
    assert isinstance(first, FsdpModule), "as all of them"
    for group_index, group in enumerate(groups):
        group.unit = groups[0].unit
        group.show_sharded()
        for parameter_index, parameter in enumerate(group.fsdp_parameters):
            setattr(parameter.full, WHOLE, True)
            if group.requires_grad:
                collect = _weakly(
                    first, FsdpModule._fsdp_post_accumulate, (group_index, parameter_index)
                )
                parameter.full.register_post_accumulate_grad_hook(collect)
                wait = _weakly(
                    first, FsdpModule._fsdp_pre_accumulate, (group_index, parameter_index)
                )
                parameter.sharded.register_hook(wait)


def names_taken(module: nn.Module) -> list[str]:
    """The module's own attributes that have the names of attributes that `attach` gives it."""
    names = (*FsdpModule.__annotations__, *vars(FsdpModule), *vars(Fsdp2Methods))
    return [name for name in names if _is_taken(module, name)]


def _is_taken(module: nn.Module, name: str) -> bool:
    if name.startswith("__") or hasattr(nn.Module, name):
        return False
    # hasattr would find attributes of an inner module, which wrappers such as CheckpointWrapper
    # forward.
    own = (vars(module), module._parameters, module._buffers, module._modules)
    return hasattr(type(module), name) or any(name in names for names in own)


# Excluded from torch.compile, as FSDP2's hooks are: they communicate, and exchange parameters.
# `torch.compiler.disable` would import the compiler with this file; this imports it at first use.
@_disable_dynamo
def _pre_forward(module: FsdpModule, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    unit = module._fsdp_unit
    if module is not unit:
        module._fsdp_check_filled()
    return unit._fsdp_pre_forward(args, kwargs)


@_disable_dynamo
def _post_forward(module: FsdpModule, _: Any, output: Any) -> None:
    module._fsdp_unit._fsdp_post_forward(output, module._fsdp_is_last)


def _weakly(
    module: FsdpModule, method: Callable[[FsdpModule, Any, T], R], argument: T
) -> Callable[[Any], R | None]:
    """`method` with its argument, as a hook that does not keep the module alive."""
    return partial(_call_weakly, weakref.ref(module), method, argument)


# One function for all hooks: excluding a new one for each call of a module costs 20 us a hook.
@_disable_dynamo
def _call_weakly(
    reference: weakref.ref[FsdpModule],
    method: Callable[[FsdpModule, Any, T], R],
    argument: T,
    gradient: Any,
) -> R | None:
    # Not with this file: it imports the compiler.
    from torch._dynamo import compiled_autograd

    if compiled_autograd.in_compiled_autograd_region:
        raise RuntimeError(
            "A backward of sharded modules runs under compiled autograd, which calls the hooks of "
            "inputs before weights have their gradients: some would be missing. Set "
            "torch._dynamo.config.compiled_autograd = False."
        )
    module = reference()
    return None if module is None else method(module, gradient, argument)


def _watch_gradients(module: FsdpModule, inputs: Sequence[torch.Tensor], call: _Call) -> None:
    """Has the module's backward end when all inputs that a backward reaches have their gradients.

    PyTorch's `register_multi_grad_hook` does this, too, but its hooks refer to the nodes that own
    them. Such a cycle keeps a graph without a backward, and its activations, until garbage is
    collected, which happens at other moments on other ranks. Here the hooks on outputs own the
    call, the call refers to the nodes, and the hooks on inputs refer to the call weakly.
    """
    call.input_nodes = [get_gradient_edge(tensor).node for tensor in inputs]
    count = partial(_count_gradient, weakref.ref(module), weakref.ref(call), defaultdict(int))
    for tensor in inputs:
        tensor.register_hook(count)


@_disable_dynamo
def _count_gradient(
    module_reference: weakref.ref[FsdpModule],
    call_reference: weakref.ref[_Call],
    counts: defaultdict[int, int],
    _: torch.Tensor,
) -> None:
    module, call = module_reference(), call_reference()
    if module is None or call is None:
        return
    backward = torch._C._current_graph_task_id()
    counts[backward] += 1
    if counts[backward] == sum(map(torch._C._will_engine_execute_node, call.input_nodes)):
        del counts[backward]
        module._fsdp_post_backward(None, call)


# One for each class: sharded modules of one class stay of one class.
_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _sharded_classes:
        _sharded_classes[original] = type(f"Fsdp{original.__name__}", (FsdpModule, original), {})
    return _sharded_classes[original]
