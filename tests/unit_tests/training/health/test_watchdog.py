"""Ranks that die, hang, stop and fail: what the others find out, how soon, and what they end with.

The ranks here are processes of their own, not those of `tests/helpers/ranks.py`: they are meant to
die.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from megatron.core import log
from megatron.core.device import Device
from megatron.core.lanes import ThreadEvent
from megatron.core.options import ConfigError
from megatron.training.health import progress as progress_module
from megatron.training.health import watchdog as watchdog_module
from megatron.training.health.cause import Silence
from megatron.training.health.events import EventLog, read_events, read_heartbeat
from megatron.training.health.exits import (
    ExitCode,
    ExitError,
    code_of,
    exit_process,
    is_foreseen,
    process_status,
)
from megatron.training.health.phases import Phase
from megatron.training.health.watchdog import Watchdog
from megatron.training.launch import Launch, process_group

WAIT = 60.0  # seconds, for what must come
TIMEOUT = 1.0  # --hang-timeout-seconds
BOUND = 5.0  # within which after the timeout, or after a death, everybody must have ended
QUICK = {
    "hang_timeout_seconds": TIMEOUT,
    "long_timeout_seconds": TIMEOUT,
}  # from the first iteration on
NAMES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)

Body = Callable[["Rank"], None]


@dataclass
class Rank:
    """What a rank's body works with."""

    rank: int
    world_size: int
    watchdog: Watchdog
    pipe: Any

    def ready(self) -> None:
        """Tells the test that this rank has come so far, and knows of the others."""
        while not self.watchdog._roll_call.knows_all:
            time.sleep(0.01)
        self.pipe.send("ready")

    def train(self, fault: Callable[[], None], at: int = 3, iterations: int = 10**9) -> None:
        """Iterations with one all-reduce each; before that of iteration `at`, on every rank, the
        fault.
        """
        tensor = torch.ones(1000)
        for iteration in range(1, iterations + 1):
            self.watchdog.mark(Phase.FORWARD, iteration)
            if iteration == at:
                fault()
            self.watchdog.mark(Phase.AGREE, iteration)
            dist.all_reduce(tensor)
            self.watchdog.mark(Phase.STEP, iteration)
            if iteration >= at:
                time.sleep(0.01)  # leaves the cores to others


def live(rank: int, environment: dict[str, str], folder: str, job: bytes, pipe: Any) -> None:
    """A rank's process, in the way of `pretrain_gpt.py`."""
    output = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    body, options = cloudpickle.loads(job)
    launch = Launch.from_environment()
    log.configure(rank)
    code = ExitCode.FINISHED
    try:
        with process_group(launch, Device("cpu"), 1.0):
            watchdog = Watchdog(
                launch=launch,
                store=dist.distributed_c10d._get_default_store(),
                events=EventLog(folder, rank=rank),
                **{"hang_timeout_seconds": None, "tick_seconds": 0.2, **options},
            )
            with watchdog:
                guarded(body, Rank(rank, launch.world_size, watchdog, pipe))
    except BaseException as error:
        code = code_of(error)
        if not is_foreseen(error):
            traceback.print_exc()
    exit_process(process_status(code, launch.is_elastic))


def guarded(body: Body, rank: Rank) -> None:
    try:
        body(rank)
    except BaseException as error:
        if is_foreseen(error):
            raise
        cause = rank.watchdog.explain(error)
        if cause.is_own:
            raise
        raise ExitError(cause.code, cause.text, is_reported=True) from error


class Job:
    """The processes of one job, and what they have said."""

    def __init__(
        self, folder: Path, body: Body, world_size: int, is_elastic: bool, **options: Any
    ) -> None:
        self.folder = folder
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "megatron.training.health.watchdog"])
        if is_elastic:  # as under torchrun, whose agent holds the store; here it is this process
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port if is_elastic else free_port()
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        for rank in range(world_size):
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
            }
            environment = {name: str(value) for name, value in environment.items()}
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if is_elastic:
                environment.update(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True")
            ours, theirs = context.Pipe()
            job = cloudpickle.dumps((body, options))
            process = context.Process(
                target=live, args=(rank, environment, str(folder), job, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def wait_until_ready(self) -> None:
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(WAIT), f"rank {rank} did not become ready:\n{self.output(rank)}"
            pipe.recv()

    def kill(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self, *ranks: int, within: float = WAIT) -> list[int]:
        """The exit codes of ranks (default: all), which must have ended by then."""
        deadline = time.monotonic() + within
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        codes = [self.processes[rank].exitcode for rank in ranks or range(len(self.processes))]
        assert None not in codes, f"within {within} s: {codes}\n{self.outputs()}"
        return codes

    def output(self, rank: int) -> str:
        path = self.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def outputs(self) -> str:
        return "\n".join(
            f"-- rank {rank}\n{self.output(rank)}" for rank in range(len(self.processes))
        )

    def causes(self) -> list[str]:
        """What was said at the level of errors, on all ranks together."""
        lines = [
            line for rank in range(len(self.processes)) for line in self.output(rank).splitlines()
        ]
        return [line.partition("ERROR: ")[2] for line in lines if "ERROR: " in line]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["event"] in kinds]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({socket.gethostname()}, pid {self.processes[rank].pid})"


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., Job]]:
    """start(body, world_size=2, is_elastic=True, **options of the watchdog) -> Job"""
    for name in (*NAMES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    jobs: list[Job] = []

    def begin(body: Body, world_size: int = 2, is_elastic: bool = True, **options: Any) -> Job:
        jobs.append(Job(tmp_path, body, world_size, is_elastic, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.join()


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def training(rank: Rank) -> None:
    """Trains for ever, well."""
    rank.train(rank.ready)


def forever() -> None:
    threading.Event().wait()


def in_c(holds_gil: bool = False) -> None:
    """Sleeps for ever in C, where Python runs no signal handlers; the other threads run on unless
    it holds the GIL.
    """
    libc = ctypes.PyDLL(None) if holds_gil else ctypes.CDLL(None)
    while True:
        libc.sleep(1000)


def on(victim: int, fault: Callable[[], None]) -> Body:
    """Training in which one rank meets with something."""

    def body(rank: Rank) -> None:
        def strike() -> None:
            rank.ready()
            if rank.rank == victim:
                fault()

        rank.train(strike)

    return body


# Deaths


@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_all_end_soon(start, victim, is_elastic):
    """Also when the store was in the process that was killed: that of rank 0, without torchrun."""
    job = start(training, world_size=3, is_elastic=is_elastic)
    job.wait_until_ready()
    job.kill(victim, signal.SIGKILL)
    survivors = [rank for rank in range(3) if rank != victim]
    assert job.end(*survivors, within=BOUND) == [ExitCode.LOST_RANK] * 2
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


def test_two_ranks_that_are_killed_are_both_named(start):
    job = start(training, world_size=4)
    job.wait_until_ready()
    for victim in (0, 2):
        job.kill(victim, signal.SIGSTOP)
    for victim in (0, 2):
        job.kill(victim, signal.SIGKILL)
    assert job.end(1, 3, within=BOUND) == [ExitCode.LOST_RANK] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(0)}, {job.name(2)} were killed or have crashed (rank 1 is in"
    )


def test_a_rank_that_fails_is_the_cause_and_not_the_connections_that_it_closes(start):
    def fail() -> None:
        raise ValueError("a bad batch\nin file 7")

    job = start(on(1, fail), world_size=3)
    job.wait_until_ready()
    assert job.end(within=BOUND) == [ExitCode.LOST_RANK, ExitCode.FAILED, ExitCode.LOST_RANK]
    assert job.causes() == [
        f"{job.name(1)} failed in iteration 3, forward: ValueError: a bad batch in file 7"
    ]
    assert "Traceback" in job.output(1)
    assert "Traceback" not in job.output(0) + job.output(2)
    lost, exit_event = job.events("lost", "exit")
    assert lost["ranks"] == [1]
    assert (exit_event["code"], exit_event["name"]) == (1, "FAILED"), (
        "what ended the run, not what it did to others"
    )


def test_the_error_of_every_rank_is_its_own(start):
    def body(rank: Rank) -> None:
        rank.train(lambda: [][0])

    job = start(body)
    assert job.end() == [ExitCode.FAILED] * 2
    assert len(job.causes()) == 1
    assert "failed in iteration 3, forward: IndexError: list index out of range" in job.causes()[0]
    assert all("Traceback" in job.output(rank) for rank in range(2))


def test_the_last_words_of_a_rank_with_a_foreseen_error_are_the_cause(start):
    """It says its one line itself, and needs no roll call; the others would call it dead without
    its word.
    """

    def refuse() -> None:
        raise ConfigError("--data-path: expected a file, got none.")

    job = start(on(1, refuse))
    assert job.end() == [ExitCode.LOST_RANK, ExitCode.BAD_CONFIGURATION]
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(1)} failed in iteration 3, forward: ConfigError: --data-path: expected a file, "
        "got none."
    )


def test_a_rank_that_hangs_while_it_leaves_ends_all_the_same(start):
    """It knows the cause, and has some time to take down what it has built up."""

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
    assert job.end(0, within=BOUND) == [ExitCode.LOST_RANK]


# Hangs


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (forever, "threading.py"),
        (in_c, "test_watchdog.py"),
        (lambda: time.sleep(1e6), "test_watchdog.py"),
    ],
    ids=["lock", "c", "sleep"],
)
def test_a_hung_rank_is_named_with_its_place_and_all_end(start, fault, place):
    job = start(on(1, fault), world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 3
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
    assert job.end(0, 2, within=TIMEOUT + BOUND) == [ExitCode.HANG] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(1)} does not answer: it hangs, or its machine or the network is down"
    )


def test_a_stopped_process_is_the_cause(start):
    job = start(training, world_size=3, hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    job.kill(0, signal.SIGSTOP)
    assert job.end(1, 2, within=TIMEOUT + BOUND) == [ExitCode.HANG] * 2
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
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 2
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
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 2
    assert job.causes()[0].startswith(f"{job.name(1)} has made no progress for ")


def test_a_rank_that_hangs_in_writing_its_log_ends_all_the_same(start):
    """It holds the lock that every line of the log takes."""

    def hang() -> None:
        logging.getLogger("megatron").handlers[0].acquire()
        forever()

    job = start(on(0, hang), hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 2
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
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 3
    assert job.events("hang")[0]["ranks"] == [1]
    assert job.causes()[0].startswith(f"{job.name(1)} has made no progress for ")


def test_a_rank_whose_device_is_stuck_before_a_collective_hangs(start):
    """All have issued the collective, but the device of rank 1 does not come to it."""
    job = start(standing_in_no_collective({0: 1, 1: 0, 2: 1}), world_size=3, **QUICK)
    job.wait_until_ready()
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 3
    assert job.events("hang")[0]["ranks"] == [1]
    assert (
        "(its device has not come to the gather of the last layer, collective 1 of this rank)"
        in job.causes()[0]
    )


def test_devices_that_all_wait_in_a_collective_are_all_named(start):
    """Every rank has come to it: then it is the connection between them."""
    job = start(standing_in_no_collective({0: 1, 1: 1}), **QUICK)
    job.wait_until_ready()
    assert job.end(within=TIMEOUT + BOUND) == [ExitCode.HANG] * 2
    assert job.events("hang")[0]["ranks"] == [0, 1]
    assert job.causes()[0].startswith(
        "all 2 ranks wait for one another, in iteration 3, forward, at "
    )
    assert "its device is waiting in the gather of the last layer" in job.causes()[0]


def test_a_failure_that_only_the_backend_knows_of_ends_the_run_with_its_name(start):
    """The main thread of rank 0 would wait for ever, and hears nothing of it."""

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.watchdog._find_failure = lambda: (
                "the communication of a collective failed, in the group 'outer'"
            )
        rank.ready()
        in_c()

    job = start(body)
    job.wait_until_ready()
    assert job.end(within=BOUND) == [ExitCode.LOST_RANK] * 2
    (cause,) = job.causes()
    assert cause.startswith(f"the connection of {job.name(0)} to another rank failed ")
    assert cause.endswith(
        "though all ranks answer: the communication of a collective failed, in the group 'outer'"
    )


# Signals


def test_sigterm_ends_a_rank_that_sits_in_a_collective(start):
    """As it would without a watchdog, had the rank not been in a call that does not return."""
    job = start(on(1, forever))
    job.wait_until_ready()
    job.kill(0, signal.SIGTERM)
    assert job.end(0, within=BOUND) == [128 + signal.SIGTERM]
    assert job.causes() == []
    assert [event["signal"] for event in job.events("signal")] == ["SIGTERM"]
    assert job.events("exit")[0]["code"] == 143


def test_a_rank_that_another_ones_sigterm_has_ended_is_named_as_such(start):
    job = start(training)
    job.wait_until_ready()
    job.kill(1, signal.SIGTERM)
    assert job.end(within=BOUND) == [ExitCode.LOST_RANK, 128 + signal.SIGTERM]
    assert job.causes() == [f"{job.name(1)} was ended by SIGTERM"]


@pytest.mark.parametrize("is_handled", [False, True])
def test_the_sigterm_that_follows_a_death_ends_a_blocked_rank_with_the_cause_of_that_death(
    start, is_handled
):
    """torchrun sends it to the survivors. Over NCCL nothing else would tell them."""

    def body(rank: Rank) -> None:
        if is_handled:
            signal.signal(signal.SIGTERM, lambda *_: None)
        rank.ready()
        in_c()

    job = start(body, grace_seconds=1000.0)
    job.wait_until_ready()
    job.kill(1, signal.SIGKILL)
    job.kill(0, signal.SIGTERM)
    assert job.end(0, within=BOUND) == [ExitCode.LOST_RANK]
    assert job.causes()[0].startswith(f"{job.name(1)} was killed or has crashed")


def test_a_signalled_rank_that_waits_in_vain_asks_once_more_and_ends(start):
    """The rank that it waits for is on another machine as far as it knows, and may just be slow to
    answer.
    """

    def body(rank: Rank) -> None:
        watchdog_module._SIGNALLED_IDLE_SECONDS = 0.5
        signal.signal(signal.SIGTERM, lambda *_: None)
        rank.ready()
        dist.barrier()

    job = start(lambda rank: body(rank) if rank.rank == 0 else (rank.ready(), in_c(holds_gil=True)))
    job.wait_until_ready()
    job.kill(0, signal.SIGTERM)
    assert job.end(0, within=2 * BOUND) == [ExitCode.LOST_RANK]
    assert job.causes()[0].startswith(f"{job.name(1)} does not answer: it hangs")


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
    assert job.end(0, within=1.0 + BOUND) == [status]
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


def test_a_signal_to_a_forked_data_worker_is_none_of_the_ranks(start):
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


def test_a_rank_whose_agent_has_died_ends(start):
    def orphan() -> None:
        os.getppid = lambda: 1

    job = start(on(1, orphan), hang_timeout_seconds=TIMEOUT)
    job.wait_until_ready()
    assert job.end(within=BOUND) == [ExitCode.LOST_RANK] * 2
    assert job.causes()[0].startswith(f"{job.name(1)} failed in iteration ")
    assert job.causes()[0].endswith(": its torchrun agent has died")
    assert job.causes()[1] == "rank 1 ends, since its torchrun agent has died"


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
        time.sleep(0.7)
        for phase, iteration in (
            (Phase.BUILD, 0),
            (Phase.LOAD, 0),
            (Phase.DATA, 20),
            (Phase.FORWARD, 21),
            (Phase.STEP, 21),
        ):
            rank.watchdog.mark(phase, iteration)
            time.sleep(0.7)
        rank.train(lambda: None, iterations=5)
        rank.watchdog.mark(Phase.SAVE, 5)
        time.sleep(1.0)

    job = start(body, hang_timeout_seconds=0.3, tick_seconds=0.1)
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
            time.sleep(3.0)
            is_saving = False
        rank.watchdog.mark(Phase.AGREE, 7)
        dist.barrier()
        rank.train(lambda: None, iterations=3)

    job = start(body, hang_timeout_seconds=0.5, tick_seconds=0.1)
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
    assert job.end(0, within=TIMEOUT + BOUND) == [ExitCode.HANG]
    assert job.causes()[0].startswith(
        f"{job.name(1)} does not answer, since its process is stopped"
    )


def test_slow_iterations_are_no_hang(start):
    """Each takes most of the timeout, and together they take several."""

    def body(rank: Rank) -> None:
        for iteration in range(1, 8):
            rank.watchdog.mark(Phase.STEP, iteration)
            time.sleep(0.3)
            dist.barrier()

    job = start(body, hang_timeout_seconds=1.0)
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


# Under torchrun

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from megatron.core import log
from megatron.core.device import Device
from megatron.training.health.events import EventLog
from megatron.training.health.exits import ExitError, code_of, exit_process
from megatron.training.launch import Launch, process_group
from megatron.training.health.phases import Phase
from megatron.training.health.watchdog import Watchdog

how, folder, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])

def train(launch, watchdog):
    for iteration in range(1, 30):
        watchdog.mark(Phase.FORWARD, iteration)
        if (launch.restart_count, launch.rank, iteration) == (0, 1, 20):
            print(f"strike {time.time()}", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1e6)
        dist.all_reduce(torch.ones(10))
        watchdog.mark(Phase.STEP, iteration)
        time.sleep(0.05)

def main():
    launch = Launch.from_environment()
    log.configure(launch.rank)
    with process_group(launch, Device("cpu"), 1.0):
        store = dist.distributed_c10d._get_default_store()
        events = EventLog(folder, rank=launch.rank, restart=launch.restart_count)
        with Watchdog(
            launch=launch, store=store, events=events, hang_timeout_seconds=timeout
        ) as watchdog:
            try:
                train(launch, watchdog)
            except Exception as error:
                cause = watchdog.explain(error)
                raise ExitError(cause.code, cause.text) from error
    print(f"rank {launch.rank} has finished in restart {launch.restart_count}", flush=True)

code = 0
try:
    main()
except ExitError as error:
    code = code_of(error)
print(f"rank {os.environ['RANK']} leaves with {int(code)} at {time.time()}", flush=True)
exit_process(code)
"""


@pytest.mark.wide  # tests/functional_tests/test_recovery.py does the same with whole runs
@pytest.mark.parametrize(
    ("how", "launcher"),
    [("kill", ["--rdzv-backend", "static"]), ("hang", ["--standalone"])],
)
def test_torchrun_starts_a_job_anew_whose_rank_was_killed_or_hung(
    tmp_path, monkeypatch, how, launcher
):
    """The agent keeps its store, so that the new ranks could take the old ones' addresses for each
    other's.
    """
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *launcher,
        *"--nproc-per-node 3 --max-restarts 1".split(),
    ]
    command += ["--master-port", str(free_port())] if "static" in launcher else []
    command += [str(script), how, str(tmp_path / "events"), "1.0" if how == "hang" else "60.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for rank in range(3):
        assert f"rank {rank} has finished in restart 1" in output
    causes = [
        line.partition("ERROR: ")[2] for line in done.stdout.splitlines() if "ERROR: rank" in line
    ]
    assert len(causes) == 1, output
    assert causes[0].startswith(f"rank 1 ({socket.gethostname()}, pid ")
    expected = "was killed or has crashed" if how == "kill" else "has made no progress for "
    assert expected in causes[0]
    assert "in iteration 20, forward" in causes[0] or how == "kill"
    struck = float(re.search(r"strike ([\d.]+)", output).group(1))
    left = [float(text) for text in re.findall(r"rank \d leaves with [56] at ([\d.]+)", output)]
    assert all(time - struck < BOUND for time in left)
    kind, exit_event = [
        e for e in read_events(tmp_path / "events") if e["event"] in ("lost", "hang", "exit")
    ]
    assert (kind["ranks"], kind["restart"], exit_event["restart"]) == ([1], 0, 0)
