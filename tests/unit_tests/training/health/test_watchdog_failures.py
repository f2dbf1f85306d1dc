"""Ranks that die, fail or hang: the cause that is reported, and all exit codes."""

from __future__ import annotations

import logging
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.lanes import ThreadEvent
from megatron.core.options import ConfigError
from megatron.training.health import backstop
from megatron.training.health import watchdog as watchdog_module
from megatron.training.health.exits import ExitCode
from megatron.training.health.progress import Phase
from tests.unit_tests.training.health.helpers.jobs import (
    TIMEOUT,
    Rank,
    forever,
    in_c,
    on,
    training,
)

# Deaths


@pytest.mark.parametrize(("victim", "is_elastic"), [(0, False), (1, True)])
def test_a_killed_rank_is_named_and_all_ranks_exit(start, victim, is_elastic):
    """Without torchrun, the store ends with the process of rank 0."""
    job = start(training, world_size=3, is_elastic=is_elastic)
    job.wait_until_ready()
    job.kill(victim, signal.SIGKILL)
    survivors = [rank for rank in range(3) if rank != victim]
    assert job.end(*survivors) == [ExitCode.LOST_RANK] * 2
    with_store = is_elastic or victim != 0
    causes, name = job.causes(), job.name(victim)
    assert len(causes) == (1 if with_store else 2), job.outputs()
    for cause in causes:
        assert cause.startswith(f"{name} was killed or has crashed (rank "), cause
    assert "Traceback" not in job.outputs()
    if with_store:
        lost, exit_event = job.events("lost", "exit")
        assert (lost["ranks"], lost["rank"]) == ([victim], survivors[0])
        assert lost["cause"] == exit_event["reason"] == causes[0]
        assert (exit_event["code"], exit_event["name"]) == (5, "LOST_RANK")
        assert exit_event["iteration"] >= 3


def test_a_rank_that_fails_is_the_cause_and_not_the_connections_that_it_closes(start):
    def fail() -> None:
        raise ValueError("a bad batch\nin file 7")

    job = start(on(1, fail), world_size=3)
    job.wait_until_ready()
    assert job.end() == [ExitCode.LOST_RANK, ExitCode.FAILED, ExitCode.LOST_RANK]
    assert job.causes() == [
        f"{job.name(1)} failed in iteration 3, forward: ValueError: a bad batch in file 7"
    ]
    assert "Traceback" in job.output(1)
    assert "Traceback" not in job.output(0) + job.output(2)
    lost, exit_event = job.events("lost", "exit")
    assert lost["ranks"] == [1]
    assert (exit_event["code"], exit_event["name"]) == (1, "FAILED")


def test_the_error_of_every_rank_is_its_own(start):
    def body(rank: Rank) -> None:
        rank.train(lambda: [][0])

    job = start(body)
    assert job.end() == [ExitCode.FAILED] * 2
    assert len(job.causes()) == 1
    assert "failed in iteration 3, forward: IndexError: list index out of range" in job.causes()[0]
    assert all("Traceback" in job.output(rank) for rank in range(2))


def test_the_last_words_of_a_rank_with_a_foreseen_error_are_the_cause(start):
    """It logs its line itself, without a roll call. The others read the reason of its exit."""

    def refuse() -> None:
        raise ConfigError("--data-path: expected a file, got none.")

    job = start(on(1, refuse))
    assert job.end() == [ExitCode.LOST_RANK, ExitCode.BAD_CONFIGURATION]
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(1)} failed in iteration 3, forward: ConfigError: --data-path: expected a file, "
        "got none."
    )


def test_a_rank_that_hangs_in_its_exit_ends(start):
    """After it has the cause, it has some seconds to shut down."""

    def body(rank: Rank) -> None:
        watchdog_module._LEAVE_SECONDS = 0.5
        try:
            rank.train(rank.ready)
        except RuntimeError as error:
            rank.watchdog.explain(error)
            in_c()

    job = start(body)
    job.wait_until_ready()
    job.kill(1, signal.SIGKILL)
    assert job.end(0) == [ExitCode.LOST_RANK]


# Hangs


def test_a_hung_rank_is_named_with_its_place_and_all_end(start):
    job = start(on(1, in_c), world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 3
    cause, stack = job.causes()
    assert cause.startswith(f"{job.name(1)} has made no progress for "), cause
    assert "s, in iteration 3, forward, at " in cause
    assert "jobs.py" in cause
    assert stack == "the stack of rank 1, innermost last:"
    hang, exit_event = job.events("hang", "exit")
    assert (hang["ranks"], exit_event["code"], exit_event["name"]) == ([1], 6, "HANG")


def test_a_rank_whose_thread_keeps_pythons_lock_is_the_one_that_hangs(start):
    """Its watchdog cannot run, so it does not respond."""
    job = start(on(1, lambda: in_c(holds_gil=True)), world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end(0, 2) == [ExitCode.HANG] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(1)} does not respond: it hangs, or its machine or the network is down"
    )


def test_a_rank_whose_thread_keeps_pythons_lock_ends_by_the_timer(start):
    """Alone: others would name it, unless its short timer is quicker."""

    def body(rank: Rank) -> None:
        watchdog_module._LEAST_BACKSTOP_SECONDS = 0.0

        def strike() -> None:
            while backstop.OF_THIS_PROCESS._seconds != 6.0:
                rank.watchdog.mark(Phase.FORWARD, 3)
                time.sleep(0.01)
            in_c(holds_gil=True)

        rank.train(strike)

    job = start(body, world_size=1, hang_timeout_seconds=3.0)
    assert job.end() == [ExitCode.FAILED]
    assert " in in_c\n" in job.output(0), "the stack of the thread that has the lock"


def test_a_stopped_process_is_the_cause(start):
    job = start(training, world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    job.kill(0, signal.SIGSTOP)
    assert job.end(1, 2) == [ExitCode.HANG] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(0)} does not respond, since its process is stopped (SIGSTOP, or"
    )


def test_ranks_that_wait_for_each_other_are_all_named(start):
    def body(rank: Rank) -> None:
        def deadlock() -> None:
            rank.ready()
            dist.recv(torch.ones(1), 1 - rank.rank)

        rank.train(deadlock)

    job = start(body, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 2
    assert job.causes()[0].startswith(
        "all 2 ranks wait for one another, in iteration 3, forward, at "
    )
    assert job.events("hang")[0]["ranks"] == [0, 1]


def test_of_waiting_ranks_the_one_that_is_behind_is_named(start):
    def body(rank: Rank) -> None:
        def fall_behind() -> None:
            rank.ready()
            if rank.rank == 0:
                rank.watchdog.mark(Phase.AGREE, 3)
            dist.recv(torch.ones(1), 1 - rank.rank)

        rank.train(fall_behind)

    job = start(body, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 2
    assert job.causes()[0].startswith(f"{job.name(1)} has made no progress for ")


def test_a_rank_that_hangs_in_writing_its_log_ends(start):
    """It holds the lock that every line of the log takes."""

    def hang() -> None:
        logging.getLogger("megatron").handlers[0].acquire()
        forever()

    job = start(on(0, hang), hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 2
    assert job.events("hang")[0]["ranks"] == [0]


# Collectives of a device


def test_a_rank_whose_device_is_stuck_before_a_collective_hangs(start):
    """All hosts are blocked in C. All devices except rank 1's wait in the collective."""

    def body(rank: Rank) -> None:
        rank.watchdog.mark(Phase.FORWARD, 3)
        events = [ThreadEvent(), ThreadEvent()]  # around the collective
        device = SimpleNamespace(event=iter(events).__next__, make_current=lambda: None)
        with rank.watchdog._collectives.issuing("gather of the last layer", device):
            pass
        if rank.rank != 1:
            events[0].finish(None)
        rank.ready()
        in_c()

    timeouts = {"hang_timeout_seconds": TIMEOUT, "long_timeout_seconds": TIMEOUT}
    job = start(body, world_size=3, **timeouts)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 3
    assert job.events("hang")[0]["ranks"] == [1]
    assert "its device has not come to the gather of the last layer" in job.causes()[0]


def test_a_failure_that_only_the_backend_has_found_ends_the_run(start):
    """The main thread of rank 0 would wait for ever."""

    def body(rank: Rank) -> None:
        rank.ready()
        dist.barrier()  # an earlier failure would end ranks that are not ready yet
        if rank.rank == 0:
            rank.watchdog._find_failure = lambda: "a collective failed, in the group 'outer'"
        in_c()

    job = start(body)
    job.wait_until_ready()
    assert job.end() == [ExitCode.LOST_RANK] * 2
    (cause,) = job.causes()
    assert cause.startswith(f"the connection of {job.name(0)} to another rank failed ")
    assert cause.endswith(": a collective failed, in the group 'outer'")
