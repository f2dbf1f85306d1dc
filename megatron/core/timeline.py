"""`Timeline`: the work of a rank's lanes and its computation in chosen iterations, and when.

    timeline = Timeline(device)
    engine.record_to(timeline)

    timeline.begin_iteration(20)
    engine.train_batch(microbatches, forward_step, mark=timeline.phase)
    timeline.end_iteration()

    slices = timeline.slices(zero)          # None while some of the work is still in progress

Code that queues work names it (`timed`, `note`), the thread that computes names its phases and
waits (`phase`, `waiting`, `awaited`). All of it becomes spans, which read clocks and do not wait;
`lane_timings.py` adds up spans of work, too. On an accelerator a span is between two events of a
stream, and becomes a time of the host's clock only when it is asked for.

Work that starts while the timeline is open is recorded, also if it was queued before. Without a
timeline, everybody has `NO_TIMELINE`, which returns work unchanged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias, TypeVar

from megatron.core.device import Device
from megatron.core.lanes import Awaited, Event
from megatron.core.spans import ClockSpan, Origin, Span
from megatron.core.trace_file import (
    CHECKPOINT,
    COMPUTE,
    DISK,
    HOST,
    ITERATION,
    PHASE,
    WAIT,
    WORK,
    Slice,
)

T = TypeVar("T")

RANKS = "ranks"  # waits for a collective of the computation's own

# Names of the phases of a training step where they are drawn.
_PHASES = {"batch": "data", "agree": "norm"}
_ON_THREADS = (HOST, CHECKPOINT, DISK)  # rows of threads, on any device
_NOTHING = nullcontext()


class _Note(NamedTuple):
    """A slice whose times are not known yet."""

    what: Slice
    span: Span
    origin: Origin

    def dated(self) -> Slice | None:
        """The slice, in seconds of the clock; None while it is not over."""
        interval = self.span.interval(self.origin)
        if interval is None:
            return None
        return self.what._replace(begin=interval.begin, end=interval.end)


class Timeline:
    """Records spans of a rank's work. Any thread adds spans; the thread that computes opens it."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._origins = device.origins(clock)
        self._origin = Origin(clock())  # of the iteration in progress
        self._computing_spans = device.spans(clock)
        self._iteration = 0
        self._is_open = False
        self._notes: deque[_Note] = deque()
        self._dated: list[Slice] = []  # of finished work, in seconds of the clock
        self._whole: Span | None = None  # the iteration in progress
        self._phase: Span | None = None  # and its phase

    # Recorded

    def begin_iteration(self, number: int) -> None:
        """Opens the timeline. The iteration before, if one is open, ends here."""
        # Not closed in between: lanes may be about to start work.
        self._end_slices()
        # A new one each time: an accelerator reports the time between events in few digits.
        self._origin = self._origins()
        self._computing_spans = self._device.spans(self._clock)
        self._iteration = number
        self._is_open = True
        self._whole = self._begin(Slice(COMPUTE, ITERATION, f"iteration {number}", 0, 0, number))

    def end_iteration(self) -> None:
        """Closes the timeline, if it is open. Started work is still recorded to its end."""
        self._is_open = False
        self._end_slices()

    def phase(self, name: str) -> None:
        """A phase of the computation starts, and the one before ends."""
        if self._is_open:
            self._end_phase()
            shown = _PHASES.get(name, str(name))
            self._phase = self._begin(Slice(COMPUTE, PHASE, shown, 0, 0, self._iteration))

    def timed(self, row: str, name: str, work: Callable[[], T], nbytes: int = 0) -> Callable[[], T]:
        """The work, which is recorded if the timeline is open when it starts."""

        def work_in_span() -> T:
            if not self._is_open:
                return work()
            span = self._span(row)
            self.note(row, name, span, nbytes)
            with span:
                return work()

        return work_in_span

    def note(self, row: str, name: str, span: Span, nbytes: int = 0) -> None:
        """Records work of a row, whose span is about to start."""
        if self._is_open:
            self._add(Slice(row, WORK, name, 0, 0, self._iteration, nbytes), span)

    def waiting(self, what: str, about: str = "") -> AbstractContextManager[None]:
        """Around a wait of the computation: of its thread or, on an accelerator, of its stream.

        There it may be another thread that waits, or this one for the host: the stream then idles
        as long as it has no work left.
        """
        if not self._is_open:
            return _NOTHING
        span = self._span(COMPUTE)
        name = f"wait for {what}"
        self._add(Slice(COMPUTE, WAIT, name, 0, 0, self._iteration, about=about), span)
        return span

    def awaited(self, event: Event, what: str, about: str = "") -> Event:
        """An event, whose `wait` is recorded as the computation's."""
        if not self._is_open:
            return event

        def wait() -> None:
            with self.waiting(what, about):
                event.wait()

        return Awaited(event, wait)

    # Recorded so far

    def slices(self, zero: float, *, is_final: bool = False) -> list[Slice] | None:
        """All slices so far, by their beginnings. None while some are not over. Does not wait.

        Args:
            zero: unix seconds, from which they count.
            is_final: leave out unfinished work.
        """
        self._date_notes()
        if self._notes and not is_final:
            return None

        # By both clocks at once. The wall clock may be set while the program runs.
        shift = time.time() - self._clock() - zero
        known = [one._replace(begin=one.begin + shift, end=one.end + shift) for one in self._dated]
        return sorted(known, key=lambda one: (one.begin, -one.end))

    def synchronize(self) -> None:
        """Blocks this thread until its issued work is done, and can be dated."""
        self._device.event().synchronize()
        if self._origin.event is not None:
            self._origin.event.synchronize()

    def forget(self) -> None:
        """Drops all records."""
        self._notes.clear()
        self._dated.clear()

    def _span(self, row: str) -> Span:
        if row == COMPUTE:
            # Of one stream, for any wait: later work on it is later, or inside.
            return self._computing_spans()
        return ClockSpan(self._clock) if row in _ON_THREADS else self._device.span(self._clock)

    def _begin(self, what: Slice) -> Span:
        span = self._span(COMPUTE)
        self._add(what, span)
        span.__enter__()
        return span

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__()
            self._phase = None

    def _end_slices(self) -> None:
        """The iteration in progress ends, and its phase."""
        self._end_phase()
        if self._whole is not None:
            self._whole.__exit__()
            self._whole = None

    def _date_notes(self) -> None:
        # Only unfinished notes are queried again: a save may stay open for many iterations.
        for _ in range(len(self._notes)):
            note = self._notes.popleft()
            dated = note.dated()
            if dated is None:
                self._notes.append(note)
            else:
                self._dated.append(dated)

    def _add(self, what: Slice, span: Span) -> None:
        self._notes.append(_Note(what, span, self._origin))


class NoTimeline:
    """Records no work, and makes no spans."""

    __slots__ = ()

    def phase(self, name: str) -> None:
        """No effect."""

    def timed(
        self,
        row: str,  # noqa: ARG002 (as Timeline has it)
        name: str,  # noqa: ARG002
        work: Callable[[], T],
        nbytes: int = 0,  # noqa: ARG002
    ) -> Callable[[], T]:
        return work

    def note(self, row: str, name: str, span: Span, nbytes: int = 0) -> None:
        """No effect."""

    def waiting(self, what: str, about: str = "") -> AbstractContextManager[None]:  # noqa: ARG002
        return _NOTHING

    def awaited(self, event: Event, what: str, about: str = "") -> Event:  # noqa: ARG002
        return event


NO_TIMELINE = NoTimeline()

AnyTimeline: TypeAlias = Timeline | NoTimeline
