"""Ctrl-C: the effect of SIGINT on a run, and its log lines.

With `--exit-signal-handler`, the run saves and exits at the first SIGINT, and exits at once at the
second one. Without the flag, it exits at once at the first one.

KeyboardInterrupt is raised in neither case. It would reach the main thread between any two lines of
Python, and not at all while it waits in a collective; the other ranks would then report a failed
connection. Instead `StopConditions` records the first SIGINT, and the watchdog's thread ends the
process at any place of the main thread.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# Some programs forward a SIGINT to a child that also gets it from the terminal: one Ctrl-C arrives
# twice within milliseconds.
_SAME_PRESS_SECONDS = 0.5


class Press(enum.Enum):
    """The meaning of a SIGINT."""

    FIRST = enum.auto()
    ECHO = enum.auto()  # the first one, received again
    SECOND = enum.auto()  # exit at once


class Presses:
    """Distinguishes a second Ctrl-C from the first one that arrives twice.

    SIGTERM does not count: torchrun's agent sends it if Ctrl-C is pressed while its ranks save.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None

    def add(self) -> Press:
        """Counts a SIGINT that was just received."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return Press.FIRST
        return Press.ECHO if now - self._first < _SAME_PRESS_SECONDS else Press.SECOND


@dataclass(frozen=True)
class OnInterrupt:
    """The log lines for a SIGINT.

    In each line, `when` is the rank's progress, such as "in iteration 17, forward".

    Attributes:
        is_handled: whether `--exit-signal-handler` is set.
        saves: whether `--save` is set.
        is_elastic: whether torchrun started this rank.
    """

    is_handled: bool = False
    saves: bool = False
    is_elastic: bool = False

    def first(self, when: str, is_saved: bool) -> str:
        """Returns the line for the first SIGINT with `--exit-signal-handler`.

        Args:
            is_saved: whether the present state is saved.
        """
        next_step = "the run will finish its step, save and end."
        if is_saved:
            next_step = "its state is saved, and the run ends after the present step."
        elif not self.saves:
            next_step = "the run will finish its step and end without saving, as --save is not set."
        if self.is_elastic:
            limit = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
            more = f"torchrun kills it after {limit} s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)."
        else:
            more = "A second Ctrl-C ends it at once."
        return f"SIGINT {when}: {next_step} {more}"

    def unhandled(self, when: str, has_trained: bool, is_saved: bool) -> str:
        """Returns the line for a SIGINT that ends the run at once.

        Args:
            has_trained: whether this start of the run has completed a step.
            is_saved: whether the present state is saved.
        """
        if not has_trained:
            return f"SIGINT ends the run {when}, before its first step."
        if not self.saves:
            return f"SIGINT ends the run {when}. It is not saved, as --save is not set."
        if is_saved:
            return f"SIGINT ends the run {when}. Its state is saved."
        return (
            f"SIGINT ends the run {when}. Its steps since the last checkpoint are lost; "
            "--exit-signal-handler saves first."
        )
