"""A run's page: one HTML file, rendered from `page.html.jinja`, that needs no other file.

Its policy only allows its style and its script, by their digests, so that markup in the run's
files cannot load or execute anything.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.core.log import counted, printable
from megatron.training.health.events import METRICS_FILE, EventKind
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
    ChartLine,
    Curve,
    Mark,
    curve_of,
    figure_of,
)
from megatron_hybrid.report.metrics import TRAIN, Columns, MetricsReader
from megatron_hybrid.run_history import (
    Event,
    Session,
    checkpoint_folders,
    date_text,
    duration_text,
    is_kind,
    is_relaunch,
    publication_of,
    read_history,
    split_sessions,
)

_RECENT = 50  # iterations, for the present speed
_GIB = 2.0**30
_MOST_CHARACTERS = 1000  # of a text from a file
_NONE = "\N{EN DASH}"  # an unknown value
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


def _train(column: str, label: str, scale: float = 1.0) -> ChartLine:
    return ChartLine(TRAIN, column, label, scale)


def _lanes(table: str, prefix: str = "") -> list[ChartLine]:
    labels = {"d2h": "down (d2h)", "host": "host update", "h2d": "up (h2d)"}
    return [ChartLine(table, f"{prefix}{lane}_ms", label) for lane, label in labels.items()]


_LOSSES = [
    _train("loss", "train"),
    ChartLine(VALIDATION, "loss", "validation"),
    ChartLine(TEST, "loss", "test"),
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


def _columns_by_table() -> dict[str, list[str]]:
    """Returns the columns in charts, by table of the metrics file."""
    tables = defaultdict(list)
    for chart in chain.from_iterable(_SECTIONS.values()):
        for line in chart.lines:
            tables[line.table].append(line.column)
    return dict(tables)


class EventRow(NamedTuple):
    """A row of the table of events."""

    time: float | None  # Unix seconds
    what: str
    iteration: int | None
    rank: int | None
    detail: str
    mark: str  # the kind of mark in charts; empty: none


# The name of a kind of events, its mark, and its detail. Other kinds are shown in charts.
_KINDS = {
    EventKind.START: ("start", "", "{world_size}process {pid} on {host}"),
    EventKind.RESUME: ("resume", RESTART, "from {folder}, loaded in {duration}"),
    EventKind.DAMAGED: ("damaged checkpoint", TROUBLE, "{folder}: {reason}"),
    EventKind.SET_ASIDE: ("set aside", "", "{what}"),
    EventKind.SAVE_PUBLISHED: ("save", SAVE, "{folder}, took {duration}"),
    EventKind.SAVE_FAILED: ("save failed", TROUBLE, "{reason}"),
    EventKind.SAVE_SKIPPED: ("save left out", TROUBLE, "{reason}"),
    EventKind.SKIP: ("skipped iteration", SKIP, "no step was taken; gradient norm {grad_norm}"),
    EventKind.NAN: ("nan iteration", SKIP, "the loss was not finite, on ranks {ranks}"),
    EventKind.SIGNAL: ("signal", TROUBLE, "{signal}"),
    EventKind.LOST: ("rank lost", TROUBLE, "{cause}"),
    EventKind.HANG: ("hang", TROUBLE, "{cause}"),
    EventKind.INJECT: ("injected fault", TROUBLE, "{spec}, in {phase}"),
    EventKind.EXIT: ("exit", TROUBLE, "{code} ({name}): {reason}"),
}


def event_rows(events: Sequence[Event]) -> list[EventRow]:
    """Returns the rows of the table of events, in order."""
    return [_event_row(event, kind) for event in events for kind in _KINDS if is_kind(event, kind)]


def _event_row(event: Event, kind: EventKind) -> EventRow:
    what, mark, detail = _KINDS[kind]
    texts = defaultdict(str, {key: str(each) for key, each in event.items() if each is not None})
    size = event.get("world_size")
    texts["world_size"] = "" if size is None else f"{counted(size, 'rank')}, "
    texts["folder"] = PurePath(texts["checkpoint"]).name
    texts["duration"] = _seconds(event) or ""
    ranks = event.get("ranks") if isinstance(event.get("ranks"), list) else None
    texts["ranks"] = " ".join(map(str, ranks or []))
    texts["grad_norm"] = str(event.get("grad_norm", "not finite"))

    iteration, rank = event.get("iteration"), event.get("rank")
    if kind in (EventKind.LOST, EventKind.HANG) and ranks is not None:
        # The rank in the event is the one that wrote it.
        rank = ranks[0] if len(ranks) == 1 and type(ranks[0]) is int else None
    if kind is EventKind.DAMAGED:
        iteration = iteration_of(texts["folder"])
    if kind is EventKind.RESUME and not texts["folder"]:
        detail = _without_checkpoint(event)
    is_first_start = kind is EventKind.RESUME and not iteration
    if is_first_start or (kind is EventKind.EXIT and event.get("code") == 0):
        mark = ""
    return EventRow(event.get("time"), what, iteration, rank, detail.format_map(texts), mark)


def _without_checkpoint(event: Event) -> str:
    """The detail of a resume that loaded none."""
    time, failed_at = event.get("time"), event.get("failed_at")
    if not isinstance(time, float | int) or not isinstance(failed_at, float | int):
        return "from the beginning"
    seconds = max(0.0, time - failed_at)
    return f"from the kept host state, {seconds:.1f} s after the failure; no step was lost"


def start_rows(sessions: Sequence[Session], *, is_running: bool) -> list[tuple[object, ...]]:
    """Returns a row for each start: time, starter, ranks, first and last iteration, end.

    Args:
        is_running: Whether the last one has not ended.
    """
    rows: list[tuple[object, ...]] = []
    for number, session in enumerate(sessions):
        if session.events:
            time = (session.start or session.events[0]).get("time")
            started_by = "launcher" if is_relaunch(sessions, number) else "hand"
            iterations = [event["iteration"] for event in session.events if "iteration" in event]
            is_current = is_running and session is sessions[-1]
            end = "running" if is_current else session.cause()
            last = max(iterations, default=None)
            rows.append((time, started_by, session.world_size, session.resumed_at, last, end))
    return rows


def checkpoint_row(iteration: int, path: Path, events: Sequence[Event]) -> tuple[object, ...]:
    """Returns a published checkpoint's iteration, time, duration of the save, and name."""
    save = publication_of(events, iteration)
    return iteration, save.get("time"), _seconds(save), path.name


def _seconds(event: Event) -> str | None:
    return f"{event['seconds']:.2f} s" if "seconds" in event else None


class RunPage:
    """Renders the pages of a run, and keeps the metrics that it has read."""

    def __init__(self, folder: Path, refresh_seconds: float) -> None:
        """
        Args:
            refresh_seconds: Interval at which a browser reloads the page of a live run.
        """
        self._folder = folder
        self._refresh_seconds = refresh_seconds
        self._metrics = MetricsReader(_columns_by_table())

    def html(self, status: Mapping[str, Any], lines: Iterable[str], now: float) -> str:
        """Returns the page. OSError if the events cannot be read.

        Args:
            status, lines: Results of `run_status` and `lines_of`.
            now: Unix seconds.
        """
        events = read_history(self._folder)
        sessions = split_sessions(events)

        note = self._read_metrics(sessions)
        metrics = self._metrics.columns()
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
        """Reads new metrics. Returns a note if they are missing or old."""
        start = next((each.start for each in reversed(sessions) if "metrics" in each.start), {})
        writes_none = "metrics" in start and start["metrics"] is None
        try:
            self._metrics.read(_metrics_path(self._folder, start))
        except (FileNotFoundError, NotADirectoryError):
            if writes_none:
                return "The run writes no metrics: it was started with --metrics-jsonl none."
            return f"No metrics yet: there is no {METRICS_FILE} next to the run's events."
        except OSError as error:
            return f"The metrics could not be read: {error}"
        if writes_none:
            return "The last start writes no metrics (--metrics-jsonl none): these are older."
        return ""


def _metrics_path(folder: Path, start: Event) -> Path:
    """Returns the file named by the last start, or the default if the run was copied."""
    logged = start.get("metrics")
    with suppress(OSError, ValueError):  # text that is no path
        if isinstance(logged, str) and Path(logged).is_absolute() and Path(logged).exists():
            return Path(logged)
    return folder / METRICS_FILE


def _tiles(metrics: Mapping[str, Columns]) -> list[tuple[str, str, str]]:
    """Returns the name, the value and a note of every known figure."""
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
    """Returns the title and the figures of each section."""
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
    """Returns the first and the last known iteration; (0, 1) without any."""
    known = [columns.iterations for columns in metrics.values() if len(columns.iterations)]
    first = min((int(each[0]) for each in known), default=0)
    last = max((int(each[-1]) for each in known), default=1)
    # The axis of a whole run starts at 0 rather than 1.
    return (0 if first <= max(1, last // 20) else first), last


def _shown(value: object) -> object:
    """Returns text from files as one line of bounded length, which the template escapes."""
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
