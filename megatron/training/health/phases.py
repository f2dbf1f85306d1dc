"""The phases of a rank: the watchdog times them, reports name them, faults strike at them."""

from __future__ import annotations

import enum


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
