"""`GroupGradients`: from the gradients that autograd leaves at full parameters to the gradients
that the optimizer reads.

    unsharded   this rank's gradients of the weights in use, as its backward leaves them
    partial     their sum over microbatches, where an axis is reduced only after the last of them
    main        reduced over all axes except kept ones; read by the optimizer

Where no other rank has gradients to add (`GroupPlan.skips_reduction`), only `main` has memory.
Autograd's own tensors are kept until they are added to it.

The gradient of a sharded parameter is its sum so far: None, a part of `main`, or, between the
microbatches of a deferred reduction, a part of `partial`, with the placements of a partial sum.
There is no other record, so clearing gradients, to None or to zero, is enough to start a new sum.

`main` exists from the first reduction into it until the group's next forward, or next reduction,
that finds all gradients cleared to None: the forward then runs without it. It is allocated anew
rather than resized, so a gradient that a program has kept keeps its values.

Messages between ranks must not depend on which gradients each of them has. So whether a microbatch
has deferred a reduction is remembered apart from the gradients, alike on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.collectives import Label, Move, carry_out
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.distributed.fsdp.uneven_rows import recut
from megatron.core.dtensors import is_partial, local_tensor
from megatron.core.mesh import second_group


@dataclass(frozen=True)
class ReductionStep:
    """Reduce `source` over the axes where `target` is not partial, into `target`."""

    source: DBuffer
    source_rows: Sequence[torch.Tensor]
    target: DBuffer
    target_rows: Sequence[torch.Tensor]
    # Parameters whose sum so far, in `target`, is added to; the others' values there are junk.
    kept: Collection[int]
    received: Collection[int]  # parameters that have a gradient in `source`
    divisor: float

    @cached_property
    def axes(self) -> list[int]:
        """The mesh axes to reduce over, from the last one, where cut axes are, to the first."""
        pairs = list(zip(self.source.placements, self.target.placements, strict=True))
        return [axis for axis in reversed(range(len(pairs))) if pairs[axis][0] != pairs[axis][1]]


class Prepared(NamedTuple):
    """A reduction that `GroupGradients.reduce` has prepared."""

    gradients: GroupGradients
    folded: Sequence[int]  # finished sums that become partial ones first
    steps: Sequence[ReductionStep]


def carry_out_reductions(reductions: Sequence[Prepared], labels: Sequence[Label]) -> None:
    """Reduces the gradients of groups. Steps of the same number start together, where they can."""
    for prepared in reductions:
        for index in prepared.folded:
            prepared.gradients.fold(index)
    for steps in zip_longest(*(prepared.steps for prepared in reductions)):
        carry_out(
            [
                prepared.gradients.move(step, label)
                for prepared, step, label in zip(reductions, steps, labels, strict=True)
                if step is not None
            ]
        )


class GroupGradients:
    """The gradient buffers of one parameter group, which have memory only while they are needed.

    Attributes:
        unsharded, partial, main: buffers, described in the module's docstring. `partial` is None
            where no reduction is deferred, `main` while no gradient has been reduced.
    """

    main: DBuffer | None

    def __init__(self, plan: GroupPlan, mesh: DeviceMesh, device: torch.device) -> None:
        placements, layout = plan.placements, plan.layout
        self._plan = plan
        self._mesh = mesh
        self._device = device
        # By mesh axis, where they are not the mesh's own.
        self._process_groups: dict[int, dist.ProcessGroup | None] = {}
        self._divisor = plan.grad_divisor
        self._received: set[int] = set()
        self._own: dict[int, torch.Tensor] = {}  # autograd's, by index, of `skips_reduction`
        self._has_deferred = False  # since the last reduction over all axes

        # Ranks along a kept axis have the gradients of different rows, which are not summed.
        partial_sums = [
            placement if kept else _as_partial(placement)
            for placement, kept in zip(placements.gradient, placements.is_kept, strict=True)
        ]
        self.main = None
        self._main_rows: Sequence[torch.Tensor] = ()
        self._main_grads: Sequence[DTensor] = ()
        self._earlier_writes = 0  # to buffers before `main`
        # To describe a DTensor takes ten times as long as to make one like another.
        numbers = range(len(layout.tensor_shapes))
        likes = DBuffer(mesh, placements.optimizer, layout, plan.grad_dtype, "meta")
        self._main_likes = [likes.get_dtensor(index) for index in numbers]
        self.unsharded = DBuffer(mesh, partial_sums, layout, plan.sent_dtype, device)
        self.partial: DBuffer | None = None

        # Their views are made now, since none can be made while a storage is released.
        self._slots = [self.unsharded.get_local_tensor(index) for index in numbers]
        if plan.defers_reduction:
            self.partial = DBuffer(mesh, placements.gradient, layout, plan.grad_dtype, device)
            self._partial_rows = [self.partial.get_local_tensor(index) for index in numbers]
            self._partial_grads = [self.partial.get_dtensor(index) for index in numbers]
            inner = self.partial.view(placements.optimizer)
            self._main_rows_in_partial = [inner.get_local_tensor(index) for index in numbers]
            self.partial.release_storage()
        self.unsharded.release_storage()

    def reduce_alongside_gathers(self) -> None:
        """Has gradients reduced over process groups that gather no weights, between machines. All
        ranks must call it.
        """
        placements = self._plan.placements
        for axis, (placement, is_kept) in enumerate(
            zip(placements.parameter, placements.is_kept, strict=True)
        ):
            if isinstance(placement, Shard) and not is_kept and self._mesh.size(axis) > 1:
                group = self._mesh.get_group(axis)
                self._process_groups[axis] = second_group(group, self._device)

    def divide_sums_by(self, factor: float) -> None:
        """Divides gradients by `factor` instead of the number of ranks that average them, then by
        the divisor.
        """
        num_averaged = math.prod(
            self._mesh.size(axis)
            for axis, placement in enumerate(self.unsharded.placements)
            if isinstance(placement, Partial) and placement.reduce_op == "avg"
        )
        self._divisor = self._plan.grad_divisor * factor / num_averaged

    @property
    def received(self) -> Collection[int]:
        """The parameters whose gradients have been collected and not reduced yet."""
        return self._received

    def is_main(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether a parameter's gradient is the one in `main`, not one that replaced it."""
        return self.main is not None and gradient is self._main_grads[index]

    def main_versions(self) -> int:
        """Counts the writes to `main` that autograd sees, through the gradients or the buffer. A
        new buffer counts as a write.
        """
        versions = self._earlier_writes
        if self.main is not None:
            versions += self.main.local_buffer._version
        for gradient in self._main_grads:
            versions += gradient._version + gradient._local_tensor._version
        return versions

    def is_main_unused(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether `main` exists though all gradients have been cleared to None."""
        return self.main is not None and all(own.grad is None for own in parameters)

    def free_main(self) -> None:
        """Drops `main`, whose memory is free unless a program has kept a gradient. Call it after
        all other lanes have read it.
        """
        self._earlier_writes = self.main_versions() + 1
        self.main, self._main_rows, self._main_grads = None, (), ()

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a gradient of the whole parameter `index`; adds it to one that is there. The caller
        must not write to it afterwards.
        """
        if self._plan.skips_reduction:
            is_first = index not in self._received
            self._own[index] = gradient if is_first else self._own[index] + gradient
            self._received.add(index)
            return
        if not self._received:
            self._take_memory()
        if index in self._received:
            self._slots[index].add_(gradient)
        else:
            self._slots[index].copy_(gradient)
            self._received.add(index)

    def takes_memory_to_reduce(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether `reduce` would take the memory of whole gradients now, though none has been
        collected.

        It does unless all parameters are frozen, since other ranks may have gradients, and a
        collective that only some ranks issue would hang. After `collect` the memory has been taken
        already.
        """
        return not self._received and any(own.requires_grad for own in parameters)

    def reduce(self, parameters: Sequence[nn.Parameter], is_last: bool) -> Prepared:
        """Prepares the reduction of the collected gradients; the caller chooses the lane for the
        work.

        The gradients of `parameters`, the sharded ones, show the result at once, and have it when
        the work is done. No gradient may be collected before that and `release`.

        Args:
            is_last: whether deferred axes are reduced too.
        """
        has_deferred, self._has_deferred = self._has_deferred, not is_last
        joins = self.takes_memory_to_reduce(parameters)
        received, self._received = frozenset(self._received), set()
        # Cleared after the forward: a gradient that a program has kept must not be written over.
        if self.is_main_unused(parameters):
            self.free_main()
        with_sum = [index for index, own in enumerate(parameters) if own.grad is not None]
        in_partial = [index for index in with_sum if is_partial(parameters[index].grad)]
        in_main = [index for index in with_sum if index not in in_partial]

        # All parameters are frozen by now, and no reduction is deferred: gradients stay unchanged.
        takes_part = bool(received) or joins
        if not takes_part and not (is_last and in_partial):
            return Prepared(self, [], [])

        if joins:
            self._take_memory()
        if in_main or is_last or self.partial is None:
            self._allocate_main()
        self._take_over(parameters, in_main, self._main_grads)

        # Straight to `main` if no axis is deferred, or if all are and this microbatch is the only
        # one.
        if self.partial is None or (is_last and not has_deferred and self._plan.defers_all_axes):
            step = self._step(self.unsharded, self._allocated_main, in_main, received)
            self._show(parameters, received, self._main_grads)
            return Prepared(self, [], [step])

        self.partial.reallocate_storage()
        self.partial.zero_padding()
        self._take_over(parameters, in_partial, self._partial_grads)
        # A finished sum of an earlier step, which was not cleared, continues as a partial one.
        folded = [] if is_last else in_main
        kept = [*in_partial, *folded]

        steps = list[ReductionStep]()
        if takes_part:
            steps.append(self._step(self.unsharded, self.partial, kept, received))
        shown = received.union(kept)
        if is_last:
            steps.append(self._step(self.partial, self._allocated_main, in_main, shown))
        self._show(parameters, shown, self._main_grads if is_last else self._partial_grads)
        return Prepared(self, folded, steps)

    @staticmethod
    def _show(
        parameters: Sequence[nn.Parameter], indices: Iterable[int], grads: Sequence[DTensor]
    ) -> None:
        for index in indices:
            parameters[index].grad = grads[index]

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Frees the buffers that the last `reduce` has read, after its work is done."""
        if not self._received:
            self.unsharded.release_storage()
            self._own.clear()
        if self.partial is not None and not any(
            is_partial(parameter.grad) for parameter in parameters
        ):
            self.partial.release_storage()

    def forget(self) -> None:
        """Drops collected gradients that are not reduced yet."""
        self._received = set()
        self._own.clear()

    def forget_deferred(self) -> None:
        """Forgets that a reduction was deferred. All ranks must call it, without partial sums."""
        self._has_deferred = False

    @property
    def _allocated_main(self) -> DBuffer:
        assert self.main is not None, "allocated before"
        return self.main

    def _allocate_main(self) -> None:
        if self.main is not None:
            return
        plan = self._plan
        self.main = DBuffer(
            self._mesh, plan.placements.optimizer, plan.layout, plan.grad_dtype, self._device
        )
        self._main_rows = [self.main.get_local_tensor(i) for i in range(len(self._main_likes))]
        pairs = zip(self._main_likes, self._main_rows, strict=True)
        self._main_grads = [like.with_local(rows) for like, rows in pairs]

    def _take_memory(self) -> None:
        if self._plan.skips_reduction:
            return
        self.unsharded.reallocate_storage()
        self.unsharded.zero_padding()

    def _step(
        self, source: DBuffer, target: DBuffer, kept: Collection[int], received: Collection[int]
    ) -> ReductionStep:
        source_rows = self._slots if source is self.unsharded else self._partial_rows
        target_rows = self._main_rows if target is self.main else self._partial_rows
        divisor = self._divisor if source is self.unsharded else 1.0
        return ReductionStep(source, source_rows, target, target_rows, kept, received, divisor)

    def _take_over(
        self, parameters: Sequence[nn.Parameter], indices: Iterable[int], own: Sequence[DTensor]
    ) -> None:
        """Copies gradients that have replaced views of our buffers into the buffers."""
        for index in indices:
            gradient = parameters[index].grad
            if gradient is own[index]:
                continue

            ours, theirs = local_tensor(own[index]), local_tensor(_cut_as(gradient, own[index]))
            if ours.shape != theirs.shape:
                raise ValueError(
                    f"Expected a gradient sharded like its parameter, {tuple(ours.shape)} here, "
                    f"got one of {tuple(theirs.shape)}."
                )
            if ours.data_ptr() != theirs.data_ptr():
                ours.copy_(theirs)

    def move(self, step: ReductionStep, label: Label) -> Move:
        """A step of a reduction, as a lane's work."""
        group, axes = None, [] if self._plan.skips_reduction else step.axes
        if len(axes) == 1 and isinstance(step.target.placements[axes[0]], Shard):
            group = self._process_groups.get(axes[0]) or self._mesh.get_group(axes[0])
        work = partial(self._carry_out, step)
        return Move(work, group, step.source.local_buffer, self._plan.comm_dtype, label)

    def _add_own(self, step: ReductionStep) -> None:
        """Adds autograd's gradients to the sums in `main`."""
        for index, target in enumerate(step.target_rows):
            if index not in step.received:
                if index not in step.kept:
                    target.zero_()
                continue

            gradient = self._own[index]
            if step.divisor != 1:
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                gradient = gradient.to(dtype, copy=True).div_(step.divisor)
            if index in step.kept:
                target.add_(gradient)
            else:
                target.copy_(gradient)

    def _carry_out(self, step: ReductionStep, label: Label) -> None:
        if self._plan.skips_reduction:
            self._add_own(step)
            return

        indices, kept = set(range(len(self._slots))), set(step.kept)
        missing, junk = indices.difference(step.received), indices - kept
        # Zero does not change an existing sum. Otherwise NaN makes sure that what
        # ranks with a gradient get does not pass for a mean.
        for index in missing:
            step.source_rows[index].fill_(0.0 if index in kept else math.nan)
        if step.kept:
            for index in junk:
                step.target_rows[index].zero_()

        self._reduce(step, label)

        # A gradient that no rank has must not leave NaN behind for the next one to be added to.
        def clear() -> None:
            for index in missing & junk:
                step.target_rows[index].zero_()

        label.end(clear)

    def fold(self, index: int) -> None:
        """Turns a parameter's reduced sum of an earlier step into a partial sum that would reduce
        to it.

        This rank has only its own rows of it. An average over ranks of which one has a value needs
        that value times their number; a sum over ranks that all have it needs it from one of them.
        """
        scale = 1.0
        for axis, (own, reduced) in enumerate(
            zip(self._plan.placements.gradient, self._plan.placements.optimizer, strict=True)
        ):
            if isinstance(own, Partial) and isinstance(reduced, Shard) and own.reduce_op == "avg":
                scale *= self._mesh.size(axis)
            if (
                isinstance(own, Partial)
                and isinstance(reduced, Replicate)
                and own.reduce_op == "sum"
            ):
                scale *= float(self._mesh.get_local_rank(axis) == 0)

        self._partial_rows[index].zero_()
        self._main_rows_in_partial[index].copy_(self._main_rows[index]).mul_(scale)

    def _reduce(self, step: ReductionStep, label: Label) -> None:
        """source (+)-> target over all axes where the target is not partial."""
        source, target, accumulates, axes = step.source, step.target, bool(step.kept), step.axes
        if not axes:
            _add_locally(source, target, accumulates, step.divisor)
            return

        if self._plan.comm_dtype.itemsize < source.dtype.itemsize:
            source = source.cast(self._plan.comm_dtype)
        divisor = step.divisor
        for number, axis in enumerate(axes):
            placement, is_final = target.placements[axis], number == len(axes) - 1
            # A step on the way may use the target's memory, unless that holds the sum so far.
            out = target if is_final else None
            if not is_final and not accumulates:
                out = target.part_for(
                    [*source.placements[:axis], placement, *source.placements[axis + 1 :]]
                )
            move = source.allreduce
            if isinstance(placement, Shard):
                move = partial(source.reduce_scatter, placement=placement)
            source = move(
                axis,
                dtype=self._plan.grad_dtype,
                out=out,
                divisor=divisor,
                accumulates=accumulates and is_final,
                device_dtype=self._plan.comm_dtype,
                label=label,
                group=self._process_groups.get(axis),
            )
            divisor = 1.0  # once, not on every axis


def _cut_as(gradient: torch.Tensor | None, own: DTensor) -> torch.Tensor | None:
    """The rows of a gradient that `own` has; a partial sum unchanged."""
    return gradient if gradient is None or is_partial(gradient) else recut(gradient, own)


def _add_locally(source: DBuffer, target: DBuffer, accumulates: bool, divisor: float) -> None:
    """Adds up the gradients of microbatches that are reduced over no axis yet."""
    if accumulates:
        target.local_buffer.add_(source.local_buffer, alpha=1.0 / divisor)
        return

    target.local_buffer.copy_(source.local_buffer)
    if divisor != 1:
        target.local_buffer.div_(divisor)


def _as_partial(placement: Placement) -> Placement:
    return placement if isinstance(placement, Partial) else Partial("avg")
