"""Reasons to end a run early, and how all ranks come to agree on them.

A rank may be signalled, or its clock may run out, a step before the others'. So each rank votes, the votes travel with
the loss in the step's one all-reduce, and what the sum says holds on every rank.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from megatron.core.options import check_options, option


@dataclass(frozen=True)
class StopConfig:
    """When to end before the last iteration. Names are Megatron's."""

    exit_interval: int | None = option(None, "save and exit after the iterations divisible by this", more_than=0)
    exit_duration_in_mins: float | None = option(None, "save and exit after this many minutes", more_than=0)
    exit_signal_handler: bool = option(False, "on SIGTERM finish the iteration, save and exit")

    def __post_init__(self) -> None:
        check_options(self)


class StopConditions:
    """Watches for reasons to stop; a context manager, since it may install a signal handler."""

    def __init__(self, config: StopConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._start = clock()
        self._is_signalled = False
        self._previous_handler: Any = None

    def __enter__(self) -> StopConditions:
        if self._config.exit_signal_handler:
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._config.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._is_signalled = True

    def votes(self) -> tuple[float, float]:
        """This rank's votes, 0 or 1: (was signalled, ran out of time)."""
        limit = self._config.exit_duration_in_mins
        is_late = limit is not None and self._clock() - self._start > 60.0 * limit
        return float(self._is_signalled), float(is_late)

    def reason(self, iteration: int, votes: Sequence[float]) -> str | None:
        """Why the run ends after `iteration` iterations, given the votes summed over ranks; None: it goes on."""
        signalled, late = votes
        if signalled:
            return "SIGTERM was received"
        if late:
            return f"--exit-duration-in-mins {self._config.exit_duration_in_mins} is over"
        interval = self._config.exit_interval
        if interval is not None and iteration % interval == 0:
            return f"iteration {iteration} is a multiple of --exit-interval {interval}"
        return None
