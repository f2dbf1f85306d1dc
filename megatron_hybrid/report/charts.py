"""Which charts a run's page has, and why one is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hybrid.report.axis import figures
from megatron_hybrid.report.metrics_file import (
    ACTIVATION_TIMING,
    AUXILIARY,
    LANES,
    TEST,
    TIMING,
    TRAIN,
    VALIDATION,
    WAITS,
    Columns,
)
from megatron_hybrid.report.series import curve_of
from megatron_hybrid.report.svg import Chart, Line

_GIB = 2.0**30
_LANE_NAMES = ("down (d2h)", "host update", "up (h2d)")
RECENT = 50  # iterations, for the page's figures of now


@dataclass(frozen=True)
class Section:
    """Charts under a heading; or, if there are none, a sentence that says why."""

    title: str
    charts: Sequence[Chart]
    absence: str


@dataclass(frozen=True)
class Now:
    """How the run is doing at its last iterations; None: not known."""

    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    seconds: float | None  # of an iteration
    host_bytes: float | None
    device_bytes: float | None


def sections_of(metrics: Mapping[str, Columns], note: str) -> list[Section]:
    """The page's sections of charts.

    Args:
        note: why there are no metrics, or not all.
    """
    none = note or "No iteration has been made yet."
    # What not every run has is left out where it is not.
    special = [_lanes(metrics), _experts(metrics[TRAIN])]
    return [
        _learning(metrics, none),
        _speed(metrics, none),
        *(section for section in special if section.charts),
    ]


def iterations_of(metrics: Mapping[str, Columns]) -> tuple[int, int]:
    """The first and the last iteration that anything is known of; (0, 1) if there is none."""
    known = [columns.iterations for columns in metrics.values() if len(columns.iterations)]
    if not known:
        return 0, 1
    first, last = min(int(each[0]) for each in known), max(int(each[-1]) for each in known)
    # A whole run's axis begins at 0, not at 1.
    return (0 if first <= max(1, last // 20) else first), last


def now_of(metrics: Mapping[str, Columns]) -> Now:
    """The last values; of the speed, the median of recent iterations."""
    train = metrics[TRAIN]
    milliseconds = _recent(train, "elapsed_ms")
    return Now(
        loss=_last(train, "loss"),
        validation_loss=_last(metrics[VALIDATION], "loss"),
        tokens_per_second=_recent(train, "tokens_per_second"),
        seconds=None if milliseconds is None else milliseconds / 1000.0,
        host_bytes=_last(train, "peak_host_memory_bytes"),
        device_bytes=_last(train, "peak_device_memory_bytes"),
    )


def _learning(metrics: Mapping[str, Columns], none: str) -> Section:
    train = metrics[TRAIN]
    losses = [
        line
        for line in (
            _line(train, "loss", "train", 0),
            _line(metrics[VALIDATION], "loss", "validation", 1),
            _line(metrics[TEST], "loss", "test", 2),
        )
        if len(line.curve) or line.color == 0
    ]
    charts = [
        Chart("Loss", losses),
        Chart("Gradient norm", [_line(train, "grad_norm", "norm", 0)]),
        Chart("Learning rate", [_line(train, "learning_rate", "rate", 0)]),
    ]
    auxiliary = [
        _line(train, name, name.removesuffix("_loss").replace("_", " "), color)
        for color, name in enumerate(AUXILIARY)
        if train.has(name)
    ]
    charts += [Chart("Auxiliary losses", auxiliary)] if auxiliary else []
    if train.has("loss_scale"):
        charts.append(Chart("Loss scale", [_line(train, "loss_scale", "scale", 0)]))
    return _section("Learning", charts, none)


def _speed(metrics: Mapping[str, Columns], none: str) -> Section:
    train = metrics[TRAIN]
    memory = [
        _line(train, f"peak_{where}_memory_bytes", where, color, size=_GIB)
        for color, where in enumerate(("host", "device"))
        if train.has(f"peak_{where}_memory_bytes")
    ]
    charts = [
        Chart(
            "Tokens per second",
            [_line(train, "tokens_per_second", "all devices", 0)],
            is_from_zero=True,
        ),
        Chart("Time per iteration", [_line(train, "elapsed_ms", "time", 0)], " ms", True),
        Chart("Memory of rank 0, at most so far", memory, " GiB", True),
    ]
    return _section("Speed and memory", charts, none)


def _lanes(metrics: Mapping[str, Columns]) -> Section:
    charts = []
    for title, columns in (
        ("Optimizer", metrics[TIMING]),
        ("Activations", metrics[ACTIVATION_TIMING]),
    ):
        charts += [
            Chart(f"{title}: lanes at work", _lane_lines(columns, LANES), " ms", True),
            Chart(f"{title}: waited for", _lane_lines(columns, WAITS), " ms", True),
        ]
    return _section("Lanes of offloading, per step", charts)


def _lane_lines(columns: Columns, names: Sequence[str]) -> list[Line]:
    return [
        _line(columns, name, label, color)
        for color, (name, label) in enumerate(zip(names, _LANE_NAMES, strict=True))
        if columns.has(name)
    ]


def _experts(train: Columns) -> Section:
    charts = [
        Chart(
            "Unevenness of loads (coefficient of variation)",
            [
                _line(train, "expert_load_cv", "mean of layers", 0),
                _line(train, "expert_load_cv_max", "worst layer", 1),
            ],
            is_from_zero=True,
        ),
        Chart("Busiest expert, in units of the mean", [_line(train, "busiest_expert", "load", 0)]),
        Chart(
            "Idle experts", [_line(train, "idle_experts", "without a token", 0)], is_from_zero=True
        ),
    ]
    return _section("Balance of experts", charts)


def _section(title: str, charts: Sequence[Chart], absence: str = "") -> Section:
    return Section(title, [chart for chart in charts if chart.curves], absence)


def _line(columns: Columns, name: str, label: str, color: int, *, size: float = 1.0) -> Line:
    """A column as a line, in units of `size`."""
    return Line(label, curve_of(columns.iterations, columns.values[name] / size), color)


def _last(columns: Columns, name: str) -> float | None:
    values = columns.values[name]
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def _recent(columns: Columns, name: str) -> float | None:
    values = columns.values[name][-RECENT:]
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def memory_text(now: Now) -> str:
    """`0.46 GiB`, with a device `12.3 + 0.46 GiB`; empty if it is not known."""
    known = [each for each in (now.device_bytes, now.host_bytes) if each is not None]
    return " + ".join(figures(each / _GIB) for each in known) + (" GiB" if known else "")
