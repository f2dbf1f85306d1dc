"""The time of a training step, from its operations and transfers and a machine's rates.

Two steps are simulated group by group, from the last backward of one to that of the next, and the
second one counts:

    backward    gathers and reductions overlap with it; in the last microbatch, so do gradient
                copies to the host, and early updates there
    step        the norm, and the device's pass over the states on the device; then the host's pass
                and the streamed one, in the order of forward
    forward     gathers overlap with it; in the first microbatch, each group waits for its weights

Copies and both passes share host memory. A CPU device has no overlap, and times add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.core.optimizer.config import Overlap
from megatron.core.optimizer.cpu_offloading.update_split import interleaved
from megatron_hybrid.plan.simulation import Span, Task, simulate, waits

COMPUTE, HOST, LINK, DEVICE, OTHERS = PARTS = (
    "compute",
    "host pass",
    "link",
    "device pass",
    "interconnect",
)
_CLOSE = 1 / 32  # of the share that `auto` finds, the distance to the best one
_ROUNDING = 1e-9  # of a step, waits that are rounding errors


@dataclass(frozen=True)
class Machine:
    """Rates per second of one rank while all ranks of its machine work.

    Attributes:
        flops: FLOP of forward and backward.
        device_bytes: bytes that the optimizer's pass on the device reads and writes.
        link_bytes: bytes copied between device and host, each way.
        host_bytes: bytes that the optimizer's pass in host memory reads and writes.
        interconnect_bytes: bytes that a rank sends or receives in collectives; None: not counted.
        collective_seconds: the latency of a collective.
        device_is_host: whether the device is the CPU, which has no overlap.
        memory_bytes: bytes that passes and copies together read and write in host memory; None: as
            many as they can.
    """

    flops: float
    device_bytes: float
    link_bytes: float
    host_bytes: float
    interconnect_bytes: float | None = None
    collective_seconds: float = 0.0
    device_is_host: bool = False
    memory_bytes: float | None = None


@dataclass(frozen=True)
class GroupWork:
    """One group of parameters in one step of one rank, in FLOP and bytes.

    Attributes:
        forward, backward: FLOP of one microbatch.
        host_pass: bytes that the optimizer reads and writes in host memory; 0: the states are on
            the device.
        down, up: gradients copied to the host, and weights copied back.
        states: main weights and states in host memory.
        early_pass: as `host_pass`, with an undo log, if the optimizer updates the group before the
            norm is known, as soon as its gradients have arrived; 0: it does not.
        chunks: the number of parts in which the states pass through the device.
        gathered_forward, gathered_backward, reduced: bytes that the rank receives or sends in each
            microbatch.
        gathered_once, reduced_once: bytes that it receives or sends once a step.
    """

    forward: float = 0.0
    backward: float = 0.0
    host_pass: float = 0.0
    down: float = 0.0
    up: float = 0.0
    states: float = 0.0
    early_pass: float = 0.0
    chunks: int = 1
    gathered_forward: float = 0.0
    gathered_backward: float = 0.0
    reduced: float = 0.0
    gathered_once: float = 0.0
    reduced_once: float = 0.0


@dataclass(frozen=True)
class Work:
    """One step of one rank.

    Attributes:
        groups: in the order of forward.
        norm: bytes that the gradient norm reads on the device.
        device_pass: bytes that the optimizer reads and writes on the device.
        update_on_device: the share of the states in host memory that passes through the device,
            which updates it; None: the share with the shortest step.
        activations: bytes copied to the host in each forward, and back in its backward.
        hides_activations: whether only as many are copied as the computation hides.
        exchanged: bytes that expert, context and tensor parallelism exchange in each microbatch.
            They do not overlap with computation.
        exchanges: number per microbatch.
    """

    groups: tuple[GroupWork, ...]
    num_microbatches: int
    norm: float = 0.0
    device_pass: float = 0.0
    update_on_device: float | None = 0.0
    activations: float = 0.0
    hides_activations: bool = False
    exchanged: float = 0.0
    exchanges: int = 0
    overlap: Overlap = Overlap.ALL

    @property
    def flops(self) -> float:
        """Of a microbatch."""
        return sum(group.forward + group.backward for group in self.groups)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    Attributes:
        parts: the computation, and its waits for each of the others; their sum is the step.
        update_on_device: the share of the states in host memory that the device updates.
        forward: the forward of one microbatch.
        activations: copies of one microbatch's activations, one way.
        exposed_activations: the computation's wait for activation copies, a part of `link`.
    """

    parts: Mapping[str, float]
    update_on_device: float
    forward: float
    activations: float
    exposed_activations: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def hides_offloading(self) -> bool:
        """Whether the computation never waits because the optimizer is offloaded."""
        waited = self.parts[HOST] + self.parts[LINK] - self.exposed_activations
        return waited <= _ROUNDING * self.seconds


def step_time(work: Work, machine: Machine) -> StepTime:
    """Returns the time of a step."""
    if work.update_on_device is not None:
        return SimulatedStep(work, machine, work.update_on_device).time()
    alone = SimulatedStep(work, machine, 0.0).time()
    if machine.device_is_host or alone.hides_offloading:
        return alone
    times = {0.0: alone}
    best, width = 0.5, 0.5
    while width > _CLOSE:
        for share in (best - width, best, best + width):
            if share not in times and 0 <= share <= 1:
                times[share] = SimulatedStep(work, machine, share).time()
        best, width = min(times, key=lambda share: times[share].seconds), width / 2
    return times[best]


class SimulatedStep:
    """The tasks of two steps, in the order of their lanes.

    Gradients and weights of the host's pass and states of the streamed one have separate lanes,
    which share the link.

    Attributes:
        tasks: from the last backward of the step before to that of the second.
    """

    def __init__(self, work: Work, machine: Machine, share: float) -> None:
        self._work, self._machine = work, machine
        self.tasks: list[Task] = []
        self._is_streamed = interleaved([group.states for group in work.groups], share)
        self._share = share
        # The latest tasks that leave a group's gradients in host memory, update it there in spare
        # memory, and leave its weights on the device.
        self._down: dict[int, int] = {}
        self._early: dict[int, int] = {}
        self._updated: dict[int, int] = {}
        self._slots: list[list[int]] = [[], []]  # the tasks after which each may be filled
        self._forward, self._backward = (
            sum(flops) / machine.flops
            for flops in zip(*((one.forward, one.backward) for one in work.groups), strict=True)
        )

        norms = [self._last_backward()]
        for _ in range(2):
            self._update(norms[-1])
            self._first_forward()
            self._middle()
            norms.append(self._last_backward())
        _, self._begin, self._end = norms

    def spans(self) -> list[Span]:
        """Simulates the tasks."""
        link, memory = self._machine.link_bytes, self._machine.memory_bytes
        rates = {"down": link, "up": link, "interconnect": 1.0}
        return simulate(self.tasks, rates if memory is None else {**rates, "memory": memory})

    def time(self) -> StepTime:
        """Returns the time of the second step."""
        spans, begin = self.spans(), self._begin
        # A step drops early updates that have not started.
        norm = spans[self._end].end
        late = {index for index, task in self._early.items() if spans[task].begin >= norm}
        if late:
            groups = tuple(
                replace(group, early_pass=0.0) if index in late else group
                for index, group in enumerate(self._work.groups)
            )
            work = replace(self._work, groups=groups)
            return SimulatedStep(work, self._machine, self._share).time()

        parts = dict.fromkeys(PARTS, 0.0)
        for task, span in zip(self.tasks[begin + 1 :], spans[begin + 1 :], strict=True):
            parts[task.kind] += span.end - span.begin if task.lane == COMPUTE else 0.0
        for index, kind, seconds in waits(self.tasks, spans, COMPUTE):
            parts[kind] += seconds if index > begin else 0.0
        return StepTime(
            parts,
            self._share,
            self._forward,
            self._work.activations / self._machine.link_bytes,
            self._work.num_microbatches * sum(self._exposed_activations()),
        )

    # One step

    def _last_backward(self) -> int:
        """Adds the last microbatch's backward, the work that starts during it, and the norm;
        returns the index of the norm.
        """
        done, reduced = list[int](), list[int]()
        for index in reversed(range(len(self._work.groups))):
            group = self._work.groups[index]
            gathered = self._collective("gathers", group.gathered_backward, done[-2:-1])
            done.append(self._compute(group.backward, [gathered]))
            nbytes = group.reduced + group.reduced_once
            reduced.append(self._collective("reductions", nbytes, [done[-1]]))
            if self._work.overlap.in_backward:
                self._fetch(index, reduced[-1])
        self._add(COMPUTE, LINK, self._exposed_activations()[1])
        return self._add(COMPUTE, DEVICE, self._work.norm / self._machine.device_bytes, reduced)

    def _fetch(self, index: int, after: int) -> None:
        """Adds the copy of a group's gradients to the host, and its early update."""
        group = self._work.groups[index]
        if not group.host_pass or self._is_streamed[index]:
            return
        self._down[index] = self._copy("gradients down", "down", group.down, [after])
        if group.early_pass and self._work.overlap.in_backward:
            self._early[index] = self._host(group.early_pass, [self._down[index]])

    def _update(self, norm: int) -> None:
        """Adds the update of all groups, in the order of forward."""
        self._add(COMPUTE, DEVICE, self._work.device_pass / self._machine.device_bytes)
        for index, group in enumerate(self._work.groups):
            if self._is_streamed[index]:
                self._updated[index] = self._stream(group, norm)
                continue
            if not self._work.overlap.in_backward:
                self._fetch(index, norm)
            if index not in self._down:
                continue
            updated = self._early.get(index)
            if updated is None:
                updated = self._host(group.host_pass, [norm, self._down[index]])
            self._updated[index] = self._copy("weights up", "up", group.up, [norm, updated])

    def _stream(self, group: GroupWork, norm: int) -> int:
        """Adds the way of a group's states through the device, chunk by chunk, and returns the
        update of the last one.
        """
        updated, nbytes = norm, group.states / group.chunks
        for _ in range(group.chunks):
            slot = self._slots.pop(0)
            up = self._copy("states up", "up", nbytes, [norm, *slot])
            seconds = 2 * nbytes / self._machine.device_bytes
            updated = self._add("states update", DEVICE, seconds, [up])
            self._slots.append([self._copy("states down", "down", nbytes, [updated])])
        return updated

    def _first_forward(self) -> None:
        """Adds the first microbatch's forward, in which each group waits for its own weights."""
        # The computation waits until all gradients have been read.
        before = [*self._down.values()]
        if not self._work.overlap.in_forward:
            before += self._updated.values()
        done = list[int]()
        for index, group in enumerate(self._work.groups):
            own = [self._updated[index]] if index in self._updated else []
            nbytes = group.gathered_forward + group.gathered_once
            gathered = self._collective("gathers", nbytes, [*own, *done[-2:-1]])
            done.append(self._compute(group.forward, [gathered, *before]))
        self._add(COMPUTE, LINK, self._exposed_activations()[0])

    def _middle(self) -> None:
        """Adds the microbatches in between, which never wait for the optimizer."""
        groups, num = self._work.groups, self._work.num_microbatches - 1
        gathers, others = (
            sum(map(self._seconds, nbytes))
            for nbytes in (
                [group.gathered_forward for group in groups],
                [nbytes for one in groups for nbytes in (one.gathered_backward, one.reduced)],
            )
        )
        if not self._machine.device_is_host:
            gathers -= min(gathers, self._forward)
            others -= min(others, self._backward)
        self._add(COMPUTE, COMPUTE, num * (self._forward + self._backward))
        self._add(COMPUTE, OTHERS, num * (gathers + others + self._exchange))
        self._add(COMPUTE, LINK, num * sum(self._exposed_activations()))

    # Tasks

    def _add(
        self, lane: str, kind: str, seconds: float, after: Sequence[int] = (), **uses: float
    ) -> int:
        """Adds a task and returns its index."""
        if self._machine.device_is_host:
            lane = COMPUTE
        elif kind in (HOST, LINK) and lane != COMPUTE and not self._work.overlap.has_lanes:
            lane = HOST
        self.tasks.append(Task(lane, kind, seconds, after, uses))
        return len(self.tasks) - 1

    def _compute(self, flops: float, after: Sequence[int]) -> int:
        """Adds the computation of a group, and its part of the exchanges of tokens."""
        seconds = flops / self._machine.flops
        done = self._add(COMPUTE, COMPUTE, seconds, after)
        if not self._exchange or not flops:
            return done
        seconds = self._exchange * flops / self._work.flops
        return self._add(COMPUTE, OTHERS, seconds, interconnect=seconds)

    def _host(self, nbytes: float, after: Sequence[int]) -> int:
        seconds = nbytes / self._machine.host_bytes
        return self._add("host", HOST, seconds, after, memory=nbytes)

    def _copy(self, lane: str, way: str, nbytes: float, after: Sequence[int]) -> int:
        """Adds a copy between device and host, `way` up or down."""
        uses = {way: nbytes, "memory": nbytes}
        return self._add(lane, LINK, nbytes / self._machine.link_bytes, after, **uses)

    def _collective(self, lane: str, nbytes: float, after: Sequence[int]) -> int:
        seconds = self._seconds(nbytes)
        return self._add(lane, OTHERS, seconds, after, interconnect=seconds)

    def _seconds(self, nbytes: float) -> float:
        """Of a collective."""
        rate = self._machine.interconnect_bytes
        if rate is None or not nbytes:
            return 0.0
        return nbytes / rate + self._machine.collective_seconds

    @cached_property
    def _exchange(self) -> float:
        """Seconds of the exchanges of tokens in a microbatch."""
        rate = self._machine.interconnect_bytes
        if rate is None:
            return 0.0
        each = self._machine.collective_seconds
        return self._work.exchanged / rate + each * self._work.exchanges

    def _exposed_activations(self) -> tuple[float, float]:
        """Seconds that a microbatch's forward and backward wait for copies of activations: one way
        at a time, and gradients and weights the other way.
        """
        copies = self._work.activations / self._machine.link_bytes
        if self._machine.device_is_host:
            return copies, copies
        if self._work.hides_activations:
            return 0.0, 0.0
        return max(0.0, copies - self._forward), max(0.0, copies - self._backward)
