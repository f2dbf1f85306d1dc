"""Situations without an alarm, jobs of one rank, and the state after a watchdog has stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.health import backstop
from megatron.training.health import progress as progress_module
from megatron.training.health.cause import Silence
from megatron.training.health.events import EventLog, read_heartbeat
from megatron.training.health.exits import (
    ExitCode,
)
from megatron.training.health.progress import Phase
from megatron.training.health.watchdog import Watchdog
from megatron.training.launch import Launch
from tests.unit_tests.training.health.helpers.jobs import (
    TIMEOUT,
    WAIT,
    Rank,
    forever,
    on,
    training,
)

# No false alarms


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_rank_may_finish_long_before_the_others(start, is_elastic):
    """Without torchrun, the store ends with rank 0. An exited process is not a failure."""

    def body(rank: Rank) -> None:
        rank.train(rank.ready, iterations=5)
        if rank.rank == 1:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            while rank.watchdog._roll_call._members[0].silence() is not Silence.GONE:
                rank.watchdog.mark(Phase.EVALUATE, 5)
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)  # starts a roll call
            time.sleep(0.5)

    job = start(body, is_elastic=is_elastic, tick_seconds=0.05)
    assert job.end() == [0, 0], job.outputs()
    assert job.causes() == []
    assert "WARNING" not in job.outputs()
    assert job.events("hang", "lost", "exit") == []


class Clock:
    """A watchdog of one rank under a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self._now = 100.0
        monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: self._now))
        options = {"hang_timeout_seconds": 5.0, "tick_seconds": 1.0, **options}
        self.watchdog = Watchdog(launch=Launch(), store=None, events=EventLog(None), **options)
        self.watchdog._progress.start_clock()

    def look(self, seconds: float, times: int = 1) -> tuple[float, bool]:
        """Looks after so many seconds. Returns the idle seconds and whether the rank is stuck."""
        for _ in range(times):
            self._now += seconds
            self.watchdog._progress.look()
        return self.watchdog._progress.idle_seconds, self.watchdog._is_stuck()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_start_a_save_and_the_first_iterations_have_the_longer_timeout(clock):
    phases = [(Phase.BUILD, 0), (Phase.LOAD, 0), (Phase.DATA, 20), (Phase.FORWARD, 21)]
    for phase, iteration in phases:
        clock.watchdog.mark(phase, iteration)
        clock.look(1.0)
        assert clock.look(2.0, times=290) == (580.0, False)
    for iteration in (21, 22):
        clock.watchdog.mark(Phase.STEP, iteration)
    clock.look(1.0)
    assert clock.look(1.0, times=6) == (6.0, True)
    clock.watchdog.mark(Phase.SAVE, 22)
    assert clock.look(1.0) == (0.0, False)
    assert clock.look(2.0, times=290) == (580.0, False)
    assert clock.look(2.0, times=11) == (602.0, True)


def test_time_in_which_the_process_was_stopped_does_not_count(clock):
    """No thread could make progress in it. Time before the last mark does not count either."""
    for iteration in (1, 2):
        clock.watchdog.mark(Phase.STEP, iteration)
    assert [clock.look(1.0)[0] for _ in range(3)] == [0.0, 1.0, 2.0]
    assert clock.look(3600.0) == (4.0, False)
    clock.watchdog.mark(Phase.STEP, 3)
    assert [clock.look(seconds)[0] for seconds in (1.0, 1.5, 1.5, 1.5)] == [0.0, 1.5, 3.0, 4.5]
    assert clock.look(1.0) == (5.5, True)


def test_a_step_that_waits_for_a_slow_save_is_not_stuck_until_the_save_takes_too_long(clock):
    is_saving = True
    clock.watchdog.takes_long_while(lambda: is_saving)
    for iteration in (1, 2, 3):
        clock.watchdog.mark(Phase.STEP, iteration)
    clock.look(1.0)
    assert clock.look(2.0, times=290) == (580.0, False)
    is_saving = False
    assert clock.look(2.0) == (0.0, False), "the time starts anew after the save"
    assert clock.look(2.0, times=3) == (6.0, True)
    is_saving = True
    assert clock.look(2.0, times=301)[1]


def test_a_rank_that_is_frozen_while_the_others_save_is_found_within_the_timeout(start):
    def body(rank: Rank) -> None:
        rank.watchdog.takes_long_while(lambda: True)
        training(rank)

    job = start(body, hang_timeout_seconds=TIMEOUT, long_timeout_seconds=10.0 * WAIT)
    job.wait_until_ready()
    job.kill(1, signal.SIGSTOP)
    assert job.end(0) == [ExitCode.HANG]
    assert job.causes()[0].startswith(
        f"{job.name(1)} does not respond, since its process is stopped"
    )


def test_a_watchdog_that_fails_warns_once_and_training_continues(start):
    def body(rank: Rank) -> None:
        calls: list[int] = []
        rank.watchdog._roll_call.is_called = lambda: calls.append(1) or 1 / 0
        while len(calls) < 3:
            time.sleep(0.01)

    job = start(body, tick_seconds=0.05)
    assert job.end() == [0, 0]
    assert job.outputs().count("ZeroDivisionError") == 2


# Alone


def test_a_rank_without_others_reports_where_it_hangs(start):
    job = start(on(0, forever), world_size=1, is_elastic=False, hang_timeout_seconds=1.0)
    assert job.end() == [ExitCode.HANG]
    assert job.causes()[0].startswith(f"{job.name(0)} has made no progress for ")


def test_a_rank_without_others_fails_with_its_own_error(start):
    job = start(on(0, lambda: 1 / 0), world_size=1, is_elastic=False)
    assert job.end() == [ExitCode.FAILED]
    assert job.causes() == [
        f"{job.name(0)} failed in iteration 3, forward: ZeroDivisionError: division by zero"
    ]
    assert [event["name"] for event in job.events("lost", "exit")] == ["FAILED"]


def test_a_stopped_watchdog_leaves_no_thread_handler_or_socket():
    before, others = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    for _ in range(2):
        with Watchdog(
            launch=Launch(), store=None, events=EventLog(None), hang_timeout_seconds=3600.0
        ):
            while backstop.OF_THIS_PROCESS._seconds is None:
                time.sleep(0.01)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert "watchdog" in {thread.name for thread in set(threading.enumerate()) - others}
        assert signal.getsignal(signal.SIGTERM) == before
        assert not [t for t in set(threading.enumerate()) - others if t.name.startswith("watchdog")]
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        assert descriptor == -1
        assert backstop.OF_THIS_PROCESS._seconds is None


def test_the_heartbeat_of_rank_0_has_its_phase_and_status(start):
    def body(rank: Rank) -> None:
        rank.watchdog.status(loss=2.5, train_iters=100)
        rank.watchdog.mark(Phase.FORWARD, 7)
        rank.ready()

    job = start(body)
    job.wait_until_ready()
    assert job.end() == [0, 0]
    beat = read_heartbeat(job.folder)
    assert beat is not None
    assert (beat["pid"], beat["phase"], beat["iteration"]) == (job.processes[0].pid, "forward", 7)
    assert (beat["loss"], beat["train_iters"]) == (2.5, 100)
