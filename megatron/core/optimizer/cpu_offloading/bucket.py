"""`Bucket`: flat arrays in host memory that move together between device and host.

    grad           gradients, copied down
    main_weight    weights that the host updates
    weight         new compute weights, copied up; may share the memory of `grad`

A bucket holds the parameters of one FSDP group (`FsdpBucket`), whose shards on the device are flat
too and move with one copy, or other tensors, plain ones or DTensors (`TensorBucket`), which move
one by one. A `Slot` is the place of a parameter in the arrays.
"""

from __future__ import annotations

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from megatron.core.distributed.fsdp.aliases import apart
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.placement import sharded_axes
from megatron.core.dtensors import local_tensor
from megatron.core.dtypes import FLOAT_DTYPES
from megatron.core.lane_timings import D2H, Recorder, StepRecorder
from megatron.core.lanes import Awaited, Event, IssuingLane, Lane, RelayedEvent
from megatron.core.optimizer.cpu_offloading.early_updates import EarlyUpdate
from megatron.core.optimizer.kernels.piece import Encode, Piece, PieceCodes
from megatron.core.optimizer.matrix_pass import MatrixStep
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_tensors import MASTER, TensorWrites, is_rounding, like


class Slot(NamedTuple):
    """One parameter's place in a bucket: this rank's elements of it, which may be none."""

    parameter: nn.Parameter
    offset: int  # elements
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of one of the bucket's arrays."""
        return flat.narrow(0, self.offset, self.numel)


class StatePlaces(NamedTuple):
    """Where the states of slots are, if a rule has parts with different ones: matrices of Muon have
    a momentum, other parameters the moments of Adam. The array of a state has room only for the
    slots that have it.

    Attributes:
        rules: the part that updates each slot.
        offsets: elements, of each slot in the arrays of its states.
        numels: elements of the array of each state, padding included.
    """

    rules: Sequence[UpdateRule]
    offsets: list[int]
    numels: dict[str, int]

    @classmethod
    def of(cls, numels: Sequence[int], rules: Sequence[UpdateRule]) -> StatePlaces:
        """The places of slots of so many elements, one after the other."""
        offsets, ends = [], dict[UpdateRule, int]()
        for numel, rule in zip(numels, rules, strict=True):
            offsets.append(ends.get(rule, 0))
            ends[rule] = offsets[-1] + padded_numel(numel)
        return cls(
            rules, offsets, {n: end for rule, end in ends.items() for n in rule.state_dtypes}
        )


class Pending(NamedTuple):
    """An update of a bucket that has been queued.

    Attributes:
        updated: the parameters and their states may be read in host memory.
        sent: compute weights on the device are new, the gradients have been read, and the arrays
            of both are free again.
        done: the later of the two.
    """

    updated: Event
    sent: RelayedEvent
    done: Event


class BucketStep(NamedTuple):
    """A step of one bucket, but for the factor of the gradients."""

    bucket: Bucket
    gradients: list[tuple[Slot, torch.Tensor]]  # of the slots that are stepped
    begin: Callable[[], None]
    # Given the factor of the gradients, starts the update; returns what waits until it is done.
    start: Callable[[float], Callable[[], None]]
    pieces: Sequence[Piece] = ()  # of a rule's work; none of other optimizers
    nbytes: int = 0  # that the work reads and writes; 0: not known
    matrices: Sequence[MatrixStep] = ()  # which are stepped before the pieces


class Bucket(ABC):
    """Arrays of one bucket, which are set once host memory has been allocated.

    Attributes:
        name: for messages.
        slots: of the parameters that are stepped.
        numel: elements of each array, padding included.
        main_numel: elements of the array of main weights before `adopt`.
        weight_numel: elements of the array of compute weights, where two codes are one.
        main_dtype, grad_dtype, weight_dtype: of the arrays.
        accepted_grad_dtypes: dtypes of gradients that are copied without loss.
        is_delivered: whether the device itself waits for weights that have been sent; otherwise
            the sender must.
        is_quantized: whether compute weights are codes, which an update or `quantize` makes.
        is_streamed: whether the device updates the bucket; see streamed_pass.py.
        is_watched: whether all other readers and writers of its main weights call `settle` first.
        undo: memory for old values by name, as in `Piece.undo`; empty where the bucket is not
            updated early.
        early: an update that is not final yet; see early_updates.py.
        pending: the last update; None before the first step.
        state_places: where the rule's states are; None: each has the layout of the bucket.
        reads: events after which readers on other threads have read states and main weights. The
            next update waits for these.
    """

    is_delivered: ClassVar[bool]
    is_quantized = False
    is_streamed = False
    is_watched = False
    state_places: StatePlaces | None = None

    main_weight: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        numel: int,
        *,
        main_numel: int | None = None,
        weight_numel: int | None = None,
        main_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        accepted_grad_dtypes: Sequence[torch.dtype],
    ) -> None:
        self.name = name
        self.slots = slots
        self.numel = numel
        self.main_numel = numel if main_numel is None else main_numel
        self.weight_numel = numel if weight_numel is None else weight_numel
        self.main_dtype = main_dtype
        self.grad_dtype = grad_dtype
        self.weight_dtype = weight_dtype
        self.accepted_grad_dtypes = accepted_grad_dtypes
        self.undo: dict[str, torch.Tensor] = {}
        self.early: EarlyUpdate | None = None
        self._early_lock = threading.Lock()
        self.pending: Pending | None = None
        self.reads: list[Event] = []

    @property
    def global_numel(self) -> int:
        """Elements of the parameters that are stepped, of all ranks."""
        return sum(slot.parameter.numel() for slot in self.slots)

    def own_main_weight(self) -> torch.Tensor | None:
        """The main weights as a flat array, if they are in host memory already."""
        return None

    @abstractmethod
    def adopt(self, owner: object) -> None:
        """Moves the main weights into the bucket, unless they are there; `owner` updates them."""

    @abstractmethod
    def reload(self) -> None:
        """Takes over the parameters' values, whatever was written to them."""

    def check(self, owner: object) -> None:  # noqa: B027
        """RuntimeError if another optimizer updates the main weights."""

    def fetch_during_backward(  # noqa: B027
        self, lane: Lane, timings: Recorder, begin_early: Callable[[Event], None]
    ) -> None:
        """Fetches gradients as soon as they are reduced from here on, if the group reports it.

        Args:
            begin_early: called with the event after which they are there. It must keep neither the
                optimizer nor its lanes alive.
        """

    def keep_main_weight(self, stepped: Sequence[Slot]) -> None:  # noqa: B027
        """Before an update: takes over writes of others to the parameters since the last one."""

    def main_weight_loaded(self, index: int) -> None:  # noqa: B027
        """A slot's main weight was loaded: it takes precedence over the parameter's value."""

    def is_fetched(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> bool:  # noqa: ARG002
        """Whether the gradients of a step are in `grad` already."""
        return False

    def land(
        self, lane: Lane, gradients: Sequence[tuple[Slot, torch.Tensor]], now: Event
    ) -> list[Event]:
        """Fetches the gradients of the coming step, unless they have been. Returns the events after
        which they are in `grad`.

        Args:
            now: after which they may be read.
        """
        raise NotImplementedError("Only FSDP groups' gradients can be fetched before a step.")

    @abstractmethod
    def fetch(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        """Copies the gradients of a step into `grad`, unless they are there already."""

    def codes_of(self, index: int) -> PieceCodes | None:  # noqa: ARG002
        """How the update of a slot writes its codes; None where it does not."""
        return None

    def choose_scales(self) -> None:  # noqa: B027
        """Before an update, chooses the scales of codes that do not depend on it."""

    def quantize(self, pieces: Sequence[Piece], encode: Encode | None) -> None:  # noqa: B027
        """After an update, makes the codes in `weight` that it has not made, where compute weights
        are kept as codes.

        Args:
            pieces: of the update.
            encode: of the kernel that carried it out; see `HostKernel`.
        """

    @abstractmethod
    def send(self, stepped: Sequence[Slot]) -> None:
        """Copies new compute weights to the device."""

    def on_device(self, step: BucketStep) -> list[Piece] | None:  # noqa: ARG002
        """The pieces of a step with the device's own gradients and compute weights instead of the
        arrays in host memory; None where these are not flat arrays, or where compute weights are
        codes and some are not stepped.
        """
        return None

    def with_undo(self, step: BucketStep) -> list[Piece]:  # noqa: ARG002
        """The pieces of a step that may be carried out early, with their undo log; else none."""
        return []

    def take_early(self) -> EarlyUpdate | None:
        """Hands over the early update for a step; drops it, and returns None, if it has not
        started.
        """
        with self._early_lock:
            early, self.early = self.early, None
        return None if early is None or early.drop() else early

    @torch.no_grad()
    def settle(self) -> None:
        """Before main weights or states are read or written: restores them, if an early update has
        changed them.
        """
        with self._early_lock:
            if self.early is not None and not self.early.drop():
                self.early.restore()
            # Only now: after an error, the next reader must fail too.
            self.early = None

    def expire_early(self) -> None:
        """Before `grad` is written to: the early update, if any, does not become final."""
        with self._early_lock:
            if self.early is not None and self.early.expire():
                self.early = None

    def hold_gradients(self, read: Event) -> None:  # noqa: B027
        """Has the device write to the gradients only after they have been read."""

    def deliver(self, timings: StepRecorder) -> None:  # noqa: B027
        """Makes the device wait for the pending update before it uses the weights."""

    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A slot's part of an array in the shape of its parameter: a DTensor if that is one."""
        slot = self.slots[index]
        return like(slot.parameter, slot.of(flat).view(local_tensor(slot.parameter).shape))

    def queue_fetch(
        self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()
    ) -> Event:
        """Queues work that writes to `grad`."""
        # New weights, which share its memory, may still be in flight.
        in_flight = [] if self.pending is None else [self.pending.sent]
        return lane.enqueue(work, after=[*after, *in_flight])

    def updates(self) -> list[Event]:
        """The events after which the bucket may be updated again, on either side."""
        # The device writes over weights that the host may still be sending.
        return [] if self.pending is None else [self.pending.done]

    def take_reads(self) -> list[Event]:
        """Hands over the events that the next update waits for."""
        # A copy: it must not grow while its events are awaited. Units keep the list itself.
        reads = self.reads.copy()
        self.reads.clear()
        return reads

    def master(self, index: int) -> dict[str, torch.Tensor]:
        """The main weight of a slot as a state; empty where the parameter is the main weight."""
        if self.slots[index].parameter.dtype == self.main_dtype:
            return {}
        return {MASTER: self.as_state(self.main_weight, index)}

    def forget_master(self, index: int) -> None:
        """The main weight of a slot becomes its parameter's value again."""
        if self.master(index):
            slot = self.slots[index]
            slot.of(self.main_weight).copy_(flat_local(slot.parameter))


def flat_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, in a row."""
    return local_tensor(tensor).detach().reshape(-1)


def fetch_each(grad: torch.Tensor, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
    """Copies gradients into a bucket's array one by one."""
    for slot, gradient in gradients:
        slot.of(grad).copy_(flat_local(gradient), non_blocking=True)


class FsdpBucket(Bucket):
    """The arrays have the layout of the group's own shards, or of the part from the first to the
    last parameter that is stepped; other optimizers may step others of the group. Its main weights
    are the group's `main_weight` itself.
    """

    is_delivered = True

    def __init__(self, group: FsdpParameterGroup, stepped: Iterable[nn.Parameter]) -> None:
        gradients = group.gradients
        assert gradients is not None, "parameters that are stepped require gradients"
        self._group = group
        self._gradients = gradients
        self._indices = sorted(group.index_of(parameter) for parameter in stepped)
        self._fetched: int | None = None  # main_versions of the gradients in `grad`
        self._landed: Event | None = None  # after which they are there
        self._owner: weakref.ref[object] | None = None
        # A parameter without a shard is read without a call that this project sees.
        self.is_watched = any(sharded_axes(group.placements.optimizer))

        whole = [self._slot(index) for index in self._indices]
        self._start, numel = 0, group.main_weight.range.numel
        if len(whole) < len(group.fsdp_parameters):
            # A parameter of which this rank has no rows is at no offset.
            own = [slot for slot in whole if slot.numel]
            self._start = min((slot.offset for slot in own), default=0)
            numel = max((slot.offset + slot.numel for slot in own), default=0) - self._start
        super().__init__(
            group.display_name,
            [slot._replace(offset=max(0, slot.offset - self._start)) for slot in whole],
            numel,
            main_numel=group.main_weight.range.numel,
            weight_numel=group.plan.weight_numel(numel),
            main_dtype=group.main_weight.dtype,
            grad_dtype=group.plan.grad_dtype,
            weight_dtype=group.plan.weight_dtype,
            accepted_grad_dtypes=(group.plan.grad_dtype,),
        )
        self.is_quantized = group.codes is not None
        # Of tiles: over all ranks in the last update, or, for the coming one, as histories have
        # chosen; and where an update puts those it finds.
        self._maxima = torch.zeros(group.plan.maxima_numel if self.is_quantized else 0)
        self._own_maxima = torch.zeros_like(self._maxima)
        if self.is_quantized and len(whole) < len(group.fsdp_parameters):
            raise ValueError(
                f"Expected one optimizer for all weights of {group.display_name}, which are kept "
                "as codes and quantized together, got one for some of them."
            )

    def own_main_weight(self) -> torch.Tensor | None:
        # For autograd, an update of the array is no change of the parameters: the delivery is.
        if not self._group.is_on_host:
            return None
        return self._part(apart(self._group.main_weight.local_buffer))

    def adopt(self, owner: object) -> None:
        group = self._group
        if not group.is_on_host:
            flat, placements = apart(self.main_weight), group.placements.optimizer
            group.put_main_weight(DBuffer.from_local(flat, group.mesh, placements, group.layout))
            self.main_weight = self._part(self.main_weight)
        group.delivery.claim(owner, self._indices)
        group.delivery.settle_by(self.settle, self._indices[0])
        self._owner = weakref.ref(owner)

    def reload(self) -> None:
        self._group.mark_updated()

    def check(self, owner: object) -> None:
        if not self._is_claimed_by(owner):
            raise RuntimeError(
                f"Expected to be the one optimizer of parameters of {self.name}, got another one, "
                "made later, that updates their main weights."
            )

    def fetch_during_backward(
        self, lane: Lane, timings: Recorder, begin_early: Callable[[Event], None]
    ) -> None:
        # The group belongs to the model, and must keep neither the optimizer nor its lanes alive.
        own_bucket, own_lane = weakref.ref(self), weakref.ref(lane)

        def send_down(reduced: Event) -> Event:
            bucket, lane = own_bucket(), own_lane()
            if bucket is None or lane is None or bucket.is_streamed:
                return reduced

            # A worker thread issues the copy behind the reduction, which has counted its writes,
            # but not behind writes of this thread until the worker gets to it.
            is_late = isinstance(lane, IssuingLane)
            fetch = partial(bucket.fetch_early, bucket._main_versions() if is_late else None)
            timed = timings.coming.timed(D2H, fetch, bucket.grad.nbytes, bucket.name)
            bucket.expire_early()  # of an earlier backward, without a step since
            fetched = bucket.queue_fetch(lane, timed, [reduced])
            bucket._landed = fetched
            begin_early(fetched)
            return fetched

        self._group.send_main_grad(send_down, self._indices[0])

    def fetch_early(self, seen_versions: int | None = None) -> None:
        """Copies all gradients before the step.

        Args:
            seen_versions: `_main_versions` when the copy was asked for, if later writes are not in
                it.
        """
        # Before the copy: writes during the copy must count as writes after it.
        self._fetched = self._main_versions() if seen_versions is None else seen_versions
        self.grad.copy_(self._main_grad(), non_blocking=True)

    def is_fetched(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> bool:
        return not self._assigned(gradients) and self._fetched == self._main_versions()

    def land(
        self, lane: Lane, gradients: Sequence[tuple[Slot, torch.Tensor]], now: Event
    ) -> list[Event]:
        if self._assigned(gradients):
            raise NotImplementedError(f"Gradients of {self.name} were assigned by a caller.")
        if self._landed is not None:
            self._landed.synchronize()
        if not self.is_fetched(gradients):
            self._landed = self.queue_fetch(lane, self.fetch_early, [now])
        return [] if self._landed is None else [self._landed]

    def fetch(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        others = self._assigned(gradients)
        if len(others) < len(gradients) and self._fetched != self._main_versions():
            self.grad.copy_(self._main_grad(), non_blocking=True)
        self._fetched = None
        fetch_each(self.grad, others)

    def codes_of(self, index: int) -> PieceCodes | None:
        codes, slot = self._group.codes, self.slots[index]
        if codes is None or self._group.dtype != torch.bfloat16 or not slot.numel:
            return None
        rows = codes.own_rows(index, self._group.main_weight)
        if not PieceCodes.is_supported(rows.quantizer.scaling):
            return None
        own, last = (codes.by_weight(flat)[index] for flat in (self._own_maxima, self._maxima))
        return PieceCodes(slot.of(self.weight), own, last, *rows)

    def choose_scales(self) -> None:
        if self._group.codes is not None:
            self._maxima.copy_(self._group.codes.limits(self._maxima))

    def quantize(self, pieces: Sequence[Piece], encode: Encode | None) -> None:
        group = self._group
        if group.codes is None:
            return

        # Codes of weights that were not stepped may be codes of other values, loaded since.
        encoded = [piece for piece in pieces if piece.codes is not None]
        is_whole = sum(piece.numel for piece in encoded) == sum(slot.numel for slot in self.slots)
        if encode is None or not is_whole:
            codes = DBuffer.from_local(
                self.weight, group.mesh, group.placements.optimizer, group.plan.weight_layout
            )
            self._maxima.copy_(group.quantize_on_host(codes))
            return

        # The pass has made the codes of tiles of which this rank has all rows. Where matrices have
        # one scale it has made all codes, which are right only if the scales were known before, as
        # with delayed scaling, unless the pass was early or a history is empty.
        group.combine_on_host(self._own_maxima)
        limits = group.codes.limits(self._own_maxima)
        are_known = all(
            piece.codes is not None and piece.codes.has_one_scale for piece in encoded
        ) and torch.equal(limits, self._maxima)
        if not are_known:
            self._maxima.copy_(limits)
            encode(encoded)
        self._maxima.copy_(self._own_maxima)
        # The next pass writes those of its rows only.
        self._own_maxima.zero_()

    def send(self, stepped: Sequence[Slot]) -> None:
        whole = self._group.post_optimizer_model_weight.local_buffer
        if self._group.codes is not None:
            self._group.codes.set_scales(self._maxima)
            whole.copy_(self.weight, non_blocking=True)
            return
        target = self._part(whole)
        for offset, numel in _ranges(stepped):
            target.narrow(0, offset, numel).copy_(
                self.weight.narrow(0, offset, numel), non_blocking=True
            )

    def on_device(self, step: BucketStep) -> list[Piece] | None:
        # Codes are made of all weights of a group together.
        is_in_part = self.is_quantized and len(step.gradients) < len(self.slots)
        if self._assigned(step.gradients) or is_in_part:
            return None

        buffer = self._group.post_optimizer_model_weight
        if self.is_quantized:
            buffer = self._group.rounded_weight()
        weight = self._part(buffer.local_buffer)
        found = []
        for start, piece in self._placed(step.pieces):
            grad = self._main_grad().narrow(0, start, piece.numel)
            out = weight.narrow(0, start, piece.numel)
            found.append(piece._replace(grad=grad, out=out, codes=None))
        return found

    def with_undo(self, step: BucketStep) -> list[Piece]:
        owner = None if self._owner is None else self._owner()
        if not self.undo or not self._is_claimed_by(owner) or self._assigned(step.gradients):
            return []
        return [
            piece._replace(
                undo={n: kept.narrow(0, start, piece.numel) for n, kept in self.undo.items()}
            )
            for start, piece in self._placed(step.pieces)
        ]

    def hold_gradients(self, read: Event) -> None:
        self._group.hold_main_grad(read)

    def deliver(self, timings: StepRecorder) -> None:
        assert self.pending is not None, "called once the update is queued"
        sent = self.pending.sent
        # The device uses weights as soon as they are there; the host reads main weights later.
        updated = Awaited(self.pending.done, timings.awaited(sent).wait)
        self._group.delivery.announce(updated, timings.before_use(sent), self._indices[0])
        self._group.follow_histories()

    def _is_claimed_by(self, owner: object) -> bool:
        return self._group.delivery.is_claimed_by(owner, self._indices)

    def _assigned(
        self, gradients: Sequence[tuple[Slot, torch.Tensor]]
    ) -> list[tuple[Slot, torch.Tensor]]:
        """Gradients that a caller assigned, which are outside of the group's buffer."""
        pairs = zip(self.slots, self._indices, strict=True)
        indices = {id(slot.parameter): index for slot, index in pairs}
        return [
            (slot, gradient)
            for slot, gradient in gradients
            if not self._gradients.is_main(indices[id(slot.parameter)], gradient)
        ]

    def _placed(self, pieces: Sequence[Piece]) -> list[tuple[int, Piece]]:
        """Pieces with their offsets in the bucket's arrays, in elements."""
        begin = self.main_weight.storage_offset()
        return [(int(piece.weight.storage_offset() - begin), piece) for piece in pieces]

    def _main_versions(self) -> int:
        """Counts the writes to the group's gradients."""
        return self._gradients.main_versions()

    def _main_grad(self) -> torch.Tensor:
        """The bucket's part of the group's gradients, of which there are some."""
        main = self._gradients.main
        assert main is not None, "kept until it has been read"
        return self._part(main.local_buffer)

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        """The bucket's part of one of the group's local buffers."""
        return flat.narrow(0, self._start, self.numel)

    def _slot(self, index: int) -> Slot:
        parameter = self._group.fsdp_parameters[index].sharded
        offset = self._group.main_weight.chunk(index).offset
        return Slot(parameter, offset, local_tensor(parameter).numel())


def _ranges(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Returns (offset, numel) of the slots, with neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if ranges and sum(ranges[-1]) == slot.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + slot.numel)
        elif slot.numel:
            ranges.append((slot.offset, slot.numel))
    return ranges


_ALIGNMENT = 64  # elements: every parameter starts on a cache line


class TensorBucket(Bucket):
    """Main weights that are copies of the parameters, and follow writes to them."""

    is_delivered = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        main_dtype: torch.dtype,
        use_decoupled_grad: bool = False,
    ) -> None:
        slots, numel = [], 0
        for parameter in parameters:
            slots.append(Slot(parameter, numel, local_tensor(parameter).numel()))
            numel += padded_numel(slots[-1].numel)

        # Decoupled gradients may have other dtypes than parameters: they travel in fp32.
        dtype = parameters[0].dtype
        grad_dtype = torch.float32 if use_decoupled_grad else dtype
        super().__init__(
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            slots,
            numel,
            main_dtype=main_dtype,
            grad_dtype=grad_dtype,
            weight_dtype=dtype,
            accepted_grad_dtypes=FLOAT_DTYPES if use_decoupled_grad else (grad_dtype,),
        )
        self._writes = TensorWrites()

    def adopt(self, owner: object) -> None:
        del owner  # no other optimizer has these arrays
        self.reload()

    def reload(self) -> None:
        for slot in self.slots:
            self._writes.see(slot.parameter)
            slot.of(self.main_weight).copy_(flat_local(slot.parameter))

    def main_weight_loaded(self, index: int) -> None:
        self._writes.see(self.slots[index].parameter)

    def keep_main_weight(self, stepped: Sequence[Slot]) -> None:
        for slot in stepped:
            if self._writes.are_new(slot.parameter):
                self._writes.see(slot.parameter)
                own, given = slot.of(self.main_weight), flat_local(slot.parameter)
                if not is_rounding(given, own):
                    own.copy_(given)

    def fetch(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        fetch_each(self.grad, gradients)

    def send(self, stepped: Sequence[Slot]) -> None:
        for slot in stepped:
            target = local_tensor(slot.parameter).detach()
            target.copy_(slot.of(self.weight).view(target.shape), non_blocking=True)
            # This write must not look like a write of the user.
            self._writes.see(slot.parameter)


def padded_numel(numel: int) -> int:
    """The elements of each array that a parameter occupies."""
    return math.ceil(numel / _ALIGNMENT) * _ALIGNMENT
