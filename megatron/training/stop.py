"""Reasons to end a run early, and how all ranks come to agree on them.

A rank may be signalled, or its clock may run out, a step before the others'. So each rank votes,
the votes travel with the loss in the step's one all-reduce, and what the sum says holds on every
rank.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from megatron.core.options import check_options, expect, option
from megatron.training.health.exits import ExitCode

logger = logging.getLogger(__name__)

# What a scheduler sends before it takes the machine away.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class StopConfig:
    """When to end before the last iteration. Names are Megatron's, but for the grace period."""

    exit_interval: int | None = option(
        None, "save and exit after the iterations divisible by this", more_than=0
    )
    exit_duration_in_mins: float | None = option(
        None, "save and exit after this many minutes", more_than=0
    )
    exit_signal_handler: bool = option(
        False, "on SIGTERM or SIGUSR1 finish the iteration, save and exit"
    )
    exit_signal_grace_seconds: float | None = option(
        None,
        "after such a signal, exit within these: without saving if a save takes longer; None: save",
        more_than=0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        expect(
            self.exit_signal_handler or self.exit_signal_grace_seconds is None,
            "--exit-signal-grace-seconds",
            "--exit-signal-handler",
            self.exit_signal_grace_seconds,
        )


@dataclass(frozen=True)
class Stop:
    """The decision to end a run before its last iteration."""

    reason: str
    code: ExitCode
    saves: bool  # whether the state is saved first


class StopConditions:
    """Watches for reasons to stop; a context manager, since it may install signal handlers.

    Args:
        config: which reasons there are.
        clock: seconds that only grow.
        rank: of this process, for the log.
    """

    def __init__(
        self, config: StopConfig, clock: Callable[[], float] = time.monotonic, *, rank: int = 0
    ) -> None:
        self._config = config
        self._clock = clock
        self._rank = rank
        self._start = clock()
        # (signal, when it came), set by the handler. The first one counts: schedulers repeat
        # themselves.
        self._received: tuple[signal.Signals, float] | None = None
        self._is_logged = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopConditions:
        if self._config.exit_signal_handler:
            self._previous_handlers = {
                number: signal.signal(number, self._on_signal) for number in _SIGNALS
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._received is None:
            self._received = (signal.Signals(number), self._clock())

    def votes(self, save_seconds: float | None = None) -> tuple[float, float, float]:
        """This rank's votes, 0 or 1: (was signalled, ran out of time, a save takes longer than is
        left).

        Args:
            save_seconds: how long a save takes, as measured on earlier ones; None: not known, and
                taken to fit while any of the grace period is left.
        """
        limit = self._config.exit_duration_in_mins
        is_late = limit is not None and self._clock() - self._start > 60.0 * limit
        if self._received is None:
            return 0.0, float(is_late), 0.0
        number, when = self._received
        past = self._clock() - when
        grace = self._config.exit_signal_grace_seconds
        is_too_short = grace is not None and past + (save_seconds or 0.0) > grace
        if not self._is_logged:
            self._is_logged = True
            left = (
                "no grace period is set"
                if grace is None
                else f"{grace - past:.1f} s of {grace:g} s are left"
            )
            takes = "unknown" if save_seconds is None else f"{save_seconds:.1f} s"
            logger.warning(
                "%s was received by rank %d %.1f s ago; %s; time of a save: %s",
                number.name, self._rank, past, left, takes,
            )  # fmt: skip
        return 1.0, float(is_late), float(is_too_short)

    def stop(self, iteration: int, votes: Sequence[float]) -> Stop | None:
        """What the run comes to after `iteration` iterations, given the votes summed over ranks;
        None: it goes on.

        The code and whether to save are the same on every rank; the reason names the signal where
        it came.
        """
        signalled, late, too_short = votes
        if signalled:
            reason = (
                "another rank was signalled"
                if self._received is None
                else f"{self._received[0].name} was received"
            )
            if too_short:
                grace = self._config.exit_signal_grace_seconds
                reason += f", and a save takes longer than what is left of --exit-signal-grace-seconds {grace}"
                return Stop(reason, ExitCode.PREEMPTED_UNSAVED, saves=False)
            return Stop(reason, ExitCode.PREEMPTED, saves=True)
        if late:
            reason = f"--exit-duration-in-mins {self._config.exit_duration_in_mins} is over"
            return Stop(reason, ExitCode.FINISHED, saves=True)
        interval = self._config.exit_interval
        if interval is not None and iteration % interval == 0:
            reason = f"iteration {iteration} is a multiple of --exit-interval {interval}"
            return Stop(reason, ExitCode.FINISHED, saves=True)
        return None
