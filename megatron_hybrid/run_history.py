"""The history of a run from its files: starts, checkpoints, whether its processes are alive.

The files may be torn, or written by anyone, so every value is checked before it is used.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.training.health.events import STOPPED, EventKind

Event = dict[str, Any]

_MOST = 1e15  # of any number in a file, seconds too; NaN is not below it either


@dataclass
class Session:
    """One start of the run and the events until the next."""

    start: Event = field(default_factory=dict)  # the event `start`, or empty
    events: list[Event] = field(default_factory=list)  # all of them, in the order of the file

    @property
    def restart(self) -> float:
        """How often the launcher had restarted the job; the same in all events of a session."""
        return next((number_in(event, "restart") or 0.0 for event in self.events), 0.0)

    @property
    def world_size(self) -> int | None:
        resume = self.last(EventKind.RESUME) or {}
        return as_whole(number_in(resume, "world_size") or number_in(self.start, "world_size"))

    @property
    def resumed_at(self) -> int | None:
        """The iteration of the checkpoint that was loaded."""
        return as_whole(number_in(self.last(EventKind.RESUME) or {}, "iteration"))

    def last(self, *kinds: EventKind) -> Event | None:
        """The last event of one of these kinds."""
        return next((event for event in reversed(self.events) if is_kind(event, *kinds)), None)

    def end(self) -> Event | None:
        """The event of its end. An event of a rank that lost another rank counts least."""
        ends = [event for event in self.events if is_kind(event, EventKind.EXIT)]
        others = [event for event in ends if event.get("name") != "LOST_RANK"]
        return next(reversed(others or ends), None)


class Life(NamedTuple):
    """Whether the processes of a run that has not ended are there."""

    seen: float | None  # unix seconds of the last sign of life
    why_dead: str | None  # None: they are alive


class Published(NamedTuple):
    """The newest checkpoint."""

    iteration: int
    time: float | None  # unix seconds
    is_on_disk: bool  # False: known from the log alone


def is_kind(event: Event, *kinds: EventKind) -> bool:
    """Whether an event is of one of these kinds."""
    return event.get("event") in kinds


def split_sessions(events: Iterable[Event]) -> list[Session]:
    """The run's starts, in order. There is at least one, which may be empty.

    An event belongs to the session with its number of restarts: a rank may outlive its session a
    little and write into the next one's, or write before rank 0 has written the start.
    """
    sessions = [Session()]
    for event in events:
        current, restart = sessions[-1], number_in(event, "restart")
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
    """Whether the launcher made this start, rather than somebody by hand."""
    return number > 0 and sessions[number].restart > sessions[number - 1].restart


def newest_checkpoint(folder: Path, events: Sequence[Event]) -> Published | None:
    """The newest published checkpoint: in the directory, or where the log has the run save."""
    found = checkpoint_folders(folder, events)
    if found:
        iteration, newest = found[-1]
        times = [number_in(event, "time") for event in publications(events, iteration)]
        return Published(iteration, times[-1] if times else newest.stat().st_mtime, True)

    logged = next(reversed(_publications(events)), {})
    known = as_whole(number_in(logged, "iteration"))
    return None if known is None else Published(known, number_in(logged, "time"), False)


def checkpoint_folders(folder: Path, events: Sequence[Event]) -> list[tuple[int, Path]]:
    """The published checkpoints by iteration, ascending: in the directory, or where the log has
    the run save.
    """
    found = _folders(folder)
    path = next(reversed(_publications(events)), {}).get("checkpoint")
    # A URL is not absolute, and a relative path depends on where the run was started.
    if not found and isinstance(path, str) and Path(path).is_absolute():
        with suppress(OSError):  # the path may be of another machine
            found = _folders(Path(path).parent)
    return sorted(found)


def publications(events: Sequence[Event], iteration: int | None) -> list[Event]:
    """The events of successful saves of an iteration."""
    return [each for each in _publications(events) if number_in(each, "iteration") == iteration]


def _publications(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if is_kind(event, EventKind.SAVE_PUBLISHED)]


def _folders(place: Path) -> list[tuple[int, Path]]:
    """Published checkpoints in a directory, with their iterations. Saving renames them last."""
    if not place.is_dir():
        return []
    found = [(iteration_of(path.name), path) for path in place.iterdir()]
    return [(number, path) for number, path in found if number is not None and path.is_dir()]


def is_of(heartbeat: Event, session: Session) -> bool:
    """Whether a heartbeat is of this session, by the fields that both have."""
    known: Event = {"restart": session.restart} if session.events else {}
    for key in ("pid", "host"):
        if session.start.get(key) is not None:
            known[key] = session.start[key]
    return all(heartbeat.get(key) in (None, value) for key, value in known.items())


def restarts_left(session: Session) -> int | None:
    """How often torchrun may start the job again; None without torchrun."""
    limit = as_whole(number_in(session.start, "max_restarts"))
    return None if limit is None else max(0, limit - int(session.restart))


def save_in_flight(session: Session) -> Event | None:
    """The start of the last save, if it has not ended."""
    ended = []
    for event in reversed(session.events):
        if is_kind(event, EventKind.SAVE_PUBLISHED, EventKind.SAVE_FAILED):
            ended.append(event.get("iteration"))
        elif is_kind(event, EventKind.SAVE_BEGUN):
            # The previous save may end after the start of this one. An end without an iteration
            # may be of either.
            return None if None in ended or event.get("iteration") in ended else event
    return None


def life_of(session: Session, heartbeat: Event | None, now: float, stale_seconds: float) -> Life:
    """Whether rank 0's process is on this machine, or has written something recently."""
    process = heartbeat or session.start
    times = [number_in(event, "time") for event in (*session.events[-1:], process)]
    seen = max((each for each in times if each is not None), default=None)

    pid = process.get("pid")
    is_here = process.get("host") == socket.gethostname()
    if is_here and isinstance(pid, int) and not _is_process(pid):
        return Life(seen, f"process {pid} is gone and left no exit event")
    # A clock that went back, or another machine's that is ahead, does not make a run dead.
    is_stale = seen is None or now - seen > stale_seconds
    return Life(seen, "no exit event, and no heartbeat since" if is_stale else None)


def _is_process(pid: int) -> bool:
    """Whether there is such a process on this machine, other than as a zombie."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's; or a system without /proc
        return True
    return status[:1] != ["Z"]


def is_under_way(event: Event) -> bool:
    """Whether the iteration of an event was unfinished at that moment."""
    if is_kind(event, EventKind.EXIT):
        return event.get("name") not in ("FINISHED", STOPPED, "PREEMPTED")
    return is_kind(event, EventKind.INJECT, EventKind.SIGNAL)


def cause_of(session: Session) -> str:
    """Why a session ended, in the words of the rank that found out first."""
    found = [event for event in session.events if is_kind(event, EventKind.LOST, EventKind.HANG)]
    first, end = found[0] if found else {}, session.end() or {}
    for event, key in ((first, "cause"), (end, "reason"), (end, "name")):
        if event.get(key):
            name = str(event.get("name"))
            return f"{name}: {event[key]}" if name.startswith("SIG") else str(event[key])
    return "not known: all ranks ended without a word"


def number_in(event: Event, key: str) -> float | None:
    """A field that is a finite number, or None."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _MOST else None


def as_whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def age_of(now: float, moment: float | None) -> float | None:
    """Seconds since then; 0 if the clock went back in between."""
    return None if moment is None else max(0.0, now - moment)


def date_text(moment: float) -> str:
    """In local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def duration_text(seconds: float) -> str:
    """The two largest units: "12 s", "4 min 2 s", "3 d 1 h"."""
    total = int(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, name, smaller, smaller_name in units:
        if total >= size:
            return f"{total // size} {name} {total % size // smaller} {smaller_name}"
    return f"{total} s"
