"""How long something takes, and when, by the host's clock or an accelerator's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from megatron.core.drivers import Driver

Clock = Callable[[], float]  # seconds


class Origin(NamedTuple):
    """One moment by both clocks. It dates the events of an accelerator on the host's clock."""

    seconds: float  # by the host's clock
    event: Any = None  # of the accelerator, timed; None on the CPU


class Interval(NamedTuple):
    """From when to when, in seconds by the host's clock."""

    begin: float
    end: float


class Span(Protocol):
    """The duration of the work done or issued while it is open. Used once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def seconds(self) -> float | None:
        """How long it took; None while that is unknown. Does not wait."""

    def interval(self, origin: Origin) -> Interval | None:
        """From when to when it was; None while that is unknown. Does not wait."""


class ClockSpan:
    """The time of a thread's own work, by a clock in seconds."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._begin = 0.0
        self._end: float | None = None

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *error: object) -> None:
        self._end = self._clock()

    @property
    def seconds(self) -> float | None:
        return None if self._end is None else self._end - self._begin

    def interval(self, origin: Origin) -> Interval | None:  # noqa: ARG002  it is the host's clock
        return None if self._end is None else Interval(self._begin, self._end)


class StreamSpan:
    """The time of work issued to an accelerator's stream, between two of its events."""

    def __init__(self, driver: Driver, index: int, stream: Any = None) -> None:
        """
        Args:
            stream: default: the one that is current where the span starts, and where it ends.
        """
        self._driver = driver
        self._index = index
        self._stream = stream
        self._events = [driver.new_event(index, is_timed=True) for _ in range(2)]
        self._is_closed = False

    def __enter__(self) -> None:
        self._record(0)

    def __exit__(self, *error: object) -> None:
        self._record(1)
        self._is_closed = True

    @property
    def seconds(self) -> float | None:
        if not self._is_over:
            return None
        return float(self._events[0].elapsed_time(self._events[1])) / 1000.0

    def interval(self, origin: Origin) -> Interval | None:
        if not self._is_over or not origin.event.query():
            return None
        # Milliseconds, negative before the origin.
        since = [float(origin.event.elapsed_time(event)) / 1000.0 for event in self._events]
        return Interval(origin.seconds + since[0], origin.seconds + since[1])

    def _record(self, number: int) -> None:
        own = self._stream
        stream = self._driver.current_stream(self._index) if own is None else own
        self._events[number].record(stream)

    @property
    def _is_over(self) -> bool:
        # torch counts an event that was never recorded as done.
        return self._is_closed and bool(self._events[1].query())


class StreamClock:
    """Makes origins, on a separate stream. It has no work, and reaches an event at once, where
    the stream that computes may be far behind the host.
    """

    def __init__(self, driver: Driver, index: int, clock: Clock) -> None:
        self._driver = driver
        self._index = index
        self._clock = clock
        self._stream = driver.new_stream(index, is_urgent=True)

    def __call__(self) -> Origin:
        event = self._driver.new_event(self._index, is_timed=True)
        event.record(self._stream)
        return Origin(self._clock(), event)
