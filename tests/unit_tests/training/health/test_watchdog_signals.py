"""Ranks that receive signals, and ranks whose launcher has died."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch.distributed as dist

from megatron.training.health import signals
from megatron.training.health import watchdog as watchdog_module
from megatron.training.health.exits import (
    ExitCode,
)
from megatron.training.health.progress import Phase
from megatron.training.health.signals import OnInterrupt
from tests.unit_tests.training.health.helpers.jobs import (
    TIMEOUT,
    WAIT,
    Rank,
    forever,
    in_c,
    on,
    training,
)


def test_sigterm_ends_a_rank_that_sits_in_a_collective(start):
    job = start(on(1, forever))
    job.wait_until_ready()
    job.kill(0, signal.SIGTERM)
    assert job.end(0) == [128 + signal.SIGTERM]
    assert job.causes() == []
    assert [event["signal"] for event in job.events("signal")] == ["SIGTERM"]
    assert job.events("exit")[0]["code"] == 143


def test_a_rank_that_sigterm_has_ended_is_the_cause_on_the_others(start):
    job = start(training)
    job.wait_until_ready()
    job.kill(1, signal.SIGTERM)
    assert job.end() == [ExitCode.LOST_RANK, 128 + signal.SIGTERM]
    assert job.causes() == [f"{job.name(1)} was ended by SIGTERM"]


@pytest.mark.parametrize("is_handled", [False, True])
def test_the_sigterm_after_a_death_ends_a_blocked_rank_with_the_cause_of_the_death(
    start, is_handled
):
    """torchrun sends it to the survivors. Over NCCL they get no other sign."""

    def body(rank: Rank) -> None:
        if is_handled:
            signal.signal(signal.SIGTERM, lambda *_: None)
        rank.ready()
        in_c()

    job = start(body, grace_seconds=1000.0)
    job.wait_until_ready()
    job.kill(1, signal.SIGKILL)
    job.kill(0, signal.SIGTERM)
    assert job.end(0) == [ExitCode.LOST_RANK]
    assert job.causes()[0].startswith(f"{job.name(1)} was killed or has crashed")


def test_a_signalled_rank_that_still_waits_starts_a_roll_call_and_ends(start):
    """The rank that it waits for may be on another machine, and only be slow."""

    def body(rank: Rank) -> None:
        watchdog_module._SIGNALLED_IDLE_SECONDS = 0.5
        signal.signal(signal.SIGTERM, lambda *_: None)
        rank.ready()
        dist.barrier()

    job = start(lambda rank: body(rank) if rank.rank == 0 else (rank.ready(), in_c(holds_gil=True)))
    job.wait_until_ready()
    job.kill(0, signal.SIGTERM)
    assert job.end(0) == [ExitCode.LOST_RANK]
    assert job.causes()[0].startswith(f"{job.name(1)} does not respond: it hangs")


@pytest.mark.parametrize(
    ("is_elastic", "status"), [(True, 0), (False, int(ExitCode.PREEMPTED_UNSAVED))]
)
def test_a_rank_that_cannot_finish_its_iteration_ends_with_the_grace_period(
    start, is_elastic, status
):
    def body(rank: Rank) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        rank.watchdog.mark(Phase.FORWARD, 7)
        rank.ready()
        in_c()

    job = start(body, is_elastic=is_elastic, grace_seconds=1.0)
    job.wait_until_ready()
    job.kill(0, signal.SIGUSR1)
    assert job.end(0) == [status]
    assert job.causes() == [
        "rank 0: the 1 s after SIGUSR1 are over in iteration 7, forward, whose state was not saved"
    ]
    event = job.events("exit")[0]
    assert (event["code"], event["name"]) == (76, "PREEMPTED_UNSAVED")


def test_a_signal_to_all_ranks_that_finish_in_time_is_no_alarm(start):
    def body(rank: Rank) -> None:
        received: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        rank.ready()
        while not received:
            rank.watchdog.mark(Phase.FORWARD, 1)
            time.sleep(0.01)
        time.sleep(0.3)  # saves

    job = start(body, world_size=3, grace_seconds=30.0)
    job.wait_until_ready()
    for rank in range(3):
        job.kill(rank, signal.SIGTERM)
    assert job.end() == [0, 0, 0]
    assert job.causes() == []
    assert sorted(event["rank"] for event in job.events("signal")) == [0, 1, 2]


def test_a_signal_to_a_forked_data_worker_is_not_one_to_the_rank(start):
    def body(_rank: Rank) -> None:
        pid = os.fork()
        if pid == 0:
            forever()
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        time.sleep(0.5)

    job = start(body, world_size=1, tick_seconds=0.05)
    assert job.end() == [0], job.outputs()
    assert job.events("signal") == []


@pytest.mark.parametrize("body", [training, on(1, in_c)], ids=["training", "in a collective"])
def test_an_unhandled_ctrl_c_ends_all_ranks_and_blames_none(start, body):
    job = start(body)
    job.wait_until_ready()
    for rank in range(2):
        job.kill(rank, signal.SIGINT)
    assert job.end() == [128 + signal.SIGINT] * 2
    assert job.causes() == []
    assert "Traceback" not in job.outputs()
    assert job.outputs().count("SIGINT ends the run in iteration") == 1
    (end,) = job.events("exit")
    assert (end["code"], end["name"]) == (130, "SIGINT")


def test_a_handled_ctrl_c_is_announced_once_and_the_second_one_ends_a_rank_without_python(start):
    def body(rank: Rank) -> None:
        signal.signal(signal.SIGINT, lambda *_: None)
        rank.watchdog.mark(Phase.SAVE, 7)
        rank.ready()
        in_c(holds_gil=False)

    job = start(body, world_size=1, is_elastic=False, on_interrupt=OnInterrupt(True, saves=True))
    job.wait_until_ready()
    deadline = time.monotonic() + WAIT
    while job.processes[0].exitcode is None and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            job.kill(0, signal.SIGINT)
        job.processes[0].join(0.05)
    assert job.end() == [ExitCode.PREEMPTED_UNSAVED], job.outputs()
    assert job.output(0).count("SIGINT in iteration 7, save: the run will finish its step") == 1
    reason = "a second SIGINT ends the run in iteration 7, save, whose state was not saved"
    assert job.causes() == [f"rank 0: {reason}"]
    assert [event["reason"] for event in job.events("exit")] == [reason]


def test_a_handler_of_the_program_keeps_sigint(start):
    def body(_rank: Rank) -> None:
        received: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _: received.append(number))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(signals._SAME_PRESS_SECONDS)
        assert len(received) == 2

    job = start(body, world_size=1, tick_seconds=0.05)
    assert job.end() == [0], job.outputs()
    assert "SIGINT" not in job.output(0)


def test_a_rank_whose_agent_has_died_ends(start):
    def orphan() -> None:
        os.getppid = lambda: 1

    job = start(on(1, orphan), hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.LOST_RANK] * 2
    assert job.causes()[0].startswith(f"{job.name(1)} failed in iteration ")
    assert job.causes()[0].endswith(": its torchrun agent has died")
    assert job.causes()[1] == "rank 1 ends, since its torchrun agent has died"
