"""The block `peers`: this project beside others, property by property and figure by figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reporting.rounding import figure, number, ratio
from benchmarks.reporting.stored import StoredResult
from benchmarks.reporting.tables import NOT_MEASURED, measured_on, table

CLAIMS = Path(__file__).with_name("peers.yaml")


@dataclass(frozen=True)
class Claim:
    """What a project says or does, and where that can be checked."""

    claim: str
    source: str


@dataclass(frozen=True)
class MeasuredRow:
    """A row that is filled in from a result.

    Attributes:
        group: Of the measurements to show.
        fact: In the place of a group: the fact that has a value for each side.
        relative: Whether medians are given as multiples of ours.
        sides: By column, the side's name where it is not the column's own.
    """

    name: str
    benchmark: str
    group: str | None = None
    fact: str | None = None
    relative: bool = False
    sides: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.group is None) == (self.fact is None):
            raise ValueError(f"Expected a group or a fact for the row {self.name!r}.")


@dataclass(frozen=True)
class Column:
    """A project: its title, and what benchmarks call it."""

    title: str
    side: str


@dataclass(frozen=True)
class Comparison:
    """All that `peers.yaml` says; mappings are by column."""

    columns: Mapping[str, Column]
    properties: Mapping[str, Mapping[str, Claim]]  # by the row's name
    measured: Sequence[MeasuredRow]
    versions: str

    def __post_init__(self) -> None:
        for name, claims in self.properties.items():
            if claims.keys() != self.columns.keys():
                raise ValueError(
                    f"Expected claims about {', '.join(self.columns)} in the row {name!r}, "
                    f"got {', '.join(claims)}."
                )


def read_comparison(path: Path = CLAIMS) -> Comparison:
    """The comparison's data file. TypeError and ValueError for what does not belong there."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Comparison(
        columns={key: Column(**column) for key, column in content["columns"].items()},
        properties={
            row["name"]: {key: Claim(**claim) for key, claim in row.items() if key != "name"}
            for row in content["properties"]
        },
        measured=[MeasuredRow(**row) for row in content["measured"]],
        versions=content["versions"],
    )


def peers_block(comparison: Comparison, results: Mapping[str, StoredResult], root: str) -> str:
    """Markdown. `root` leads from the page to the project's root: "" or "../"."""
    sources = _Sources(root)
    rows = [
        [name, *(sources.cited(claims[key]) for key in comparison.columns)]
        for name, claims in comparison.properties.items()
    ]
    rows += [_measured_row(row, comparison.columns, results) for row in comparison.measured]

    header = ["", *(column.title for column in comparison.columns.values())]
    used = [results[name] for name in results if name in {r.benchmark for r in comparison.measured}]
    lines = [*table(header, rows), "", *measured_on(used), comparison.versions]
    return "\n".join(lines)


class _Sources:
    """Numbers the sources in the order in which they are cited."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._numbers: dict[str, int] = {}

    def cited(self, claim: Claim) -> str:
        """A page of this project is linked from the claim itself, others by their number."""
        if claim.source.startswith("docs/"):
            page = self._root + claim.source
            # From a page of docs/, its neighbours need no detour.
            return f"[{claim.claim}]({page.replace('../docs/', '')})"
        place = self._numbers.setdefault(claim.source, len(self._numbers) + 1)
        return f"{claim.claim} [[{place}]]({claim.source})"


def _measured_row(
    row: MeasuredRow, columns: Mapping[str, Column], results: Mapping[str, StoredResult]
) -> list[str]:
    result = results.get(row.benchmark)
    if result is None:
        return [row.name, *(NOT_MEASURED for _ in columns)]

    sides = {key: row.sides.get(key, column.side) for key, column in columns.items()}
    ours = next(iter(sides.values()))
    return [row.name, *(_cell(row, result, side, ours) for side in sides.values())]


def _cell(row: MeasuredRow, result: StoredResult, side: str, ours: str) -> str:
    if row.fact is not None:
        by_side = result.result.facts.get(row.fact)
        if isinstance(by_side, Mapping) and side in by_side:
            return _fact(by_side[side])
    else:
        medians = {
            one.side: (one.median, one.unit)
            for one in result.result.measurements
            if one.group == row.group
        }
        if side in medians:
            median, unit = medians[side]
            base = medians.get(ours, (0.0, ""))[0] if row.relative else 0.0
            shown = figure(median, unit)
            return f"{ratio(median / base)} ({shown})" if base else shown

    why = {one.side: one.why for one in result.result.not_run}
    return f"not run: {why[side]}" if side in why else NOT_MEASURED


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)
