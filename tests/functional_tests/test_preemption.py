"""Runs that are told to leave: SIGUSR1, a grace period, and the save in it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.store import latest_iteration, open_store
from megatron.training.checkpoint.saver import Saver
from megatron.training.health.inject import Injections
from tests.functional_tests.helpers.recovery_scenes import (
    TIMEOUT,
    Job,
    children,
    started,
    torchrun,
    until,
)
from tests.functional_tests.helpers.runs import SETTINGS
from tests.helpers.ranks import run_ranks

# Longer than any test. The second save is the first of which it is known how long one takes.
FLAGS = [
    *SETTINGS,
    *"--train-iters 100000 --eval-iters 0 --save-interval 20 --save-keep-last 2".split(),
]
ALONE = [sys.executable]


def preempt(job: Job, launcher: list[str], *flags: str) -> int:
    """Runs a job until it has saved, and signals its last rank. Returns the exit code."""
    with started(job, launcher, *FLAGS, "--exit-signal-handler", *flags) as process:
        until(
            lambda: len(job.events("save_published")) >= 2 or process.poll() is not None,
            "two saves",
        )
        assert process.poll() is None, job.log
        signalled = [process.pid, *children(process.pid)][-1 if len(launcher) > 1 else 0]
        os.kill(signalled, signal.SIGUSR1)
        return process.wait(TIMEOUT)


def end_of(job: Job) -> dict:
    """The exit event of a run."""
    (end,) = job.events("exit")
    return end


def test_a_run_whose_grace_period_is_over_leaves_without_saving_and_says_so(tmp_path):
    """A period that is over before the iteration is; whether the loop or the watchdog finds that
    out first.
    """
    job = Job(tmp_path)
    assert preempt(job, ALONE, "--exit-signal-grace-seconds", "0.001") == 76
    end = end_of(job)
    assert (end["code"], end["name"]) == (76, "PREEMPTED_UNSAVED")
    (received,) = job.events("signal")
    assert (received["signal"], received["rank"]) == ("SIGUSR1", 0)
    assert re.search(r"grace-seconds 0\.001|the 0\.001 s after SIGUSR1 are over", end["reason"])
    # Only the saves of --save-interval, one of which may be of the last iteration.
    assert not [event for event in job.events("save_published") if event["iteration"] % 20]
    assert end["reason"] in job.log


@pytest.mark.parametrize(
    ("number", "save_seconds", "code", "newest"),
    [(signal.SIGUSR1, 100.0, 76, 4), (signal.SIGTERM, 10.0, 75, 5)],
)
def test_a_save_is_held_against_the_grace_period_by_what_saves_have_taken(
    tmp_path, number, save_seconds, code, newest
):
    """One rank is signalled, and both come to the same."""
    job = Job(tmp_path)
    flags = [*FLAGS, *job.flags, "--save-interval", "2"]
    outcomes = run_ranks(2, _run_signalled, flags, save_seconds, number)
    for end, reason, _ in outcomes:
        assert end == code
        assert ("a save takes longer than the rest" in reason) == (code == 76)
    received = rf"{number.name} was received by rank 1 .* time of a save: {save_seconds} s"
    assert re.search(received, outcomes[1][2])
    assert latest_iteration(open_store(job.saved)) == newest
    assert '"eval"' not in (tmp_path / "metrics.jsonl").read_text(), "it does not evaluate first"


def _run_signalled(
    argv: list[str], save_seconds: float, number: signal.Signals
) -> tuple[int, str, str]:
    """A run on this rank in which saves take `save_seconds`, and rank 1 is signalled in iteration
    5.
    """
    log = io.StringIO()
    flags = "--exit-signal-handler --exit-signal-grace-seconds 60 --eval-iters 1".split()
    real = Injections.at

    def at(injections: Injections, phase: str, iteration: int) -> None:
        if (phase, iteration) == ("backward", 5) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        real(injections, phase, iteration)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(log):
        patch.setattr(Saver, "save_seconds", save_seconds)
        patch.setattr(Injections, "at", at)
        outcome = pretrain_gpt.run([*argv, *flags])
    return int(outcome.code), outcome.reason, log.getvalue()


@pytest.mark.wide
def test_under_torchrun_one_ranks_signal_ends_all_and_the_launcher_starts_none_of_them_again(
    tmp_path,
):
    job = Job(tmp_path)
    flags = ["--exit-signal-grace-seconds", "60"]
    assert preempt(job, torchrun("--max-restarts", "3"), *flags) == 0, job.log
    end = end_of(job)
    assert (end["code"], end["name"], end["rank"]) == (75, "PREEMPTED", 0)
    (received,) = job.events("signal")
    assert received["rank"] == 1
    assert end["iteration"] == latest_iteration(open_store(job.saved))
    assert len(job.events("start")) == 1
