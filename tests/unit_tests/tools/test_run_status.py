from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.store import open_store, published_iterations
from megatron.training.health.events import EVENTS_FILE, HEARTBEAT_FILE, STOPPED
from megatron.training.health.exits import ExitCode
from megatron_hybrid import run_status
from megatron_hybrid.run_status import View, watch
from tests.unit_tests.tools.helpers.run_files import BEGIN, ELSEWHERE, HERE, Run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Run]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield Run(tmp_path / "run")
    time.tzset()


def state_of(run: Run) -> tuple[str, int]:
    status = run.status()
    return status["state"], status["exit_code"]


def test_five_lines_describe_a_run(run):
    run.start()
    run.write("lost", rank=1, ranks=[1], cause="rank 1 was killed in iteration 17 (forward)")
    run.exit(ExitCode.LOST_RANK, "rank 1 was killed", 17, rank=1)
    run.now += 20.0
    run.start(iteration=10)
    run.write("skip", iteration=12, grad_norm=float("inf"))
    run.now += 60.0
    run.save(300)
    run.now += 182.0
    run.beat(320)
    run.now += 3.0
    assert run.lines() == [
        "state: running since 2023-11-14 22:13:40 (4 min 5 s), heartbeat 3 s ago in forward, "
        "process 4712 on node7",
        "progress: iteration 320/500, loss 4.081, mean 385.9 ms per iteration, 1 min 9 s left",
        "checkpoint: iteration 300, 3 min 5 s ago, took 0.15 s; no save failed since",
        "restarts: 1 by the launcher, the last from iteration 10, with 2 ranks; last end: rank 1 "
        "was killed in iteration 17 (forward)",
        "trouble: 1 lost rank (last 1), 1 skipped iteration (last 12)",
    ]


@pytest.mark.parametrize("code", list(ExitCode))
def test_a_run_that_has_ended_has_the_exit_code_of_its_end(run, code):
    expected = {
        ExitCode.FINISHED: "finished",
        ExitCode.PREEMPTED: "preempted",
        ExitCode.PREEMPTED_UNSAVED: "preempted",
        ExitCode.HANG: "hung",
    }
    run.start()
    run.beat(500)
    run.exit(code, "it was so", 500)
    run.now += 1e6
    assert state_of(run) == (expected.get(code, "failed"), code)
    status = run.status()
    assert type(status["exit_code"]) is int
    assert (status["seconds"], status["progress"]["seconds_left"]) == (1e6, None)
    cause = None if code is ExitCode.FINISHED else "it was so"
    assert status["restarts"]["last_end"] == cause


def test_a_planned_stop_before_the_end_is_stopped(run):
    run.start()
    run.beat(318, train_iters=500)
    run.write("exit", code=0, name=STOPPED, reason="--exit-interval 320", iteration=320)
    assert state_of(run) == ("stopped", 0)
    progress = run.status()["progress"]
    assert (progress["iteration"], progress["loss_iteration"]) == (320, 318)


def test_restarts_by_the_launcher_and_starts_by_hand_are_counted_separately(run):
    for restart in (0, 1, 2, 0, 0, 1):
        run.start(restart=restart, iteration=10 * restart)
        run.exit(ExitCode.HANG, "rank 1 hung", 17)
    restarts = run.status()["restarts"]
    assert (restarts["count"], restarts["by_hand"]) == (3, 2)


def test_starts_that_end_without_an_event_are_counted(run):
    run.start()  # and everything is killed at once
    run.start(restart=0)
    run.write("lost", ranks=[3], cause="rank 3 was killed")
    run.exit(ExitCode.LOST_RANK, "rank 3 was killed", 17)
    run.start(restart=1)
    run.write("hang", ranks=[0, 2], cause="ranks 0 and 2 hang")
    run.exit(ExitCode.HANG, "ranks 0 and 2 hang", 17)
    trouble = run.status()["trouble"]
    assert (trouble["lost"], trouble["hung"], trouble["silent"]) == ([3], [0, 2], 1)
    run.start(restart=0)
    run.beat(20)
    assert run.status()["trouble"]["silent"] == 1, "the last one still runs"
    run.now += 1000.0
    assert run.status()["trouble"]["silent"] == 2


@pytest.mark.parametrize(
    ("code", "expected"), [(None, 1), ("5", 1), (5.0, 5), (-9, 247), (300, 44)]
)
def test_the_exit_code_is_one_that_a_process_can_have(run, code, expected):
    run.start()
    run.write("exit", code=code, name="OF_A_LATER_VERSION")
    assert state_of(run) == ("failed", expected)


def test_names_of_ends_are_names_of_exit_codes():
    assert run_status._ENDS.keys() <= ExitCode.__members__.keys() | {STOPPED}


def test_a_save_in_flight_is_shown(run):
    run.start()
    run.now += 10.0
    run.write("save_begun", iteration=10)
    assert (run.status()["state"], run.status()["since"]) == ("saving", BEGIN + 10.0)
    for outcome in ("save_published", "save_failed"):
        run.write("save_begun", iteration=20)
        assert run.status()["state"] == "saving"
        run.write(outcome, iteration=20, reason="disk full")
        assert run.status()["state"] == "running"
    run.write("save_begun", iteration=30)
    run.write("save_begun", iteration=40)
    run.write("save_published", iteration=30)
    assert run.status()["state"] == "saving", "the next one"
    run.write("save_failed", reason="an event without an iteration")
    assert run.status()["state"] == "running"


def test_a_run_with_an_old_heartbeat_is_dead(run):
    run.start()
    run.now -= 7200.0  # a clock that went back does not keep it alive
    run.write("skip", iteration=6)
    run.beat(7)
    run.now += 59.0
    assert run.status()["state"] == "running"
    run.now += 2.0
    assert state_of(run) == ("dead", 1)
    assert run.status(stale_seconds=90.0)["state"] == "running"


def test_a_clock_that_went_back_makes_no_run_dead_and_no_age_negative(run):
    run.start()
    run.save(10)
    run.now -= 7200.0
    run.beat(11)
    run.now -= 5.0
    status = run.status()
    found = (status["state"], status["seconds"], status["checkpoint"]["age_seconds"])
    assert found == ("running", 0.0, 0.0)


def test_a_run_whose_process_is_gone_is_dead_at_once(run):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run.start(pid=process.pid, host=HERE)
    run.beat(7)
    assert run.status()["state"] == "running"
    process.kill()
    # Dead, but its exit status was not read yet: a zombie.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run.status()["state"] == "dead"
    process.communicate()
    assert run.status()["state"] == "dead"
    run.start(pid=process.pid, host=ELSEWHERE)
    run.beat(7)
    assert run.status()["state"] == "running", "a process of another machine"


@pytest.mark.parametrize(
    ("pid", "state"), [(0, "dead"), (-1, "dead"), (2**70, "dead"), ("4711", "running")]
)
def test_a_pid_that_no_process_can_have_does_no_harm(run, pid, state):
    run.start(pid=pid, host=HERE)
    run.beat(7)
    assert run.status()["state"] == state


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, 1e300, True, "7", [7], {}])
def test_a_value_that_is_no_plausible_number_counts_as_missing(run, value):
    run.start(iteration=5)
    names = ("iteration", "train_iters", "loss", "ms_per_iteration")
    heartbeat = {"time": BEGIN, **dict.fromkeys(names, value)}
    (run.folder / HEARTBEAT_FILE).write_text(json.dumps(heartbeat))
    assert run.lines()[1] == "progress: iteration 5"


def test_a_heartbeat_belongs_to_the_start_with_its_restart_number_and_process(run):
    run.start()
    run.beat(320)
    run.exit(ExitCode.LOST_RANK, "rank 1 was killed", 320)
    run.start(iteration=300)
    progress = run.status()["progress"]
    assert (progress["iteration"], progress["loss"]) == (300, None)
    # Started by hand, the number of restarts is the same, but not the process.
    for process in ({"pid": 99}, {"pid": 99, "host": "node8"}):
        run.beat(301)
        run.start(restart=1, iteration=None, **process)
        assert run.status()["progress"]["iteration"] is None


def test_a_late_event_of_an_earlier_start_does_not_end_the_next_one(run):
    run.start()
    run.start(iteration=10)
    run.events(rank=1, restart=0).write(
        "exit", code=5, name="LOST_RANK", reason="late", iteration=17
    )
    status = run.status()
    assert (status["state"], status["restarts"]["last_end"]) == ("running", "late")
    # A requeued job counts its restarts from 0 again.
    run.start(restart=0, pid=1, iteration=10)
    run.events(rank=1, restart=1).write("exit", code=6, name="HANG", reason="later", iteration=18)
    status = run.status()
    assert (status["state"], status["restarts"]["last_end"]) == ("running", "later")
    assert (status["restarts"]["count"], status["restarts"]["by_hand"]) == (1, 1)


def test_a_start_without_a_start_event_counts(run):
    run.start()
    run.exit(ExitCode.HANG, "rank 1 hung", 17)
    run.events(rank=1, restart=1).write(
        "exit", code=2, name="BAD_CONFIGURATION", reason="so much memory", iteration=0
    )
    status = run.status()
    assert (status["exit_code"], status["restarts"]["count"]) == (2, 1)
    run.start(restart=2, iteration=None)
    restarts = run.status()["restarts"]
    assert (restarts["count"], restarts["last_end"]) == (2, "so much memory")
    assert run.status()["state"] == "running"


def test_an_event_before_its_start_event_belongs_to_that_start(run):
    run.start()
    run.exit(ExitCode.HANG, "rank 1 hung", 17)
    run.events(rank=1, restart=1).write("signal", signal="SIGTERM", iteration=0)
    assert run.status()["state"] == "running"
    run.start(iteration=10)
    restarts = run.status()["restarts"]
    assert (restarts["count"], restarts["last_end"]) == (1, "rank 1 hung")


def test_a_start_that_loads_no_checkpoint_makes_no_progress(run):
    run.start()
    run.start(iteration=None)
    run.beat(0, phase="load", loss=None, ms_per_iteration=None, train_iters=None)
    run.exit(ExitCode.BAD_FILES, "no intact checkpoint", 0)
    assert run.status()["progress"]["iteration"] is None
    assert run.status()["restarts"]["last_end"] == "no intact checkpoint"


def test_the_end_is_the_exit_of_the_rank_with_the_cause(run):
    run.start()
    run.exit(ExitCode.NON_FINITE_LOSS, "the loss was not finite", 17)
    run.exit(ExitCode.LOST_RANK, "rank 0 ended", 17, rank=1)
    status = run.status()
    assert (status["exit_code"], status["restarts"]["last_end"]) == (4, "the loss was not finite")


def test_the_cause_of_an_end_is_the_first_that_was_found(run):
    run.start()
    run.write("lost", rank=1, ranks=[0], cause="rank 0 was killed")
    run.write("lost", rank=3, ranks=[3], cause="rank 3: its torchrun agent has died")
    run.exit(ExitCode.LOST_RANK, "rank 0 was killed", 17, rank=1)
    run.start()
    assert run.status()["restarts"]["last_end"] == "rank 0 was killed"


def test_an_unhandled_signal_is_a_preemption(run):
    run.start()
    run.write("exit", code=143, name="SIGTERM", reason="it is not handled", iteration=17)
    assert state_of(run) == ("preempted", 143)
    assert run.status()["restarts"]["last_end"] == "SIGTERM: it is not handled"


def test_the_newest_checkpoint_is_the_newest_published_directory(run):
    run.start()
    run.save(10)
    for name in ("iter_0000030.ab12.saving", "iter_0000040.ab12.damaged", "iter_50"):
        (run.folder / name).mkdir()
    (run.folder / "iter_0000070").write_text("a file")
    (run.folder / "iter_0000020").mkdir()  # its event was lost
    os.utime(run.folder / "iter_0000020", (BEGIN, BEGIN - 5.0))
    found = run.status()["checkpoint"]
    assert (found["iteration"], found["age_seconds"], found["save_seconds"]) == (20, 5.0, None)
    assert found["iteration"] == published_iterations(open_store(run.folder))[-1]
    for iteration in (9_999_999, 10_000_000):
        run.save(iteration)
    assert run.status()["checkpoint"]["iteration"] == 10_000_000


def test_failed_saves_since_the_last_checkpoint_are_counted_with_the_last_reason(run):
    run.start()
    run.write("save_failed", iteration=5, reason="before")
    found = run.status()["checkpoint"]
    assert (found["iteration"], found["failed_since"], found["failure"]) == (None, 1, "before")
    run.save(10, seconds=1.5)
    run.write("save_failed", iteration=20, reason="no space left")
    run.write("save_skipped", iteration=25, reason="busy")
    run.write("save_failed", iteration=30, reason="last")
    found = run.status()["checkpoint"]
    assert (found["iteration"], found["failed_since"], found["failure"]) == (10, 2, "last")
    run.save(40)
    assert run.status()["checkpoint"]["failed_since"] == 0


def test_checkpoints_in_another_directory_are_found_through_the_events(run, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "relative" / "path" / "iter_0000099").mkdir(parents=True)
    (elsewhere / "iter_0000030").mkdir(parents=True)
    run.start()
    run.write(
        "save_published", iteration=20, checkpoint=str(elsewhere / "iter_0000020"), seconds=2.0
    )
    assert run.status()["checkpoint"]["iteration"] == 30
    for place in ("s3://bucket/run", "a/relative/path", ".", "/" + "x" * 5000):
        run.write("save_published", iteration=40, checkpoint=f"{place}/iter_0000040", seconds=2.0)
        found = run.status()["checkpoint"]
        assert (found["iteration"], found["is_on_disk"]) == (40, False)


def test_trouble_is_counted_over_all_starts_and_a_repeated_iteration_once(run):
    run.start()
    for _ in range(2):
        run.write("skip", iteration=3, grad_norm=None)
        run.write("nan", iteration=4, ranks=[1])
        run.write("damaged", checkpoint="runs/a/iter_0000010", reason="truncated")
        run.write("signal", signal="SIGTERM", iteration=4)
        run.write("inject", spec="kill:rank=1,step=5", iteration=5)
        run.start(iteration=0)
    run.write("skip", iteration=9, grad_norm=None)
    assert run.status()["trouble"] == {
        "lost": [],
        "hung": [],
        "skipped": [3, 9],
        "nan": [4],
        "damaged": ["runs/a/iter_0000010"],
        "signals": ["SIGTERM", "SIGTERM"],
        "injected": ["kill:rank=1,step=5"] * 2,
        "silent": 2,
    }


def test_an_event_during_an_iteration_means_that_the_iteration_is_unfinished(run):
    run.start(iteration=0)
    run.write("inject", spec="kill:step=17", iteration=17)
    assert run.status()["progress"]["iteration"] == 16
    run.write("signal", rank=1, signal="SIGTERM", iteration=18)
    assert run.status()["progress"]["iteration"] == 17
    run.exit(ExitCode.LOST_RANK, "rank 0 was killed", 19, rank=1)
    assert run.status()["progress"]["iteration"] == 18
    run.exit(ExitCode.FINISHED, "trained to the end", 20)
    assert run.status()["progress"]["iteration"] == 20


def test_checkpoints_without_events_or_a_heartbeat_alone_are_a_run(run):
    (run.folder / "iter_0000500").mkdir(parents=True)
    assert state_of(run) == ("unknown", 0)
    assert run.status()["checkpoint"]["iteration"] == 500
    run.restart = 0
    run.beat(7)
    assert (run.status()["state"], run.status()["progress"]["iteration"]) == ("running", 7)


@pytest.mark.parametrize("make", ["nothing", "file", "empty files"])
def test_a_directory_without_a_run_is_an_error(run, make, capsys):
    if make == "file":
        run.folder.write_text("")
    elif make == "empty files":
        run.folder.mkdir()
        (run.folder / EVENTS_FILE).write_text("")
        (run.folder / HEARTBEAT_FILE).write_text("")
    assert run_status.main([str(run.folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert str(run.folder) in line


def test_the_script_prints_json_and_exits_with_the_code_of_the_run(run):
    run.start()
    run.exit(ExitCode.PREEMPTED, "SIGTERM was received", 17)
    command = [sys.executable, "-m", "megatron_hybrid", "status", run.folder, "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    status = json.loads(printed.stdout)
    assert (printed.returncode, printed.stderr) == (75, "")
    assert (status["state"], status["exit_code"]) == ("preempted", 75)


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def views(*found: View | OSError):
    waiting = iter(found)

    def look() -> View:
        view = next(waiting)
        if isinstance(view, OSError):
            raise view
        return view

    return look


def test_on_a_terminal_each_view_clears_the_one_before():
    look = views(View(["state: running"], True, 0), View(["state: failed"], False, 5))
    stream = Stream(True)
    watch(look, stream, 1.0, sleep=lambda _: None)
    _, first, second = stream.getvalue().split("\x1b[H\x1b[2J")
    assert (first, second) == ("state: running\n\n", "state: failed\n\n")


def test_a_look_that_fails_is_shown_and_the_next_one_may_go_well():
    stream = Stream(False)
    error = OSError(5, "Input/output error")
    last = View(["state: finished"], False, 0)
    look = views(View(["state: running"], True, 0), error, error, last)
    assert watch(look, stream, 1.0, sleep=lambda _: None) == 0
    first, second, third, fourth, _ = stream.getvalue().split("\n\n")
    assert first == "state: running"
    assert second == third
    assert second.startswith("state: running\n")
    assert str(error) in second
    assert fourth == "state: finished"


def test_the_first_look_must_succeed():
    with pytest.raises(FileNotFoundError):
        watch(views(FileNotFoundError("no run")), Stream(False), 1.0, sleep=pytest.fail)
