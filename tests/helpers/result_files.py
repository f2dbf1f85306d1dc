"""Result files as the benchmarks' runner writes them, with figures that nobody measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers.result import Measurement, NotRun, Ratio, Result


def write_result_file(
    folder: Path,
    benchmark: str,
    measurements: Sequence[Measurement] = (),
    ratios: Sequence[Ratio] = (),
    not_run: Sequence[NotRun] = (),
    facts: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Path:
    """Writes a full run's result of 3 May 2026 and returns its path; `changed` fields differ."""
    result = Result(tuple(measurements), tuple(ratios), tuple(not_run), {}, facts or {})
    content = {
        "schema": 2,
        "benchmark": benchmark,
        "mode": "full",
        "date": "2026-05-03T10:00:00+00:00",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "is_dirty": False,
        "command": f"python -m benchmarks.{benchmark}",
        "machine": {
            "cpu": "A CPU",
            "cores": 2,
            "memory_gib": 24.0,
            "platform": "Linux",
            "accelerator": None,
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        **result.to_json(),
        "seconds": 60.0,
        **changed,
    }
    path = folder / f"{benchmark}.json"
    path.write_text(json.dumps(content))
    return path
