"""The blocks `results`, of single benchmarks and of pictures, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, NotRun, Ratio
from benchmarks.reporting.contents import PICTURES
from benchmarks.reporting.rounding import bar, figure, ratio, spread
from benchmarks.reporting.stored import StoredResult, provenance

NOT_MEASURED = "not measured"
COMPUTED = "computed_table"  # the fact that a benchmark without measurements shows instead


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar within a cell does not end it."""
    return [_row(header), "|" + "---|" * len(header), *(_row(row) for row in rows)]


def measured_on(results: Sequence[StoredResult]) -> list[str]:
    """The lines below a table: one for each machine, or a note without results."""
    lines = provenance(results)
    if not lines:
        return ["No result has been stored yet."]
    if len(lines) == 1:
        return [f"Measured on {lines[0]}."]
    return ["Measured on", "", *(f"- {line}" for line in lines)]


def results_block(
    benchmarks: Iterable[Benchmark], results: Mapping[str, StoredResult], root: str
) -> str:
    """Each benchmark with its question and the number of bars that are met. Ratios that miss their
    bar are listed, and so are sides that did not run.

    Args:
        benchmarks: All benchmarks.
        root: The path from the page to the project's root, "" or "../".
    """
    rows = [_overview_row(one, results.get(one.name), root) for one in benchmarks]
    header = ["benchmark", "what is compared", "bars met", "missed, or not run"]
    lines = table(header, rows)
    return "\n".join([*lines, "", *measured_on([*results.values()])])


def benchmark_block(result: StoredResult | None, root: str) -> str:
    """One benchmark's sides with median and spread, its ratios that have a bar, and the sides that
    did not run. Ratios without a bar follow from the medians; they are shown only without medians.
    A benchmark that only computes has a table instead.
    """
    if result is None:
        return f"{NOT_MEASURED.capitalize()}: no full run's result has been stored yet."

    found = result.result
    has_groups = any(one.group for one in found.measurements)
    computed = found.facts.get(COMPUTED)
    lines: list[str] = []
    if computed is not None:
        lines += table(computed["header"], computed["rows"])
    if found.measurements or found.not_run:
        rows = [*_measurement_rows(found.measurements), *map(_not_run_row, found.not_run)]
        header = ["", "side", "median", "middle half of the rounds", "rounds"]
        first = 0 if has_groups else 1
        lines += table(header[first:], [row[first:] for row in rows])

    with_bars = [one for one in found.ratios if one.is_met is not None]
    if with_bars:
        value = "measured" if computed is None else "computed"
        lines += ["", *table(["ratio", value, "bar", ""], [_ratio(one) for one in with_bars])]
    elif not found.measurements and found.ratios:
        lines += ["", *table(["ratio", "measured"], [_ratio(one)[:2] for one in found.ratios])]
    link = f"([result]({root}benchmarks/results/{result.file}))"
    if computed is not None:
        return "\n".join([*lines, "", f"Computed, not measured {link}."])
    *above, last = measured_on([result])
    return "\n".join([*lines, "", *above, f"{last.rstrip('.')} {link}."]).strip("\n")


def file_names(picture: str) -> dict[str, str]:
    """The names of a picture's files by theme."""
    return {theme: f"{picture}_{theme}.svg" for theme in ("light", "dark")}


def picture_block(name: str, *, is_drawn: bool, root: str) -> str:
    """The picture in the variant that suits the page's brightness.

    Code hosts support `<picture>` on every page. The site has a separate switch, which only the
    fragment of an image's address follows; pages in docs/ use the fragment.
    """
    if not is_drawn:
        return f"*{PICTURES[name]}: {NOT_MEASURED} yet.*"
    files = file_names(name)
    if root:
        return "\n".join(
            f"![{PICTURES[name]}](img/{file}#gh-{theme}-mode-only)" for theme, file in files.items()
        )
    return "\n".join(
        [
            "<picture>",
            f'<source media="(prefers-color-scheme: dark)" srcset="docs/img/{files["dark"]}">',
            f'<img alt="{PICTURES[name]}" src="docs/img/{files["light"]}" width="800">',
            "</picture>",
        ]
    )


def _overview_row(benchmark: Benchmark, result: StoredResult | None, root: str) -> list[str]:
    if result is None:
        return [f"`{benchmark.name}`", benchmark.question, NOT_MEASURED, ""]

    name = f"[`{benchmark.name}`]({root}benchmarks/results/{result.file})"
    with_bars = [one for one in result.result.ratios if one.is_met is not None]
    missed = [one for one in with_bars if not one.is_met]
    count = f"{len(with_bars) - len(missed)} of {len(with_bars)}" if with_bars else "no bars"
    notes = [
        f"{one.name} = {ratio(one.value, one.at_least, one.at_most)} "
        f"({bar(one.at_least, one.at_most)})"
        for one in missed
    ]
    notes += [f"{one.side} not run: {one.why}" for one in result.result.not_run]
    return [name, benchmark.question, count, "; ".join(notes)]


def _ratio(one: Ratio) -> list[str]:
    verdict = {None: "", True: "met", False: "**missed**"}[one.is_met]
    value = ratio(one.value, one.at_least, one.at_most)
    return [one.name, value, bar(one.at_least, one.at_most), verdict]


def _measurement_rows(measurements: Sequence[Measurement]) -> Iterator[list[str]]:
    """Group by group, in the order of their first measurements; the first row of a group has its
    name. A single value has no spread.
    """
    groups = list(dict.fromkeys(one.group for one in measurements))
    before = None
    for one in sorted(measurements, key=lambda one: groups.index(one.group)):
        yield [
            one.group if one.group != before else "",
            one.side,
            figure(one.median, one.unit),
            spread(*one.quartiles, one.unit) if len(one.values) > 1 else "",
            str(len(one.values)),
        ]
        before = one.group


def _not_run_row(one: NotRun) -> list[str]:
    return ["", one.side, f"not run: {one.why}", "", ""]


def _row(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.replace("|", r"\|").split()) for cell in cells)
    return "| " + " | ".join(escaped) + " |"
