"""`pretrain_gpt.py` as a user starts it: alone, under torchrun, with a mistake, with a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
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
    execute,
    losses,
    train,
)


def run(launcher: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    return execute([*launcher, "pretrain_gpt.py", *flags])


def test_one_process_needs_no_torchrun_and_no_fsdp(tmp_path):
    """The unsharded engine gives the losses of both FSDPs on one rank."""
    flags = [*SETTINGS, "--hidden-dropout", "0", "--metrics-jsonl"]
    done = run([sys.executable], *flags, str(tmp_path / "alone"), "--no-use-megatron-fsdp")
    assert done.returncode == 0, done.stderr
    expected = losses(tmp_path / "alone")
    assert len(expected) == 4
    for engine in ("--use-torch-fsdp2", "--use-megatron-fsdp"):
        train("--hidden-dropout", 0, engine, "--metrics-jsonl", tmp_path / engine)
        assert losses(tmp_path / engine) == pytest.approx(expected, rel=1e-6)


def test_the_times_of_an_offloaded_optimizer_are_reported_if_a_flag_requests_them(tmp_path):
    offload = "--bf16 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --log-interval 2"
    found = {}
    for level, iterations in ((1, [2, 4]), (0, [])):
        metrics = tmp_path / f"{level}.jsonl"
        log = train(*offload.split(), "--timing-log-level", level, "--metrics-jsonl", metrics)
        assert log.count("offload (ms a step): d2h ") == len(iterations)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        timings = [record for record in records if record["kind"] == "timing"]
        assert [record["iteration"] for record in timings] == iterations
        for record in timings:
            assert record["num_steps"] == 2
            for name in ("d2h_ms", "host_ms", "h2d_ms", "host_gb_per_second"):
                assert record[name] > 0
        found[level] = losses(metrics)
    assert found[0] == found[1]


def test_a_mistake_on_two_ranks_is_one_line_and_exit_code_two():
    """Under torchrun its own report follows, which the project's launcher leaves out."""
    done = run(LAUNCHER, *SETTINGS, "--micro-batch-size", "1", "--global-batch-size", "7")
    assert done.returncode == 2
    assert done.stdout == ""
    mistake, end = done.stderr.splitlines()
    assert mistake.startswith("pretrain_gpt.py: --global-batch-size: expected a multiple of 2")
    assert end.endswith("launch: rank 0 ended with status 2")


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
def running(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run on two ranks in the background that has shown that it trains."""
    command = [*TORCHRUN, "pretrain_gpt.py", *SETTINGS, *flags]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert any("| lm loss" in line for line in process.stdout), "it ended before it trained"
        yield process
        process.kill()


@pytest.mark.wide
def test_sigterm_to_everybody_leaves_the_ranks_their_data_workers_and_saves(tmp_path):
    """torchrun passes the signal to the process groups of its ranks, the workers of their data
    loaders included.
    """
    flags = [*LONG, "--num-workers", "2", "--save", str(tmp_path)]
    with running(*flags) as process:
        assert all(len(_children(worker)) >= 2 for worker in _children(process.pid))
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=TIMEOUT)
    assert "SIGTERM was received" in rest
    assert latest_iteration(open_store(tmp_path)) > 0


def _children(pid: int) -> list[int]:
    """The processes that a process started, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
