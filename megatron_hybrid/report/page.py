"""A run's page: one HTML file, made from `page.html.jinja`, that needs no other file or network.

Its policy only allows its style and its script, by their digests, so markup in the run's files
could not load or execute anything.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from megatron.core.log import printable
from megatron.training.health.events import METRICS_FILE, read_events
from megatron_hybrid.charts import figures
from megatron_hybrid.report.curves import (
    MARK_SHAPES,
    NARROW,
    RESTART,
    SAVE,
    SKIP,
    TROUBLE,
    WIDE,
    Chart,
    Curve,
    Line,
    Mark,
    curve_of,
    figure_of,
)
from megatron_hybrid.report.events import checkpoint_row, event_rows, start_rows
from megatron_hybrid.report.metrics_file import TRAIN, Columns, MetricsReader
from megatron_hybrid.run_history import (
    Event,
    Session,
    checkpoint_folders,
    date_text,
    duration_text,
    split_sessions,
)

_RECENT = 50  # iterations, for the present speed
_GIB = 2.0**30
_MOST_CHARACTERS = 1000  # of a text from a file
_NONE = "\N{EN DASH}"  # in place of an unknown value
_MARKS = {
    SAVE: "save",
    RESTART: "resumed",
    SKIP: "skipped or nan iteration",
    TROUBLE: "fault, signal, failure",
}
_TONES = {
    "running": "good",
    "saving": "good",
    "finished": "good",
    "stopped": "wait",
    "preempted": "wait",
    "unknown": "wait",
}


TIMING, ACTIVATION_TIMING = "timing", "activation_timing"  # kinds of records
VALIDATION, TEST = "validation", "test"  # splits of evaluations


def _train(column: str, label: str, scale: float = 1.0) -> Line:
    return Line(TRAIN, column, label, scale)


def _lanes(table: str, prefix: str = "") -> list[Line]:
    labels = {"d2h": "down (d2h)", "host": "host update", "h2d": "up (h2d)"}
    return [Line(table, f"{prefix}{lane}_ms", label) for lane, label in labels.items()]


_LOSSES = [
    _train("loss", "train"),
    Line(VALIDATION, "loss", "validation"),
    Line(TEST, "loss", "test"),
]
_AUXILIARY_LOSSES = [
    _train("balance_loss", "balance"),
    _train("z_loss", "z"),
    _train("logit_z_loss", "logit z"),
]
_MEMORY = [
    _train("peak_host_memory_bytes", "host", _GIB),
    _train("peak_device_memory_bytes", "device", _GIB),
]
_LOADS = [
    _train("expert_load_cv", "mean of layers"),
    _train("expert_load_cv_max", "worst layer"),
]
# Charts and lines without a value are left out.
_SECTIONS = {
    "Learning": [
        Chart("Loss", _LOSSES),
        Chart("Gradient norm", [_train("grad_norm", "norm")]),
        Chart("Learning rate", [_train("learning_rate", "rate")]),
        Chart("Auxiliary losses", _AUXILIARY_LOSSES),
        Chart("Loss scale", [_train("loss_scale", "scale")]),
    ],
    "Speed and memory": [
        Chart("Tokens per second", [_train("tokens_per_second", "all devices")], "", True),
        Chart("Time per iteration", [_train("elapsed_ms", "time")], " ms", True),
        Chart("Memory of rank 0, at most so far", _MEMORY, " GiB", True),
    ],
    "Lanes of offloading, per step": [
        Chart("Optimizer: lanes at work", _lanes(TIMING), " ms", True),
        Chart("Optimizer: waited for", _lanes(TIMING, "waited_"), " ms", True),
        Chart("Activations: lanes at work", _lanes(ACTIVATION_TIMING), " ms", True),
        Chart("Activations: waited for", _lanes(ACTIVATION_TIMING, "waited_"), " ms", True),
    ],
    "Balance of experts": [
        Chart("Unevenness of loads (coefficient of variation)", _LOADS, "", True),
        Chart("Busiest expert, in units of the mean", [_train("busiest_expert", "load")]),
        Chart("Idle experts", [_train("idle_experts", "without a token")], "", True),
    ],
}
_ALWAYS = ("Learning", "Speed and memory")  # without charts, these show the reason


def _tables() -> dict[str, list[str]]:
    """The columns that charts show, by table of the metrics file."""
    tables: dict[str, list[str]] = {}
    for charts in _SECTIONS.values():
        for line in (line for chart in charts for line in chart.lines):
            tables.setdefault(line.table, []).append(line.column)
    return tables


class RunPage:
    """Makes pages of a run, and keeps the metrics that it has read."""

    def __init__(self, folder: Path, refresh_seconds: float) -> None:
        """
        Args:
            refresh_seconds: Interval at which a browser reloads the page of a live run.
        """
        self._folder = folder
        self._refresh_seconds = refresh_seconds
        self._reader = MetricsReader(folder / METRICS_FILE, _tables())

    def html(self, status: Mapping[str, Any], lines: Iterable[str], now: float) -> str:
        """The page of this moment. OSError if the events cannot be read.

        Args:
            status, lines: As data and as text, from `run_status`.
            now: Unix seconds.
        """
        events = read_events(self._folder)
        sessions = split_sessions(events)
        note = self._read_metrics(sessions)
        metrics = {name: self._reader.columns(name) for name in self._reader.tables}
        checkpoints = checkpoint_folders(self._folder, events)
        is_running = status["state"] in ("running", "saving")
        start = next((each.start for each in reversed(sessions) if each.start), {})
        settings, command = start.get("settings"), start.get("command")
        rows = event_rows(events)
        marks = [(e.iteration, e.mark) for e in rows if e.mark and e.iteration is not None]
        kinds = {kind for _, kind in marks}
        return _TEMPLATE.render(
            name=self._folder.resolve().name,
            status=status,
            tone=_TONES.get(status["state"], "bad"),
            lines=[line.partition(": ") for line in lines],
            now=now,
            refresh_seconds=max(1, round(self._refresh_seconds)),
            tiles=_tiles(metrics),
            note=note,
            sections=_sections(metrics, marks),
            legend=[(kind, MARK_SHAPES[kind], _MARKS[kind]) for kind in _MARKS if kind in kinds],
            events=rows,
            starts=start_rows(sessions, is_running=is_running),
            checkpoints=[checkpoint_row(*each, events) for each in checkpoints[-50:]],
            num_checkpoints=len(checkpoints),
            settings=settings if isinstance(settings, dict) else {},
            command=shlex.join(map(str, command)) if isinstance(command, list) else "",
        )

    def _read_metrics(self, sessions: Sequence[Session]) -> str:
        """Reads new metrics; returns a note if metrics are missing or old."""
        start = next((each.start for each in reversed(sessions) if "metrics" in each.start), {})
        path = _metrics_path(self._folder, start)
        if path != self._reader.path:
            self._reader = MetricsReader(path, self._reader.tables)
        writes_none = "metrics" in start and start["metrics"] is None
        try:
            self._reader.read()
        except (FileNotFoundError, NotADirectoryError):
            if writes_none:
                return "The run writes no metrics: it was started with --metrics-jsonl none."
            return f"No metrics yet: there is no {METRICS_FILE} beside the run's events."
        except OSError as error:
            return f"The metrics could not be read: {error}"
        if writes_none:
            return "The last start writes no metrics (--metrics-jsonl none): these are older ones."
        return "The metrics file is so long that its beginning is left out." * self._reader.is_cut


def _metrics_path(folder: Path, start: Event) -> Path:
    """The file named by the last start, or the default if the run was copied from elsewhere."""
    logged = start.get("metrics")
    with suppress(OSError, ValueError):  # of text that is no path
        if isinstance(logged, str) and Path(logged).is_absolute() and Path(logged).exists():
            return Path(logged)
    return folder / METRICS_FILE


def _tiles(metrics: Mapping[str, Columns]) -> list[tuple[str, str, str]]:
    """The name, the value and a note of every figure that is known."""
    train = metrics[TRAIN]
    losses = {"Loss": train, "Validation loss": metrics[VALIDATION]}
    known = {name: columns.last("loss") for name, columns in losses.items()}
    tiles = [(name, figures(loss), "last") for name, loss in known.items() if loss is not None]

    speed, times = (train.recent(name, _RECENT) for name in ("tokens_per_second", "elapsed_ms"))
    recent = f"median of the last {_RECENT}"
    if len(speed):
        tiles.append(("Tokens per second", figures(float(np.median(speed))), recent))
    if len(times):
        ms = float(np.median(times))
        text = f"{figures(ms)} ms" if ms < 1000 else f"{figures(ms / 1000)} s"
        tiles.append(("Time per iteration", text, recent))
    peaks = [train.last(f"peak_{where}_memory_bytes") for where in ("device", "host")]
    memory = " + ".join(figures(each / _GIB) for each in peaks if each is not None)
    return [*tiles, ("Memory of rank 0", f"{memory} GiB", "at most so far")] if memory else tiles


def _sections(
    metrics: Mapping[str, Columns], marks: Sequence[Mark]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The title and the figures of each section."""
    iterations = _iterations_of(metrics)
    sections = []
    for title, charts in _SECTIONS.items():
        drawn = [(chart, curves) for chart in charts if (curves := _curves(chart, metrics))]
        found = []
        for number, (chart, curves) in enumerate(drawn):
            # The first of an odd number gets its own row, where there is room for two in a row.
            is_alone = number == 0 and len(drawn) % 2 == 1
            widths = {WIDE: "wide", NARROW: "narrow"} if is_alone else {NARROW: ""}
            for width, name in widths.items():
                figure = figure_of(chart, curves, iterations, marks, width)
                found.append(figure | {"class": name})
        if found or title in _ALWAYS:
            sections.append((title, found))
    return sections


def _curves(chart: Chart, metrics: Mapping[str, Columns]) -> list[Curve]:
    curves = []
    for color, line in enumerate(chart.lines):
        columns = metrics[line.table]
        values = columns.values[line.column] / line.scale
        curves.append(curve_of(line.label, color, columns.iterations, values))
    return [curve for curve in curves if len(curve)]


def _iterations_of(metrics: Mapping[str, Columns]) -> tuple[int, int]:
    """The first and the last known iteration; (0, 1) without any."""
    known = [columns.iterations for columns in metrics.values() if len(columns.iterations)]
    first = min((int(each[0]) for each in known), default=0)
    last = max((int(each[-1]) for each in known), default=1)
    # The axis of a whole run starts at 0 rather than 1.
    return (0 if first <= max(1, last // 20) else first), last


def _shown(value: object) -> object:
    """Text from files as one harmless line of bounded length. The template escapes it."""
    if isinstance(value, Markup):
        return value
    return _NONE if value is None else printable(str(value), _MOST_CHARACTERS)


def _setting(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=_shown,
)
_ENVIRONMENT.filters |= {
    "date": lambda moment: None if moment is None else date_text(moment),
    "count": lambda value: f"{value:,}" if isinstance(value, int) else value,
    "duration": duration_text,
    "setting": _setting,
    "digest": _digest,
}
_TEMPLATE = _ENVIRONMENT.get_template("page.html.jinja")
