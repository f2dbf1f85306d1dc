"""tools/gpu_check.py: stages end alone, and leave one result file and one table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_check
from tools.gpu_check import RESULT, STAGES, Stage, check, main, read_figures, read_tests, run_stage

ROOT = Path(__file__).resolve().parents[3]
HERE = {"machine": {"cores": 2}, "versions": {"python": "3"}}

WRITES = """
import sys
open(sys.argv[1], "w").write('<testsuite><testcase classname="a" name="b"/></testsuite>')
"""
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open(sys.argv[2], "w").write(str(child.pid))
print("before it hung", flush=True)
time.sleep(1000)
"""
ENDS = {
    "passes": WRITES,
    "raises": "raise ValueError('a fish')",
    "dies": WRITES + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "fails after it has written": WRITES + "sys.exit(3)",
    "writes nothing": "",
}


def stage(program: str, *arguments: str, limit_seconds: float = 60.0) -> Stage:
    return Stage("one", limit_seconds, ("-c", program, RESULT, *arguments), read_tests)


def junit(folder: Path, *cases: str) -> Path:
    path = folder / "junit.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


PASSED = '<testcase classname="m" name="passes"/>'
FAILED = '<testcase classname="m" name="fails"><failure message="assert 1 == 2"/></testcase>'
BROKEN = '<testcase classname="m" name="breaks"><error message="no disk"/></testcase>'
SKIPPED = '<testcase classname="m" name="skips"><skipped message="no GPU"/></testcase>'


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("name", "outcome", "summary"),
    [
        ("passes", "passed", "1 passed"),
        ("raises", "FAILED", "exit code 1; no result"),
        ("dies", "FAILED", "ended by SIGSEGV; 1 passed"),
        ("fails after it has written", "FAILED", "exit code 3; 1 passed"),
        ("writes nothing", "FAILED", "no result"),
    ],
)
def test_a_stage_records_how_it_ended(name, outcome, summary):
    record = run_stage(stage(ENDS[name]))
    assert (record["outcome"], record["summary"]) == (outcome, summary)


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_GRACE_SECONDS", 0.1)
    pid = tmp_path / "pid"
    for limit_seconds in (1.0, 60.0):  # a busy machine may take longer to start it
        record = run_stage(stage(HANGS, str(pid), limit_seconds=limit_seconds))
        assert record["outcome"] == "FAILED"
        assert record["summary"].startswith(f"stopped after {limit_seconds:.0f} s")
        if "before it hung" in record["log"]:
            break
    assert "before it hung" in record["log"]
    deadline = time.monotonic() + 60
    while is_running(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid.read_text()))


def test_a_check_continues_after_a_failure_and_writes_one_result_file_and_one_table(tmp_path):
    stages = [stage(ENDS["raises"]), stage(ENDS["passes"])]
    assert not check(stages, tmp_path / "out", HERE)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "results.json",
        "table.txt",
    ]
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["machine"] == HERE["machine"]
    assert [record["outcome"] for record in content["stages"]] == ["FAILED", "passed"]
    table = (tmp_path / "out" / "table.txt").read_text()
    assert "ValueError: a fish" in table
    assert check(stages[1:], tmp_path / "out", HERE)


def test_tests_that_fail_or_break_are_named_with_their_messages(tmp_path):
    report = read_tests(junit(tmp_path, PASSED, FAILED, BROKEN, SKIPPED))
    assert not report.is_good
    counts = {name: report.content[name] for name in ("passed", "failed", "skipped")}
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert report.lines == ("m::fails: assert 1 == 2", "m::breaks: no disk")
    assert read_tests(junit(tmp_path, PASSED, SKIPPED)).is_good


@pytest.mark.parametrize("cases", [(), (SKIPPED,)])
def test_a_suite_without_a_run_test_fails(tmp_path, cases):
    assert not read_tests(junit(tmp_path, *cases)).is_good


def benchmark_result(**changes: Any) -> dict[str, Any]:
    measurement = {"group": "copies", "side": "h2d", "unit": "GB/s", "values": [50.0, 52.0]}
    ratio = {"name": "slow", "value": 2.0, "at_least": None, "at_most": 1.0}
    return {
        "settings": {},
        "measurements": [measurement],
        "ratios": [ratio],
        "not_run": [{"side": "FSDP2", "why": "no memory"}],
        "facts": {"planner_flags": {"--link": "51.0 GB/s"}},
        **changes,
    }


def test_figures_of_a_benchmark_are_shown_and_a_missed_bar_is_no_failure(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(benchmark_result()))
    report = read_figures(path)
    assert report.is_good
    assert report.summary == "1 figures, 1 bars missed"
    for value in ("copies, h2d", "MISSED", "FSDP2: no memory", "--link 51.0 GB/s"):
        assert any(value in line for line in report.lines), value
    path.write_text(json.dumps(benchmark_result(measurements=[])))
    assert not read_figures(path).is_good


def test_all_stages_together_end_within_ten_minutes_and_name_what_exists():
    grace = gpu_check._GRACE_SECONDS
    assert sum(one.limit_seconds + grace for one in STAGES) <= 600
    assert len({one.name for one in STAGES}) == len(STAGES)
    paths = [word for one in STAGES for word in one.words if word.startswith("tests/")]
    assert len(paths) == 12
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert all(any(RESULT in word for word in one.words) for one in STAGES)


@pytest.mark.parametrize(
    ("probed", "lacks"),
    [
        ("print('{\"has_gpu\": false}')", "torch.cuda.is_available() is False"),
        ("raise OSError('libcuda is missing')", "OSError: libcuda is missing"),
    ],
)
def test_a_machine_without_a_gpu_is_one_line(tmp_path, capsys, monkeypatch, probed, lacks):
    monkeypatch.setattr(gpu_check, "_PROBE", probed)
    assert main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert lacks in line


def test_stages_are_chosen_by_name_and_unknown_names_are_rejected(monkeypatch, capsys):
    ran: list[str] = []

    def remember(stages: list[Stage], *_: object) -> bool:
        ran.extend(one.name for one in stages)
        return len(stages) > 1

    monkeypatch.setattr(gpu_check, "probe", lambda: dict(HERE))
    monkeypatch.setattr(gpu_check, "check", remember)
    assert main(["watchdog", "lanes"]) == 0
    assert ran == ["lanes", "watchdog"]
    assert main(["lanes"]) == 1
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_missing_requirement_of_the_machine_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "_TEST_PACKAGES", ("pytest", "no_such_package"))
    assert main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_such_package" in line
    assert list(tmp_path.iterdir()) == []
