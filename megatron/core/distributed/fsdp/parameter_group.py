"""`FsdpParameterGroup`: the buffers behind the parameters of one module that have one dtype, one
requires_grad and one policy, or of a part of them.

All of them have one layout, but different dtypes and placements. The buffers of weights are a
`WeightBuffers`, the buffers of gradients a `GroupGradients`. `unsharded_weight` has memory only
while the weights are in use.

A parameter is two: `full`, a view of the unsharded weights, takes part in forward and backward;
`sharded`, a view of the main weights, rests in the module and goes to the optimizer.

The methods are in the order of a step: forward, backward, reduce, update. Comparisons between ranks
and the construction of the group come last.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron.core.device import Device
from megatron.core.distributed.fsdp.aliases import apart
from megatron.core.distributed.fsdp.collective_history import (
    Kind,
    gradient_details,
    histories_over,
)
from megatron.core.distributed.fsdp.collectives import Label, Move, carry_out, tag_of
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.gradients import (
    GroupGradients,
    Prepared,
    carry_out_reductions,
)
from megatron.core.distributed.fsdp.group_codes import GroupCodes
from megatron.core.distributed.fsdp.group_plan import THE_MODEL, GroupPlan
from megatron.core.distributed.fsdp.group_weights import (
    Delivery,
    FsdpParameter,
    MemoryPhase,
    OwnedParameter,
    WeightBuffers,
    sharded_parameter,
)
from megatron.core.distributed.fsdp.placement import axes_to_move
from megatron.core.dtensors import is_partial, local_tensor
from megatron.core.lanes import Event, Lane
from megatron.core.mesh import all_reduce_over
from megatron.core.timeline import NO_TIMELINE, AnyTimeline
from megatron.core.trace_file import D2H, GATHER, REDUCE

# The attribute of a sharded parameter that leads to its group, weakly; read it with `group_of`.
_GROUP = "_fsdp_group"

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


# Counts the groups over a set of ranks, alike on all of them. Ranks may have different groups over
# other sets.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
_COUNT_BITS = 30  # of a number, which is less than 2**62
# A digest of the ranks of a mesh, and their counter: a mesh of thousands has hundreds of groups.
_counters = weakref.WeakKeyDictionary[DeviceMesh, tuple[int, Iterator[int]]]()


def _next_number(mesh: DeviceMesh) -> int:
    if mesh not in _counters:
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        _counters[mesh] = zlib.crc32(repr(ranks).encode()), _numbers[ranks]
    digest, numbers = _counters[mesh]
    return (digest << _COUNT_BITS) + next(numbers) % (1 << _COUNT_BITS)


def group_of(parameter: torch.Tensor) -> FsdpParameterGroup | None:
    """The group of a sharded parameter; None for any other tensor."""
    reference = getattr(parameter, _GROUP, None)
    return None if reference is None else reference()


class Gather(NamedTuple):
    """The work after which the full parameters of a group are up to date.

    Attributes:
        writes: see `FsdpParameterGroup._writes`; counted before: later ones are not in it.
        has_changed: whether the full parameters get other values.
        is_copied: whether the main weights are copied to the compute weights, or quantized.
        is_scattered: whether other ranks have updated the rest of the compute weights.
        after: events after which it may start; empty without any work.
    """

    group: FsdpParameterGroup
    writes: tuple[int, ...]
    has_changed: bool
    is_copied: bool
    is_scattered: bool
    after: list[Event]


def _carry_out_gathers(gathers: Sequence[Gather]) -> None:
    # In this order: main weights -> this rank's compute weights -> all at rest -> all in use.
    for group in [gather.group for gather in gathers if gather.is_copied]:
        group.copy_updated()
    updated = [gather.group for gather in gathers if gather.is_scattered]
    carry_out([own.move_updated() for own in updated])
    gathered = [gather.group for gather in gathers if gather.group.is_gathered]
    carry_out([own.move_gathered() for own in gathered])


class FsdpParameterGroup:
    """A parameter group with its buffers.

    Work that a method queues on a lane continues after the call. A buffer may be touched again
    after `wait_unsharded`, or after the event that `reduce` returns.

    Attributes:
        number: identifies the group among all groups of its ranks, and is the same on each of them.
        unit: an object that all groups made by one `fully_shard` share.
        name: path of the unit's module from the outermost sharded module, for messages. Empty
            until a `fully_shard_context` has ended.
        names: paths of the parameters from the outermost sharded module; from the unit's module
            until a `fully_shard_context` has ended.
        plan: the plan that the group was built from.
        dtype: of the compute weights.
        requires_grad: whether there are gradients.
        histories: by mesh axis; every collective over the axis is recorded as it is queued.
        phase: see `MemoryPhase`.
        delivery: the updates of an optimizer that copies the compute weights to the device itself.
        timeline: is shown gathers, reductions, and waits for them.
        is_on_host: whether the main weights are in host memory, apart from any compute weights.
        codes: how main weights become codes; None where compute weights have their own dtype.
        is_restored: whether the main weights are the ones of an earlier process, and must not be
            initialized.
        layout: of all buffers.
        fsdp_parameters: in the order of the layout's tensors.
    """

    main_weight: DBuffer
    model_weight: DBuffer
    post_optimizer_model_weight: DBuffer
    unsharded_weight: DBuffer

    def __init__(
        self,
        plan: GroupPlan,
        owned: Sequence[OwnedParameter],
        mesh: DeviceMesh,
        device: Device,
    ) -> None:
        """`owned`: the parameters of `plan`, in its order; `mesh`: of its shape."""
        self.plan = plan
        self.number = _next_number(mesh)
        self.histories = histories_over(mesh)
        for history in self.histories:
            history.groups[self.number] = self
        self.unit = object()
        self.name = ""
        self.dtype = plan.dtype
        self.requires_grad = plan.requires_grad
        self.mesh = mesh
        self.placements = plan.placements
        self.layout = plan.layout
        self._device = device
        self.is_on_host = plan.is_on_host
        kept = plan.offload.kept
        self.is_restored = plan.is_on_host and kept is not None and kept.is_restored

        self.phase = MemoryPhase.SHARDED
        self._reserved: Event | None = None  # after which the reserved memory may be written to
        self._gathered: Event | None = None  # after which the full weights have their values
        self._failure: tuple[Exception, TracebackType | None] | None = None
        self._num_marked = 0  # calls of `mark_updated`
        self._copied: tuple[int, ...] | None = None  # `_writes` that the compute weights include
        self._rounded: DBuffer | None = None  # what codes are made of next; see `rounded_weight`
        self._initial_sample = 0
        # Versions and a sample of the main weights, once they had their initial values.
        self._filled: tuple[int, int] | None = None
        self.delivery = Delivery()
        self.timeline: AnyTimeline = NO_TIMELINE
        # By the first index of the parameters whose gradients they send; see `send_main_grad`.
        self._send_down: dict[int, Callable[[Event], Event]] = {}
        self._main_grad_reads: list[Event] = []

        weights = WeightBuffers.make(plan, mesh, device)
        self.main_weight, self.model_weight = weights.main, weights.model
        self.post_optimizer_model_weight = weights.post_optimizer_model
        self.unsharded_weight = weights.unsharded
        self.codes: GroupCodes | None = None
        if plan.recipe is not None:
            # Modules that share a weight have one history, or none, if it is kept as codes.
            histories = [getattr(own.owners[0][0], "amax_history", None) for own in owned]
            self.codes = GroupCodes(plan, weights, mesh, histories)
        # The mesh axes over which they are moved.
        self._updated_axes = _axes_between(self.post_optimizer_model_weight, self.model_weight)
        self._gathered_axes = _axes_between(self.model_weight, self.unsharded_weight)
        self.gradients: GroupGradients | None = None
        if plan.requires_grad:
            self.gradients = GroupGradients(plan, mesh, device.torch_device)
        self.fsdp_parameters = [
            self._make_parameter(index, parameter) for index, parameter in enumerate(owned)
        ]
        self.names = [parameter.fqns[0] for parameter in owned]
        self._offsets = [self.main_weight.chunk(index).offset for index in range(len(owned))]
        # Only now that the parameters are views of it: none can be made of released storage.
        if self.is_gathered:
            self.unsharded_weight.release_storage()

    @property
    def main_grad(self) -> DBuffer | None:
        """The gradients that the optimizer reads; None while there are none."""
        return None if self.gradients is None else self.gradients.main

    @property
    def is_gathered(self) -> bool:
        """Whether compute weights in use are another buffer than compute weights at rest."""
        return self.unsharded_weight is not self.model_weight

    @property
    def is_unsharded(self) -> bool:
        """Whether the full parameters have their values, or will have after `wait_unsharded`."""
        return self.phase.is_unsharded

    def is_replicated(self, axis: int) -> bool:
        """Whether the ranks of a mesh axis hold the same main weights."""
        return not isinstance(self.placements.optimizer[axis], Shard) and self.mesh.size(axis) > 1

    @property
    def display_name(self) -> str:
        """The name of the unit's module in messages."""
        return self.name or THE_MODEL

    def index_of(self, sharded: torch.Tensor) -> int:
        """The index of a sharded parameter in `fsdp_parameters` and in the layout."""
        return next(
            index
            for index, parameter in enumerate(self.fsdp_parameters)
            if parameter.sharded is sharded
        )

    @property
    def _sharded(self) -> list[nn.Parameter]:
        return [parameter.sharded for parameter in self.fsdp_parameters]

    def _full_tensors(self) -> list[torch.Tensor]:
        """All tensors over the full weights that a graph may have saved."""
        full: list[torch.Tensor] = [parameter.full for parameter in self.fsdp_parameters]
        return full if self.codes is None else [*full, *self.codes.shown_tensors]

    # Forward

    def reserve(self) -> None:
        """Takes the full parameters' memory for a later `unshard`, whose gather then waits only for
        work issued before this call.

        Work issued in between must not use the full parameters. If it writes to the main weights,
        `unshard` waits for it all the same.
        """
        if self.phase is MemoryPhase.SHARDED:
            if self.is_gathered:
                self.unsharded_weight.reallocate_storage()
            self._reserved = self._device.event()
            self.phase = self.phase.to(MemoryPhase.RESERVED)

    def unshard(self, lane: Lane, others: Sequence[FsdpParameterGroup] = ()) -> None:
        """Starts to update the full parameters, unless they are up to date. Raises the error of an
        earlier `wait_unsharded` again.

        Args:
            others: groups of the same unit, which are gathered together with this one.
        """
        prepared = [group._prepare_gather() for group in (self, *others)]
        gathers = [gather for gather in prepared if gather is not None]
        if queued := [gather for gather in gathers if gather.after]:
            work = partial(_carry_out_gathers, queued)
            nbytes = sum(gather.group.unsharded_weight.local_buffer.nbytes for gather in queued)
            timed = self.timeline.timed(GATHER, self.display_name, work, nbytes)
            event = lane.enqueue(timed, [event for gather in queued for event in gather.after])
            for gather in queued:
                gather.group._gathered = event
                gather.group.delivery.gather_queued()

        for gather in gathers:
            group = gather.group
            if gather.has_changed:
                # A backward of an earlier forward must not use the new values unnoticed.
                torch.autograd.graph.increment_version(group._full_tensors())
            group._copied = gather.writes
            group.phase, group._reserved = group.phase.to(MemoryPhase.GATHERING), None

    def _prepare_gather(self) -> Gather | None:
        """Takes memory for the full parameters, and records the collectives that they need; None if
        they are up to date.
        """
        if self._failure is not None:
            error, traceback = self._failure
            raise error.with_traceback(traceback)

        writes = self._writes()
        is_stale = writes != self._copied
        has_changed = is_stale or self.delivery.is_announced
        if self.is_unsharded and not has_changed:
            return None

        if self.is_gathered:
            self.unsharded_weight.reallocate_storage()
        is_copied = is_stale and self.main_weight is not self.post_optimizer_model_weight
        if is_copied:
            self.delivery.settle()
            self._rounded = None  # the main weights are newer
        is_copied = is_copied or self._rounded is not None
        is_scattered = has_changed and self.post_optimizer_model_weight is not self.model_weight
        awaited = self.delivery.events
        after: list[Event] = []
        if self.is_gathered or is_copied or is_scattered or awaited:
            # After a reservation, the gather may overlap with work issued since, unless that has
            # written to the main weights.
            ready = self._reserved
            if ready is None or is_stale:
                ready = self._device.event()
            after = [ready, *awaited]
        if is_copied and self.codes is not None and self.plan.divided_axes:
            self._record(self.plan.divided_axes, Kind.GATHER)
        if is_scattered:
            self._record(self._updated_axes, Kind.GATHER)
        if self.is_gathered:
            self._record(self._gathered_axes, Kind.GATHER)
        return Gather(self, writes, has_changed, is_copied, is_scattered, after)

    def copy_updated(self) -> None:
        """Makes this rank's part of the compute weights of its main weights, as a lane's work."""
        target = self.post_optimizer_model_weight
        if self.codes is None:
            target.local_buffer.copy_(self.main_weight.local_buffer)
        else:
            label = self._label(Kind.GATHER, "maxima of the weights")
            updated = self._rounded or self.main_weight
            self.codes.set_scales(self.codes.quantize(updated, target, label))

    def move_updated(self) -> Move:
        """The redistribution of updated compute weights, as a lane's work."""
        return self._move(self.post_optimizer_model_weight, self.model_weight, self._updated_axes)

    def move_gathered(self) -> Move:
        """The redistribution of compute weights for their use, as a lane's work."""
        return self._move(self.model_weight, self.unsharded_weight, self._gathered_axes)

    def _move(self, source: DBuffer, target: DBuffer, axes: Sequence[int]) -> Move:

        def work(label: Label) -> None:
            source.redistribute(target.placements, out=target, label=label)

        group = self.mesh.get_group(axes[0]) if len(axes) == 1 else None
        label = self._label(Kind.GATHER, "weights")
        return Move(work, group, source.local_buffer, source.dtype, label)

    def wait_unsharded(self) -> None:
        """Makes this thread's next work wait for `unshard`. After an error, every later `unshard`
        raises it too: the memory of the weights may hold anything.
        """
        if self.phase is MemoryPhase.WHOLE:
            return

        gathered, self._gathered = self._gathered, None
        try:
            if gathered is not None:
                self.delivery.wait(self.timeline.awaited(gathered, GATHER, self.display_name))
        except Exception as error:
            self._failure = error, error.__traceback__
            self.phase = self.phase.to(MemoryPhase.FAILED)
            raise
        self._rounded = None  # only now: the gather has read it
        self.phase = self.phase.to(MemoryPhase.WHOLE)

    def show_full(self) -> None:
        """Puts the full parameters into the modules; they require gradients as the sharded ones do.

        RuntimeError if a sharded parameter has been replaced: the full one would not follow it.
        """
        for index, parameter in enumerate(self.fsdp_parameters):
            self._check_is_view(index, parameter)
            if parameter.full.requires_grad != parameter.sharded.requires_grad:
                self._follow_requires_grad(parameter)
            parameter.show(parameter.full)

    def _check_is_view(self, index: int, parameter: FsdpParameter) -> None:
        sharded = parameter.sharded
        local, buffer = local_tensor(sharded), self.main_weight.local_buffer
        place = buffer.data_ptr() + self._offsets[index] * buffer.element_size()
        is_other = group_of(sharded) is not self or (
            local.numel() > 0 and local.data_ptr() != place
        )
        if is_other or not parameter.is_shown():
            raise RuntimeError(
                f"Expected {self.names[index]} to be the view of its buffer that fully_shard made, "
                "got another tensor; convert and replace parameters before."
            )

    def _follow_requires_grad(self, parameter: FsdpParameter) -> None:
        if parameter.sharded.requires_grad and not self.requires_grad:
            raise RuntimeError(
                f"Expected {parameter.fqns[0]} of {self.display_name} to stay frozen, as it "
                "was when it was sharded and got no gradient buffer, got requires_grad=True."
            )
        parameter.full.requires_grad_(parameter.sharded.requires_grad)

    def record_exchange(self, is_backward: bool) -> None:
        """Records an exchange of tokens, or of their gradients, for a module of this group, on the
        last axis. Its ranks are consecutive, as are the ranks that exchange.
        """
        self._record([len(self.histories) - 1], Kind.EXCHANGE, int(is_backward))

    def show_sharded(self) -> None:
        """Puts the sharded parameters into the modules."""
        for parameter in self.fsdp_parameters:
            parameter.show(parameter.sharded)

    def reshard(self) -> None:
        """Frees the full parameters' memory, reserved or used, unless the compute weights rest in
        it. A group that has failed stays so.
        """
        if self.phase is MemoryPhase.SHARDED:
            return
        if self.phase is MemoryPhase.GATHERING:
            self.wait_unsharded()  # the gather writes to that memory

        if self.is_gathered:
            self.unsharded_weight.release_storage()
        if self.phase is not MemoryPhase.FAILED:
            self.phase, self._reserved = self.phase.to(MemoryPhase.SHARDED), None

    # Backward. It gathers by the same calls, and its hooks collect into `gradients`.

    def forget_gradients(self) -> None:
        """Drops gradients that were collected but not reduced, after a failed backward."""
        for parameter in self.fsdp_parameters:
            parameter.full.grad = None
        if self.gradients is not None:
            self.gradients.forget()
            self.release_gradients()

    def drop_partial_sums(self) -> None:
        """Drops gradients whose reduction over deferred axes is still to come. All ranks must call
        it.
        """
        for sharded in self._sharded:
            if is_partial(sharded.grad):
                sharded.grad = None
        if self.gradients is not None:
            self.gradients.forget_deferred()

    # Reduce

    @property
    def reduction_takes_memory(self) -> bool:
        """Whether `reduce` would take memory now; see `GroupGradients.takes_memory_to_reduce`."""
        assert self.gradients is not None, "called for groups that have gradients"
        return self.gradients.takes_memory_to_reduce(self._sharded)

    def reduce(self, lane: Lane, is_last: bool, others: Sequence[FsdpParameterGroup] = ()) -> Event:
        """Starts to reduce the collected gradients; see `GroupGradients.reduce`.

        Args:
            others: groups of the same unit, which are reduced together with this one.
        """
        groups = (self, *others)
        reductions = [group._prepare_reduction(is_last) for group in groups]
        labels = [group._label(Kind.REDUCE, "gradients") for group in groups]
        work = partial(carry_out_reductions, reductions, labels)
        nbytes = sum(each.gradients.unsharded.local_buffer.nbytes for each in reductions)
        timed = self.timeline.timed(REDUCE, self.display_name, work, nbytes)
        reduced = lane.enqueue(timed, [self._device.event()])
        for group in groups if is_last else ():
            group._main_grad_reads = [send(reduced) for send in group._send_down.values()]
        return reduced

    def _prepare_reduction(self, is_last: bool) -> Prepared:
        assert self.gradients is not None, "called for groups that have gradients"
        self._wait_main_grad_read()
        prepared = self.gradients.reduce(self._sharded, is_last)
        for step in prepared.steps:
            if step.axes:
                details = gradient_details(step.received, step.kept)
                self._record(step.axes, Kind.REDUCE, *details)
        return prepared

    def _wait_main_grad_read(self) -> None:
        """Makes this thread's next work wait until the last step's gradients have been copied to
        the host.
        """
        reads, self._main_grad_reads = self._main_grad_reads, []
        for event in reads:
            self.timeline.awaited(event, D2H, self.display_name).wait()

    def wait_reduced(self, reduced: Event) -> None:
        """Makes this thread's next work wait for `reduce`, by its event."""
        self.timeline.awaited(reduced, REDUCE, self.display_name).wait()

    def release_gradients(self) -> None:
        """Frees the buffers that `reduce` has read. Call it after the event that `reduce`
        returned.
        """
        assert self.gradients is not None, "called for groups that have gradients"
        self.gradients.release(self._sharded)

    def free_unused_main_grad(self) -> None:
        """Frees the reduced gradients if all of them have been cleared to None. In a forward, whose
        weights have been updated by them, the copies to wait for are done.
        """
        if self.gradients is not None and self.gradients.is_main_unused(self._sharded):
            self._wait_main_grad_read()
            self.gradients.free_main()

    def send_main_grad(self, send_down: Callable[[Event], Event], first: int = 0) -> None:
        """Has the reduced gradients of every last microbatch sent away as soon as they are ready.

        Args:
            send_down: from the event after which main_grad may be read to the one after which it
                has been read; called in the middle of the backward.
            first: index of the first parameter whose gradients it sends: it takes the place of the
                last one with the same first parameter.
        """
        self._send_down[first] = send_down

    def hold_main_grad(self, read: Event) -> None:
        """Has reduced gradients neither overwritten nor freed before an event."""
        self._main_grad_reads.append(read)

    # Update

    def record_ready(self, updated: Collection[int]) -> None:
        """Records the parameters that an optimizer is about to update, where ranks must compare
        before it does.

        Args:
            updated: the `id` of each parameter, also of other groups.
        """
        sharded = enumerate(parameter.sharded for parameter in self.fsdp_parameters)
        details = gradient_details([index for index, one in sharded if id(one) in updated])
        for history in self.histories:
            if history.needs_comparison(self.number):
                history.add(Kind.READY, self.number, *details)

    def wait_main_weight(self) -> None:
        """Blocks this thread until no update of the main weights is running."""
        self.delivery.synchronize()

    def quantize_on_host(self, codes: DBuffer) -> torch.Tensor:
        """Writes the codes of main weights in host memory, as a host lane's work. All ranks that
        divide the weights call it. Returns what `GroupCodes.set_scales` takes.
        """
        assert self.codes is not None, "called for weights that are kept as codes"
        return self.codes.quantize(self.main_weight, codes, self._host_label())

    def combine_on_host(self, maxima: torch.Tensor) -> None:
        """The same of the maxima alone, in place, where an update has made codes."""
        assert self.codes is not None, "called for weights that are kept as codes"
        self.codes.combine(maxima, self._host_label())

    def rounded_weight(self) -> DBuffer:
        """Memory on the device for new weights, which are kept as codes. An optimizer writes them
        there, in the compute dtype, before the event that it announces, and the next gather
        quantizes them and frees the memory.
        """
        if self._rounded is None:
            placements, device = self.placements.optimizer, self._device.torch_device
            self._rounded = DBuffer(self.mesh, placements, self.layout, self.dtype, device)
        return self._rounded

    def put_main_weight(self, buffer: DBuffer) -> None:
        """Moves the main weights into another buffer of the same kind, in host memory.

        The sharded parameters stay the same objects, over the new memory. Their `device` stays that
        of the compute weights, where their gradients are.
        """
        expected = (self.placements.optimizer, self.layout, self.main_weight.dtype)
        got = (buffer.placements, buffer.layout, buffer.dtype)
        if expected != got:
            raise ValueError(f"Expected a buffer of {expected}, got {got}.")
        for index, parameter in enumerate(self.fsdp_parameters):
            self._check_is_view(index, parameter)

        self.wait_main_weight()
        buffer.local_buffer.copy_(self.main_weight.local_buffer)
        self.main_weight = buffer
        self.is_on_host = True
        for index, parameter in enumerate(self.fsdp_parameters):
            local = buffer.get_local_tensor(index)
            parameter.sharded._local_tensor = local  # type: ignore[attr-defined]
        self.mark_updated()

    def record_step(self) -> None:
        """Records that an optimizer has updated the main weights."""
        self._record(range(self.mesh.ndim), Kind.STEP)

    def mark_updated(self) -> None:
        """Marks the compute weights as stale; they are made anew before their next use."""
        self._num_marked += 1

    def recover(self) -> None:
        """Drops the gradients of the sharded parameters, and makes the compute weights anew before
        their next use: on an accelerator, a gather that did not match may have mixed them up.
        Weights whose gather failed may be gathered again, unless that came after an update by
        another optimizer. All ranks must call it.
        """
        self.drop_partial_sums()
        for sharded in self._sharded:
            sharded.grad = None
            # Where TransformerEngine's FusedAdam reads gradients with `use_decoupled_grad`.
            if hasattr(sharded, "decoupled_grad"):
                sharded.decoupled_grad = None
        self.mark_updated()

        # After an update that failed, the main weights are no source for another gather.
        if self.phase is MemoryPhase.FAILED and self.delivery.status is not Delivery.Status.FAILED:
            self.reshard()
            self.phase, self._failure = self.phase.to(MemoryPhase.SHARDED), None

    def follow_histories(self) -> None:
        """Records that an update makes codes by the histories as they are."""
        if self._copied is not None:
            self._copied = (*self._copied[:-1], self._writes()[-1])

    def _writes(self) -> tuple[int, ...]:
        """(marked writes to the main weights, writes counted by their tensor versions, writes to
        histories that scales of codes are computed from).
        """
        of_histories = 0 if self.codes is None else self.codes.history_versions
        return self._num_marked, self._versions(), of_histories

    def _versions(self) -> int:
        """Counts writes to the main weights that autograd sees, by parameter or by buffer."""
        versions = self.main_weight.local_buffer._version
        for parameter in self.fsdp_parameters:
            versions += parameter.sharded._version + local_tensor(parameter.sharded)._version
        return versions

    # Comparing ranks

    def checksum(self) -> torch.Tensor:
        """A number that most likely differs if main weights do. Scalar, int64."""
        self.wait_main_weight()
        integers = self.main_weight.local_buffer.view(_INTEGERS[self.main_weight.dtype.itemsize])
        return integers.sum(dtype=torch.int64).to(self._device.torch_device)

    def sample_initial_weight(self, whole: torch.Tensor) -> None:
        """Takes a sample of a parameter's initial values, which every rank must have drawn alike.
        Call it after they have been copied into the main weights.
        """
        self._initial_sample += _sample(whole)

    def keep_initial_sample(self) -> None:
        """Ends the samples. They are valid until other code writes to the main weights."""
        self._filled = (self._versions(), self._local_sample())

    def initial_checksum(self) -> torch.Tensor:
        """A number that most likely differs if ranks had different initial weights to cut; 0 if
        they are unknown, or something else has been loaded since. Scalar, int64.
        """
        self.wait_main_weight()
        # A write of the same values shows in the versions alone, one by `.data` in values alone;
        # a rank without rows sees neither.
        is_known = self._has_rows and self._filled == (self._versions(), self._local_sample())
        value = 1 + self._initial_sample % 2**62 if is_known else 0
        return torch.tensor(value, dtype=torch.int64, device=self._device.torch_device)

    @property
    def _has_rows(self) -> bool:
        return any(self.main_weight.get_local_tensor(i).numel() for i in range(len(self.names)))

    def _local_sample(self) -> int:
        own = (self.main_weight.get_local_tensor(index) for index in range(len(self.names)))
        return sum(map(_sample, own))

    def names_without_values(self, lane: Lane) -> list[str]:
        """The names of the parameters with NaN on any rank, which `fully_shard` writes to main
        weights that have no values. All ranks must call it.
        """
        self.wait_main_weight()
        rows = [self.main_weight.get_local_tensor(index) for index in range(len(self.names))]
        is_empty = torch.stack([own.isnan().any() for own in rows])
        flags = is_empty.to(self._device.torch_device, torch.int32)
        what = "which weights have values"
        exchange = partial(all_reduce_over, self.mesh, flags, dist.ReduceOp.MAX, what)
        lane.enqueue(exchange, [self._device.event()]).wait()
        return [name for name, flag in zip(self.names, flags.tolist(), strict=True) if flag]

    def _record(self, axes: Iterable[int], kind: Kind, *details: int) -> None:
        # Ranks along kept axes hold different rows of the same parameters, so they do the same.
        recorded = set(axes)
        for axis, is_kept in enumerate(self.placements.is_kept):
            if is_kept or axis in recorded:
                self.histories[axis].add(kind, self.number, *details)

    def _host_label(self) -> Label:
        # Another tag than gathers, which another thread may be exchanging over the same group.
        return self._label(Kind.STEP, "maxima of updated weights")

    def _label(self, kind: Kind, tensors: str) -> Label:
        return Label(tag_of(kind, self.number), f"the {tensors} of {self.display_name}")

    # Construction

    def _make_parameter(self, index: int, owned: OwnedParameter) -> FsdpParameter:
        # Gathers write to this memory, which autograd must not take for a change of saved tensors.
        rows = self.unsharded_weight.get_local_tensor(index)
        whole = apart(rows) if self.codes is None else self.codes.placeholder(index)
        full = nn.Parameter(whole, requires_grad=self.requires_grad)
        sharded = sharded_parameter(
            self.main_weight.get_dtensor(index),
            self._device.torch_device,
            self.requires_grad,
            before_use=self.wait_main_weight,
        )

        # What users have set on the original parameter holds for both.
        for parameter in (full, sharded):
            vars(parameter).update(vars(owned.original))
        if self.codes is not None:
            self.codes.show(index, full)
        setattr(sharded, _GROUP, weakref.ref(self))
        if self.requires_grad and self.plan.grad_dtype != self.main_weight.dtype:
            # Any dtype; `fully_shard_optimizer` casts for the time of a step.
            sharded.grad_dtype = None

        owners = tuple((weakref.ref(module), name) for module, name in owned.owners)
        return FsdpParameter(owned.fqns, owners, full, sharded)


def _sample(tensor: torch.Tensor) -> int:
    """The sum of the bits of about 16 rows: all would take a pass over the whole model."""
    rows = tensor.detach()[:: max(1, len(tensor) // 16)] if tensor.dim() else tensor.detach()
    return int(rows.contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))


def _axes_between(source: DBuffer, target: DBuffer) -> list[int]:
    return axes_to_move(source.placements, target.placements)
