"""A run's history for operators and scripts: `events.jsonl` and `heartbeat.json`.

docs/recovery.md lists the events and their fields. All ranks append to one file, and a restarted
run continues it. Readers ignore unknown fields and damaged lines; lines may be missing. A restarted
run also reads the findings of its earlier starts from it (`EarlierFindings`).
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError, shown
from megatron.core.files import read_regular, reason_of, temporary_path
from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron.training.health.jsonl import JsonLines, finite, parse_object, read_json_lines

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
HEARTBEAT_FILE = "heartbeat.json"
CONFIG_FILE = "config.yaml"
# The name in the exit event of a planned stop before the end, whose code is 0 as well.
STOPPED = "STOPPED"
TIMELINES_FOLDER = "timelines"
METRICS_FILE = "metrics.jsonl"  # in the same directory, unless --metrics-jsonl names another file
_MOST_HEARTBEAT_BYTES = 65536
_MOST_REASON_CHARACTERS = 1000


class EventKind(str, enum.Enum):
    """The kinds of events. docs/recovery.md describes when they are written, and their fields."""

    START = "start"
    RESUME = "resume"
    DAMAGED = "damaged"
    SET_ASIDE = "set_aside"
    STEP = "step"
    SAVE_BEGUN = "save_begun"
    SAVE_PUBLISHED = "save_published"
    SAVE_FAILED = "save_failed"
    SAVE_SKIPPED = "save_skipped"
    EVALUATION = "evaluation"
    SKIP = "skip"
    NAN = "nan"
    SIGNAL = "signal"
    LOST = "lost"
    HANG = "hang"
    INJECT = "inject"
    EXIT = "exit"


class EventLog:
    """Appends to a run's events. Without a directory, drops them.

    Never raises and never ends a run: a failing disk is one warning. Any thread and any signal
    handler may call it.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        rank: int = 0,
        restart: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            folder: a directory that all ranks share, created with the first event.
            rank: the rank to write in each line.
            restart: the number of restarts of this job, also in each line.
            clock: returns seconds since 1970.
        """
        self._lines = None if folder is None else JsonLines(Path(folder) / EVENTS_FILE)
        self._heartbeat = None if folder is None else Path(folder) / HEARTBEAT_FILE
        self._rank = rank
        self._restart = restart
        self._clock = clock
        self._has_warned = False
        self._num_exits = itertools.count()

    def require_folder(self) -> None:
        """Raises ConfigError if the events cannot be written to the directory of --events-dir."""
        if self._lines is None:
            return
        try:
            self._lines.touch()
        except OSError as error:
            raise ConfigError(
                f"--events-dir: expected a writable directory, got "
                f"{self._lines.path.parent} ({reason_of(error)})."
            ) from None

    def write(self, kind: EventKind, /, **fields: object) -> None:
        """Appends {"time", "event", "rank", "restart", **fields}; NaN and infinity become null.

        A rank exits once: only its first exit event is written.
        """
        if self._lines is None:
            return
        # The loop and the watchdog may end the run at the same time. A lock would block a signal
        # handler; the counter is atomic.
        if kind is EventKind.EXIT and next(self._num_exits):
            return
        own = {"rank": self._rank, "restart": self._restart}
        try:
            self._lines.append({"time": self._clock(), "event": kind, **own, **fields})
        except Exception as error:  # no failure of the log may end a run
            self._warn(self._lines.path, error)

    def beat(self, **fields: object) -> None:
        """Replaces the heartbeat by {"time", "restart", **fields}, atomically for readers."""
        if self._heartbeat is None:
            return

        temporary = temporary_path(self._heartbeat)
        content = {"time": self._clock(), "restart": self._restart, **fields}
        try:
            text = json.dumps(finite(content), default=str)
            try:
                self._heartbeat.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("x") as stream:
                    stream.write(text + "\n")
                temporary.replace(self._heartbeat)
            finally:
                temporary.unlink(missing_ok=True)
        except Exception as error:  # as above
            self._warn(self._heartbeat, error)

    def _warn(self, path: Path, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "Could not write %s: %s. The run continues; its events may be incomplete."
            logger.warning(text, path, error)


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Returns a run's events in the order of the file; an empty list for a missing file.

    Lines that are not JSON objects are skipped. OSError for an unreadable or irregular file.
    """
    return read_json_lines(Path(folder) / EVENTS_FILE)


def read_heartbeat(folder: str | Path) -> dict[str, Any] | None:
    """Returns a run's heartbeat; None for a missing or damaged file. OSError as `read_events`."""
    path = Path(folder) / HEARTBEAT_FILE
    try:
        return parse_object(read_regular(path, max_bytes=_MOST_HEARTBEAT_BYTES, what="a heartbeat"))
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass(frozen=True)
class EarlierFindings:
    """The findings of the earlier starts of a job since it was last launched by hand.

    Plain data, which ranks exchange as JSON.

    Attributes:
        damaged: the reasons why checkpoints are damaged, by path.
        resumed: the iterations at which the starts resumed, in order.
        has_saved: whether the job has saved a checkpoint.
    """

    damaged: dict[str, str] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    has_saved: bool = False

    @classmethod
    def read(cls, folder: str | Path) -> EarlierFindings:
        """Reads the events since the last launch by hand.

        A log that cannot be read is a warning, like one that cannot be written.

        Raises:
            CheckpointError: if a field of an event is missing or has another type than it is
                written with. Without it, the run might resume from a damaged checkpoint, or from
                one of another job.
        """
        try:
            events = read_events(folder)
        except OSError as error:
            text = "Could not read the event log: %s. The findings of earlier starts are lost."
            logger.warning(text, error)
            return cls()

        starts = [number for number, event in enumerate(events) if _is_first_start(event)]
        damaged: dict[str, str] = {}
        resumed: list[int] = []
        has_saved = False

        for event in events[starts[-1] if starts else 0 :]:
            match event.get("event"), event.get("checkpoint"), event.get("reason"):
                case EventKind.DAMAGED, str(path), str(reason):
                    damaged[path] = printable(reason, _MOST_REASON_CHARACTERS)
                case EventKind.SAVE_PUBLISHED, str(path), _:
                    damaged.pop(path, None)  # replaced by a new checkpoint
                    has_saved = True
                case EventKind.SET_ASIDE, str(path), _:
                    damaged.pop(path, None)
                case EventKind.DAMAGED | EventKind.SAVE_PUBLISHED | EventKind.SET_ASIDE, _, _:
                    raise _malformed(event, "a checkpoint and a reason as text", folder)
                case EventKind.RESUME, _, _:
                    resumed.append(_iteration_of(event, folder))
        return cls(damaged, resumed, has_saved)


def _is_first_start(event: dict[str, Any]) -> bool:
    """Returns whether a job was launched by hand here."""
    restart = event.get("restart")
    return event.get("event") == EventKind.START and type(restart) is int and restart == 0


def _iteration_of(event: dict[str, Any], folder: str | Path) -> int:
    iteration = event.get("iteration")
    if type(iteration) is not int or iteration < 0:
        raise _malformed(event, "an iteration >= 0", folder)
    return iteration


def _malformed(event: dict[str, Any], expected: str, folder: str | Path) -> CheckpointError:
    got = {name: event.get(name) for name in ("checkpoint", "reason", "iteration")}
    shown_fields = ", ".join(f"{name} {shown(value)}" for name, value in got.items())
    return CheckpointError(
        f"Expected {expected} in the event {event['event']!r} of {folder}/{EVENTS_FILE}, got "
        f"{shown_fields}. A run that is launched by hand does not read it."
    )
