"""A run's history for operators and scripts: `events.jsonl` and `heartbeat.json`.

docs/recovery.md lists the events and their fields. All ranks append to one file, and a restarted
run continues it. Readers ignore unknown fields and damaged lines; lines may be missing.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.files import read_regular, reason_of, temporary_path
from megatron.core.options import ConfigError
from megatron.training.health.jsonl import JsonLines, finite, parse_object, read_json_lines

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
HEARTBEAT_FILE = "heartbeat.json"
CONFIG_FILE = "config.yaml"
# The name in an exit event of a planned stop before the end, whose code is 0 too.
STOPPED = "STOPPED"
METRICS_FILE = "metrics.jsonl"  # in the same directory, unless --metrics-jsonl names another file
_MOST_HEARTBEAT_BYTES = 65536


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

    Never raises and never ends a run: a disk that fails is one warning. Any thread and any signal
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
            folder: on a file system that all ranks see. Made with the first event.
            rank: the rank to write in each line.
            restart: how often the launcher has restarted this job, also in each line.
            clock: seconds since 1970.
        """
        self._lines = None if folder is None else JsonLines(Path(folder) / EVENTS_FILE)
        self._heartbeat = None if folder is None else Path(folder) / HEARTBEAT_FILE
        self._rank = rank
        self._restart = restart
        self._clock = clock
        self._has_warned = False
        self._num_exits = itertools.count()

    def require_folder(self) -> None:
        """ConfigError if the events cannot be written. For a folder that the user has named."""
        if self._lines is None:
            return
        try:
            self._lines.touch()
        except OSError as error:
            raise ConfigError(
                f"--events-dir: expected a folder that can be written, got "
                f"{self._lines.path.parent} ({reason_of(error)})."
            ) from None

    def write(self, kind: EventKind, /, **fields: object) -> None:
        """Appends {"time", "event", "rank", "restart", **fields}; NaN and infinity become null.

        A rank ends once: of several exits, the first is written.
        """
        if self._lines is None:
            return
        # The loop and the watchdog may find at once that the run is to end. A lock would block a
        # signal handler; this number is taken in one step.
        if kind is EventKind.EXIT and next(self._num_exits):
            return
        own = {"rank": self._rank, "restart": self._restart}
        try:
            self._lines.append({"time": self._clock(), "event": kind, **own, **fields})
        except Exception as error:  # whatever it is, it is not worth a run
            self._warn(self._lines.path, error)

    def beat(self, **fields: object) -> None:
        """Replaces the heartbeat by {"time", "restart", **fields}, whole for whoever reads it."""
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
            text = "Could not write %s: %s. The run goes on; its events may be incomplete."
            logger.warning(text, path, error)


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """A run's events, in the order in which they were written; none if there is no such file.

    Lines that are no JSON objects are skipped. OSError for a file that is unreadable or irregular.
    """
    return read_json_lines(Path(folder) / EVENTS_FILE)


def read_heartbeat(folder: str | Path) -> dict[str, Any] | None:
    """A run's heartbeat, or None if there is none that makes sense. OSError as `read_events`."""
    path = Path(folder) / HEARTBEAT_FILE

    try:
        return parse_object(read_regular(path, max_bytes=_MOST_HEARTBEAT_BYTES, what="a heartbeat"))
    except (FileNotFoundError, NotADirectoryError):
        return None
