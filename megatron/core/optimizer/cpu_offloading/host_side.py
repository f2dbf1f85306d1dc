"""`HostSide`: the buckets in host memory, what updates them, and the lanes on which it happens."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import Device
from megatron.core.host_keeper import KeptMemory
from megatron.core.lane_timings import (
    D2H,
    H2D,
    HOST,
    NoTimings,
    Recorder,
    StepRecorder,
    StepTimings,
    TimingRecorder,
)
from megatron.core.lanes import Event, InlineLane, IssuingLane, Lane, is_lane_thread, relay
from megatron.core.local_ranks import local_world_size
from megatron.core.optimizer.cpu_offloading.bucket import Bucket, BucketStep, Pending
from megatron.core.optimizer.cpu_offloading.early_updates import EarlyUpdate, EarlyUpdates
from megatron.core.optimizer.cpu_offloading.executors import (
    Executor,
    Options,
    RuleExecutor,
    Stepped,
    TorchExecutor,
)
from megatron.core.optimizer.cpu_offloading.host_layout import HostAllocator
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings
from megatron.core.optimizer.cpu_offloading.kept_layout import (
    KeptArray,
    KeptBucket,
    KeptSlot,
    Landed,
)
from megatron.core.optimizer.cpu_offloading.kept_updates import KeptUpdates
from megatron.core.optimizer.cpu_offloading.streamed_pass import (
    NUM_SLOTS,
    SlotSize,
    StreamedPass,
)
from megatron.core.optimizer.cpu_offloading.update_split import SplitChooser, interleaved
from megatron.core.optimizer.kernels.host_threads import host_threads
from megatron.core.optimizer.kernels.piece import HostKernel, Kernel, Piece
from megatron.core.optimizer.matrix_pass import (
    DeviceLanes,
    MatrixBatch,
    MatrixPass,
    matrix_rows_of,
)
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_tensors import STEP
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.optimizer.step_inputs import IDENTITIES, gradient_of

logger = logging.getLogger(__name__)


class Lanes(NamedTuple):
    """Gradients down, updates, weights up. Updates have two: one starts them and one waits for each
    and sends its weights up, so that the host's threads have the next bucket when they need it.
    Matrices are orthogonalized on another one, if the rule takes any.
    """

    d2h: Lane
    start: Lane
    host: Lane
    h2d: Lane
    matrices: Lane

    @classmethod
    def make(cls, device: Device, overlaps: bool, pins_grads: bool, takes_matrices: bool) -> Lanes:
        """The lanes of one optimizer; without overlap, one that works in the calling thread."""
        if not overlaps:
            inline = InlineLane(device)
            return cls(inline, inline, inline, inline, inline)

        d2h: Lane = device.lane("optimizer d2h")
        if device.pins_host_memory and not pins_grads:
            d2h = IssuingLane(device.host_lane("optimizer d2h issue"), d2h)
        start, host = (device.host_lane(f"optimizer host{end}") for end in (" start", ""))
        h2d = device.lane("optimizer h2d")
        matrices = device.lane("optimizer matrices") if takes_matrices else h2d
        return cls(d2h, start, host, h2d, matrices)


class HostStep(NamedTuple):
    """A step of all buckets, but for the factor of the gradients.

    Attributes:
        matrices: the batches of matrices of all buckets, in the order of all ranks.
    """

    steps: list[BucketStep]
    matrices: list[MatrixBatch]


class _Begun(NamedTuple):
    """A bucket whose gradients are being fetched for a step.

    Attributes:
        fetched: after which they are there.
        free: after which states and main weights may be written to, besides.
        early: its early update, if any.
    """

    fetched: Event
    free: list[Event]
    early: EarlyUpdate | None


class HostSide:
    """The buckets of one optimizer, and what updates them. It has none until `add`.

    Attributes:
        executors: one for each bucket, in the order of forward.
        rule: the rule that they carry out; None for an optimizer of torch's.
        lanes: on which they work.
        timings: the recorder of their times.
        shown_timings: the same recorder with `records_timings`; otherwise one without effect.
        nbytes_by_state: bytes of host memory by purpose.
        early_nbytes: bytes among them that early updates need.
    """

    def __init__(self, device: Device, settings: HybridSettings) -> None:
        self.rule = settings.host.rule
        takes_matrices = self.rule is not None and self.rule.takes_matrices
        has_lanes, pins_grads = settings.overlap.has_lanes, settings.pins_grads
        self.lanes = Lanes.make(device, has_lanes, pins_grads, takes_matrices)
        self.timings: Recorder = NoTimings()
        self._chooser = SplitChooser() if settings.update_on_device is None else None
        if settings.records_timings or self._chooser is not None:
            self.timings = TimingRecorder(device, has_lanes=settings.overlap.has_lanes)
        self.shown_timings = self.timings if settings.records_timings else NoTimings()
        self.executors: list[Executor] = []
        self.nbytes_by_state: dict[str, int] = {}
        self.early_nbytes = 0
        self._device = device
        self._settings = settings
        self._kernel: HostKernel | None = None  # of the rule's part that takes no matrices
        self._matrix_kernel: HostKernel | None = None
        self._matrix_pass = MatrixPass()
        self._matrix_rows: Mapping[nn.Parameter, tuple[int, ...]] = {}
        self._places: dict[int, tuple[Executor, int]] = {}
        self._streamed: StreamedPass | None = None
        self._early: EarlyUpdates | None = None
        self._kept: KeptUpdates | None = None
        # Each parameter's group, as of the last step that was planned.
        self._options: Mapping[nn.Parameter, Options] = {}
        self._mesh: DeviceMesh | None = None

    def add(
        self,
        buckets: Sequence[Bucket],
        allocator: HostAllocator,
        owner: object,
        mesh: DeviceMesh | None,
    ) -> None:
        """Allocates buckets' memory and moves the main weights there, which `owner` updates.

        Args:
            mesh: of the ranks that add buckets together.

        Raises:
            HostMemoryError, PinError: see `HostAllocator.allocate`.
        """
        if self.rule is not None and buckets and self._kernel is None:
            for part in self.rule.parts:
                kernel = _host_kernel(part, self._device, self._settings)
                if part.takes_matrices:
                    self._matrix_kernel = kernel
                else:
                    self._kernel = kernel
            if self._settings.early_update_bytes:
                assert self._kernel is not None, "every rule has such a part"
                self._early = EarlyUpdates(self.lanes.start, self.lanes.host, self._kernel)
        allocator.allocate()
        added = []
        for bucket in buckets:
            allocator.fill(bucket)
            bucket.adopt(owner)
            added.append(self._executor(bucket, allocator))
            if self._settings.overlap.in_backward:
                begin_early = partial(_begin_early, weakref.ref(self), weakref.ref(added[-1]))
                bucket.fetch_during_backward(self.lanes.d2h, self.timings, begin_early)
        # `adopt` only started the copies from the device.
        self._device.event().synchronize()

        if self._settings.kept is not None and added:
            if self.executors:
                raise RuntimeError("Kept memory has all parameters of an optimizer from the start.")
            self._kept = KeptUpdates(self._settings.kept, self._device, buckets)
        self.executors += added
        self._mesh = self._mesh or mesh
        if self._may_stream:
            self._make_streamed()
        self._split()
        self.early_nbytes += allocator.early_nbytes
        for name, nbytes in allocator.nbytes_by_state.items():
            self.nbytes_by_state[name] = self.nbytes_by_state.get(name, 0) + nbytes
        for executor in added:
            for index, slot in enumerate(executor.bucket.slots):
                self._places[id(slot.parameter)] = (executor, index)

    @property
    def _may_stream(self) -> bool:
        """Whether the device may update a bucket from here on."""
        chooser = self._chooser
        if chooser is not None and chooser.is_done:
            return chooser.fraction != 0
        return self._settings.update_on_device != 0

    def _split(self) -> None:
        """Chooses the buckets that the device updates from the next backward on."""
        fraction = self._settings.update_on_device
        if self._chooser is not None:
            fraction = self._chooser.fraction
        buckets = [bucket for bucket in self.buckets if bucket.is_delivered]
        numels = [bucket.global_numel for bucket in buckets]
        for bucket, is_streamed in zip(buckets, interleaved(numels, fraction or 0.0), strict=True):
            bucket.is_streamed = is_streamed

    def _make_streamed(self) -> None:
        """Makes lanes and slots for the buckets that the device can update, if any, and replaces
        slots that are too small for buckets added since.
        """
        rule, device = self.rule, self._device
        buckets = [bucket for bucket in self.buckets if bucket.is_delivered]
        if rule is None or self._kernel is None or not buckets:
            return

        size = SlotSize.of(
            [(bucket.numel, bucket.main_dtype) for bucket in buckets], rule.state_dtypes.values()
        )
        if self._streamed is not None:
            if size.nbytes <= self._streamed.size.nbytes:
                return
            # Before its memory is freed, which queued work still uses.
            self._streamed.close()
            self._streamed = None

        kernel: Kernel = self._kernel
        if device.is_accelerator:
            kernel = rule.device_kernel(device.torch_device)
        self._streamed = StreamedPass(device, kernel, size)

    def _streamed_share(self) -> float:
        """The share of the elements that the device updates."""
        streamed = sum(bucket.global_numel for bucket in self.buckets if bucket.is_streamed)
        return streamed / max(1, sum(bucket.global_numel for bucket in self.buckets))

    def _executor(self, bucket: Bucket, allocator: HostAllocator) -> Executor:
        """The executor of a bucket that has its memory."""
        rule, kernel, updater = self.rule, self._kernel, self._settings.host
        if rule is not None and kernel is not None:
            states = allocator.states(bucket, rule.all_state_dtypes)
            bucket.undo = allocator.undo(bucket, rule.all_state_dtypes)
            return RuleExecutor(bucket, states, rule, kernel)
        return TorchExecutor(bucket, updater.cls, updater.options, allocator.widened())

    @property
    def buckets(self) -> list[Bucket]:
        """In the order of forward."""
        return [executor.bucket for executor in self.executors]

    def place_of(self, parameter: torch.Tensor) -> tuple[Executor, int] | None:
        """A parameter's optimizer and the number of its slot; None if it is not on the host."""
        return self._places.get(id(parameter))

    # A step

    def plan_step(
        self,
        gradients: Mapping[nn.Parameter, torch.Tensor | None],
        options: Mapping[nn.Parameter, Options],
    ) -> HostStep:
        """Plans the buckets that have a gradient. Both mappings hold all parameters."""
        self._options = options
        if self.rule is not None and self.rule.takes_matrices:
            groups = {id(group): group for group in options.values() if group["use_muon"]}
            self._matrix_rows = {
                parameter: rows
                for group in groups.values()
                for parameter, rows in zip(group["params"], matrix_rows_of(group), strict=True)
            }
        planned = [self._plan(executor, gradients) for executor in self.executors]
        kept, kernel = self._kept, self._kernel
        if kept is not None and kernel is not None:
            planned = [
                step and step._replace(start=partial(kept.start, kernel, number, step.pieces))
                for number, step in enumerate(planned)
            ]
        steps = [step for step in planned if step is not None]
        matrices = [matrix for step in steps for matrix in step.matrices]
        return HostStep(steps, self._matrix_pass.plan(matrices))

    # Kept memory

    def land(self, number: int) -> list[Landed]:
        """See `HybridDeviceOptimizer.land`."""
        for bucket in self.buckets:
            # Updates of buckets that have no gradient this time, too.
            for event in bucket.updates():
                event.synchronize()
        assert self._kept is not None, "only with kept memory"
        self._kept.step = number
        now = self._device.event()
        fetched, found = [], []
        for executor in self.executors:
            slots = executor.bucket.slots
            gradients = {
                number: (slot, gradient)
                for number, slot in enumerate(slots)
                if (gradient := gradient_of(slot.parameter, False)) is not None
            }
            if gradients:
                fetched += executor.bucket.land(self.lanes.d2h, list(gradients.values()), now)
            counts = [int(executor.states(number)[STEP]) for number in range(len(slots))]
            found.append(Landed(counts, list(gradients)))
        for event in fetched:
            event.synchronize()
        return found

    def kept_buckets(
        self,
        memory: KeptMemory,
        groups: Mapping[nn.Parameter, int],
        names: Mapping[torch.Tensor, list[str]],
    ) -> list[KeptBucket]:
        """See `HybridDeviceOptimizer.kept_buckets`."""
        found = []
        for executor in self.executors:
            assert isinstance(executor, RuleExecutor), "kept memory needs a rule"
            slots = [
                KeptSlot(offset, numel, groups[parameter], names[parameter])
                for parameter, offset, numel in executor.bucket.slots
            ]
            placed = {name: KeptArray.of(own, memory) for name, own in executor.arrays().items()}
            arrays = {name: array for name, array in placed.items() if array is not None}
            found.append(KeptBucket(executor.bucket.numel, slots, arrays))
        return found

    def finish_kept(
        self,
        number: int,
        memory: KeptMemory,
        buckets: Sequence[KeptBucket],
        landed: Sequence[Landed],
        groups: Sequence[Options],
        grad_scale: float,
    ) -> None:
        """See `HybridDeviceOptimizer.finish_kept`."""
        rule, kernel = self.rule, self._kernel
        assert rule is not None, "kept memory needs a rule"
        assert kernel is not None, "kept memory needs a rule"
        kept = KeptUpdates(memory, self._device, buckets)
        kept.step = number
        pieces = {
            place: bucket.pieces(rule, memory, own, groups)
            for place, (bucket, own) in enumerate(zip(buckets, landed, strict=True))
            if own.stepped
        }
        kept.finish(kernel, pieces, grad_scale)

    def take_over(self, counts: Sequence[Sequence[int]]) -> None:
        """See `HybridDeviceOptimizer.take_over`."""
        for executor, own in zip(self.executors, counts, strict=True):
            for index, count in enumerate(own):
                executor.states(index)[STEP].fill_(count)
            executor.bucket.reload()

    def _plan(
        self, executor: Executor, gradients: Mapping[nn.Parameter, torch.Tensor | None]
    ) -> BucketStep | None:
        stepped = [
            Stepped(
                index,
                slot,
                gradient,
                self._options[slot.parameter],
                self._matrix_rows.get(slot.parameter, ()),
            )
            for index, slot in enumerate(executor.bucket.slots)
            if (gradient := gradients.get(slot.parameter)) is not None
        ]
        return executor.prepare(stepped) if stepped else None

    def expect_grad_scale(self, grad_scale: float) -> None:
        """Sets the factor of the gradients of early updates."""
        if self._early is not None:
            self._early.grad_scale = grad_scale

    def begin_early(self, executor: Executor, fetched: Event) -> None:
        """Queues the early update of a bucket whose gradients are being fetched, if it is possible
        and useful.
        """
        bucket, early = executor.bucket, self._early
        is_measuring = self._chooser is not None and not self._chooser.is_done
        if early is None or early.is_paused or is_measuring or not bucket.undo or bucket.early:
            return

        gradients = {slot.parameter: gradient_of(slot.parameter, False) for slot in bucket.slots}
        try:
            step = self._plan(executor, gradients)
        except (KeyError, ValueError):
            return  # no options yet, in the first step, or wrong ones: `step` will raise
        pieces = None if step is None else bucket.with_undo(step)
        if pieces:
            after = [fetched, *bucket.reads, *bucket.updates()]
            bucket.early = early.queue(pieces, after, self.timings.coming, bucket.name)

    def step(self, planned: HostStep, grad_scale: float, now: Event) -> None:
        """Queues the planned steps, and waits for as much of them as the caller needs.

        Args:
            now: after which the gradients may be read and the weights written over.
        """
        timings = self.timings.begin()
        fetched = []
        if planned.matrices:
            fetched = self._begin_matrices(planned, grad_scale, now, timings)
        for step in planned.steps if not planned.matrices else ():
            pieces = step.bucket.on_device(step) if step.bucket.is_streamed else None
            if pieces is None:
                begun = self._fetch(step, now, timings)
                self._begin(step, grad_scale, now, timings, begun)
                fetched.append(begun.fetched)
            else:
                self._begin_streamed(step, pieces, grad_scale, now, timings)
        if self._early is not None:
            self._early.step_ended(grad_scale)

        # The caller may write to gradients again once they have been read.
        with timings.waiting(D2H):
            for event in fetched:
                event.wait()

        # Weights may be awaited one by one, where the device does that itself.
        in_forward = self._settings.overlap.in_forward
        for bucket in self.buckets:
            pending = bucket.pending
            if pending is not None and not (in_forward and bucket.is_delivered):
                timings.wait(pending.sent)
        if not in_forward:
            self.timings.end()
        chooser = None if self._streamed is None else self._chooser
        if chooser is not None and not chooser.is_done and isinstance(timings, StepTimings):
            chooser.step_ended(timings, self._streamed_share(), self.synchronize, self._mesh)
            self._split()
            if not self._may_stream and self._streamed is not None:
                self._streamed.close()
                self._streamed = None

    def _fetch(self, step: BucketStep, now: Event, timings: StepRecorder) -> _Begun:
        """Queues the copy of a bucket's gradients."""
        bucket = step.bucket
        slots = [slot for slot, _ in step.gradients]
        early = bucket.take_early()

        def fetch() -> None:
            bucket.keep_main_weight(slots)
            if early is not None and not bucket.is_fetched(step.gradients):
                early.expire()
            bucket.fetch(step.gradients)

        step.begin()
        reads = bucket.take_reads()
        free = [*reads, *bucket.updates()]
        # Main weights that are copies may be taken over from the parameters first, and so must not
        # be read meanwhile.
        before_fetch = [now] if bucket.is_delivered else [now, *reads]
        # Gradients that were fetched during the backward are not fetched again.
        is_fetched = self._settings.overlap.in_backward and bucket.is_delivered
        nbytes = 0 if is_fetched else bucket.grad.nbytes
        fetch_timed = timings.timed(D2H, fetch, nbytes, bucket.name)
        fetched = bucket.queue_fetch(self.lanes.d2h, fetch_timed, before_fetch)
        return _Begun(fetched, free, early)

    def _begin_matrices(
        self, planned: HostStep, grad_scale: float, now: Event, timings: StepRecorder
    ) -> list[Event]:
        """Queues the steps of buckets, some of which have matrices. Returns the events after which
        their gradients have been fetched.
        """
        assert self._matrix_kernel is not None, "made with the first bucket"
        # The lane that fetches gradients also brings rows down: it must not wait for an update that
        # needs it for that, as of a step without a forward in between.
        for step in planned.steps:
            for updated in step.bucket.updates():
                updated.synchronize()
        begun = {id(step.bucket): self._fetch(step, now, timings) for step in planned.steps}

        # The buckets of each batch, and the last batch that has matrices of a bucket.
        batches = [{id(self._bucket_of(each)) for each in b.parameters} for b in planned.matrices]
        last = {key: number for number, keys in enumerate(batches) for key in keys}
        lanes = DeviceLanes(self.lanes.matrices, self.lanes.d2h)
        stages = self._matrix_pass.stages(planned.matrices, grad_scale, self._matrix_kernel, lanes)
        for number, stage in enumerate(stages):
            # Gradients are fetched after `now`, when the buffers of rows may be written to, too.
            after, nbytes = list[Event](), 0
            if number < len(batches):
                own = [begun[key] for key in batches[number]]
                after = [event for each in own for event in (each.fetched, *each.free)]
                nbytes = planned.matrices[number].traffic
            ended = self.lanes.start.enqueue(timings.timed(HOST, stage, nbytes, "matrices"), after)
            # On the lane of the stages, so these updates come after those.
            for step in planned.steps:
                if last.get(id(step.bucket), -2) + 2 == number:
                    self._begin(step, grad_scale, now, timings, begun[id(step.bucket)])

        # Exchanges are collectives, and so is what this thread does next: all ranks must issue them
        # in one order.
        if any(batch.route.group is not None for batch in planned.matrices):
            with timings.waiting(HOST):
                ended.synchronize()
        return [each.fetched for each in begun.values()]

    def _bucket_of(self, parameter: torch.Tensor) -> Bucket:
        return self._places[id(parameter)][0].bucket

    def _begin(
        self,
        step: BucketStep,
        grad_scale: float,
        now: Event,
        timings: StepRecorder,
        begun: _Begun,
    ) -> None:
        """Queues the update of a bucket whose gradients are being fetched."""
        bucket, h2d = step.bucket, self.lanes.h2d
        slots = [slot for slot, _ in step.gradients]
        fetched, free, early = begun
        is_final = early is not None and early.is_final(step.pieces, grad_scale)

        def start_update() -> Callable[[], None]:
            bucket.choose_scales()
            return step.start(grad_scale)

        def update_again(early: EarlyUpdate) -> None:
            early.restore()
            start_update()()

        def start_pass() -> None:
            if early is None:
                started.append(start_update())
            elif early.is_final(step.pieces, grad_scale):
                timings.count_early(step.nbytes)
                started.append(lambda: None)
            else:
                started.append(partial(update_again, early))

        started: list[Callable[[], None]] = []
        nbytes = 0 if is_final else step.nbytes

        def finish_pass() -> None:
            started.pop()()
            bucket.quantize(step.pieces, None if self._kernel is None else self._kernel.encode)

        work = timings.timed(HOST, finish_pass, nbytes, bucket.name)
        send = timings.timed(H2D, partial(bucket.send, slots), bucket.weight.nbytes, bucket.name)

        def update() -> Event:
            work()
            # Only after the backward, which has used the weights that are now written over.
            return h2d.enqueue(send, after=[now])

        start = self.lanes.start.enqueue(start_pass, after=[fetched, *free])
        sent = relay(self.lanes.host, update, after=[start])
        # Where the device waits for its weights, parameters are the main weights themselves.
        bucket.pending = Pending(sent.first if bucket.is_delivered else sent, sent, sent)
        bucket.deliver(timings)

    def _begin_streamed(
        self,
        step: BucketStep,
        pieces: Sequence[Piece],
        grad_scale: float,
        now: Event,
        timings: StepRecorder,
    ) -> None:
        """Queues a bucket's step on the device."""
        bucket, streamed = step.bucket, self._streamed
        assert streamed is not None, "made with the first streamed bucket"
        bucket.settle()
        step.begin()
        if bucket.is_quantized:
            now = self._device.event()  # after which memory that `on_device` took is free
        free = [*bucket.take_reads(), *bucket.updates()]
        bucket.pending = streamed.queue(pieces, grad_scale, now, free, timings, bucket.name)
        bucket.hold_gradients(bucket.pending.sent)
        bucket.deliver(timings)

    # Waiting

    def synchronize(self) -> None:
        """Waits until all updates have ended, and undoes early ones. Raises what failed there."""
        for bucket in self.buckets:
            bucket.settle()
            if bucket.pending is not None:
                bucket.pending.done.synchronize()

    def wait_gradients_read(self) -> None:
        """Has the device write to gradients only after pending updates have read them."""
        for bucket in self.buckets:
            if bucket.pending is not None and bucket.is_streamed:
                bucket.pending.sent.wait()

    def wait_until_free(self) -> None:
        """Waits until all updates and reads of the buckets have ended."""
        self.synchronize()
        for bucket in self.buckets:
            for read in bucket.take_reads():
                read.synchronize()

    def release(self) -> None:
        """Ends the lanes once they have done their work, and lets go of the memory only then.

        Callable in any thread: a lane's own, where garbage may be collected, must not wait for a
        lane.
        """
        if is_lane_thread():
            threading.Thread(target=self._close, daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        lanes = self.lanes
        for lane in (lanes.start, lanes.host, lanes.matrices, lanes.d2h, lanes.h2d):
            lane.close()
        if self._streamed is not None:
            self._streamed.close()
        for bucket in self.buckets:
            # The model keeps the main weights. No caller is left for the error of an update.
            with contextlib.suppress(Exception):
                bucket.settle()
        self.executors, self._places, self.nbytes_by_state = [], {}, {}

    # States

    def torch_optimizers(
        self, options: Mapping[nn.Parameter, Options]
    ) -> list[torch.optim.Optimizer]:
        """One over the main weights of each bucket, with these options, once pending updates have
        finished.
        """
        self.synchronize()
        found = []
        for executor in self.executors:
            found.append(executor.as_torch_optimizer())
            for slot, own in zip(executor.bucket.slots, found[-1].param_groups, strict=True):
                # Parameters that left the groups keep the options of their last step.
                given = options.get(slot.parameter, own)
                known = (found[-1].defaults or given).keys() - set(IDENTITIES)
                own.update({name: value for name, value in given.items() if name in known})
        return found

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The main weights of the parameters that are not these themselves, not copies, once
        pending updates have finished.
        """
        self.synchronize()
        return {
            slot.parameter: master
            for bucket in self.buckets
            for index, slot in enumerate(bucket.slots)
            for master in bucket.master(index).values()
        }

    def init_states(self, options: Mapping[nn.Parameter, Options]) -> None:
        """Allocates the missing states; a rule has all of them from the start."""
        if self.rule is not None:
            return
        # Some start with a rate, which may have changed.
        self.torch_optimizers(options)
        for executor in self.executors:
            executor.init_states()

    def state_units(self, owner: torch.optim.Optimizer) -> list[StateUnit]:
        """Each bucket, as what may be read while others are being updated."""
        self._wait_for_counts()
        for bucket in self.buckets:
            bucket.settle()
        return [executor.state_unit(owner) for executor in self.executors]

    @property
    def slots_nbytes(self) -> int:
        """Bytes on the device through which the states of streamed buckets pass."""
        return 0 if self._streamed is None else NUM_SLOTS * self._streamed.size.nbytes

    def all_nbytes_by_state(self) -> dict[str, int]:
        """`nbytes_by_state`, and the states that optimizers of torch's have so far."""
        self.synchronize()
        by_state = dict(self.nbytes_by_state)
        for executor in self.executors:
            for name, nbytes in executor.own_nbytes().items():
                by_state[name] = by_state.get(name, 0) + nbytes
        return by_state

    def _wait_for_counts(self) -> None:
        # A rule's executor counts a step when it is queued, other optimizers as they update.
        if self.rule is None:
            self.synchronize()


def _begin_early(
    side: Callable[[], HostSide | None], executor: Callable[[], Executor | None], fetched: Event
) -> None:
    """`HostSide.begin_early` of objects that are held weakly."""
    own, its = side(), executor()
    if own is not None and its is not None:
        own.begin_early(its, fetched)


def _host_kernel(rule: UpdateRule, device: Device, settings: HybridSettings) -> HostKernel:
    num_local_ranks = settings.num_local_ranks or local_world_size()
    threads = host_threads(device, num_local_ranks, settings.num_host_threads)
    logger.info("host update: %s", threads)
    return HostKernel.of(rule.host_kernel(threads.number, threads.cores))
