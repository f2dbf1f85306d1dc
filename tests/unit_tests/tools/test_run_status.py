from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.store import open_store, published_iterations
from megatron.training.health.events import EVENTS_FILE, HEARTBEAT_FILE, STOPPED, read_events
from megatron.training.health.exits import ExitCode
from megatron_hybrid import run_status
from tests.unit_tests.tools.helpers.run_files import BEGIN, ELSEWHERE, HERE, Run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Run]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield Run(tmp_path / "run")
    time.tzset()


def test_five_lines_say_how_a_run_is_doing(run):
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


def test_a_run_without_a_past_has_little_to_say(run):
    run.start(iteration=None)
    assert run.lines() == [
        "state: running since 2023-11-14 22:13:20 (0 s), no heartbeat yet",
        "progress: none yet",
        "checkpoint: none",
        "restarts: none, with 2 ranks",
        "trouble: none",
    ]


@pytest.mark.parametrize("code", list(ExitCode))
def test_a_run_that_has_ended_says_how_and_the_exit_code_is_its_own(run, code):
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
    status = run.status()
    assert (status["state"], status["exit_code"]) == (expected.get(code, "failed"), code)
    assert type(status["exit_code"]) is int
    assert run.lines()[0].endswith(f"(11 d 13 h), exit code {int(code)} ({code.name})")
    assert status["progress"]["seconds_left"] is None
    cause = None if code is ExitCode.FINISHED else "it was so"
    assert status["restarts"]["last_end"] == cause


def test_restarts_that_torchrun_has_left_are_told_where_it_uses_them(run):
    for restart, left in enumerate((", 2 restarts left", ", 1 restart left", "")):
        run.start(restart=restart, max_restarts=2)
        run.exit(ExitCode.LOST_RANK, "rank 1 was killed", 7)
        assert run.lines()[0].endswith(f"exit code 5 (LOST_RANK){left}")
    run.start(restart=0, max_restarts=2)
    run.exit(ExitCode.PREEMPTED, "SIGTERM was received", 7)
    assert run.lines()[0].endswith("exit code 75 (PREEMPTED)")
    run.start(restart=0, max_restarts=None)
    run.exit(ExitCode.FAILED, "an error", 7)
    assert run.lines()[0].endswith("exit code 1 (FAILED)")


def test_a_run_that_was_told_to_stop_early_is_stopped(run):
    run.start()
    run.beat(318, train_iters=500)
    reason = "iteration 320 is a multiple of --exit-interval 320"
    run.write("exit", code=0, name=STOPPED, reason=reason, iteration=320)
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("stopped", 0)
    state, progress, *_ = run.lines()
    assert "FINISHED" not in state
    assert progress == "progress: iteration 320/500, loss 4.081 in 318, mean 385.9 ms per iteration"


def test_restarts_by_the_launcher_are_told_apart_from_starts_by_hand(run):
    for restart in (0, 1, 2, 0, 0, 1):
        run.start(restart=restart, iteration=10 * restart)
        run.exit(ExitCode.HANG, "rank 1 hung", 17)
    restarts = run.status()["restarts"]
    assert (restarts["count"], restarts["by_hand"]) == (3, 2)
    assert run.lines()[3].startswith("restarts: 3 by the launcher, 2 by hand, the last from")


def test_lost_and_hung_ranks_and_ends_without_a_word_are_trouble(run):
    run.start()  # and everything is killed at once
    run.start(restart=0)
    run.write("lost", ranks=[3], cause="rank 3 was killed")
    run.exit(ExitCode.LOST_RANK, "rank 3 was killed", 17)
    run.start(restart=1)
    run.write("hang", ranks=[0, 2], cause="ranks 0 and 2 hang")
    run.exit(ExitCode.HANG, "ranks 0 and 2 hang", 17)
    assert run.lines()[4] == (
        "trouble: 1 lost rank (last 3), 2 hung ranks (last 2), 1 start that ended without a word"
    )
    run.start(restart=0)
    run.beat(20)
    assert "1 start that" in run.lines()[4], "the last one still runs"
    run.now += 1000.0
    assert "2 starts that" in run.lines()[4]


@pytest.mark.parametrize(
    ("code", "expected"), [(None, 1), ("5", 1), (5.0, 5), (-9, 247), (300, 44)]
)
def test_the_exit_code_is_one_that_a_process_can_have(run, code, expected):
    run.start()
    run.write("exit", code=code, name="OF_A_LATER_VERSION")
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("failed", expected)


def test_names_are_those_of_the_exit_codes():
    assert run_status._ENDS.keys() <= ExitCode.__members__.keys() | {STOPPED}


def test_a_save_in_flight_is_said(run):
    run.start()
    run.now += 10.0
    run.write("save_begun", iteration=10)
    run.now += 2.0
    run.beat(11)
    assert run.lines()[0].startswith(
        "state: saving since 2023-11-14 22:13:30 (2 s), heartbeat 0 s ago"
    )
    for outcome in ("save_published", "save_failed"):
        run.write("save_begun", iteration=20)
        assert run.status()["state"] == "saving"
        run.write(outcome, iteration=20, reason="disk full")
        assert run.status()["state"] == "running"
    run.write("save_begun", iteration=30)
    run.write("save_begun", iteration=40)
    run.write("save_published", iteration=30)
    assert run.status()["state"] == "saving", "the next one"
    run.write("save_failed", reason="of a log that does not say which")
    assert run.status()["state"] == "running"


def test_an_old_heartbeat_is_a_dead_run(run):
    run.start()
    run.beat(7)
    run.now += 59.0
    assert run.status()["state"] == "running"
    run.now += 2.0
    status = run.status()
    assert (status["state"], status["exit_code"], status["since"]) == ("dead", 1, BEGIN)
    assert run.status(stale_seconds=90.0)["state"] == "running"
    assert run.lines()[0] == (
        "state: dead since 2023-11-14 22:13:20 (1 min 1 s), no exit event, and no heartbeat since"
    )
    assert run.lines()[3] == (
        "restarts: none, with 2 ranks; last end: not known: all ranks ended without a word"
    )


def test_a_run_whose_process_is_gone_is_dead_at_once(run):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run.start(pid=process.pid, host=HERE)
    run.beat(7)
    assert run.status()["state"] == "running"
    process.kill()
    # Dead, but nobody has asked for its exit status yet: a zombie.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run.status()["state"] == "dead"
    process.communicate()
    assert run.status()["detail"] == f"process {process.pid} is gone and left no exit event"


def test_a_process_of_another_machine_is_not_looked_for(run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    run.start(pid=process.pid, host=ELSEWHERE)
    run.beat(7)
    assert run.status()["state"] == "running"


@pytest.mark.parametrize(
    ("pid", "state"),
    [
        (0, "dead"),
        (-1, "dead"),
        (2**70, "dead"),
        ("4711", "running"),
        (None, "running"),
        (1.5, "running"),
    ],
)
def test_a_pid_that_is_none_does_no_harm(run, pid, state):
    run.start(pid=pid, host=HERE)
    run.beat(7)
    assert run.status()["state"] == state


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, 1e300, True, "7", [7], {}]
)
def test_a_number_that_is_none_is_as_good_as_missing(run, value):
    run.start(iteration=5)
    heartbeat = {
        "time": BEGIN,
        "iteration": value,
        "train_iters": value,
        "loss": value,
        "ms_per_iteration": value,
    }
    (run.folder / HEARTBEAT_FILE).write_text(json.dumps(heartbeat))
    assert run.lines()[1] == "progress: iteration 5"


def test_a_clock_that_went_back_makes_no_run_dead_and_no_age_negative(run):
    run.start()
    run.save(10)
    run.now -= 7200.0
    run.beat(11)
    run.now -= 5.0
    status = run.status()
    assert (status["state"], status["seconds"], status["checkpoint"]["age_seconds"]) == (
        "running",
        0.0,
        0.0,
    )


def test_a_clock_that_went_back_does_not_keep_a_dead_run_alive(run):
    run.start()
    run.now -= 7200.0
    run.write("save_begun", iteration=10)
    run.beat(11)
    run.now += 61.0
    assert run.status()["state"] == "dead"


def test_the_heartbeat_of_the_start_before_says_nothing_of_this_one(run):
    run.start()
    run.beat(320)
    run.exit(ExitCode.LOST_RANK, "rank 1 was killed", 320)
    run.now += 5.0
    run.start(iteration=300)
    status = run.status()
    assert (status["state"], status["progress"]["iteration"], status["progress"]["loss"]) == (
        "running",
        300,
        None,
    )
    # Started by hand, so that the number of restarts is the same; the process tells.
    for number, process in enumerate(({"pid": 99}, {"pid": 99, "host": "node8"}), start=2):
        run.beat(301)
        run.start(restart=1, iteration=None, **process)
        assert run.status()["progress"]["iteration"] is None
        restarts = run.status()["restarts"]
        assert (restarts["count"], restarts["by_hand"]) == (1, number - 1)


def test_a_rank_that_writes_after_the_next_start_does_not_end_that(run):
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


def test_a_start_that_came_to_no_start_event_counts(run):
    run.start()
    run.exit(ExitCode.HANG, "rank 1 hung", 17)
    run.events(rank=1, restart=1).write(
        "exit", code=2, name="BAD_CONFIGURATION", reason="so much memory", iteration=0
    )
    status = run.status()
    assert (status["exit_code"], status["restarts"]["count"]) == (2, 1)
    run.start(restart=2, iteration=None)
    status = run.status()
    assert (status["restarts"]["count"], status["restarts"]["last_end"]) == (2, "so much memory")
    assert status["state"] == "running"


def test_a_start_that_does_not_get_to_its_checkpoint_makes_no_progress(run):
    run.start()
    run.start(iteration=None)
    run.beat(0, phase="load", loss=None, ms_per_iteration=None, train_iters=None)
    run.exit(ExitCode.BAD_FILES, "no intact checkpoint", 0)
    assert run.lines()[1] == "progress: none yet"
    assert (
        run.lines()[3]
        == "restarts: 1 by the launcher, with 2 ranks; last end: no intact checkpoint"
    )


def test_a_rank_that_writes_before_its_start_belongs_to_it(run):
    run.start()
    run.exit(ExitCode.HANG, "rank 1 hung", 17)
    run.events(rank=1, restart=1).write("signal", signal="SIGTERM", iteration=0)
    assert run.status()["state"] == "running"
    run.start(iteration=10)
    status = run.status()
    assert (status["restarts"]["count"], status["restarts"]["last_end"]) == (1, "rank 1 hung")


def test_the_rank_with_the_cause_says_how_it_ended_not_the_one_that_lost_it(run):
    run.start()
    run.exit(ExitCode.NON_FINITE_LOSS, "the loss was not finite", 17)
    run.exit(ExitCode.LOST_RANK, "rank 0 ended", 17, rank=1)
    status = run.status()
    assert (status["exit_code"], status["restarts"]["last_end"]) == (4, "the loss was not finite")


def test_a_finished_run_names_what_ended_it_before(run):
    run.start()
    run.write("hang", ranks=[1], cause="rank 1 hung in sleep")
    run.exit(ExitCode.HANG, "hang", 17)
    run.start(iteration=10)
    run.exit(ExitCode.FINISHED, "training ended", 500)
    assert run.lines()[3] == (
        "restarts: 1 by the launcher, the last from iteration 10, with 2 ranks; last end: rank 1 "
        "hung in sleep"
    )


def test_the_newest_checkpoint_is_that_of_the_folder(run):
    run.start()
    run.save(10)
    for name in (
        "iter_0000030.ab12.saving",
        "iter_0000040.ab12.damaged",
        "iter_50",
        "iter_0000060.ab.deleting",
    ):
        (run.folder / name).mkdir()
    (run.folder / "iter_0000070").write_text("a file")
    (run.folder / "iter_0000020").mkdir()  # its event was lost
    os.utime(run.folder / "iter_0000020", (BEGIN, BEGIN - 5.0))
    assert run.lines()[2] == "checkpoint: iteration 20, 5 s ago; no save failed since"
    assert (
        run.status()["checkpoint"]["iteration"] == published_iterations(open_store(run.folder))[-1]
    )


def test_a_very_long_run_keeps_its_newest_checkpoint(run):
    run.start()
    for iteration in (9_999_999, 10_000_000):
        run.save(iteration)
    assert run.status()["checkpoint"]["iteration"] == 10_000_000


def test_saves_that_failed_since_are_counted_with_the_last_reason(run):
    run.start()
    run.write("save_failed", iteration=5, reason="before")
    assert run.lines()[2] == "checkpoint: none; 1 save failed since: before"
    run.save(10, seconds=1.5)
    run.write("save_failed", iteration=20, reason="no space left")
    run.write("save_skipped", iteration=25, reason="busy")
    run.write("save_failed", iteration=30, reason="rank 1:\n no space\x1b[2J left")
    line = (
        r"checkpoint: iteration 10, 0 s ago, took 1.50 s; 2 saves failed since: "
        r"rank 1:\n no space\x1b[2J left"
    )
    assert run.lines()[2] == line
    run.save(40)
    assert run.lines()[2].endswith("; no save failed since")


def test_checkpoints_elsewhere_are_found_through_the_log(run, tmp_path, monkeypatch):
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
        line = (
            "checkpoint: iteration 40, 0 s ago, took 2.00 s, by the log alone; no save failed since"
        )
        assert run.lines()[2] == line


def test_trouble_is_counted_over_all_starts_and_an_iteration_made_again_counts_once(run):
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
    assert "2 skipped iterations (last 9), 1 nan iteration (last 4)" in run.lines()[4]


def test_what_strikes_in_an_iteration_says_that_those_before_have_been_made(run):
    run.start(iteration=0)
    run.write("inject", spec="kill:step=17", iteration=17)
    assert run.status()["progress"]["iteration"] == 16
    run.write("signal", rank=1, signal="SIGTERM", iteration=18)
    assert run.status()["progress"]["iteration"] == 17
    run.exit(ExitCode.LOST_RANK, "rank 0 was killed", 19, rank=1)
    assert run.status()["progress"]["iteration"] == 18
    run.exit(ExitCode.FINISHED, "trained to the end", 20)
    assert run.status()["progress"]["iteration"] == 20


def test_a_signal_that_nobody_handles_is_how_a_run_ended(run):
    run.start()
    run.write("exit", code=143, name="SIGTERM", reason="it is not handled", iteration=17)
    assert run.lines()[0].startswith("state: preempted since")
    assert run.lines()[0].endswith("exit code 143 (SIGTERM)")
    assert run.status()["exit_code"] == 143
    assert run.status()["restarts"]["last_end"] == "SIGTERM: it is not handled"


def test_the_cause_is_the_first_that_was_found(run):
    run.start()
    run.write("lost", rank=1, ranks=[0], cause="rank 0 was killed")
    run.write("lost", rank=3, ranks=[3], cause="rank 3: its torchrun agent has died")
    run.exit(ExitCode.LOST_RANK, "rank 0 was killed", 17, rank=1)
    run.start()
    assert run.status()["restarts"]["last_end"] == "rank 0 was killed"


def test_checkpoints_without_events_are_a_run_of_which_little_is_known(run):
    (run.folder / "iter_0000500").mkdir(parents=True)
    assert run.lines()[0] == "state: unknown, no events here"
    assert run.lines()[2].startswith("checkpoint: iteration 500, ")
    assert run.status()["exit_code"] == 0


def test_a_heartbeat_without_events_is_a_run(run):
    run.restart = 0
    run.beat(7)
    assert run.lines()[0].startswith("state: running, heartbeat 0 s ago in forward, process 4711")
    assert run.lines()[1].startswith("progress: iteration 7/500")


@pytest.mark.parametrize("make", ["nothing", "folder", "file", "empty files"])
def test_a_folder_without_a_run_is_an_error(run, make, capsys):
    if make == "file":
        run.folder.write_text("")
    elif make != "nothing":
        run.folder.mkdir()
    if make == "empty files":
        (run.folder / EVENTS_FILE).write_text("")
        (run.folder / HEARTBEAT_FILE).write_text("")
    assert run_status.main([str(run.folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("run_status.py: ")
    assert str(run.folder) in line


def test_a_torn_line_is_passed_over(run):
    run.start()
    run.write("skip", iteration=3)
    with (run.folder / EVENTS_FILE).open("a") as file:
        file.write('{"time": 17.0, "event": "ex')
    assert run.status()["state"] == "running"
    run.exit(ExitCode.FINISHED, "training ended", 500)
    assert run.status()["state"] == "finished"


KINDS = [
    *"start resume damaged step save_begun save_published save_failed signal skip nan lost".split(),
    *"hang inject evaluation exit".split(),
    *("of a later version", None, 3, []),
]
KEYS = (
    "time rank restart iteration train_iters world_size pid host checkpoint seconds reason cause "
    "code name spec signal phase loss ms_per_iteration ranks"
).split()
TEXTS = [HERE, "FINISHED", "HANG", "LOST_RANK", "a\nb", "\ud800", "s3://a/b", "\0"]
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.integers()
    | st.floats(allow_nan=True)
    | st.sampled_from([math.nan, math.inf, 10**400, 1e300, *TEXTS])
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=1), st.integers(), max_size=1)
)
EVENTS = st.builds(
    lambda kind, fields: {**fields, "event": kind},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8),
)


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=8),
    heartbeat=st.none() | st.dictionaries(st.sampled_from(KEYS), VALUES),
    has_checkpoint=st.booleans(),
    now=st.sampled_from([0.0, BEGIN]),
)
def test_whatever_stands_in_the_files_it_is_five_lines(events, heartbeat, has_checkpoint, now):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / EVENTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
        if heartbeat is not None:
            (folder / HEARTBEAT_FILE).write_text(json.dumps(heartbeat))
        if has_checkpoint:
            (folder / "iter_0000010").mkdir()
        assert len(read_events(folder)) == len(events)
        status = run_status.run_status(folder, now=now)
        if status is None:
            assert not events
            assert heartbeat is None
            return
        lines = run_status.lines_of(status)
        names = [line.partition(":")[0] for line in lines]
        assert names == ["state", "progress", "checkpoint", "restarts", "trouble"]
        assert all(line.isprintable() for line in lines)
        assert len("\n".join(lines).encode().splitlines()) == 5
        json.loads(json.dumps(status))
        assert 0 <= status["exit_code"] <= 255


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = ROOT / "tools" / "run_status.py"
    return subprocess.run(
        [sys.executable, tool, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60
    )


def test_the_tool_prints_lines_or_json_and_exits_with_the_runs_code(run):
    run.start()
    run.exit(ExitCode.PREEMPTED, "SIGTERM was received", 17)
    printed = run_tool(str(run.folder))
    assert (printed.returncode, printed.stderr) == (75, "")
    assert len(printed.stdout.splitlines()) == 5
    printed = run_tool(str(run.folder), "--json")
    status = json.loads(printed.stdout)
    assert (printed.returncode, status["state"], status["exit_code"]) == (75, "preempted", 75)


def test_the_tool_starts_without_torch(run):
    (run.folder / "iter_0000500").mkdir(parents=True)
    code = (
        "import sys; from megatron_hybrid import run_status; "
        "run_status.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, str(run.folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert printed.stdout.splitlines()[-1] == "False", printed.stderr


def test_the_help_says_what_the_states_and_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit):
        run_status.main(["--help"])
    text = capsys.readouterr().out
    states = "running saving finished stopped preempted failed hung dead unknown".split()
    for word in (*states, "Exit code"):
        assert word in text


def test_a_fifo_or_a_file_without_end_is_one_line_and_no_wait(run, capsys):
    run.folder.mkdir(exist_ok=True)
    os.mkfifo(run.folder / EVENTS_FILE)
    assert run_status.main([str(run.folder)]) == run_status.EXIT_NO_RUN
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected a regular file of JSON lines, got a FIFO" in line

    (run.folder / EVENTS_FILE).unlink()
    run.start()
    with (run.folder / HEARTBEAT_FILE).open("w") as stream:
        stream.truncate(2**40)
    assert run_status.main([str(run.folder)]) == run_status.EXIT_NO_RUN
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected a heartbeat of at most 65536 bytes" in line


def test_a_line_is_of_bounded_length_whatever_a_cause_says(run):
    run.start()
    run.write("lost", ranks=[1], cause="\x1b]0;title\x07" + "x" * 10**5)
    run.exit(ExitCode.LOST_RANK, "x", 5)
    line = run.lines()[3]
    assert r"\x1b]0;title\x07xxx" in line
    assert len(line) < 1100
