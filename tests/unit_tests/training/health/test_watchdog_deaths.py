"""Ranks that die or fail: the cause that the other ranks report, and all exit codes."""

from __future__ import annotations

import signal

import pytest

from megatron.core.options import ConfigError
from megatron.training.health import watchdog as watchdog_module
from megatron.training.health.exits import (
    ExitCode,
)
from tests.unit_tests.training.health.helpers.jobs import (
    Rank,
    in_c,
    on,
    training,
)

# Deaths


@pytest.mark.parametrize(("victim", "is_elastic"), [(0, True), (0, False), (1, False)])
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
