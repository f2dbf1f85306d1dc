#!/usr/bin/env python3
"""`make gpu-check`: the suites on a GPU, and the benchmarks that need one, within ten minutes.

    python -m tools.gpu_check                  every stage
    python -m tools.gpu_check lanes watchdog   these alone

Every stage is a separate process with a time limit, so that a crash, a hang or a lost GPU context
ends that stage alone. docs/gpu.md describes the stages and the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.helpers.result import Result
from benchmarks.helpers.tables import measurement_lines, not_run_lines, ratio_lines

ROOT = Path(__file__).resolve().parents[1]
RESULT = "{result}"  # in a stage's command: the path of the file it writes
RESULTS_FILE, TABLE_FILE = "results.json", "table.txt"

_PROBE_SECONDS = 60.0
_GRACE_SECONDS = 5.0  # for pytest to write its results so far
_TAIL_LINES = 20
_MODULES = {"PyYAML": "yaml", "pillow": "PIL"}  # of packages whose module has another name
_TEST_PACKAGES = ("pytest", "hypothesis", "cloudpickle")
_PROBE = """
import json, torch
from benchmarks.helpers.versions import versions
from benchmarks.runner.running import machine
has_gpu = torch.cuda.is_available()
print(json.dumps({"has_gpu": has_gpu, "machine": machine(), "versions": versions()}))
"""


class Report(NamedTuple):
    """The result that a stage has written.

    Attributes:
        summary: Text of the stage's row in the table.
        lines: Lines below that row.
        content: The result as plain data, for the result file.
    """

    is_good: bool
    summary: str
    lines: tuple[str, ...]
    content: Any


def read_tests(path: Path) -> Report:
    """Reads pytest's results. A suite without a passed test is not good."""
    cases = list(ET.parse(path).getroot().iter("testcase"))
    failures, skipped = [], 0
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped += case.find("skipped") is not None
        failures += [
            {"test": name, "message": (found.get("message") or "").strip()[:2000]}
            for kind in ("failure", "error")
            for found in case.iter(kind)
        ]
    failed = {failure["test"] for failure in failures}
    counts = {
        "passed": len(cases) - skipped - len(failed),
        "failed": len(failed),
        "skipped": skipped,
    }
    shown = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
    lines = [f"{one['test']}: {' '.join(one['message'].split())[:200]}" for one in failures]
    is_good = not failures and counts["passed"] > 0
    return Report(is_good, shown or "no test ran", tuple(lines), {**counts, "failures": failures})


def read_figures(path: Path) -> Report:
    """Reads a benchmark's result. A bar that is missed is shown, and is no failure."""
    content = json.loads(path.read_text())
    result = Result.from_json(content)
    missed = sum(ratio.is_met is False for ratio in result.ratios)
    lines = [
        *measurement_lines(result),
        *ratio_lines([(ratio.name, ratio) for ratio in result.ratios]),
        *not_run_lines(result),
        *(f"{name} {value}" for name, value in content["facts"].get("planner_flags", {}).items()),
    ]
    summary = f"{len(result.measurements)} figures, {missed} bars missed"
    return Report(bool(result.measurements), summary, tuple(lines), content)


@dataclass(frozen=True)
class Stage:
    """A process of the check.

    Attributes:
        limit_seconds: The time after which the stage is stopped.
        words: The command, without the interpreter.
        read: Reads the file that the stage writes.
    """

    name: str
    limit_seconds: float
    words: tuple[str, ...]
    read: Callable[[Path], Report]


def _tests(name: str, limit_seconds: float, *paths: str) -> Stage:
    options = "-m pytest -q -p no:cacheprovider -m".split()
    words = (*options, "gpu and not wide", f"--junitxml={RESULT}", *paths)
    return Stage(name, limit_seconds, words, read_tests)


def _benchmark(name: str, limit_seconds: float, *arguments: str) -> Stage:
    words = ("-m", f"benchmarks.{name}", "--output", RESULT, *arguments)
    return Stage(name, limit_seconds, words, read_figures)


_CORE = "tests/unit_tests/core"
STAGES = (
    _benchmark("lanes", 40),
    _tests(
        "kernels",
        45,
        f"{_CORE}/optimizer/kernels/test_device_adam.py",
        f"{_CORE}/transformer/test_varlen_attention.py",
        f"{_CORE}/transformer/test_attention_core.py",
        f"{_CORE}/transformer/test_delta_rule.py",
        f"{_CORE}/test_host_memory.py",
    ),
    _tests("engine", 90, "tests/simulated_accelerator/test_engines_on_device.py"),
    _tests("offload", 40, f"{_CORE}/optimizer/cpu_offloading/test_bits.py"),
    _tests(
        "checkpoints",
        50,
        "tests/simulated_accelerator/test_checkpoints_on_device.py",
        f"{_CORE}/dist_checkpointing/test_device_saves.py",
        f"{_CORE}/dist_checkpointing/save/test_data_file.py",
    ),
    _tests(
        "watchdog",
        85,
        "tests/unit_tests/training/health/test_watchdog_on_device.py",
        "tests/functional_tests/test_accelerator_faults.py",
    ),
    _benchmark("gpu_step", 205, "--seconds=140"),
)


def run_stage(stage: Stage) -> dict[str, Any]:
    """Runs a stage to its end, or to its limit. Returns its record for the result file."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        result, log = Path(folder) / "result", Path(folder) / "log.txt"
        words = [word.replace(RESULT, str(result)) for word in stage.words]
        start = time.monotonic()
        status = _run(words, log, stage.limit_seconds)
        seconds = time.monotonic() - start
        report = _read(stage, result)
        tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]

    reason = ""
    if status is None:
        reason = f"stopped after {stage.limit_seconds:g} s"
    elif status < 0:
        reason = f"ended by {signal.Signals(-status).name}"
    elif status > 0 and (report is None or report.is_good):
        reason = f"exit code {status}"
    is_good = report is not None and report.is_good and not reason
    return {
        "stage": stage.name,
        "outcome": "passed" if is_good else "FAILED",
        "seconds": round(seconds, 1),
        "summary": "; ".join(filter(None, (reason, report.summary if report else "no result"))),
        "lines": list(report.lines) if report else [],
        "found": report.content if report else None,
        "log": [] if is_good else tail,
    }


def _run(words: Sequence[str], log: Path, limit_seconds: float) -> int | None:
    """Runs Python with these words. Returns its exit status, or None if it had to be stopped.

    The process has a session, which is killed at the end, so that no rank survives its stage.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        # Only to the process itself: pytest then writes its results so far.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(stage: Stage, path: Path) -> Report | None:
    """Reads a stage's result. Returns None for a missing or damaged file."""
    try:
        return stage.read(path)
    except (OSError, ValueError, KeyError, TypeError, ET.ParseError):
        return None


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def table_of(records: Iterable[dict[str, Any]]) -> str:
    """A row for each stage, with its figures or failures below it."""
    lines = [f"{'stage':<12} {'outcome':<8} {'seconds':>8}  found"]
    for record in records:
        row = (record["stage"], record["outcome"], record["seconds"], record["summary"])
        lines.append("{:<12} {:<8} {:>8.1f}  {}".format(*row))
        lines += [f"    {line}" for line in record["lines"]]
        lines += [f"    | {line}" for line in record["log"]]
    return "\n".join(lines) + "\n"


def missing_packages(names: Iterable[str]) -> list[str]:
    """The packages whose module this interpreter does not find."""
    return [name for name in names if importlib.util.find_spec(_MODULES.get(name, name)) is None]


def needed_packages() -> list[str]:
    """The dependencies in pyproject.toml, and the packages of the tests."""
    # Python 3.10 has no tomllib.
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None, "pyproject.toml lists dependencies"
    return [*re.findall(r'"([A-Za-z0-9_-]+)', listed[1]), *_TEST_PACKAGES]


def probe() -> dict[str, Any] | str:
    """Returns the machine and the versions, or a line about missing requirements."""
    missing = missing_packages(needed_packages())
    if missing:
        return f"the packages {', '.join(missing)} (python -m pip install -e '.[dev]')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path()},
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        return f"a PyTorch that finds the GPU; asking it failed: {said[-1]}"
    if not found.pop("has_gpu"):
        return "an NVIDIA GPU that PyTorch can use: torch.cuda.is_available() is False here"
    return found


def check(stages: Sequence[Stage], folder: Path, here: dict[str, Any]) -> bool:
    """Runs stages and writes the results after each. Returns whether all passed."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    content = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **here,
        "stages": records,
    }
    for stage in stages:
        print(f"{stage.name} ... (at most {stage.limit_seconds:g} s)", flush=True)
        records.append(run_stage(stage))
        (folder / RESULTS_FILE).write_text(json.dumps(content, indent=1) + "\n")
        (folder / TABLE_FILE).write_text(table_of(records))
    print(f"\n{table_of(records)}\nresults: {folder / RESULTS_FILE}")
    return all(record["outcome"] == "passed" for record in records)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a stage failed, 2 if the machine lacks a requirement."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check",
        description="Runs the suites and benchmarks that need a GPU (docs/gpu.md).",
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gpu_check"),
        metavar="DIR",
        help="directory for results.json and table.txt (default: runs/gpu_check)",
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.stages).difference(names)
    if unknown:
        parser.error(f"expected stages of {', '.join(names)}, got {', '.join(sorted(unknown))}")

    here = probe()
    if isinstance(here, str):
        print(f"gpu-check needs {here}", file=sys.stderr)
        return 2
    chosen = [stage for stage in STAGES if not arguments.stages or stage.name in arguments.stages]
    return int(not check(chosen, arguments.out, here))


if __name__ == "__main__":
    sys.exit(main())
