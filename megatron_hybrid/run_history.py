"""Reads a run's history from its files: starts, checkpoints, whether its processes are alive."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.training.health.events import STOPPED, EventKind, read_events

Event = dict[str, Any]

_WHOLE = ("iteration", "train_iters", "world_size", "rank", "restart", "max_restarts", "code")
_NUMBERS = ("time", "seconds", "loss", "ms_per_iteration", "grad_norm")
_MOST = 1e15  # of a number; also false for NaN


@dataclass
class Session:
    """One start of the run and the events until the next.

    Attributes:
        start: the event `start`; empty if the start did not write it.
        events: all events, in the order of the file.
    """

    start: Event = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def restart(self) -> int:
        """How often the launcher had restarted the job."""
        return next((event.get("restart", 0) for event in self.events), 0)

    @property
    def restarts_left(self) -> int | None:
        """How often torchrun may restart the job; None without torchrun."""
        limit = self.start.get("max_restarts")
        return None if limit is None else max(0, limit - self.restart)

    @property
    def world_size(self) -> int | None:
        resume = self.last(EventKind.RESUME) or {}
        return resume.get("world_size") or self.start.get("world_size")

    @property
    def resumed_at(self) -> int | None:
        """The iteration of the checkpoint that was loaded."""
        return (self.last(EventKind.RESUME) or {}).get("iteration")

    def last(self, *kinds: EventKind) -> Event | None:
        """Returns the last event of one of these kinds."""
        return next((event for event in reversed(self.events) if is_kind(event, *kinds)), None)

    def end(self) -> Event | None:
        """Returns the last exit event, preferably of a rank that did not just lose another."""
        ends = [event for event in self.events if is_kind(event, EventKind.EXIT)]
        causes = [event for event in ends if event.get("name") != "LOST_RANK"]
        return next(reversed(causes or ends), None)

    def cause(self) -> str:
        """Returns why the session ended, from the rank that detected it first."""
        found = [event for event in self.events if is_kind(event, EventKind.LOST, EventKind.HANG)]
        first, end = found[0] if found else {}, self.end() or {}
        for event, key in ((first, "cause"), (end, "reason"), (end, "name")):
            if event.get(key):
                name = str(event.get("name"))
                return f"{name}: {event[key]}" if name.startswith("SIG") else str(event[key])
        return "unknown: all ranks ended without an event"

    def save_in_flight(self) -> Event | None:
        """Returns the start of the last save if it has not ended."""
        ended = []
        for event in reversed(self.events):
            if is_kind(event, EventKind.SAVE_PUBLISHED, EventKind.SAVE_FAILED):
                ended.append(event.get("iteration"))
            elif is_kind(event, EventKind.SAVE_BEGUN):
                # The previous save may end after this one starts. An end without an iteration may
                # belong to either.
                return None if None in ended or event.get("iteration") in ended else event
        return None


def read_history(folder: Path) -> list[Event]:
    """Returns a run's events in order, with plausible numbers. OSError as `read_events`."""
    return [checked(event) for event in read_events(folder)]


def checked(record: Event) -> Event:
    """Returns the record without implausible numbers, which a damaged file may contain."""
    found = dict(record)
    for name in (*_WHOLE, *_NUMBERS):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
            found.pop(name, None)
        elif name in _WHOLE:
            found[name] = int(value)
    return found


def is_kind(event: Event, *kinds: EventKind) -> bool:
    """Whether an event is of one of these kinds."""
    return event.get("event") in kinds


def split_sessions(events: Iterable[Event]) -> list[Session]:
    """Returns the run's starts in order; at least one, which may be empty.

    An event belongs to the session with its number of restarts: a rank may outlive its session and
    write into the next one's events, or write before rank 0 writes the start.
    """
    sessions = [Session()]
    for event in events:
        current, restart = sessions[-1], event.get("restart")
        is_other = bool(current.events) and restart is not None and restart != current.restart

        if is_kind(event, EventKind.START):
            if current.start or is_other:
                sessions.append(Session())
            sessions[-1].start = event
        elif is_other:
            earlier = [session for session in sessions if session.restart == restart]
            if earlier:
                earlier[-1].events.append(event)
                continue
            sessions.append(Session())
        sessions[-1].events.append(event)
    return sessions


def is_relaunch(sessions: Sequence[Session], number: int) -> bool:
    """Whether the launcher made this start, not a user."""
    return number > 0 and sessions[number].restart > sessions[number - 1].restart


def is_under_way(event: Event) -> bool:
    """Whether the iteration of an event was unfinished at that moment."""
    if is_kind(event, EventKind.EXIT):
        return event.get("name") not in ("FINISHED", STOPPED, "PREEMPTED")
    return is_kind(event, EventKind.INJECT, EventKind.SIGNAL)


def publications(events: Sequence[Event]) -> list[Event]:
    """Returns the events of successful saves."""
    return [event for event in events if is_kind(event, EventKind.SAVE_PUBLISHED)]


def publication_of(events: Sequence[Event], iteration: int | None) -> Event:
    """Returns the last event of a successful save of an iteration, or an empty one."""
    found = [event for event in publications(events) if event.get("iteration") == iteration]
    return found[-1] if found else {}


def checkpoint_folders(folder: Path, events: Sequence[Event]) -> list[tuple[int, Path]]:
    """Returns published checkpoints by iteration, ascending: in the run's directory, or else in the
    directory that the events name.
    """
    found = _folders(folder)
    path = next(reversed(publications(events)), {}).get("checkpoint")
    # A URL is not absolute, and a relative path depends on the directory of the run's start.
    if not found and isinstance(path, str) and Path(path).is_absolute():
        with suppress(OSError):  # the path may be another machine's
            found = _folders(Path(path).parent)
    return sorted(found)


def _folders(place: Path) -> list[tuple[int, Path]]:
    if not place.is_dir():
        return []
    found = [(iteration_of(path.name), path) for path in place.iterdir()]
    return [(number, path) for number, path in found if number is not None and path.is_dir()]


def is_of(heartbeat: Event, session: Session) -> bool:
    """Whether a heartbeat is from this session, by the fields that both have."""
    known: Event = {"restart": session.restart} if session.events else {}
    for key in ("pid", "host"):
        if session.start.get(key) is not None:
            known[key] = session.start[key]
    return all(heartbeat.get(key) in (None, value) for key, value in known.items())


def is_gone(process: Event) -> bool:
    """Whether the process of a start or a heartbeat is known to have ended on this machine."""
    pid = process.get("pid")
    if process.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    if pid <= 0:
        return True

    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # another user's process, or a system without /proc
        return False
    return status[:1] == ["Z"]


def age_of(now: float, moment: float | None) -> float | None:
    """Returns the seconds since then; 0 if the clock went back in between."""
    return None if moment is None else max(0.0, now - moment)


def date_text(moment: float) -> str:
    """Returns a date in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def duration_text(seconds: float) -> str:
    """Returns the two largest units: "12 s", "4 min 2 s", "3 d 1 h"."""
    total = int(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, name, smaller, smaller_name in units:
        if total >= size:
            return f"{total // size} {name} {total % size // smaller} {smaller_name}"
    return f"{total} s"
