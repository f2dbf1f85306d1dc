"""Ctrl-C, typed into a pseudo-terminal: the byte goes to the terminal, whose driver signals every
process in the foreground, as it does for a user.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.store import LocalStore, latest_iteration, open_store
from megatron.training.health.exits import exit_process
from megatron.training.health.inject import Injections
from megatron.training.health.progress import Phase
from megatron.training.health.watchdog import Reports
from megatron_hybrid import run_status
from tests.functional_tests.helpers.recovery_scenes import ROOT, TIMEOUT, Job, environment
from tests.functional_tests.helpers.runs import LAUNCHER, SETTINGS
from tests.functional_tests.helpers.terminal import CTRL_C, Terminal, killed_at_the_end, typed_at

LONG = [*SETTINGS, *"--train-iters 100000 --log-interval 1 --save-interval 2".split()]
HANDLED = [*LONG, "--exit-signal-handler"]
ITERATION = 4  # in or after which Ctrl-C is typed: checkpoint 2 is there, 4 is due


# A run in a forked process that has imported everything, and waits at a place of the test's choice.


def run_at_terminal(name: str, flags: list[str], place: str, pipe: Any) -> None:
    """The run's process: as `pretrain_gpt.py` is started from a terminal."""
    os.environ.clear()
    os.environ.update(environment())
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # becomes the session's own
    for standard in range(3):
        os.dup2(terminal, standard)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    PLACES[place](lambda: pipe.send("there"))
    exit_process(pretrain_gpt.main(flags))


def hold(reached: Callable[[], None]) -> Callable[[], None]:
    """A function that reports that it is reached, and returns once Ctrl-C has been announced."""
    is_announced, real = threading.Event(), Reports.warn

    def warn(reports: Reports, text: str) -> None:
        real(reports, text)
        is_announced.set()

    Reports.warn = warn  # type: ignore[method-assign]

    def held() -> None:
        reached()
        assert is_announced.wait(TIMEOUT)

    return held


def at_phase(phase: Phase, held: Callable[[], None]) -> None:
    """Has a run call a function in a phase of `ITERATION`."""
    real = Injections.at

    def at(injections: Injections, now: Phase, iteration: int) -> None:
        if (now, iteration) == (phase, ITERATION):
            held()
        real(injections, now, iteration)

    Injections.at = at  # type: ignore[method-assign]


def in_the_step(reached: Callable[[], None]) -> None:
    at_phase(Phase.FORWARD, hold(reached))


def in_the_evaluation(reached: Callable[[], None]) -> None:
    at_phase(Phase.EVALUATE, hold(reached))


def in_the_save(reached: Callable[[], None]) -> None:
    """Its files are written, and it is about to be published."""
    held, real = hold(reached), LocalStore.publish

    def publish(store: LocalStore, draft: str, final: str) -> bool:
        if final.endswith(f"{ITERATION}"):
            held()
        return real(store, draft, final)

    LocalStore.publish = publish  # type: ignore[method-assign]


def for_ever(reached: Callable[[], None]) -> None:
    """Outside of Python most of the time, and never on to the end of the step."""

    def stay() -> None:
        reached()
        while True:
            ctypes.CDLL(None).sleep(1000)

    at_phase(Phase.FORWARD, stay)


PLACES = {
    place.__name__: place for place in (in_the_step, in_the_evaluation, in_the_save, for_ever)
}


def interrupted(place: Callable[..., None], *flags: str, again: bool = False) -> tuple[int, str]:
    """Types Ctrl-C when a run has come to a place. Returns (exit code, output).

    Args:
        again: whether it is typed until the run ends.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pretrain_gpt", __name__])
    terminal, (ours, theirs) = Terminal(), context.Pipe()
    process = context.Process(
        target=run_at_terminal, args=(terminal.name, list(flags), place.__name__, theirs)
    )
    process.start()
    with killed_at_the_end(process):
        assert ours.poll(TIMEOUT), f"the run did not get there:\n{terminal.text}"
        terminal.type(CTRL_C)
        deadline = time.monotonic() + TIMEOUT
        while process.is_alive() and time.monotonic() < deadline:
            process.join(0.1 if again else TIMEOUT)
            if again and process.is_alive():
                terminal.type(CTRL_C)
        assert process.exitcode is not None, terminal.text
        return process.exitcode, terminal.read_to_the_end()


def assert_no_traceback(text: str) -> None:
    for word in ("Traceback", "KeyboardInterrupt"):
        assert word not in text, text


def status_of(job: Job, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, first line) of the program status."""
    code = run_status.main([str(job.saved)])
    return code, capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("place", "phase", "flags"),
    [
        (in_the_step, "iteration 4, forward", ["--num-workers", "2"]),
        (in_the_evaluation, "iteration 4, evaluate", ["--eval-interval", "2"]),
        (in_the_save, "iteration 4, save", []),
        (in_the_save, r"iteration \d+, \w+", ["--async-save"]),
    ],
    ids=["step", "evaluation", "save", "async save"],
)
def test_ctrl_c_saves_and_ends_the_run_as_a_preempted_one(tmp_path, capsys, place, phase, flags):
    job = Job(tmp_path)
    code, text = interrupted(place, *HANDLED, *job.flags, *flags)
    assert code == 75, text
    assert_no_traceback(text)

    # One line at once, and two when it has happened.
    lines = [line for line in text.splitlines() if "SIGINT" in line]
    assert len(lines) == 2, text
    assert re.search(rf"SIGINT in {phase}: ", lines[0])
    (end,) = job.events("exit")
    assert end["reason"] in lines[1]

    assert (end["name"], end["reason"]) == ("PREEMPTED", "SIGINT was received")
    assert end["iteration"] == latest_iteration(open_store(job.saved)) >= ITERATION
    assert f"iter_{ITERATION:07d}" in " ".join(
        event["checkpoint"] for event in job.events("save_published")
    ), "the save in flight is not lost"
    status, first = status_of(job, capsys)
    assert status == 75
    assert first.startswith("state: preempted")


def test_a_second_ctrl_c_ends_the_run_at_once_wherever_it_is(tmp_path, capsys):
    job = Job(tmp_path)
    code, text = interrupted(for_ever, *HANDLED, *job.flags, again=True)
    assert code == 76, text
    assert_no_traceback(text)
    (end,) = job.events("exit")
    assert end["code"] == 76
    assert "iteration 4, forward" in end["reason"]
    assert end["reason"] in text
    assert text.count("A second Ctrl-C") == 1
    assert latest_iteration(open_store(job.saved)) == 2
    assert status_of(job, capsys)[0] == 76


# Runs as a user starts them.


@pytest.mark.wide
def test_without_the_handler_ctrl_c_ends_the_run_and_says_what_would_have_saved_it(
    tmp_path, capsys
):
    """The data workers, which also get the terminal's signal, print no output."""
    job = Job(tmp_path)
    flags = [*LONG, *job.flags, "--num-workers", "2"]
    with typed_at([sys.executable, "pretrain_gpt.py", *flags]) as (terminal, process):
        terminal.wait_for("saved checkpoint")
        terminal.type(CTRL_C)
        assert process.wait(TIMEOUT) == 128 + signal.SIGINT, terminal.text
        text = terminal.read_to_the_end()

    assert_no_traceback(text)
    (line,) = [line for line in text.splitlines() if "SIGINT" in line]
    assert "--exit-signal-handler saves" in line
    status, first = status_of(job, capsys)
    assert status == 130
    assert first.endswith("exit code 130 (SIGINT)")


def test_ctrl_c_while_make_launches_ranks_saves_on_all_of_them(tmp_path, capsys):
    """The terminal signals make and the launcher, which signals its ranks: they are in sessions of
    their own.
    """
    job = Job(tmp_path)
    command = [*LAUNCHER, str(ROOT / "pretrain_gpt.py"), *HANDLED, *job.flags]
    (tmp_path / "Makefile").write_text(f"pretrain:\n\t{shlex.join(command)}\n")
    with typed_at(["make", "pretrain"], tmp_path) as (terminal, process):
        terminal.wait_for("saved checkpoint")
        terminal.type(CTRL_C)
        assert process.wait(TIMEOUT) != 0, terminal.text
        text = terminal.read_to_the_end()
    assert re.search(r"make(\[\d+\])?: .* Error 130", text), "the launcher's status"

    assert "exit-signal-handler: true" in (ROOT / "examples" / "gpt_cpu.yaml").read_text(), (
        "so that this holds for `make pretrain`, as README.md states"
    )
    assert_no_traceback(text)
    assert "SignalException" not in text
    assert text.count("SIGINT in iteration") == 1, "one rank logs for its machine"
    assert "torchrun kills it after 30 s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)" in text
    assert {event["rank"] for event in job.events("signal")} == {0, 1}
    (end,) = job.events("exit")
    assert end["iteration"] == latest_iteration(open_store(job.saved))
    status, first = status_of(job, capsys)
    assert status == 75
    assert first.startswith("state: preempted")
