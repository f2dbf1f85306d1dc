"""Ranks and devices that hang: who is named, how soon, and what all end with."""

from __future__ import annotations

import logging
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.lanes import ThreadEvent
from megatron.training.health.exits import (
    ExitCode,
)
from megatron.training.health.phases import Phase
from tests.unit_tests.training.health.helpers.jobs import (
    TIMEOUT,
    Body,
    Rank,
    forever,
    in_c,
    on,
    training,
)

QUICK = {
    "hang_timeout_seconds": TIMEOUT,
    "long_timeout_seconds": TIMEOUT,
}  # from the first iteration on


# Hangs


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (forever, "threading.py"),
        (in_c, "jobs.py"),
        (lambda: time.sleep(1e6), "test_watchdog_hangs.py"),
    ],
    ids=["lock", "c", "sleep"],
)
def test_a_hung_rank_is_named_with_its_place_and_all_end(start, fault, place):
    job = start(on(1, fault), world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 3
    cause, stack = job.causes()
    assert cause.startswith(f"{job.name(1)} has made no progress for "), cause
    assert "s, in iteration 3, forward, at " in cause
    assert place in cause
    assert stack == "the stack of rank 1, innermost last:"
    hang, exit_event = job.events("hang", "exit")
    assert (hang["ranks"], exit_event["code"], exit_event["name"]) == ([1], 6, "HANG")


def test_a_rank_that_does_not_even_answer_is_the_one_that_hangs(start):
    """It holds Python's lock, so that its watchdog cannot run; nobody but the launcher can
    end it.
    """
    job = start(on(1, lambda: in_c(holds_gil=True)), world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end(0, 2) == [ExitCode.HANG] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(1)} does not answer: it hangs, or its machine or the network is down"
    )


def test_a_stopped_process_is_the_cause(start):
    job = start(training, world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    job.kill(0, signal.SIGSTOP)
    assert job.end(1, 2) == [ExitCode.HANG] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(0)} does not answer, since its process is stopped (SIGSTOP, or"
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


def test_of_ranks_that_wait_the_one_that_is_behind_is_named(start):
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


def test_a_rank_that_hangs_in_writing_its_log_ends_all_the_same(start):
    """It holds the lock that every line of the log takes."""

    def hang() -> None:
        logging.getLogger("megatron").handlers[0].acquire()
        forever()

    job = start(on(0, hang), hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 2
    assert job.events("hang")[0]["ranks"] == [0]


# Collectives of a device, which a rank waits in wherever its host stands


def device_at(rank: Rank, num_events: int) -> None:
    """The rank has issued a collective to its device, which has come past so many of the two events
    around it.
    """
    events = [ThreadEvent(), ThreadEvent()]
    device = SimpleNamespace(event=iter(events).__next__, make_current=lambda: None)
    with rank.watchdog._collectives.issuing("gather of the last layer", device):
        pass
    for event in events[:num_events]:
        event.finish(None)


def standing_in_no_collective(states: dict[int, int]) -> Body:
    """Ranks whose main threads all stand still in C, as in the launch of a kernel, with devices as
    `device_at`.
    """

    def body(rank: Rank) -> None:
        rank.watchdog.mark(Phase.FORWARD, 3)
        if rank.rank in states:
            device_at(rank, states[rank.rank])
        rank.ready()
        in_c()

    return body


def test_a_rank_whose_device_waits_in_a_collective_is_not_the_one_that_hangs(start):
    """All hosts stand still; only rank 1 has issued nothing that the others could be waiting in."""
    job = start(standing_in_no_collective({0: 1, 2: 1}), world_size=3, **QUICK)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 3
    assert job.events("hang")[0]["ranks"] == [1]
    assert job.causes()[0].startswith(f"{job.name(1)} has made no progress for ")


def test_a_rank_whose_device_is_stuck_before_a_collective_hangs(start):
    """All have issued the collective, but the device of rank 1 does not come to it."""
    job = start(standing_in_no_collective({0: 1, 1: 0, 2: 1}), world_size=3, **QUICK)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 3
    assert job.events("hang")[0]["ranks"] == [1]
    assert (
        "(its device has not come to the gather of the last layer, collective 1 of this rank)"
        in job.causes()[0]
    )


def test_devices_that_all_wait_in_a_collective_are_all_named(start):
    """Every rank has come to it: then it is the connection between them."""
    job = start(standing_in_no_collective({0: 1, 1: 1}), **QUICK)
    job.wait_until_ready()
    assert job.end() == [ExitCode.HANG] * 2
    assert job.events("hang")[0]["ranks"] == [0, 1]
    assert job.causes()[0].startswith(
        "all 2 ranks wait for one another, in iteration 3, forward, at "
    )
    assert "its device is waiting in the gather of the last layer" in job.causes()[0]


def test_a_failure_that_only_the_backend_knows_of_ends_the_run_with_its_name(start):
    """The main thread of rank 0 would wait for ever, and hears nothing of it."""

    def body(rank: Rank) -> None:
        rank.ready()
        dist.barrier()  # a failure that is found sooner ends ranks that are not ready yet
        if rank.rank == 0:
            rank.watchdog._find_failure = lambda: (
                "the communication of a collective failed, in the group 'outer'"
            )
        in_c()

    job = start(body)
    job.wait_until_ready()
    assert job.end() == [ExitCode.LOST_RANK] * 2
    (cause,) = job.causes()
    assert cause.startswith(f"the connection of {job.name(0)} to another rank failed ")
    assert cause.endswith(
        "though all ranks answer: the communication of a collective failed, in the group 'outer'"
    )
