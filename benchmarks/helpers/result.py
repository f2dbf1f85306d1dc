"""The result of a benchmark, as values and as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One side of a comparison.

    Attributes:
        group: The sides of a group are compared; "" for a single group.
        side: Whose figures these are.
        unit: "ms", "tokens/s", "MiB", ...; of a unit that ends in "/s", more is faster.
        values: One a round, in order.
    """

    group: str
    side: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"Expected at least one value of {self.group} {self.side}, got none.")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; of a single value, itself twice."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third


def measured(
    values: Mapping[str, Sequence[float]], unit: str, group: str = ""
) -> tuple[Measurement, ...]:
    """A group's measurements, from the values of each side."""
    return tuple(Measurement(group, side, unit, tuple(own)) for side, own in values.items())


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians, or another single figure, with the bar that is stated for it."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool | None:
        """None where no bar is stated."""
        if self.at_least is None and self.at_most is None:
            return None
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)


@dataclass(frozen=True)
class NotRun:
    """A side or a peer that cannot run here."""

    side: str
    why: str


@dataclass(frozen=True)
class Result:
    """All that a benchmark found.

    Attributes:
        settings: Sizes and rounds, as plain data.
        facts: Anything else worth keeping, as plain data.
    """

    measurements: tuple[Measurement, ...]
    ratios: tuple[Ratio, ...]
    not_run: tuple[NotRun, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "settings": dict(self.settings),
            "measurements": [
                {**asdict(one), "median": one.median, "quartiles": one.quartiles}
                for one in self.measurements
            ],
            "ratios": [{**asdict(one), "is_met": one.is_met} for one in self.ratios],
            "not_run": [asdict(one) for one in self.not_run],
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """From the content of a result file, or of a benchmark's hand-over."""
        return cls(
            tuple(
                Measurement(one["group"], one["side"], one["unit"], tuple(one["values"]))
                for one in data["measurements"]
            ),
            tuple(
                Ratio(one["name"], one["value"], one["at_least"], one["at_most"])
                for one in data["ratios"]
            ),
            tuple(NotRun(one["side"], one["why"]) for one in data["not_run"]),
            data["settings"],
            data["facts"],
        )
