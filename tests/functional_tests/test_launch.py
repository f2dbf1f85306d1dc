"""`pretrain_gpt.py` as a user starts it: alone, under torchrun, with a mistake, with a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.store import latest_iteration, open_store
from megatron_hybrid import pretrain_gpt
from tests.functional_tests.helpers.runs import (
    LAUNCHER,
    ROOT,
    SETTINGS,
    TIMEOUT,
    TORCHRUN,
    environment,
    losses,
)


def run(launcher: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "pretrain_gpt.py", *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )


def test_one_process_needs_no_torchrun_and_no_fsdp(tmp_path):
    """The unsharded engine gives the losses of both FSDPs on one rank."""
    losses = []
    for engine in ("--no-use-megatron-fsdp", "--use-torch-fsdp2", "--use-megatron-fsdp"):
        metrics = tmp_path / f"{engine}.jsonl"
        done = run(
            [sys.executable],
            *SETTINGS,
            engine,
            "--hidden-dropout",
            "0",
            "--metrics-jsonl",
            str(metrics),
        )
        assert done.returncode == 0, done.stderr
        assert "validation loss at iteration 4" in done.stdout
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    for sharded in losses[1:]:
        assert sharded == pytest.approx(losses[0], rel=1e-6)


def test_the_offloaded_optimizers_times_are_reported_where_they_are_asked_for(tmp_path):
    """The bytes of each state always are, and once."""
    offload = (
        "--bf16 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --log-interval 2"
    ).split()
    losses = []
    for level, num_reports in (("1", 2), ("0", 0)):
        metrics = tmp_path / f"{level}.jsonl"
        done = run(
            [sys.executable],
            *SETTINGS,
            *offload,
            "--timing-log-level",
            level,
            "--metrics-jsonl",
            str(metrics),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("exp_avg_sq ") == 1
        assert done.stdout.count("memory of rank 0, at rest:") == 1
        assert done.stdout.count("offload (ms a step): d2h ") == num_reports
        assert done.stdout.count("waited for d2h ") == num_reports
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        timings = [record for record in records if record["kind"] == "timing"]
        assert [record["iteration"] for record in timings] == [2, 4][:num_reports]
        for record in timings:
            assert record["num_steps"] == 2
            assert (
                min(
                    record["d2h_ms"],
                    record["host_ms"],
                    record["h2d_ms"],
                    record["host_gb_per_second"],
                )
                > 0
            )
        losses.append([record["loss"] for record in records if record["kind"] == "train"])
    assert losses[0] == losses[1]


def test_a_mistake_is_one_line_and_exit_code_two():
    done = run([sys.executable], *SETTINGS, "--global-batch-size", "7")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "pretrain_gpt.py: --global-batch-size: expected a multiple of 2, micro-batch-size 2 x 1 "
        "rank, got 7.\n"
    )


def test_a_global_batch_of_seven_on_two_ranks_is_refused_in_one_line():
    """Under torchrun its own report follows, which the project's launcher leaves out."""
    done = run(LAUNCHER, *SETTINGS, "--micro-batch-size", "1", "--global-batch-size", "7")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "pretrain_gpt.py: --global-batch-size: expected a multiple of 2, "
        "micro-batch-size 1 x 2 ranks, got 7.",
        "python -m megatron_hybrid launch: rank 0 ended with status 2",
    ]


def test_a_mistake_that_only_one_rank_sees_is_said_by_that_rank(monkeypatch, capsys):
    """It waits for the first rank of its machine, which would have ended it, and then speaks."""
    waited = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(pretrain_gpt, "time", SimpleNamespace(sleep=waited.append))
    assert pretrain_gpt.main([*SETTINGS, "--lr", "-1"]) == 2
    assert waited == [10.0]
    assert capsys.readouterr().err == "pretrain_gpt.py: --lr: expected a number >= 0, got -1.0.\n"


LONG = "--train-iters 100000 --log-interval 1 --eval-iters 0 --exit-signal-handler".split()


@contextmanager
def running(launcher: list[str], *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run in the background that has shown that it trains, or saved, whichever `--save-interval`
    asks for.
    """
    sign = "saved checkpoint" if "--save-interval" in flags else "| lm loss"
    command = [*launcher, "pretrain_gpt.py", *SETTINGS, *flags]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + TIMEOUT
        for line in process.stdout:
            assert time.monotonic() < deadline
            if sign in line:
                break
        else:
            pytest.fail("the run ended before it trained")
        yield process
        process.kill()


def test_sigterm_to_one_rank_finishes_the_iteration_saves_and_exits_on_all(tmp_path):
    with running(TORCHRUN, *LONG, "--save", str(tmp_path)) as process:
        workers = _children(process.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGTERM)
        rest, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "SIGTERM was received" in rest
    assert "validation loss" not in rest
    assert latest_iteration(open_store(tmp_path)) > 0


@pytest.mark.wide
def test_sigterm_to_everybody_leaves_the_ranks_their_data_workers_and_saves(tmp_path):
    """torchrun passes the signal to the process groups of its ranks, the workers of their data
    loaders included.
    """
    flags = [*LONG, "--num-workers", "2", "--save", str(tmp_path)]
    with running(TORCHRUN, *flags) as process:
        assert all(len(_children(worker)) >= 2 for worker in _children(process.pid))
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=TIMEOUT)
    assert "SIGTERM was received" in rest
    assert latest_iteration(open_store(tmp_path)) > 0


@pytest.mark.wide  # test_recovery.py does the same, restarted by torchrun
def test_a_rank_that_is_killed_costs_no_more_than_the_iterations_since_the_last_checkpoint(
    tmp_path,
):
    """The run is killed, started again by the same command, and its losses are the uninterrupted
    run's.
    """
    flags = "--train-iters 30 --lr-decay-iters 30 --eval-iters 0 --save-interval 10".split()
    whole = tmp_path / "whole.jsonl"
    assert (
        run(
            TORCHRUN,
            *SETTINGS,
            *flags,
            "--save",
            str(tmp_path / "whole"),
            "--metrics-jsonl",
            str(whole),
        ).returncode
        == 0
    )
    killed = tmp_path / "killed.jsonl"
    same = [
        *flags,
        "--save",
        str(tmp_path / "run"),
        "--load",
        str(tmp_path / "run"),
        "--metrics-jsonl",
        str(killed),
    ]
    with running(TORCHRUN, *same) as process:
        os.kill(_children(process.pid)[0], signal.SIGKILL)
        process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    done = run(TORCHRUN, *SETTINGS, *same)
    assert done.returncode == 0, done.stderr
    assert "loaded checkpoint" in done.stdout
    assert losses(killed) == losses(whole)
    assert len(losses(whole)) == 30


def _children(pid: int) -> list[int]:
    """The processes that a process started, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
