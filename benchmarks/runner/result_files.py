"""Result files: one `NAME.json` for each benchmark in a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.runner.revision import Revision
from megatron.core.files import published

SCHEMA = 2


class Origin(NamedTuple):
    """Where all results of one run of the runner come from."""

    mode: str  # "full" or "quick"
    revision: Revision
    machine: Mapping[str, Any]


def write_result(
    folder: Path,
    benchmark: Benchmark,
    origin: Origin,
    handed_over: Mapping[str, Any],
    *,
    command: str,
    seconds: float,
) -> Path:
    """Writes the result of a benchmark, whole or not at all, in the place of an earlier one."""
    content = {
        "schema": SCHEMA,
        "benchmark": benchmark.name,
        "mode": origin.mode,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": origin.revision.commit,
        "is_dirty": origin.revision.is_dirty,
        "command": command,
        "machine": dict(origin.machine),
        **handed_over,
        "seconds": round(seconds, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark.name}.json"
    with published(path) as stream:
        stream.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return path


def seconds_of(folder: Path) -> dict[str, float]:
    """How long each benchmark with a result in `folder` took."""
    contents = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    return {content["benchmark"]: content["seconds"] for content in contents}
