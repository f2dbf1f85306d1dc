"""Reasons to end a run early, and how all ranks come to agree on them.

A rank may be signalled, or its clock may run out, a step before the others'. So each rank votes,
the votes travel with the loss in the step's all-reduce, and every rank acts on their sum.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from megatron.training.config import StopConfig
from megatron.training.health.exits import ExitCode
from megatron.training.health.signals import Press, Presses

logger = logging.getLogger(__name__)

# Signals of schedulers before they take the machine away, and of a terminal's Ctrl-C.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Votes(NamedTuple):
    """A rank's votes on stopping and saving, 0 or 1 each, or their sum over all ranks."""

    signalled: float = 0.0  # a scheduler's signal, or Ctrl-C, has come
    out_of_time: float = 0.0  # --exit-duration-in-mins are over
    too_short: float = 0.0  # a save takes longer than the rest of the grace period
    saving: float = 0.0  # a save is pending
    save_failed: float = 0.0  # a save has failed since the last votes
    save_late: float = 0.0  # --save-interval-seconds are over


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
        is_watched: whether a watchdog announces a SIGINT, and ends the process at the second one;
            otherwise the second one raises KeyboardInterrupt.
    """

    def __init__(
        self,
        config: StopConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        rank: int = 0,
        is_watched: bool = False,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rank = rank
        self._is_watched = is_watched
        self._presses = Presses(clock)
        self._pid = os.getpid()
        self._start = clock()
        # (signal, when it came), set by the handler. The first one counts: schedulers repeat
        # themselves.
        self._received: tuple[signal.Signals, float] | None = None
        self._is_logged = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopConditions:
        if self._config.exit_signal_handler:
            # A shell has its background jobs ignore SIGINT: that Ctrl-C is meant for others.
            self._previous_handlers = {
                number: signal.signal(number, self._on_signal)
                for number in _SIGNALS
                if number is not signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
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
        # A forked process has this handler too, but no run to end.
        if os.getpid() != self._pid:
            return

        if self._received is None:
            self._received = (signal.Signals(number), self._clock())
        if number == signal.SIGINT:
            press = self._presses.add()
            if press is Press.SECOND and not self._is_watched:
                raise KeyboardInterrupt

    def votes(self, save_seconds: float | None = None) -> Votes:
        """This rank's votes on stopping; the saver adds its votes on saving.

        Args:
            save_seconds: how long a save takes, as measured on earlier ones; None: not known, and
                assumed to fit while any of the grace period is left.
        """
        limit = self._config.exit_duration_in_mins
        is_late = limit is not None and self._clock() - self._start > 60.0 * limit
        if self._received is None:
            return Votes(out_of_time=float(is_late))

        number, when = self._received
        past = self._clock() - when
        grace = self._config.exit_signal_grace_seconds
        is_too_short = grace is not None and past + (save_seconds or 0.0) > grace
        # All ranks of a terminal get a Ctrl-C; the watchdog has announced it, once.
        is_announced = number is signal.SIGINT and self._is_watched and grace is None
        if not self._is_logged and not is_announced:
            self._is_logged = True
            self._log_signal(number, past, save_seconds)

        return Votes(1.0, float(is_late), float(is_too_short))

    def _log_signal(self, number: signal.Signals, past: float, save_seconds: float | None) -> None:
        grace = self._config.exit_signal_grace_seconds
        left = "no grace period is set"
        if grace is not None:
            left = f"{grace - past:.1f} s of {grace:g} s are left"
        logger.warning(
            "%s was received by rank %d %.1f s ago; %s; time of a save: %s",
            number.name,
            self._rank,
            past,
            left,
            "unknown" if save_seconds is None else f"{save_seconds:.1f} s",
        )

    def stop(self, iteration: int, votes: Votes) -> Stop | None:
        """Why the run is to end after `iteration` iterations, by the votes summed over ranks; None:
        no reason.

        The code and whether to save are the same on every rank; the reason names the signal where
        it came.
        """
        if votes.signalled:
            reason = (
                "another rank was signalled"
                if self._received is None
                else f"{self._received[0].name} was received"
            )
            if votes.too_short:
                grace = self._config.exit_signal_grace_seconds
                reason += (
                    ", and a save takes longer than the rest of "
                    f"--exit-signal-grace-seconds {grace}"
                )
                return Stop(reason, ExitCode.PREEMPTED_UNSAVED, saves=False)
            return Stop(reason, ExitCode.PREEMPTED, saves=True)

        if votes.out_of_time:
            reason = f"--exit-duration-in-mins {self._config.exit_duration_in_mins} is over"
            return Stop(reason, ExitCode.FINISHED, saves=True)

        interval = self._config.exit_interval
        if interval is not None and iteration % interval == 0:
            reason = f"iteration {iteration} is a multiple of --exit-interval {interval}"
            return Stop(reason, ExitCode.FINISHED, saves=True)

        return None
