"""The block `peers`: this project and others, property by property and figure by figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reporting.rounding import figure, number, ratio
from benchmarks.reporting.stored import StoredResult
from benchmarks.reporting.tables import NOT_MEASURED, measured_on, table

CLAIMS = Path(__file__).with_name("peers.yaml")
NOT_RUN = "not run"


def _resumes(resume: Mapping[str, Any]) -> str:
    """Whether new processes computed the same bits as the old ones."""
    if resume["is_exact"]:
        return "yes"
    largest = max(resume["largest_difference"].values())
    return f"no, they differ by up to {number(largest)}"


def _loads(resume: Mapping[str, Any]) -> str:
    """On which other numbers of ranks the checkpoint loads, and whether as it was saved."""
    loaded = _numbers_of_ranks(resume)
    if loaded:
        return f"yes, on {loaded}"
    converted = _numbers_of_ranks(resume.get("after_conversion", {}))
    return f"after conversion, on {converted}" if converted else "no"


def _numbers_of_ranks(found: Mapping[str, Any]) -> str:
    return " and ".join(
        number for number, one in found.get("loads_on", {}).items() if one["loads"] == "yes"
    )


# What `end_to_end` finds out about each side's checkpoint, in words.
FACTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"resumes": _resumes, "loads": _loads}


@dataclass(frozen=True)
class Claim:
    """A property of a project, and its source."""

    claim: str
    source: str


@dataclass(frozen=True)
class MeasuredRow:
    """A row that is filled in from a result.

    Attributes:
        group: Of the measurements to show.
        fact: One of `FACTS`, instead of a group.
        relative: Whether medians are given as multiples of this project's.
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
        if self.fact is not None and self.fact not in FACTS:
            raise ValueError(
                f"Expected {' or '.join(FACTS)} as the fact of {self.name!r}, got {self.fact!r}."
            )


@dataclass(frozen=True)
class Column:
    """A project: its title, and what benchmarks call it."""

    title: str
    side: str


@dataclass(frozen=True)
class Comparison:
    """The content of `peers.yaml`; mappings are by column."""

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
    names = {row.benchmark for row in comparison.measured}
    used = [result for name, result in results.items() if name in names]
    lines = [*table(header, rows), "", *measured_on(used), "", comparison.versions]
    not_run = _not_run_lines(comparison, used)
    return "\n".join([*lines, "", *not_run] if not_run else lines)


def _not_run_lines(comparison: Comparison, used: Sequence[StoredResult]) -> list[str]:
    """The reason of each "not run", once."""
    sides = {column.side for column in comparison.columns.values()}
    sides.update(side for row in comparison.measured for side in row.sides.values())
    lines = [
        f"- Not run in `{result.benchmark}`: {one.side}, {one.why}"
        for result in used
        for one in result.result.not_run
        if one.side in sides
    ]
    return [" ".join(line.split()) for line in lines]


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
        of_sides = result.result.facts.get("sides", {})
        if side in of_sides and "resume" in of_sides[side]:
            return FACTS[row.fact](of_sides[side]["resume"])
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

    return NOT_RUN if side in {one.side for one in result.result.not_run} else NOT_MEASURED
