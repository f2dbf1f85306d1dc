"""What the files of a run say: its starts, whether its processes are alive, its newest checkpoint.

The files may be torn, or written by anybody, so every value is checked before it is used.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.training.health.events import STOPPED, EventKind

Event = dict[str, Any]

# For whatever is counted here, seconds too; infinity and NaN are not below it either.
_TOO_MUCH = 1e15


@dataclass
class Session:
    """One start of the run and what was logged until the next."""

    start: Event = field(default_factory=dict)  # the event `start`; empty if there is none
    events: list[Event] = field(default_factory=list)  # all of them, in the order of the file

    @property
    def restart(self) -> float:
        """How often the launcher had restarted the job; the same for all events of a session."""
        return next((number_in(event, "restart") or 0.0 for event in self.events), 0.0)

    def last(self, *kinds: EventKind) -> Event | None:
        """The last event of one of these kinds."""
        return next((event for event in reversed(self.events) if is_kind(event, *kinds)), None)

    def end(self) -> Event | None:
        """The event that says how it ended. A rank that has lost another one knows least."""
        ends = [event for event in self.events if is_kind(event, EventKind.EXIT)]
        others = [event for event in ends if event.get("name") != "LOST_RANK"]
        return others[-1] if others else ends[-1] if ends else None


@dataclass(frozen=True)
class Life:
    """Whether the processes of a run that has not ended are there."""

    seen: float | None  # unix seconds of the last sign of life
    why_dead: str | None  # None: they are


@dataclass(frozen=True)
class Published:
    """The newest checkpoint."""

    iteration: int
    time: float | None  # unix seconds
    is_on_disk: bool  # or known from the log alone


def is_kind(event: Event, *kinds: EventKind) -> bool:
    """Whether an event is of one of these kinds."""
    return event.get("event") in kinds


def split_sessions(events: Iterable[Event]) -> list[Session]:
    """The run's starts, in order; one at least, which may be empty.

    The number of restarts tells whose a line is: a rank may outlive its session a little and write
    into the next one's, or have something to say before rank 0 has written the start.
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
    """Whether the launcher has made a start again, which counts; else somebody has."""
    return number > 0 and sessions[number].restart > sessions[number - 1].restart


def newest_checkpoint(folder: Path, events: Sequence[Event]) -> Published | None:
    """The newest published checkpoint: in the folder, or where the log says that the run saves."""
    found = checkpoint_folders(folder, events)
    if found:
        iteration, newest = found[-1]
        times = [number_in(event, "time") for event in publications(events, iteration)]
        return Published(iteration, times[-1] if times else newest.stat().st_mtime, True)

    published = [event for event in events if is_kind(event, EventKind.SAVE_PUBLISHED)]
    logged = published[-1] if published else {}
    known = as_whole(number_in(logged, "iteration"))
    return None if known is None else Published(known, number_in(logged, "time"), False)


def checkpoint_folders(folder: Path, events: Sequence[Event]) -> list[tuple[int, Path]]:
    """The published checkpoints by iteration, ascending: those in the folder, or those where the
    log says that the run saves.
    """
    published = [event for event in events if is_kind(event, EventKind.SAVE_PUBLISHED)]
    path = published[-1].get("checkpoint") if published else None
    # A URL is not absolute; and a relative path is one from where the run was started.
    found = _folders(folder)
    if not found and isinstance(path, str) and Path(path).is_absolute():
        # The log may be of another machine, or of anybody: a path that cannot be read is none.
        with suppress(OSError):
            found = _folders(Path(path).parent)
    return sorted(found)


def publications(events: Sequence[Event], iteration: int | None) -> list[Event]:
    """What the log says of the saves of an iteration that went well."""
    published = (event for event in events if is_kind(event, EventKind.SAVE_PUBLISHED))
    return [event for event in published if number_in(event, "iteration") == iteration]


def _folders(place: Path) -> list[tuple[int, Path]]:
    """Published checkpoints in a folder, with their iterations. They get their names last."""
    if not place.is_dir():
        return []
    found = [(iteration_of(path.name), path) for path in place.iterdir()]
    return [(number, path) for number, path in found if number is not None and path.is_dir()]


def is_of(heartbeat: Event, session: Session) -> bool:
    """Whether a heartbeat is of this session; fields that either lacks do not count."""
    known: Event = {"restart": session.restart} if session.events else {}
    for key in ("pid", "host"):
        if session.start.get(key) is not None:
            known[key] = session.start[key]
    return all(heartbeat.get(key) in (None, value) for key, value in known.items())


def restarts_left(session: Session) -> int | None:
    """How often torchrun may start the job again; None without it."""
    limit = as_whole(number_in(session.start, "max_restarts"))
    return None if limit is None else max(0, limit - int(session.restart))


def save_in_flight(session: Session) -> Event | None:
    """The save that was begun last, unless it has come to an end."""
    ended = []
    for event in reversed(session.events):
        if is_kind(event, EventKind.SAVE_PUBLISHED, EventKind.SAVE_FAILED):
            ended.append(event.get("iteration"))
        elif is_kind(event, EventKind.SAVE_BEGUN):
            # The outcome of the save before may come when this one has begun. An outcome without an
            # iteration may be of either.
            return None if None in ended or event.get("iteration") in ended else event
    return None


def life_of(session: Session, heartbeat: Event | None, now: float, stale_seconds: float) -> Life:
    """Whether rank 0's process is there, on this machine; and the age of what was written last."""
    process = heartbeat or session.start
    times = [number_in(event, "time") for event in (*session.events[-1:], process)]
    seen = max((each for each in times if each is not None), default=None)

    pid = process.get("pid")
    is_here = process.get("host") == socket.gethostname()
    if is_here and isinstance(pid, int) and not _is_process(pid):
        return Life(seen, f"process {pid} is gone and left no exit event")

    # A clock that went back, or another machine's that is ahead, does not make a run dead.
    if seen is None or now - seen > stale_seconds:
        return Life(seen, "no exit event, and no heartbeat since")
    return Life(seen, None)


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
    """Whether the iteration that an event names is one that is being made."""
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
    return value if abs(value) < _TOO_MUCH else None


def as_whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def age_of(now: float, moment: float | None) -> float | None:
    """Seconds since then; 0 if the clock went back in between."""
    return None if moment is None else max(0.0, now - moment)
