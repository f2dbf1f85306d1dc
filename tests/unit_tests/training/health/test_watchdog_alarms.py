"""When the watchdog raises no alarm; jobs of one rank; what it leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.training.health import progress as progress_module
from megatron.training.health.cause import Silence
from megatron.training.health.events import EventLog, read_heartbeat
from megatron.training.health.exits import (
    ExitCode,
)
from megatron.training.health.phases import Phase
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
    """Rank 0 takes the store with it, without torchrun. That its process is no more is no reason to
    end.
    """

    def body(rank: Rank) -> None:
        rank.train(rank.ready, iterations=5)
        if rank.rank == 1:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            while rank.watchdog._roll_call._members[0].silence() is not Silence.GONE:
                rank.watchdog.mark(Phase.EVALUATE, 5)
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)  # so that the roll is called
            time.sleep(0.5)

    job = start(body, is_elastic=is_elastic, tick_seconds=0.05)
    assert job.end() == [0, 0], job.outputs()
    assert job.causes() == []
    assert "WARNING" not in job.outputs()
    assert job.events("hang", "lost", "exit") == []


def test_building_loading_and_the_first_iterations_may_take_longer_than_the_timeout(start):
    def body(rank: Rank) -> None:
        time.sleep(3.0)
        for phase, iteration in (
            (Phase.BUILD, 0),
            (Phase.LOAD, 0),
            (Phase.DATA, 20),
            (Phase.FORWARD, 21),
            (Phase.STEP, 21),
        ):
            rank.watchdog.mark(phase, iteration)
            time.sleep(3.0)
        rank.train(lambda: None, iterations=5)
        rank.watchdog.mark(Phase.SAVE, 5)
        time.sleep(3.0)

    job = start(body, hang_timeout_seconds=2.5, tick_seconds=0.1)
    assert job.end() == [0, 0], job.outputs()
    assert job.events("hang", "lost") == []


def test_a_start_that_takes_even_longer_is_a_hang(start):
    def body(rank: Rank) -> None:
        rank.watchdog.mark(Phase.DATA, 0)
        dist.barrier() if rank.rank == 0 else forever()

    job = start(body, hang_timeout_seconds=0.5, long_timeout_seconds=TIMEOUT)
    assert job.end() == [ExitCode.HANG] * 2
    assert f"{job.name(1)} has made no progress" in job.causes()[0]
    assert "in iteration 0, data" in job.causes()[0]


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """Nobody could make progress in it. Nor does that before the last mark count."""
    now = [100.0]
    watchdog = Watchdog(
        launch=Launch(),
        store=None,
        events=EventLog(None),
        hang_timeout_seconds=5.0,
        tick_seconds=1.0,
    )
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watchdog._progress.start_clock()

    def look(seconds: float) -> float:
        now[0] += seconds
        watchdog._progress.look()
        return watchdog._progress.idle_seconds

    for iteration in (1, 2):
        watchdog.mark(Phase.STEP, iteration)
    assert [look(1.0), look(1.0), look(1.0)] == [0.0, 1.0, 2.0]
    assert look(3600.0) == 4.0
    assert not watchdog._is_stuck()
    watchdog.mark(Phase.STEP, 3)
    assert [look(1.0), *(look(1.5) for _ in range(3)), watchdog._is_stuck()] == [
        0.0,
        1.5,
        3.0,
        4.5,
        False,
    ]
    assert look(1.0) == 5.5
    assert watchdog._is_stuck()
    watchdog.mark(Phase.SAVE, 3)
    assert look(1.0) == 0.0
    assert [look(2.0) for _ in range(290)][-1] == 580.0
    assert not watchdog._is_stuck(), "a save may take longer"
    assert [look(2.0) for _ in range(11)][-1] == 602.0
    assert watchdog._is_stuck()


def test_a_step_that_waits_for_a_slow_save_is_no_hang_for_those_either_that_wait_for_it(start):
    def body(rank: Rank) -> None:
        rank.train(lambda: None, iterations=5)
        is_saving = rank.rank == 0
        rank.watchdog.takes_long_while(lambda: is_saving)
        rank.watchdog.mark(Phase.STEP, 6)
        if is_saving:
            time.sleep(20.0)
            is_saving = False
        rank.watchdog.mark(Phase.AGREE, 7)
        dist.barrier()
        rank.train(lambda: None, iterations=3)

    job = start(body, hang_timeout_seconds=8.0, tick_seconds=0.1)
    assert job.end() == [0, 0], job.outputs()
    assert job.causes() == []
    assert job.events("hang", "lost", "exit") == []


def test_a_rank_that_is_frozen_while_the_others_save_is_found_within_the_timeout(start):
    def body(rank: Rank) -> None:
        rank.watchdog.takes_long_while(lambda: True)
        training(rank)

    job = start(body, hang_timeout_seconds=TIMEOUT, long_timeout_seconds=10.0 * WAIT)
    job.wait_until_ready()
    job.kill(1, signal.SIGSTOP)
    assert job.end(0) == [ExitCode.HANG]
    assert job.causes()[0].startswith(
        f"{job.name(1)} does not answer, since its process is stopped"
    )


def test_slow_iterations_are_no_hang(start):
    """Each takes most of the timeout, and together they take several."""

    def body(rank: Rank) -> None:
        for iteration in range(1, 8):
            rank.watchdog.mark(Phase.STEP, iteration)
            time.sleep(2.0)
            dist.barrier()

    job = start(body, hang_timeout_seconds=8.0)
    assert job.end() == [0, 0], job.outputs()
    assert job.causes() == []


def test_a_watchdog_that_fails_warns_once_and_training_goes_on(start):
    def body(rank: Rank) -> None:
        rank.watchdog._roll_call.is_called = lambda: 1 / 0
        time.sleep(0.5)

    job = start(body, tick_seconds=0.05)
    assert job.end() == [0, 0]
    assert job.outputs().count("the watchdog has failed, and goes on: ZeroDivisionError") == 2


# Alone


def test_a_rank_without_others_says_where_it_hangs(start):
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


def test_a_watchdog_that_is_let_go_of_leaves_nothing_behind():
    """No thread, no handler, no socket that signals are written to: a program may train twice."""
    before, others = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    for _ in range(2):
        with Watchdog(
            launch=Launch(), store=None, events=EventLog(None), hang_timeout_seconds=None
        ):
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert "watchdog" in {thread.name for thread in set(threading.enumerate()) - others}
        assert signal.getsignal(signal.SIGTERM) == before
        assert not [t for t in set(threading.enumerate()) - others if t.name.startswith("watchdog")]
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        assert descriptor == -1


def test_rank_0_beats_and_says_where_it_is(start):
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
