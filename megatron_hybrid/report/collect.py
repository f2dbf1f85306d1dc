"""Reads what a run has left in its folder, for its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.health.events import METRICS_FILE, read_events
from megatron_hybrid.report.history import EventRow, StartRow, event_rows, marks_of, start_rows
from megatron_hybrid.report.metrics_file import NAMES, Columns, MetricsReader
from megatron_hybrid.report.svg import Mark
from megatron_hybrid.run_history import (
    Event,
    Session,
    checkpoint_folders,
    number_in,
    publications,
    split_sessions,
)

_MOST_CHECKPOINTS = 50  # of which something is told


@dataclass(frozen=True)
class CheckpointRow:
    """A published checkpoint."""

    iteration: int
    name: str
    time: float | None  # unix seconds
    seconds: float | None  # that the save took


@dataclass(frozen=True)
class Report:
    """Everything that the page shows.

    Attributes:
        name: of the run's folder.
        status, lines: what `python -m megatron_hybrid status` says, as data and as five lines.
        now: unix seconds.
        metrics: by table of `metrics_file`.
        metrics_note: why there are no metrics, or not all; empty if there is nothing to say.
        settings: that the run was given, by field.
    """

    name: str
    status: Mapping[str, Any]
    lines: Sequence[str]
    now: float
    metrics: Mapping[str, Columns]
    metrics_note: str
    events: Sequence[EventRow]
    marks: Sequence[Mark]
    starts: Sequence[StartRow]
    checkpoints: Sequence[CheckpointRow]
    num_checkpoints: int
    settings: Mapping[str, Any]
    command: Sequence[str]


class Collector:
    """Collects a run's reports, one after the other; of its metrics it reads what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = MetricsReader(folder / METRICS_FILE)

    def collect(self, status: Mapping[str, Any], lines: Sequence[str], now: float) -> Report:
        """The report of this moment. OSError if the events cannot be read."""
        events = read_events(self._folder)
        sessions = split_sessions(events)
        note = self._read_metrics(sessions)
        checkpoints = checkpoint_folders(self._folder, events)
        start = next((each.start for each in reversed(sessions) if each.start), {})
        settings, command = start.get("settings"), start.get("command")

        return Report(
            name=self._folder.resolve().name,
            status=status,
            lines=lines,
            now=now,
            metrics={name: self._reader.columns(name) for name in NAMES},
            metrics_note=note,
            events=event_rows(events),
            marks=marks_of(events),
            starts=start_rows(sessions, is_running=status["state"] in ("running", "saving")),
            checkpoints=[
                _checkpoint(iteration, path, events)
                for iteration, path in checkpoints[-_MOST_CHECKPOINTS:]
            ],
            num_checkpoints=len(checkpoints),
            settings=settings if isinstance(settings, dict) else {},
            command=[str(each) for each in command] if isinstance(command, list) else [],
        )

    def _read_metrics(self, sessions: Sequence[Session]) -> str:
        """Reads what is new; returns what there is to say about it."""
        start = next((each.start for each in reversed(sessions) if "metrics" in each.start), {})
        path = _metrics_path(self._folder, start)
        if path != self._reader.path:
            self._reader = MetricsReader(path)
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
    """Where the last start says that its metrics are, or the default if there is no such file: the
    folder may have been copied from another machine.
    """
    logged = start.get("metrics")
    # Any text may stand there: one that is no path is none.
    with suppress(OSError, ValueError):
        if isinstance(logged, str) and Path(logged).is_absolute() and Path(logged).exists():
            return Path(logged)
    return folder / METRICS_FILE


def _checkpoint(iteration: int, path: Path, events: Sequence[Event]) -> CheckpointRow:
    event = next(iter(publications(events, iteration)[-1:]), {})
    return CheckpointRow(
        iteration, path.name, number_in(event, "time"), number_in(event, "seconds")
    )
