"""Stages that misbehave, for the tests of gpu-check's runner. Imports no torch, so that each takes
a blink.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu_check.findings import Findings, SkippedError


def passes(findings: Findings) -> None:
    findings.expect("two and two", 2 + 2, 4)
    findings.figure("speed", 12.345678, "GB/s", is_telling=True)


def fails_a_check(findings: Findings) -> None:
    findings.expect("two and two", 2 + 2, 5)
    findings.expect("one", 1, 1)


def raises(findings: Findings) -> None:
    findings.expect("one", 1, 1)
    raise ValueError("Expected a fish, got a bird.")


def checks_nothing(findings: Findings) -> None:
    findings.figure("speed", 1.0)


def hangs(findings: Findings) -> None:
    findings.expect("before it hung", 1, 1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (findings.shared / "child").write_text(str(child.pid))
    time.sleep(600)


def dies(findings: Findings) -> None:
    findings.expect("before it died", 1, 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def floods_its_log(findings: Findings) -> None:
    findings.expect("before it flooded", 1, 1)
    while True:
        print("x" * 100_000)


def floods_its_records(findings: Findings) -> None:
    for number in range(4000):
        findings.expect("the same" * 30, number, number)


def keeps_files(findings: Findings) -> None:
    findings.expect("one", 1, 1)
    for number in range(7):
        path = findings.scratch / f"trace{number}.gz"
        path.write_bytes(b"x" * 1000)
        findings.keep(path)


def keeps_a_large_file(findings: Findings) -> None:
    findings.expect("one", 1, 1)
    path: Path = findings.scratch / "large.gz"
    path.write_bytes(b"x" * (15 << 20))
    findings.keep(path)


def lacks_a_package(_findings: Findings) -> None:
    import no_such_package  # noqa: F401


def lacks_a_part_of_this_project(_findings: Findings) -> None:
    import tools.gpu_check.no_such_module  # noqa: F401


def cannot_say(_findings: Findings) -> None:
    raise SkippedError("no usable GPU")


def takes_its_time(findings: Findings) -> None:
    findings.expect("one", 1, 1)
    findings.share(findings.stage, [time.monotonic(), time.sleep(0.7), time.monotonic()])
