"""The command line; see the package's docstring and docs/gpu.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.core.help_format import ProgramParser
from tools.gpu_check.folder import ResultFolder
from tools.gpu_check.page import line_of, page_of
from tools.gpu_check.runner import STAGE_FAILED, Outcome, Runner
from tools.gpu_check.table import STAGES, selected

_BUDGET_SECONDS = 480.0
_SIMULATED_BUDGET_SECONDS = 1800.0  # two cores do what a GPU does
_INSTALL_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages. Returns 1 if one failed, 2 for a command line that cannot be honoured."""
    parser = ProgramParser(
        prog="python -m tools.gpu_check",
        description="Checks this project on a GPU: correctness, speed and limits (docs/gpu.md).",
    )
    parser.add_argument("--stages", metavar="A,B", help="stages to run (default: all)")
    parser.add_argument(
        "--list", action="store_true", help="list the stages and their time limits, and exit"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gpu_check"),
        metavar="DIR",
        help="directory for the results",
    )
    parser.add_argument(
        "--simulate", action="store_true", help="run on a simulated accelerator, with tiny sizes"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time for all stages together (default: 480; 1800 with --simulate)",
    )
    parser.add_argument(
        "--jobs", type=int, help="stages to run at a time, of those that measure no time"
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="directory of wheels of packages that are not installed",
    )
    arguments = parser.parse_args(argv)
    if arguments.list:
        for stage in STAGES:
            print(f"{stage.name:<18} {stage.limit_seconds:4.0f} s  {stage.help}")
        return 0
    try:
        stages = selected(STAGES, arguments.stages)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    start = time.monotonic()
    budget = arguments.budget or (
        _SIMULATED_BUDGET_SECONDS if arguments.simulate else _BUDGET_SECONDS
    )
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        folder = ResultFolder(arguments.out)
        site, problem = _installed(arguments.wheels, Path(scratch) / "site")
        if problem:
            print(problem, file=sys.stderr)
            folder.append({"stage": "", "kind": "note", "text": problem})
        runner = Runner(
            folder,
            Path(scratch),
            budget_seconds=budget - (time.monotonic() - start),
            simulate=arguments.simulate,
            num_jobs=arguments.jobs,
            site=site,
            tell=_tell,
        )
        outcomes = runner.run(stages)
    page = page_of(outcomes, simulate=arguments.simulate, seconds=time.monotonic() - start)
    folder.write_page(page)
    print("\n" + page)
    print(f"results: {folder.path}")
    return int(any(outcome.outcome == STAGE_FAILED for outcome in outcomes))


def _tell(outcome: Outcome) -> None:
    print(line_of(outcome), flush=True)


def _installed(wheels: Path | None, site: Path) -> tuple[Path | None, str]:
    """Installs wheels into a folder, without a network or their own dependencies.

    Returns:
        The folder, or None if nothing was installed, and what went wrong, in one line. The stages
        run all the same: those that need a missing package are skipped with its name.
    """
    if wheels is None:
        return None, ""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        return None, f"--wheels: there are none in {wheels}"

    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
    ]
    try:
        done = subprocess.run(
            [*command, *map(str, files)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return (
            None,
            f"--wheels: nothing was installed, pip was still running after {_INSTALL_SECONDS:.0f} "
            "s",
        )
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return (
            None,
            f"--wheels: nothing was installed, pip ended with {done.returncode}: {last_line}",
        )
    return site, ""


if __name__ == "__main__":
    sys.exit(main())
