"""A result as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.helpers.result import Ratio, Result


def measurement_lines(result: Result) -> Iterator[str]:
    """A line a side: its median and its spread."""
    names = [", ".join(filter(None, (one.group, one.side))) for one in result.measurements]
    width = max(map(len, names), default=0)
    for name, one in zip(names, result.measurements, strict=True):
        first, third = one.quartiles
        yield (
            f"{name:>{width}}  {figure(one.median):>10} {one.unit:9} "
            f"quartiles {figure(first)} to {figure(third)}, "
            f"all {figure(min(one.values))} to {figure(max(one.values))}"
        )


def ratio_lines(named: Sequence[tuple[str, Ratio]]) -> Iterator[str]:
    """A line a ratio under the name it is listed by: its value, its bar, whether it is met."""
    width = max((len(name) for name, _ in named), default=0)
    for name, ratio in named:
        yield f"{name:>{width}}  {figure(ratio.value):>10}  {verdict(ratio)}".rstrip()


def verdict(ratio: Ratio) -> str:
    """The bar and whether it is met; "" where none is stated."""
    limits = []
    if ratio.at_least is not None:
        limits.append(f">= {ratio.at_least:g}")
    if ratio.at_most is not None:
        limits.append(f"<= {ratio.at_most:g}")
    if not limits:
        return ""
    return f"{' and '.join(limits):10} {'met' if ratio.is_met else 'MISSED'}"


def not_run_lines(result: Result) -> Iterator[str]:
    """A line for each side that did not run."""
    for side in result.not_run:
        yield f"not run: {side.side}: {side.why}"


def figure(value: float) -> str:
    """Four digits, but no exponent for figures up to a billion."""
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4g}"
