"""Axes of a picture: which values get a tick, how they are written, where they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_DECADES = 6  # with a tick each
# From which size on a number is written in a unit: thousands only from ten thousand on.
_UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, in pixels from `start` to `end`; of logarithms, if it says so."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value; one beyond the axis lies at its end."""
        value = min(max(value, self.low), self.high)
        if self.is_logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            # Halves: the difference of the largest values would overflow.
            share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self.start + share * (self.end - self.start)

    def labels(self) -> list[str]:
        """The ticks as text, all with as many digits as their distance needs."""
        if self.is_logarithmic:
            return [_power_label(tick) for tick in self.ticks]
        return tick_labels(self.ticks)


def iteration_axis(first: int, last: int, start: float, end: float) -> Axis:
    """An axis of iterations: the ticks are whole, and it ends with the last iteration."""
    low, high = float(first), float(max(last, first + 1))
    step = max(1.0, _nice_step(high - low, 6))
    ticks = _multiples(low, high, step)
    return Axis(low, high, start, end, ticks)


def value_axis(
    low: float, high: float, start: float, end: float, *, is_logarithmic: bool = False
) -> Axis:
    """An axis of values that ends at a tick or near them, or that holds decades."""
    if is_logarithmic:
        return _decades(low, high, start, end)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a flat line lies in the middle
        margin = 0.1 * abs(low)
        low, high = (low - margin, high + margin) if margin else (0.0, 1.0)
    step, margin = _nice_step(high - low, 6), 0.05 * (high - low)
    # Up to the next tick, where that is near: a curve fills its picture.
    low = max(math.floor(low / step + 1e-9) * step, low - margin)
    high = min(math.ceil(high / step - 1e-9) * step, high + margin)
    return Axis(low, high, start, end, _multiples(low, high, step))


def _decades(low: float, high: float, start: float, end: float) -> Axis:
    # Values beyond forty decades lie at the axis's end. A power of ten below 1e-308 would be 0.
    high = max(high, 1e-260)
    low = max(low, high * 1e-40)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, -(-(last - first) // _MOST_DECADES))
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Axis(10.0**first, 10.0**last, start, end, ticks, is_logarithmic=True)


def _nice_step(span: float, most: int) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that needs at most so many steps."""
    size = 10.0 ** math.floor(math.log10(span / most))
    return next((step * size for step in _STEPS if step * size * most >= span * 0.999), 10 * size)


def _multiples(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return tuple(number * step for number in range(first, last + 1))


def tick_labels(ticks: tuple[float, ...]) -> list[str]:
    """`0`, `250`, `500`; `0.80`, `0.85`; `0`, `20k`; `1e-4`, `2e-4`."""
    largest = max(map(abs, ticks), default=0.0)
    if largest == 0:
        return ["0" for _ in ticks]
    if largest < 1e-2 or largest >= 1e15:
        return [_scientific(tick) for tick in ticks]

    size, unit = _unit_of(largest)
    decimals = next(
        (n for n in range(6) if all(_is_whole(tick / size * 10**n) for tick in ticks)), 6
    )
    return [f"{tick / size:.{decimals}f}{unit}" if tick else "0" for tick in ticks]


def _power_label(value: float) -> str:
    """A power of ten: `0.01`, `100`, `10k`, `1e-4`."""
    if not 1e-3 <= value < 1e15:
        return _scientific(value)
    size, unit = _unit_of(value)
    return f"{value / size:g}{unit}"


def _unit_of(value: float) -> tuple[float, str]:
    found = ((size, unit) for least, size, unit in _UNITS if value >= least)
    return next(found, (1.0, ""))


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-6 * max(1.0, abs(value))


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def figures(value: float) -> str:
    """A value with four significant digits: `4.081`, `0.00150`, `12.3k`, `1.5e-4`."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3 or exponent >= 15:
        return _scientific(value)
    size, unit = _unit_of(abs(value))
    scaled = value / size
    digits = max(0, 3 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:.{digits}f}{unit}"
