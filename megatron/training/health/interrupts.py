"""Ctrl-C: what SIGINT does to a run, and the lines that say so.

With `--exit-signal-handler` the first SIGINT has the run save and end, and the second one ends it
at once. Without, the first one ends it at once.

Neither raises KeyboardInterrupt. That reaches the main thread between any two lines of Python, and
not at all while it waits in a collective; the other ranks would then report a connection that
failed. Instead `StopConditions` takes note of the first SIGINT, and the watchdog's thread ends the
process, wherever the main thread is.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# Some programs pass a SIGINT on to a child that the terminal has sent it to as well: one Ctrl-C
# arrives twice within milliseconds. Nobody who means two presses fast lets go of the first save.
_SAME_PRESS_SECONDS = 0.5


class Press(enum.Enum):
    """What a SIGINT is."""

    FIRST = enum.auto()
    ECHO = enum.auto()  # the first one, which has arrived again
    SECOND = enum.auto()  # a wish to leave at once


class Presses:
    """Tells a second Ctrl-C from the first one that arrives twice.

    SIGTERM counts as none: torchrun's agent sends it when Ctrl-C is pressed while it waits for its
    ranks to save.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None

    def add(self) -> Press:
        """Counts a SIGINT that has just come."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return Press.FIRST
        return Press.ECHO if now - self._first < _SAME_PRESS_SECONDS else Press.SECOND


@dataclass(frozen=True)
class OnInterrupt:
    """What a run does on SIGINT, in the words of its log.

    In each text, `when` is the rank's place, such as "in iteration 17, forward".

    Attributes:
        is_handled: whether the first SIGINT has the run save and end: `--exit-signal-handler`.
        saves: whether there is a `--save`.
        is_elastic: whether torchrun has started this rank.
    """

    is_handled: bool = False
    saves: bool = False
    is_elastic: bool = False

    def first(self, when: str, is_saved: bool) -> str:
        """The line for the first SIGINT, if it is handled.

        Args:
            is_saved: whether the state at `when` is saved.
        """
        next_step = "the run will finish its step, save and end."
        if is_saved:
            next_step = "its state is saved, and the run ends after what is under way."
        elif not self.saves:
            next_step = (
                "the run will finish its step and end. Without --save, nothing of it is kept."
            )
        if self.is_elastic:
            limit = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
            more = f"torchrun kills it after {limit} s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)."
        else:
            more = "A second Ctrl-C ends it at once."
        return f"SIGINT {when}: {next_step} {more}"

    def unhandled(self, when: str, has_trained: bool, is_saved: bool) -> str:
        """The line for a SIGINT that ends the run at once.

        Args:
            has_trained: whether this start of the run has made a step.
            is_saved: whether the state at `when` is saved.
        """
        if not has_trained:
            return f"SIGINT ends the run {when}, before its first step."
        if not self.saves:
            return f"SIGINT ends the run {when}. Without --save, nothing of it is kept."
        if is_saved:
            return f"SIGINT ends the run {when}. Its state is saved."
        return (
            f"SIGINT ends the run {when}. What it trained since its last checkpoint is lost; "
            "--exit-signal-handler saves that first."
        )
