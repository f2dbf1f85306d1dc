"""The phases of a rank's main thread, its progress through them, and the time since."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

# If the watchdog looks later than this after its last look, the process was stopped or starved. The
# rest of the time does not count as idle, since the main thread could not use it either.
_LONGEST_WAIT_TICKS = 2.0
_NUM_LONG_STEPS = 2  # the first iterations compile


class Phase(str, enum.Enum):
    """A phase of a rank's main thread. Its value is the word in logs, events and flags."""

    START = "start"  # before the first mark
    # Once in each start of the run:
    BUILD = "build"
    LOAD = "load"
    DATA = "data"
    # In each iteration, and up to BACKWARD in each microbatch:
    BATCH = "batch"
    FORWARD = "forward"
    BACKWARD = "backward"
    AGREE = "agree"
    STEP = "step"
    # Between iterations:
    EVALUATE = "evaluate"
    SAVE = "save"

    def __str__(self) -> str:
        # Python's versions differ for an enum that is a str.
        return str(self.value)

    @property
    def is_of_start(self) -> bool:
        """Returns whether the phase occurs once per start of the run."""
        return self in (Phase.BUILD, Phase.LOAD, Phase.DATA)

    @property
    def is_long(self) -> bool:
        """Returns whether its length depends on the size of the data or the state."""
        return self.is_of_start or self in (Phase.START, Phase.SAVE)


@dataclass(frozen=True)
class Mark:
    """The main thread's last sign of progress."""

    phase: Phase = Phase.START
    iteration: int = 0
    num_marks: int = 0  # since the start of the iteration
    num_steps: int = 0  # marks of the phase STEP so far


class Progress:
    """The main thread marks its phases, and the watchdog's thread counts the time since.

    Args:
        hang_timeout_seconds: the limit of a phase; None: no limit.
        long_timeout_seconds: the limit of long phases, if longer.
        tick_seconds: the time between two looks of the watchdog's thread.
    """

    def __init__(
        self, hang_timeout_seconds: float | None, long_timeout_seconds: float, tick_seconds: float
    ) -> None:
        self._hang_timeout = hang_timeout_seconds
        self._long_timeout = long_timeout_seconds
        self._tick = tick_seconds
        # Written by the main thread, and read by the watchdog's. Assignments need no lock.
        self.mark = Mark()
        self.takes_long: Callable[[], bool] = bool  # False

        # For the watchdog's thread:
        self.seen = self.mark
        self.idle_seconds = 0.0
        self._took_long = False
        self._last_look = 0.0

    def begin(self, phase: Phase, iteration: int) -> None:
        """Called by the main thread at the start of a phase."""
        last = self.mark
        num_marks = last.num_marks + 1 if iteration == last.iteration else 0
        num_steps = last.num_steps + (phase is Phase.STEP)
        self.mark = Mark(phase, iteration, num_marks, num_steps)

    def start_clock(self) -> None:
        """Starts to count idle time."""
        self._last_look = time.monotonic()

    def look(self) -> None:
        """Counts the time since the last look, unless the main thread has moved since."""
        now = time.monotonic()
        passed, self._last_look = now - self._last_look, now
        took_long, self._took_long = self._took_long, self.takes_long()

        # The limit starts anew after an operation that takes long.
        if self.mark is self.seen and (self._took_long or not took_long):
            self.idle_seconds += min(passed, _LONGEST_WAIT_TICKS * self._tick)
        else:
            self.seen, self.idle_seconds = self.mark, 0.0

    @property
    def is_late(self) -> bool:
        """Returns whether the phase has exceeded its limit."""
        limit = self._limit(self._is_long)
        return limit is not None and self.idle_seconds > limit

    @property
    def is_excused(self) -> bool:
        """Returns whether an operation that takes long is running, within its limit."""
        return self._took_long and self.idle_seconds <= self._long_timeout

    @property
    def patience_seconds(self) -> float | None:
        """The limit of the phase or, if longer, of an operation that is running; None: no limit."""
        return self._limit(self._is_long or self._took_long)

    @property
    def _is_long(self) -> bool:
        return self.seen.phase.is_long or self.seen.num_steps < _NUM_LONG_STEPS

    def _limit(self, is_long: bool) -> float | None:
        if self._hang_timeout is None:
            return None
        return max(self._hang_timeout, self._long_timeout) if is_long else self._hang_timeout
