"""How long lanes work, and how long the computation waits for them: lanes of the offloaded
optimizer, and of offloaded activations, which have no `host`.

An optimizer's step starts with its gradients' way down and ends with its weights on the device,
which may be in the middle of the next forward. Recording reads clocks and does not wait. A
`Timeline`, if the recorder has one, is shown the spans of work that are added up here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

from megatron.core import trace_file
from megatron.core.device import Device
from megatron.core.lanes import Awaited, Event, RelayedEvent
from megatron.core.spans import ClockSpan, Span
from megatron.core.timeline import NO_TIMELINE, AnyTimeline

D2H, HOST, H2D = LANES = (trace_file.D2H, trace_file.HOST, trace_file.H2D)


class LaneTimings(NamedTuple):
    """One rank's means over steps, in seconds a step."""

    num_steps: int
    d2h: float  # gradients, or activations, moving down
    host: float  # the update, in host memory
    h2d: float  # weights, or activations, moving up
    waited_d2h: float  # by the thread that computes, for each of them
    waited_host: float
    waited_h2d: float
    host_bytes: float  # a step, that the update reads and writes; 0: not known
    early_bytes: float = 0.0  # the part that was read and written before the step

    @property
    def early_share(self) -> float:
        """The share of the update that was done before the step."""
        return self.early_bytes / self.host_bytes if self.host_bytes else 0.0

    @property
    def host_bytes_per_second(self) -> float | None:
        """Of the update; None where its bytes are not known, or there was none."""
        return self.host_bytes / self.host if self.host_bytes and self.host else None


class _Clocks:
    """What makes a recorder's spans and shows them. Its steps have it, and not the recorder: in a
    cycle, both would stay in memory until the garbage collector runs.
    """

    def __init__(self, device: Device, has_lanes: bool, clock: Callable[[], float]) -> None:
        self._device = device
        self.has_lanes = has_lanes
        self._clock = clock
        self.timeline: AnyTimeline = NO_TIMELINE
        self.prefix = ""  # of the timeline's rows

    def span(self, lane: str) -> Span:
        """Returns a span of a lane's work."""
        # The update's lane is a thread on any device.
        return ClockSpan(self._clock) if lane == HOST else self._device.span(self._clock)

    def shown_wait(self, lane: str, name: str = "") -> AbstractContextManager[None]:
        """Shows the timeline a wait of the computation for a lane.

        In a span of the timeline's own: the thread that waits for the host need not be the stream
        that computes, which may still have work.
        """
        return self.timeline.waiting(self.prefix + lane, name)


class StepTimings:
    """The spans of one step: made where work is queued, filled in where it is done."""

    def __init__(self, clocks: _Clocks) -> None:
        self._clocks = clocks
        self._spans: list[tuple[str, Span]] = []
        self._waits: list[tuple[str, Span]] = []
        self._host_bytes = 0
        self._early_bytes = 0

    def timed(
        self, lane: str, work: Callable[[], object], nbytes: int = 0, name: str = ""
    ) -> Callable[[], object]:
        """The work, timed on the lane where it will be done.

        Args:
            nbytes: that it moves.
            name: of its subject.
        """
        clocks = self._clocks
        span = clocks.span(lane)
        self._spans.append((lane, span))
        self._host_bytes += nbytes if lane == HOST else 0

        def work_in_span() -> object:
            # Without lanes, the thread that computes does the work itself.
            with nullcontext() if clocks.has_lanes else clocks.shown_wait(lane, name):
                clocks.timeline.note(clocks.prefix + lane, name, span, nbytes)
                with span:
                    return work()

        return work_in_span

    def count_early(self, nbytes: int) -> None:
        """Counts bytes of an update that was done before the step, and not by `timed`."""
        self._host_bytes += nbytes
        self._early_bytes += nbytes

    @contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        """Around a wait for a lane's work: this thread's or, on a GPU, its current stream's."""
        span = self._clocks.span(lane)
        self._waits.append((lane, span))
        with self._clocks.shown_wait(lane), span:
            yield

    def wait(self, updated: RelayedEvent) -> None:
        """`updated.wait()`, the update and the way up apart."""
        # One shows a slow host, the other a slow link.
        with self.waiting(HOST):
            updated.first.synchronize()
        with self.waiting(H2D):
            updated.wait()

    def awaited(self, updated: RelayedEvent) -> Event:
        """The same event, timed where a thread that issues work to a GPU waits for the update.

        Lanes that are threads call `synchronize`, which holds up no other thread and is not timed.
        """

        def wait() -> None:
            with self.waiting(HOST):
                updated.first.synchronize()
            updated.wait()

        return Awaited(updated, wait)

    def before_use(self, updated: RelayedEvent) -> Callable[[], None] | None:
        """A function that waits for an update and its way up, and times both."""
        return partial(self.wait, updated)

    @property
    def is_complete(self) -> bool:
        """Whether everything that was queued has been done."""
        return all(span.seconds is not None for _, span in (*self._spans, *self._waits))

    def sums(self) -> dict[str, float]:
        """Seconds by the names of `LaneTimings`, and bytes; of complete work."""
        sums = {
            "host_bytes": float(self._host_bytes),
            "early_bytes": float(self._early_bytes),
        }
        for prefix, spans in (("", self._spans), ("waited_", self._waits)):
            for lane in LANES:
                sums[prefix + lane] = sum(
                    span.seconds or 0.0 for name, span in spans if name == lane
                )
        return sums


class TimingRecorder:
    """The steps' timings, added up as they are complete.

    Any thread may call it: autograd's does, during the backward. It keeps numbers and clocks only,
    so a model with a reference to it keeps no optimizer alive.
    """

    def __init__(
        self, device: Device, has_lanes: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Without lanes, the computation waits for all work. `clock` is in seconds."""
        self._clocks = _Clocks(device, has_lanes, clock)
        self._lock = threading.Lock()
        self._coming = StepTimings(self._clocks)
        self._current: StepTimings | None = None
        self._ended: deque[StepTimings] = deque()
        self._sums: dict[str, float] = {}
        self._num_steps = 0

    def record_to(self, timeline: AnyTimeline, prefix: str = "") -> None:
        """From now on, spans go to rows of a timeline, too.

        Args:
            prefix: of the rows' names.
        """
        self._clocks.timeline, self._clocks.prefix = timeline, prefix

    @property
    def coming(self) -> StepTimings:
        """The step that has not started: gradients go down for it during the backward."""
        with self._lock:
            return self._coming

    def begin(self) -> StepTimings:
        """The coming step starts; no thread waits any more for the one before."""
        with self._lock:
            self._end()
            self._current, self._coming = self._coming, StepTimings(self._clocks)
            return self._current

    def end(self) -> None:
        """The step that has started is over: no thread will wait for it later."""
        with self._lock:
            self._end()

    def collect(self) -> LaneTimings | None:
        """Means over the steps that were completed since the last call; None without any."""
        with self._lock:
            self._add_up()
            if not self._num_steps:
                return None
            means = {name: value / self._num_steps for name, value in self._sums.items()}
            timings = LaneTimings(num_steps=self._num_steps, **means)
            self._sums, self._num_steps = {}, 0

        if self._clocks.has_lanes:
            return timings
        # The thread that computes has done all the work itself.
        return timings._replace(
            waited_d2h=timings.d2h, waited_host=timings.host, waited_h2d=timings.h2d
        )

    def _end(self) -> None:
        if self._current is not None:
            self._ended.append(self._current)
            self._current = None
        self._add_up()

    def _add_up(self) -> None:
        # A step that has ended may still have work on an accelerator, whose clock is read later.
        while self._ended and self._ended[0].is_complete:
            for name, value in self._ended.popleft().sums().items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._num_steps += 1


class NoTimings:
    """A recorder without effect, and each of its steps."""

    def record_to(self, timeline: AnyTimeline, prefix: str = "") -> None:  # noqa: ARG002
        """RuntimeError: there are no spans."""
        raise RuntimeError(
            "A timeline needs the timings of host lanes. Build the optimizer with "
            "records_timings=True."
        )

    @property
    def coming(self) -> NoTimings:
        return self

    def begin(self) -> NoTimings:
        return self

    def end(self) -> None:
        """No effect."""

    def collect(self) -> None:
        """No timings."""

    def timed(
        self,
        lane: str,  # noqa: ARG002 (as StepTimings has it)
        work: Callable[[], object],
        nbytes: int = 0,  # noqa: ARG002
        name: str = "",  # noqa: ARG002
    ) -> Callable[[], object]:
        return work

    def count_early(self, nbytes: int) -> None:
        """No effect."""

    def waiting(self, lane: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def wait(self, updated: RelayedEvent) -> None:
        updated.wait()

    def awaited(self, updated: RelayedEvent) -> Event:
        return updated

    def before_use(self, updated: RelayedEvent) -> None:
        """The wait is not timed."""


Recorder: TypeAlias = TimingRecorder | NoTimings
StepRecorder: TypeAlias = StepTimings | NoTimings
