"""Figures as people read them: three digits and a unit of a fitting size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Scale(NamedTuple):
    """A unit, and how many of the measured unit it is."""

    unit: str
    factor: float


# From small to large; a figure is given in the largest that leaves it at least 1.
_LADDERS: tuple[tuple[Scale, ...], ...] = (
    (Scale("ns", 1e-9), Scale("µs", 1e-6), Scale("ms", 1e-3), Scale("s", 1.0)),
    (
        Scale("bytes", 1.0),
        Scale("KiB", 2.0**10),
        Scale("MiB", 2.0**20),
        Scale("GiB", 2.0**30),
        Scale("TiB", 2.0**40),
    ),
)
_SYNONYMS = {"us": "µs", "seconds": "s", "B": "bytes", "byte": "bytes"}


def figure(value: float, unit: str) -> str:
    """`value` with its unit: 0.0067 s is "6.70 ms", 1234.5 tokens/s is "1,230 tokens/s"."""
    for ladder in _LADDERS:
        measured = _scale_of(unit, ladder)
        if measured is not None:
            return _scaled(value, unit, measured, _fitting(value, measured, ladder))
    return f"{number(value)} {unit}".rstrip()


def number(value: float) -> str:
    """Three digits; thousands apart; an exponent only where zeros would fill the line."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.2e}"
    if abs(value) >= 999.5:
        digits = len(f"{abs(value):.0f}")
        return f"{round(value, 3 - digits):,.0f}"

    # Sizes and counts are whole numbers and are shown as such.
    if abs(value - round(value)) < 1e-9 * abs(value):
        return str(round(value))
    return f"{value:#.3g}".rstrip(".")


def figures(values: Sequence[float], unit: str) -> list[str]:
    """Figures that are compared with each other: in one unit, if none gets six digits by that."""
    smallest = min((value for value in values if value > 0), default=0.0)
    for ladder in _LADDERS:
        measured = _scale_of(unit, ladder)
        if measured is not None:
            common = _fitting(smallest, measured, ladder)
            if all(abs(value) < 1e5 * (common.factor / measured.factor) for value in values):
                return [_scaled(value, unit, measured, common) for value in values]
    return [figure(value, unit) for value in values]


def ratio(value: float, *bars: float | None) -> str:
    """Three digits, whole numbers too: "1.00". More where a bar would be met only by rounding."""
    limits = [limit for limit in bars if limit is not None]
    texts = [number(value), *(f"{value:,.{digits}g}" for digits in range(4, 17))]
    if 0.01 <= abs(value) < 99.95:
        texts[0] = f"{value:#.3g}".rstrip(".")
    for text in texts:
        shown = float(text.replace(",", ""))
        if all(_sign(value - limit) == _sign(shown - limit) for limit in limits):
            return text
    return repr(value)


def spread(low: float, high: float, unit: str) -> str:
    """Two figures of one unit, with the unit once where it is the same for both."""
    first, second = figure(low, unit), figure(high, unit)
    value, _, own = first.partition(" ")
    return f"{value} to {second}" if own == second.partition(" ")[2] else f"{first} to {second}"


def bar(at_least: float | None, at_most: float | None) -> str:
    """The bar of a ratio, as it is stated; "" where none is."""
    limits = [
        f"{sign} {limit:,.12g}"
        for sign, limit in (("≥", at_least), ("≤", at_most))
        if limit is not None
    ]
    return " and ".join(limits)


def _scaled(value: float, unit: str, measured: Scale, chosen: Scale) -> str:
    """In another unit than the measured one, with the same denominator."""
    _, slash, per = unit.partition("/")
    return f"{number(value / (chosen.factor / measured.factor))} {chosen.unit}{slash}{per}"


def _scale_of(unit: str, ladder: Sequence[Scale]) -> Scale | None:
    name = unit.partition("/")[0]
    name = _SYNONYMS.get(name, name)
    return next((scale for scale in ladder if scale.unit == name), None)


def _fitting(value: float, measured: Scale, ladder: Sequence[Scale]) -> Scale:
    """The largest unit of which `value` is at least 1; otherwise the smallest."""
    if value == 0:
        return measured
    # Compared as quotients: a product could be more than a float holds.
    fitting = [scale for scale in ladder if abs(value) >= scale.factor / measured.factor]
    return fitting[-1] if fitting else ladder[0]


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)
