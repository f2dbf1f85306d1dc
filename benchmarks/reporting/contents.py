"""The contents of each picture: taken from results here, drawn by `drawing`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.helpers.result import Measurement, Ratio
from benchmarks.reporting.stored import StoredResult, provenance


@dataclass(frozen=True)
class Ratios:
    """All ratios with bars, by benchmark."""

    groups: Mapping[str, Sequence[Ratio]]
    caption: tuple[str, ...]


@dataclass(frozen=True)
class PeerPanel:
    """One group of measurements."""

    title: str
    unit: str
    is_rate: bool  # more is better
    bars: tuple[Measurement, ...]


@dataclass(frozen=True)
class Peers:
    """The end-to-end comparison."""

    sides: tuple[str, ...]
    panels: tuple[PeerPanel, ...]
    not_run: tuple[tuple[str, str], ...]  # (side, why)
    caption: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A side's medians by size, from small to large."""

    side: str
    is_ours: bool
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ScalingPanel:
    title: str
    size_label: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Scaling:
    """How figures grow with a size."""

    panels: tuple[ScalingPanel, ...]
    caption: tuple[str, ...]


@dataclass(frozen=True)
class MemoryBar:
    """The memory of a side in one place."""

    side: str
    place: str  # "device" or "host"
    parts: tuple[tuple[str, float], ...]  # (kind, bytes)


@dataclass(frozen=True)
class Memory:
    """Memory at rest by kind, with and without offloading."""

    bars: tuple[MemoryBar, ...]
    caption: tuple[str, ...]


Contents = Ratios | Peers | Scaling | Memory


@dataclass(frozen=True)
class Grown:
    """Where a panel's figures come from.

    Attributes:
        pattern: For "GROUP: SIDE" of a measurement. Its part `size` is a number; its part `side`
            names the line, which is "ours" without one.
        theirs: A pattern for the names of other projects' lines; without one, all names that do not
            start with "ours".
        unit: Of the measurements; None for any.
    """

    benchmark: str
    title: str
    size_label: str
    pattern: str
    theirs: str = r"(?!ours\b).*"
    unit: str | None = None


_SIZE = r"\D*(?P<size>\d[\d,]*)[^\d:]*"  # in a group: "1,024 tokens", "4096"
_SIDE = r"(?P<side>.*)"
GROWN = (
    Grown(
        "long_context",
        "Peak memory of a training step",
        "tokens",
        f"{_SIZE}: {_SIDE}",
        theirs=r"F\.cross_entropy",
        unit="MiB",
    ),
    Grown(
        "gated_delta_net",
        "Gated delta net, time of a token",
        "tokens",
        rf"{_SIZE}: (?P<side>net.*)",
        theirs=".*, transformers",
    ),
    Grown(
        "checkpoint_plan",
        "Planning of a checkpoint",
        "ranks",
        f"{_SIZE}: (?P<side>rank 0|another rank|DCP)",
        theirs="DCP",
    ),
    Grown(
        "moe_step",
        "A step of a mixture of experts",
        "experts",
        r"growth.*: (?P<size>[\d,]+) experts",
    ),
)

# Alternative texts.
PICTURES = {
    "ratios": "Every ratio that has a stated bar, and how far it is on the right side of it",
    "end_to_end": "The same training run by this project and by others: speed, memory, stalls",
    "scaling": "How time and memory grow with the length, the experts and the ranks",
    "memory": "Memory on the device and in host memory by kind, with and without offloading",
}

END_TO_END = "end_to_end"
MEMORY_BENCHMARK = "offload_step"
MEMORY_FACT = "memory_by_kind"


def pictures(results: Mapping[str, StoredResult]) -> dict[str, Contents]:
    """The contents of every picture that the results have something for, by its name."""
    found = (_ratios(results), _peers(results), _scaling(results), _memory(results))
    named = zip(PICTURES, found, strict=True)
    return {name: contents for name, contents in named if contents is not None}


def is_ours(side: str) -> bool:
    """Whether a side is this project's, by the name that benchmarks give it."""
    return re.match(r"ours\b", side) is not None


def _ratios(results: Mapping[str, StoredResult]) -> Ratios | None:
    groups = {}
    for name, stored in results.items():
        with_bars = [one for one in stored.result.ratios if one.is_met is not None]
        if with_bars:
            groups[name] = with_bars
    if not groups:
        return None
    return Ratios(groups, tuple(provenance([results[name] for name in groups])))


def margin(ratio: Ratio) -> float:
    """How many times better than its bar a ratio is; below 1 it is missed. Infinite, or 0, where
    that is no number: for a bar or a figure of 0 or less.
    """
    margins = []
    if ratio.at_least is not None:
        margins.append(_times_better(ratio.value, ratio.at_least))
    if ratio.at_most is not None:
        margins.append(_times_better(ratio.at_most, ratio.value))
    return min(margins)


def _times_better(larger: float, smaller: float) -> float:
    """How many times `smaller` the one that should be larger is."""
    if larger == smaller:
        return 1.0
    if larger > 0 and smaller > 0:
        return larger / smaller
    return math.inf if larger > smaller else 0.0


def _peers(results: Mapping[str, StoredResult]) -> Peers | None:
    stored = results.get(END_TO_END)
    if stored is None or not stored.result.measurements:
        return None
    measurements = stored.result.measurements
    sides = sorted(dict.fromkeys(one.side for one in measurements), key=lambda s: not is_ours(s))
    panels = [
        _panel([one for one in measurements if (one.group, one.unit) == key])
        for key in dict.fromkeys((one.group, one.unit) for one in measurements)
    ]
    not_run = tuple((one.side, one.why) for one in stored.result.not_run)
    return Peers(tuple(sides), tuple(panels), not_run, tuple(provenance([stored])))


def _panel(measurements: Sequence[Measurement]) -> PeerPanel:
    first = measurements[0]
    return PeerPanel(first.group, first.unit, first.unit.endswith("/s"), tuple(measurements))


def _scaling(results: Mapping[str, StoredResult]) -> Scaling | None:
    panels = []
    used = []
    for grown in GROWN:
        panel = _grown_panel(grown, results.get(grown.benchmark))
        if panel is not None:
            panels.append(panel)
            used.append(results[grown.benchmark])
    return Scaling(tuple(panels), tuple(provenance(used))) if panels else None


def _grown_panel(grown: Grown, stored: StoredResult | None) -> ScalingPanel | None:
    """None for want of a side that was measured at two sizes."""
    if stored is None:
        return None
    points: dict[str, dict[float, float]] = {}
    unit = grown.unit
    for one in stored.result.measurements:
        match = re.fullmatch(grown.pattern, f"{one.group}: {one.side}")
        if match and unit in (None, one.unit):
            unit = one.unit
            size = float(match["size"].replace(",", ""))
            side = match.groupdict().get("side", "ours")
            points.setdefault(side, {})[size] = one.median

    lines = tuple(
        Line(side, re.fullmatch(grown.theirs, side) is None, tuple(sorted(by_size.items())))
        for side, by_size in points.items()
        if len(by_size) > 1
    )
    return ScalingPanel(grown.title, grown.size_label, unit or "", lines) if lines else None


def _memory(results: Mapping[str, StoredResult]) -> Memory | None:
    """From `facts["memory_by_kind"]`: by side, by kind, bytes by place."""
    stored = results.get(MEMORY_BENCHMARK)
    by_side = stored.result.facts.get(MEMORY_FACT) if stored else None
    if stored is None or not isinstance(by_side, Mapping):
        return None
    bars = tuple(_memory_bars(by_side))
    return Memory(bars, tuple(provenance([stored]))) if bars else None


def _memory_bars(by_side: Mapping[str, Mapping[str, Any]]) -> Iterator[MemoryBar]:
    for side, kinds in by_side.items():
        for place in ("device", "host"):
            parts = tuple((kind, float(bytes_of.get(place, 0))) for kind, bytes_of in kinds.items())
            yield MemoryBar(side, place, tuple((kind, size) for kind, size in parts if size > 0))
