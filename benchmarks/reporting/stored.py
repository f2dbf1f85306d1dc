"""Stored results of benchmarks, with the machine, date and commit of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.helpers.result import Result

SCHEMA = 2


@dataclass(frozen=True)
class StoredResult:
    """A full run's result file.

    Attributes:
        file: The file's name in the directory of results.
        date: ISO 8601, UTC.
        commit: Of the working tree that ran; `is_dirty` where that tree had been changed. None for
            both where there was no git.
        machine: The CPU, its cores, the accelerator.
        versions: Of Python, torch and the peers.
    """

    benchmark: str
    file: str
    date: str
    commit: str | None
    is_dirty: bool | None
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    result: Result

    @property
    def day(self) -> str:
        return self.date[:10]

    @property
    def machine_line(self) -> str:
        """The machine and the version of torch, for captions."""
        parts = [str(self.machine["cpu"]), f"{self.machine['cores']} cores"]
        if self.machine.get("memory_gib"):
            parts.append(f"{self.machine['memory_gib']:.0f} GiB")
        if self.machine.get("accelerator"):
            parts.append(str(self.machine["accelerator"]))
        return ", ".join([*parts, f"torch {self.versions['torch']}"])

    @property
    def commit_line(self) -> str:
        if self.commit is None:
            return "unknown"
        return f"{self.commit[:7]}{' with changes' if self.is_dirty else ''}"


class ResultFileError(ValueError):
    """A file in the directory of results cannot be read as a result."""


def stored_results(folder: Path) -> dict[str, StoredResult]:
    """The results of full runs in a directory by benchmark, in the order of names.

    Raises:
        ResultFileError: for a file that is not JSON, has another schema or another name than its
            benchmark, lacks a field, or has a number that is not finite.
    """
    found = map(_read, sorted(folder.glob("*.json")))
    return {result.benchmark: result for result in found if result is not None}


def provenance(results: Sequence[StoredResult]) -> list[str]:
    """A line for each machine, with the dates and commits of its results."""
    by_machine: dict[str, list[StoredResult]] = {}
    for result in results:
        by_machine.setdefault(result.machine_line, []).append(result)
    return [
        f"{machine} · {_range(sorted({one.day for one in own}))} · {_commits(own)}"
        for machine, own in sorted(by_machine.items())
    ]


def _range(days: Sequence[str]) -> str:
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _commits(results: Sequence[StoredResult]) -> str:
    in_time = sorted(results, key=lambda one: one.date)
    lines = list(dict.fromkeys(one.commit_line for one in in_time))
    if len(lines) == 1:
        return f"commit {lines[0]}"
    return f"commits {lines[0]} to {lines[-1]}"


def _read(path: Path) -> StoredResult | None:
    """None for a quick run's result."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultFileError(f"Expected JSON in {path}, got: {error}.") from error

    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ResultFileError(f"Expected schema {SCHEMA} in {path}, got {schema!r}.")
    for place, number in _numbers(content):
        if not math.isfinite(number):
            raise ResultFileError(f"Expected finite numbers in {path}, got {number} at {place}.")

    try:
        return _stored(path.name, content) if content["mode"] == "full" else None
    except KeyError as error:
        raise ResultFileError(f"Expected the field {error} in {path}; it is missing.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultFileError(f"Expected a result of schema {SCHEMA} in {path}: {error}") from error


def _stored(file: str, content: Mapping[str, Any]) -> StoredResult:
    stored = StoredResult(
        benchmark=content["benchmark"],
        file=file,
        date=content["date"],
        commit=content["commit"],
        is_dirty=content["is_dirty"],
        machine=content["machine"],
        versions=content["versions"],
        result=Result.from_json(content),
    )
    if file != f"{stored.benchmark}.json":
        raise ValueError(f"it is the result of {stored.benchmark}, got the name {file}.")
    # Evaluated here, so that a field of another type is an error of this file.
    _ = stored.machine_line, stored.commit_line, stored.day
    return stored


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{place}[{index}]")
    elif isinstance(value, float):
        yield place, value
