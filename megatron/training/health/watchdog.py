"""The watchdog: a thread that ends a rank whose run cannot continue, and reports the cause.

A rank whose peer is dead or hangs may be blocked in a collective for minutes, where Python runs no
signal handlers. So a separate thread checks once a second, and at every signal, whether

- the main thread has made progress within its limit (`progress.py`);
- another rank has started a roll call (`roll_call.py`);
- the backend has detected a failed collective, which the main thread may never see
  (`mesh.py`);
- a signal was received (`signals.py`);
- torchrun's agent, the parent of the rank, is alive.

The roll call has the same cause on all ranks (`cause.py`). The lowest responsive rank writes it to
the log and the event log; then each rank exits with a code of docs/recovery.md, and the launcher
restarts the job. The main thread calls `explain(error)` for an unexpected exception.

Where this thread itself cannot run, a timer ends the process (`backstop.py`). Why that is not
enough, nor torchelastic's `record`: docs/decisions/0021.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

from torch.distributed.distributed_c10d import Store

from megatron.core import issued_collectives
from megatron.core.issued_collectives import IssuedCollectives
from megatron.core.rank_waits import rank_wait
from megatron.training.health import backstop
from megatron.training.health.cause import (
    Cause,
    Record,
    Verdict,
    in_one_line,
    is_peer_failure,
    place_of,
    stack_of,
)
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.exits import (
    ExitCode,
    ExitError,
    code_of,
    exit_process,
    is_foreseen,
    process_status,
)
from megatron.training.health.progress import Phase, Progress
from megatron.training.health.rank_store import StoreLostError
from megatron.training.health.roll_call import RollCall
from megatron.training.health.signals import OnInterrupt, Press, Presses, SignalSocket
from megatron.training.launch import Launch

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_FIRST_TICK_SECONDS = 0.1  # until all ranks are there
_EXPLAIN_SECONDS = 10.0  # limit of `explain`
_LEAVE_SECONDS = 10.0  # for the exit of the main thread after it has the cause
_FLUSH_SECONDS = 2.0
_REPORT_SECONDS = 1.0
_BEAT_SECONDS = 5.0
# After a signal, an iteration that takes longer may be waiting for a rank that is dead.
_SIGNALLED_IDLE_SECONDS = 10.0
# In multiples of the limit, so that the other ranks name this one first. And of short limits, which
# a busy machine may exceed between two looks.
_BACKSTOP_LIMITS = 2.0
_LEAST_BACKSTOP_SECONDS = 60.0


class Reports:
    """Writes to the log and the event log, each time in a thread that is waited for one second.

    A disk may hang, and a stuck thread may hold the log's lock.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._has_warned = False

    def error(self, *texts: str) -> None:
        def tell() -> None:
            for text in texts:
                logger.error("%s", text)

        _within(tell)

    def warn(self, text: str) -> None:
        _within(lambda: logger.warning("%s", text))

    def warn_once(self, text: str) -> None:
        """Logs the first text only."""
        if not self._has_warned:
            self._has_warned = True
            self.warn(text)

    def event(self, kind: EventKind, **fields: object) -> None:
        _within(lambda: self._events.write(kind, **fields))


class Heartbeat:
    """Writes a run's heartbeat every few seconds.

    Args:
        describe: returns the fields of the heartbeat.
    """

    def __init__(self, events: EventLog, describe: Callable[[], Mapping[str, object]]) -> None:
        self._events = events
        self._describe = describe
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="watchdog heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Writes the last heartbeat, unless it was never started."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_REPORT_SECONDS)

    def _beat(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            self._events.beat(**self._describe())
            self._is_over.wait(_BEAT_SECONDS)


def _within(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="watchdog report", daemon=True)
    thread.start()
    thread.join(_REPORT_SECONDS)


class _Wait(NamedTuple):
    """Whether a rank waits for others, and where."""

    is_for_ranks: bool
    text: str  # empty if unknown


def _leave(status: int) -> NoReturn:
    exit_process(status, _FLUSH_SECONDS)


class Watchdog:
    """Watches over this rank. A context manager, which the main thread enters after it created the
    process group. An exit without an exception means that the rank has finished.

    Args:
        launch: the rank of this process.
        store: the store of the process group, for a new connection; None for a world of one.
        events: the run's event log.
        hang_timeout_seconds: the limit of a phase without progress; None: no limit.
        grace_seconds: from SIGTERM, SIGUSR1 or SIGINT, if the main thread handles them, to the end
            of the process; None: no limit.
        on_interrupt: the lines for SIGINT, unless the program has a handler for it.
        long_timeout_seconds: the limit, if longer, of building, loading and saving, and of the
            first iterations.
        exit_process: ends the process, from the watchdog's thread.
        tick_seconds: the time between two checks.
        collectives: the collectives that this process has issued to its device.
        failed_collective: returns a failure of a collective that the backend has detected, if any.
    """

    def __init__(
        self,
        *,
        launch: Launch,
        store: Store | None,
        events: EventLog,
        hang_timeout_seconds: float | None,
        grace_seconds: float | None = None,
        on_interrupt: OnInterrupt | None = None,
        long_timeout_seconds: float = 600.0,
        exit_process: Callable[[int], NoReturn] = _leave,
        tick_seconds: float = _TICK_SECONDS,
        collectives: IssuedCollectives = issued_collectives.OF_THIS_PROCESS,
        failed_collective: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._launch = launch
        self._grace = grace_seconds
        self._on_interrupt = on_interrupt or OnInterrupt()
        self._presses = Presses()
        self._exit_process = exit_process
        self._tick = tick_seconds
        self._collectives = collectives
        self._find_failure = failed_collective
        self._reports = Reports(events)
        self._heartbeat = Heartbeat(events, self._describe)
        self._roll_call = RollCall(store, launch, self._reports.warn)
        self._progress = Progress(hang_timeout_seconds, long_timeout_seconds, tick_seconds)
        self._main = threading.get_ident()
        self._parent = os.getppid()

        # Written by the main thread, read by the watchdog's, as in `Progress`:
        self._status: dict[str, object] = {}
        self._failure: BaseException | None = None
        self._is_ending = False

        # The watchdog's thread alone:
        self._signalled: tuple[signal.Signals, float] | None = None
        self._has_asked_after_signal = False
        self._failed_collective: str | None = None
        self._error_order: int | None = None

        # From it to the main thread:
        self._cause: Cause | None = None
        self._is_explained = threading.Event()
        self._signals = SignalSocket()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._has_ended = threading.Event()

    def __enter__(self) -> Watchdog:
        try:
            self._roll_call.join()
        except StoreLostError as error:
            logger.warning("the watchdog cannot reach the other ranks: %s", error)
        self._progress.start_clock()
        self._signals.install(self._is_watching)
        self._thread.start()
        if self._launch.rank == 0:
            self._heartbeat.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and self._cause is None:
            if is_foreseen(error):
                self._say_last_words(self._record(error))
            else:
                self.explain(error)
        elif error is None:
            self._say_last_words(None)

        self._is_ending = True
        self._has_ended.set()
        self._signals.wake()
        if self._thread.ident is not None:
            self._thread.join(_REPORT_SECONDS)
        backstop.OF_THIS_PROCESS.cancel()
        self._heartbeat.stop()
        self._signals.uninstall()
        if not self._thread.is_alive():
            self._signals.close()
        self._roll_call.close()

    def mark(self, phase: Phase, iteration: int) -> None:
        """Called by the main thread at the start of a phase."""
        self._progress.begin(phase, iteration)

    def takes_long_while(self, condition: Callable[[], bool]) -> None:
        """Applies `long_timeout_seconds` while the condition is true, for example in a save."""
        self._progress.takes_long = condition

    def status(self, **fields: object) -> None:
        """Sets fields of the heartbeat."""
        self._status = {**self._status, **fields}

    def explain(self, error: BaseException) -> Cause:
        """Finds the cause of an exception of the main thread, within a few seconds.

        When this returns, the other ranks have the cause, and the lowest responsive rank has
        written it to the log and, with the exit, to the event log. The main thread must exit within
        ten seconds.
        """
        if self._cause is None:
            self._failure = error
            self._signals.wake()
            if not self._is_watching() or not self._is_explained.wait(_EXPLAIN_SECONDS):
                self._cause = self._cause or self._cause_of(error, None)
        return self._cause or self._cause_of(error, None)

    def _describe(self) -> Mapping[str, object]:
        """Returns the fields of the heartbeat."""
        mark = self._progress.mark
        fields = {"pid": os.getpid(), "host": socket.gethostname(), "phase": mark.phase}
        return {**fields, "iteration": mark.iteration, **self._status}

    # The methods below run in the watchdog's thread.

    def _is_watching(self) -> bool:
        return self._thread.is_alive()

    def _watch(self) -> None:
        while not self._is_ending:
            try:
                tick = self._tick if self._roll_call.knows_all else _FIRST_TICK_SECONDS
                received = self._signals.wait(tick)
                if not self._is_ending:
                    self._arm_backstop()
                    self._look(received)
            except Exception as error:  # no error here may end the training
                self._reports.warn_once(
                    f"the watchdog has failed, and continues: {type(error).__name__}: {error}"
                )

    def _arm_backstop(self) -> None:
        limit = self._progress.patience_seconds
        if limit is not None:
            seconds = max(_BACKSTOP_LIMITS * limit, _LEAST_BACKSTOP_SECONDS)
            backstop.OF_THIS_PROCESS.arm(seconds)

    def _look(self, received: list[signal.Signals]) -> None:
        """Checks everything once, and ends the process if necessary."""
        self._progress.look()
        if self._launch.is_elastic and os.getppid() != self._parent:
            self._end_orphan()
        for number in received:
            self._on_signal(number)

        if self._failure is not None:
            if self._cause is None:
                self._take_part()
            return

        self._check_grace()
        if (
            self._is_called()
            or self._is_stuck()
            or self._may_wait_in_vain()
            or self._has_failed_collective()
        ):
            self._take_part()

    def _is_called(self) -> bool:
        """Returns whether another rank has started a roll call."""
        if not self._roll_call.has_peers:
            return False
        try:
            self._roll_call.learn()
            return self._roll_call.is_called()
        except StoreLostError as error:
            # At the end of a run, the rank with the store may exit first.
            logger.info("the watchdog has lost the other ranks: %s", error)
            return False

    def _is_stuck(self) -> bool:
        return self._progress.is_late and not self._is_excused(self._wait())

    def _is_excused(self, wait: _Wait) -> bool:
        """Returns whether the main thread waits for a long operation, and not for another rank."""
        return self._progress.is_excused and not wait.is_for_ranks

    def _wait(self) -> _Wait:
        # The device comes first: the host of a busy device may be anywhere.
        outstanding = self._collectives.oldest()
        if outstanding is not None:
            return _Wait(outstanding.has_begun, str(outstanding))
        name = rank_wait(self._main)
        return _Wait(name is not None, "" if name is None else f"waiting in the {name}")

    def _has_failed_collective(self) -> bool:
        """Returns whether the backend has detected a failed collective, which it reports once."""
        if self._failed_collective is None:
            self._failed_collective = self._find_failure()
        return self._failed_collective is not None

    def _may_wait_in_vain(self) -> bool:
        """Returns once whether this rank made no progress after a signal."""
        is_due = self._signalled is not None and not self._has_asked_after_signal
        if not is_due or self._progress.idle_seconds < _SIGNALLED_IDLE_SECONDS:
            return False
        self._has_asked_after_signal = True
        return True

    def _take_part(self) -> None:
        """Holds a roll call. If it has a cause, the process ends, possibly by the main thread."""
        asked = self._failure
        verdict = self._roll_call.hold(self._record(asked))
        if self._is_ending:
            return

        if verdict is None and asked is None:
            if self._is_stuck():
                # The others have an excuse, so the limit starts anew.
                self._progress.idle_seconds = 0.0
            return

        if verdict is not None:
            self._announce(verdict)
        error = self._failure  # possibly set during the roll call
        cause = self._cause_of(error, verdict)
        if error is not None:
            self._cause = cause
            self._is_explained.set()
            if self._has_ended.wait(_LEAVE_SECONDS):
                return
        self._exit_process(process_status(cause.code, self._launch.is_elastic))

    def _cause_of(self, error: BaseException | None, verdict: Verdict | None) -> Cause:
        """Returns the cause for this rank, by the verdict or by its error alone."""
        if error is not None and not is_peer_failure(error):
            ranks = (self._launch.rank,) if verdict is None else verdict.ranks
            text = in_one_line(error) if verdict is None else verdict.text
            return Cause(code_of(error), ranks, text, is_own=True)
        if verdict is not None:
            return Cause(verdict.code, verdict.ranks, verdict.text, is_own=False)
        text = f"another rank failed: {in_one_line(error)}"
        return Cause(ExitCode.LOST_RANK, (), text, is_own=False)

    def _record(self, error: BaseException | None) -> Record:
        """Returns this rank's report for a roll call."""
        main = stack_of(sys._current_frames().get(self._main))
        # Called once: it may take a second, and the others wait for this record.
        wait = self._wait()
        is_excused = self._is_excused(wait)
        is_stuck = self._progress.is_late and not is_excused

        # Only a failed collective may be another rank's fault.
        failed, is_own = self._failed_collective, False
        if error is not None:
            is_own = not is_peer_failure(error)
            failed = None if is_own else in_one_line(error)
        if is_own and self._error_order is None:
            self._error_order = self._roll_call.error_order()

        waits_in_vain = wait.is_for_ranks and self._has_asked_after_signal
        return replace(
            self._identity(),
            num_marks=self._progress.mark.num_marks,
            idle_seconds=self._progress.idle_seconds,
            is_stuck=is_stuck,
            waits=wait.is_for_ranks,
            is_excused=is_excused,
            place=f"{place_of(main)} ({wait.text})" if wait.text else place_of(main),
            stack="\n".join(f"  {frame}" for frame in main) if is_stuck else "",
            error=in_one_line(error) if is_own else None,
            error_code=ExitCode.FAILED if error is None else code_of(error),
            error_order=self._error_order or 0,
            failed_collective=failed,
            needs_all=is_stuck or error is not None or failed is not None or waits_in_vain,
        )

    def _identity(self) -> Record:
        """Returns a report with only this rank's name and progress."""
        mark = self._progress.mark
        host, pid = socket.gethostname(), os.getpid()
        return Record(self._launch.rank, host, pid, mark.phase, mark.iteration)

    def _announce(self, verdict: Verdict) -> None:
        """Writes the cause to the log and the event log, on rank `verdict.speaker`."""
        if verdict.speaker != self._launch.rank:
            return

        texts = [verdict.text]
        if verdict.stack:
            texts.append(f"the stack of rank {verdict.ranks[0]}, innermost last:\n{verdict.stack}")
        self._reports.error(*texts)

        kind = EventKind.HANG if verdict.code is ExitCode.HANG else EventKind.LOST
        if kind is EventKind.HANG or self._launch.world_size > 1:
            self._reports.event(kind, ranks=list(verdict.ranks), cause=verdict.text)
        self._write_exit(verdict.run_code, verdict.run_code.name, verdict.text)
        self._roll_call.linger()

    def _write_exit(self, status: int, name: str, reason: str) -> None:
        iteration = self._progress.seen.iteration
        self._reports.event(
            EventKind.EXIT, code=int(status), name=name, reason=reason, iteration=iteration
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """Handles a signal of a scheduler, which often means that a rank is dead."""
        if self._signalled is None:
            self._signalled = (number, time.monotonic())
            iteration = self._progress.seen.iteration
            self._reports.event(EventKind.SIGNAL, signal=number.name, iteration=iteration)
        if number is signal.SIGINT:
            self._on_ctrl_c()
            return
        if self._failure is not None:
            return

        if self._roll_call.has_peers:
            self._take_part()
        if self._signals.is_own(number):
            # Without another handler, the process ends as without the watchdog.
            self._end_by(number)

    def _on_ctrl_c(self) -> None:
        """Handles SIGINT, without a roll call, since it never means that a rank is dead."""
        when, on_interrupt, press = self._identity().when, self._on_interrupt, self._presses.add()
        # A terminal's Ctrl-C reaches all ranks of its machine. One of them logs it.
        speaks, is_saved = self._launch.local_rank == 0, self._is_saved()
        if self._signals.is_own(signal.SIGINT):
            has_trained = self._progress.mark.num_steps > 0
            if speaks:
                self._reports.warn(on_interrupt.unhandled(when, has_trained, is_saved))
            self._end_by(signal.SIGINT)
        elif on_interrupt.is_handled and press is Press.SECOND:
            self._end_unfinished(signal.SIGINT, "a second SIGINT ends the run")
        elif on_interrupt.is_handled and press is Press.FIRST and speaks:
            self._reports.warn(on_interrupt.first(when, is_saved))

    def _is_saved(self) -> bool:
        return self._status.get("saved_iteration") == self._progress.mark.iteration

    def _end_by(self, number: signal.Signals) -> NoReturn:
        """Ends the process like a signal without a handler."""
        self._say_last_words(replace(self._identity(), signal=number.name))
        if self._launch.rank == 0:
            self._write_exit(128 + number, number.name, "it is not handled")
        self._exit_process(128 + number)

    def _check_grace(self) -> None:
        """Ends the process after the grace period."""
        if self._signalled is None or self._grace is None:
            return
        number, when = self._signalled
        if time.monotonic() - when >= self._grace:
            self._end_unfinished(number, f"the {self._grace:g} s after {number.name} are over")

    def _end_unfinished(self, number: signal.Signals, reason: str) -> NoReturn:
        """Ends the process before a handled signal has had its effect."""
        own, is_saved = self._identity(), self._is_saved()
        code = ExitCode.PREEMPTED if is_saved else ExitCode.PREEMPTED_UNSAVED
        text = f"{reason} {own.when}, whose state {'is' if is_saved else 'was not'} saved"

        self._reports.error(f"rank {self._launch.rank}: {text}")
        self._write_exit(code, code.name, text)
        self._say_last_words(replace(own, signal=number.name))
        self._exit_process(process_status(code, self._launch.is_elastic))

    def _end_orphan(self) -> NoReturn:
        """Ends the rank after its agent has died, before the job may be restarted elsewhere."""
        rank, text = self._launch.rank, "its torchrun agent has died"
        self._say_last_words(self._record(ExitError(ExitCode.LOST_RANK, text)))
        self._roll_call.call()

        self._reports.error(f"rank {rank} ends, since {text}")
        self._reports.event(EventKind.LOST, ranks=[rank], cause=f"rank {rank}: {text}")
        self._exit_process(int(ExitCode.LOST_RANK))

    def _say_last_words(self, record: Record | None) -> None:
        """Writes to the store why this rank exits; None if it has finished."""
        if not self._roll_call.has_peers:
            return
        try:
            self._roll_call.leave(None if record is None else replace(record, has_left=True))
        except StoreLostError as error:
            logger.debug("could not write the reason of the exit: %s", error)
