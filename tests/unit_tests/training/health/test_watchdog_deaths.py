"""Ranks that die and fail: what the others find out, how soon, and what they end with; and that
torchrun starts such a job anew.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import pytest

from megatron.core.options import ConfigError
from megatron.training.health import watchdog as watchdog_module
from megatron.training.health.events import read_events
from megatron.training.health.exits import (
    ExitCode,
)
from tests.unit_tests.training.health.helpers.jobs import (
    NAMES,
    WAIT,
    Rank,
    free_port,
    in_c,
    on,
    training,
)

# Deaths


@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_all_end_soon(start, victim, is_elastic):
    """Also when the store was in the process that was killed: that of rank 0, without torchrun."""
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


def test_two_ranks_that_are_killed_are_both_named(start):
    job = start(training, world_size=4)
    job.wait_until_ready()
    for victim in (0, 2):
        job.kill(victim, signal.SIGSTOP)
    for victim in (0, 2):
        job.kill(victim, signal.SIGKILL)
    assert job.end(1, 3) == [ExitCode.LOST_RANK] * 2
    assert len(job.causes()) == 1
    assert job.causes()[0].startswith(
        f"{job.name(0)}, {job.name(2)} were killed or have crashed (rank 1 is in"
    )


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
    assert job.end(0) == [ExitCode.LOST_RANK]


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
print(f"rank {os.environ['RANK']} leaves with {int(code)}", flush=True)
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
    for rank in (0, 2):
        assert re.search(rf"rank {rank} leaves with [56]", output)
    kind, exit_event = [
        e for e in read_events(tmp_path / "events") if e["event"] in ("lost", "hang", "exit")
    ]
    assert (kind["ranks"], kind["restart"], exit_event["restart"]) == ([1], 0, 0)
