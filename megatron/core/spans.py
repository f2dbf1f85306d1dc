"""How long something takes, by the host's clock or an accelerator's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from megatron.core.drivers import Driver


class Span(Protocol):
    """The duration of what is done or issued while it is open. Used once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def seconds(self) -> float | None:
        """How long it took; None while that is unknown. Does not wait."""


class ClockSpan:
    """The time of a thread's own work, by a clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = 0.0
        self._seconds: float | None = None

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *error: object) -> None:
        self._seconds = self._clock() - self._begin

    @property
    def seconds(self) -> float | None:
        return self._seconds


class StreamSpan:
    """The time of what is issued to an accelerator's current stream, between two of its events."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._index = index
        self._events = [driver.new_event(index, is_timed=True) for _ in range(2)]
        self._is_closed = False

    def __enter__(self) -> None:
        self._events[0].record(self._driver.current_stream(self._index))

    def __exit__(self, *error: object) -> None:
        self._events[1].record(self._driver.current_stream(self._index))
        self._is_closed = True

    @property
    def seconds(self) -> float | None:
        # torch counts an event that was never recorded as done.
        if not self._is_closed or not self._events[1].query():
            return None
        return float(self._events[0].elapsed_time(self._events[1])) / 1000.0
