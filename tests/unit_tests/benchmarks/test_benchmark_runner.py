"""benchmarks/runner: each benchmark is a separate process, and files are complete or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.processes import started
from benchmarks.helpers.result import NotRun
from benchmarks.runner.command import summary
from benchmarks.runner.registry import registered
from benchmarks.runner.running import Ending, Origin, Outcome, Revision, Runner

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"cpu": "a processor", "cores": 2}

DECLARED = """
import os, signal, sys
from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import NotRun, Ratio, Result, measured

BENCHMARK = Benchmark(
    name="{name}", question="?", ranks=1, full=("7",), quick=("1",), environment={environment!r}
)
"""
HANDS_OVER = """
values = [float(sys.argv[1])] * 3
report.hand_over(Result(measured({"ours": values}, "ms"), (Ratio("slow", 2.0, at_most=1.0),)))
"""
NOT_RUN = """
report.hand_over(Result((), (), (NotRun("a peer", f"not in {sys.executable}"),)))
"""
BODIES = {
    "a_good": HANDS_OVER,
    "b_fails": HANDS_OVER + "raise RuntimeError('after it has handed over')",
    "c_killed": "print('begun', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)",
    "d_silent": "",
    "e_of_a_peer": NOT_RUN,
    "f_good": HANDS_OVER,
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Benchmark]:
    """The package `fakes`, one benchmark for each way to end."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, body in BODIES.items():
        environment = "a_peer" if name == "e_of_a_peer" else None
        text = DECLARED.format(name=name, environment=environment) + body
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return registered(folder)


def run_all(
    fakes: dict[str, Benchmark], folder: Path, mode: str = "full"
) -> tuple[list[Outcome], list[str]]:
    """(outcomes, lines told)."""
    told: list[str] = []
    runner = Runner(
        Origin(mode, Revision("0123", is_dirty=False), MACHINE),
        folder / "results",
        folder / "logs",
        package="fakes",
        root=folder,
        tell=told.append,
    )
    return list(runner.run(list(fakes.values()))), told


def test_the_others_run_when_one_fails_or_dies(fakes: dict[str, Benchmark], tmp_path: Path):
    outcomes, told = run_all(fakes, tmp_path)

    done, failed = Ending.DONE, Ending.FAILED
    assert [one.ending for one in outcomes] == [done, failed, failed, failed, done, done]
    details = {one.benchmark.name: one.detail for one in outcomes}
    assert details["b_fails"].startswith("exit code 1")
    assert "after it has handed over" in details["b_fails"], "the end of its log"
    assert details["c_killed"].startswith("killed by SIGKILL\n    begun")
    assert details["d_silent"].startswith("it ended without handing a result over")
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert names == ["a_good.json", "e_of_a_peer.json", "f_good.json"], "the others leave no file"
    assert len(told) == 2 * len(fakes)


def test_a_result_file_says_what_was_measured_where_and_of_which_code(
    fakes: dict[str, Benchmark], tmp_path: Path
):
    (outcome,), _ = run_all({"a_good": fakes["a_good"]}, tmp_path)
    content = json.loads(Path(outcome.detail).read_text())

    assert (content["schema"], content["benchmark"], content["mode"]) == (2, "a_good", "full")
    assert (content["commit"], content["is_dirty"], content["machine"]) == ("0123", False, MACHINE)
    assert content["command"] == "python -m fakes.a_good 7", "no path of this machine"
    assert content["measurements"][0]["values"] == [7.0, 7.0, 7.0]
    assert content["ratios"][0]["is_met"] is False
    assert datetime.fromisoformat(content["date"]).tzinfo is not None
    assert content["versions"]["python"].startswith("3.")
    assert 0 < content["seconds"] < 120
    (outcome,), _ = run_all({"a_good": fakes["a_good"]}, tmp_path, mode="quick")
    assert outcome.result is not None
    assert outcome.result.measurements[0].values == (1.0, 1.0, 1.0)


def test_a_peers_benchmark_runs_in_its_environment_where_that_has_been_made(
    fakes: dict[str, Benchmark], tmp_path: Path
):
    of_a_peer = {"e_of_a_peer": fakes["e_of_a_peer"]}
    (outcome,), _ = run_all(of_a_peer, tmp_path)
    assert outcome.result is not None
    assert outcome.result.not_run == (NotRun("a peer", f"not in {sys.executable}"),)

    python = tmp_path / ".venv-peers" / "a_peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (outcome,), _ = run_all(of_a_peer, tmp_path)
    assert outcome.result is not None
    assert outcome.result.not_run == (NotRun("a peer", f"not in {python}"),)


def test_a_missed_bar_is_printed_plainly_and_is_no_failure(
    fakes: dict[str, Benchmark], tmp_path: Path
):
    outcomes, _ = run_all({name: fakes[name] for name in ("a_good", "e_of_a_peer")}, tmp_path)
    printed = list(summary(outcomes, 90.0))
    (missed,) = (line for line in printed if "MISSED" in line)
    assert missed.split() == ["a_good:", "slow", "2", "<=", "1", "MISSED"]
    assert any(line.startswith("e_of_a_peer: not run: a peer: ") for line in printed)
    assert printed[-1] == "2 benchmarks done, 0 failed; 0 bars met, 1 missed; 1.5 minutes"


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's descendants")
def test_an_interrupted_benchmark_cleans_up_and_its_ranks_end_with_it(tmp_path: Path):
    # Like torchrun, it starts a process in a new session.
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may ignore it
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
try:
    with open("pids", "w") as pids:
        print(os.getpid(), child.pid, file=pids)
    time.sleep(600)
finally:
    open("cleaned", "w").close()
"""
    os.mkfifo(tmp_path / "pids")
    words = (sys.executable, "-c", code)
    with (
        (tmp_path / "log").open("wb") as log,
        suppress(KeyboardInterrupt),
        started(words, tmp_path, os.environ, log),
    ):
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        raise KeyboardInterrupt

    assert (tmp_path / "cleaned").exists()
    # A kill that is sent takes a moment.
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def test_a_revision_is_dirty_by_changed_files_but_not_by_results(tmp_path: Path):
    assert Revision.of(tmp_path / "nowhere") == Revision(None, None)

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True)

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "--quiet", "--message", "one")
    clean = Revision.of(tmp_path)
    assert clean.commit is not None
    assert len(clean.commit) == 40
    assert clean.is_dirty is False

    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "one.json").write_text("{}")
    assert Revision.of(tmp_path) == clean
    (tmp_path / "code.py").write_text("2\n")
    assert Revision.of(tmp_path) == Revision(clean.commit, is_dirty=True)
