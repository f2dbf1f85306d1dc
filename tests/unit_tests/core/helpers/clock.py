"""A clock for tests of timings."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Advances by a number of seconds in chosen pieces of work."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds

        return work
