"""The process of one stage, or of one of its ranks: calls a function and writes down how it ended.

    python -m tools.gpu_check.stage '{"function": "tools.gpu_check.adam:adam", ...}'

Exit status: 0 if every check passed, 1 if one failed or the function raised, 3 if a package is
missing.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu_check.findings import Findings, SkippedError

PASSED, FAILED, MISSING = 0, 1, 3
_DUMP_SECONDS = 3.0  # before the limit: what each thread was doing then goes to the log


def main(argument: str) -> int:
    """Runs the stage that a JSON object describes."""
    order: dict[str, Any] = json.loads(argument)
    deadline = float(order["deadline"])
    # The parent kills this process without a word, and a log that ends in the stacks says where it
    # hung.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, deadline - _DUMP_SECONDS - time.monotonic()))
    findings = Findings(
        order["stage"],
        Path(order["records"]),
        Path(order["scratch"]),
        Path(order["shared"]),
        simulate=order["simulate"],
        deadline=deadline,
        rank=order.get("arguments", {}).get("rank"),
    )
    return _call(_function(order["function"]), findings, order.get("arguments", {}))


def _function(name: str) -> Callable[..., object]:
    """Imported when it is called, so that what is missing is reported as any other failure."""

    def call(*arguments: Any, **options: Any) -> object:
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)(*arguments, **options)

    return call


def _call(function: Callable[..., object], findings: Findings, arguments: dict[str, Any]) -> int:
    try:
        function(findings, **arguments)
    except SkippedError as reason:
        findings.record("skip", reason=str(reason))
        return FAILED if findings.num_failed else MISSING
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("megatron", "tools", "tests"):
            findings.error(traceback.format_exc())
            return FAILED
        findings.record(
            "skip", reason=f"{error.name} is not installed; carry its wheel with --wheels"
        )
        return MISSING
    except BaseException:
        traceback.print_exc()
        findings.error(traceback.format_exc())
        return FAILED

    if not findings.num_checks:
        findings.error("The stage ended without having checked anything.")
    return FAILED if findings.num_failed else PASSED


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of collectives and lanes may be stuck, and have nothing more to say.
    os._exit(status)
