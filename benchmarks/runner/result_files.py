"""Result files: their content, their names, and which are the newest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
    """Writes `NAME_DATE.json`, whole or not at all, in the place of another of today."""
    now = datetime.now(timezone.utc)
    content = {
        "schema": SCHEMA,
        "benchmark": benchmark.name,
        "mode": origin.mode,
        "date": now.isoformat(timespec="seconds"),
        "commit": origin.revision.commit,
        "is_dirty": origin.revision.is_dirty,
        "command": command,
        "machine": dict(origin.machine),
        **handed_over,
        "seconds": round(seconds, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark.name}_{now.date().isoformat()}.json"
    with published(path) as stream:
        stream.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return path


def newest(*folders: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest result of each (benchmark, mode)."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for content in _results(*folders):
        key = (content["benchmark"], content["mode"])
        if key not in found or found[key]["date"] < content["date"]:
            found[key] = content
    return found


def _results(*folders: Path) -> Iterator[dict[str, Any]]:
    """Those of this schema; results from before it are files of many shapes."""
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("schema") == SCHEMA:
            yield content
