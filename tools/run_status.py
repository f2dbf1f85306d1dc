#!/usr/bin/env python3
"""Says in five lines how a run is doing, from the files that it leaves: events, heartbeat and
checkpoints.

    python tools/run_status.py runs/gpt_cpu
    python tools/run_status.py runs/gpt_cpu --json

    state: running since 2026-11-21 20:16:01 (4 min 2 s), heartbeat 3 s ago in forward, process 4711
    on node1 progress: iteration 320/500, loss 4.081, 385.9 ms per iteration, 1 min 9 s left
    checkpoint: iteration 300, 12 s ago, took 0.15 s; no save failed since restarts: 1, the last
    from iteration 200, with 2 ranks; last end: rank 1 was killed in iteration 217 (forward)
    trouble: none

DIR is the folder of --events-dir, or of --save without it. The state is one of

    running     and so is its heartbeat
    saving      the same, and a save is in flight
    finished    trained to the end
    stopped     ended before that as it was told to, with its state saved: --exit-interval, --exit-duration-in-mins
    preempted   ended by a signal
    failed      ended by an error, or by the loss of a rank; torchrun starts it again if there are restarts left
    hung        ended for want of progress; the same
    dead        has not said that it ended, and its process is gone or its heartbeat older than --stale-seconds
    unknown     there are checkpoints, but no events: of a run that wrote none

A run that is started again goes on with the same files: state and progress are those of its last
start.

Exit code: that of the run if it has ended (docs/recovery.md lists them); 0 while it runs, and if it
is unknown; 1 if it is dead; 2 if the folder holds no run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.core.log import printable
from megatron.training.health.events import read_events, read_heartbeat

Event = dict[str, Any]

EXIT_DEAD, EXIT_NO_RUN = 1, 2
STALE_SECONDS = (
    60.0  # a heartbeat is written every few seconds; a slow file system may hold one back
)
_TOO_MUCH = (
    1e15  # for whatever is counted here, seconds too; infinity and NaN are not below it either
)
# Of the names in megatron.training.health.exits, which imports torch: that takes two seconds.
# A signal that is not handled gives its own name; all others are failures.
_MOST_CHARACTERS = 1000  # of a line: what the files say may be of any length
_ENDS = {
    "FINISHED": "finished",
    "PREEMPTED": "preempted",
    "PREEMPTED_UNSAVED": "preempted",
    "HANG": "hung",
}


@dataclass
class Session:
    """One start of the run and what was logged until the next."""

    start: Event = field(default_factory=dict)  # the event `start`; empty if there is none
    events: list[Event] = field(
        default_factory=list
    )  # in the order of the file, `start` among them

    @property
    def restart(self) -> float:
        """How often the launcher had restarted the job; the same for all events of a session."""
        return next((_number(event, "restart") or 0.0 for event in self.events), 0.0)

    def last(self, *kinds: str) -> Event | None:
        """The last event of one of these kinds."""
        return next((event for event in reversed(self.events) if event.get("event") in kinds), None)

    def end(self) -> Event | None:
        """The event that says how it ended. A rank that has lost another one knows least."""
        ends = [event for event in self.events if event.get("event") == "exit"]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the status; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    folder = Path(arguments.dir)
    try:
        status = run_status(folder, now=time.time(), stale_seconds=arguments.stale_seconds)
    except OSError as error:
        print(f"run_status.py: {error}", file=sys.stderr)
        return EXIT_NO_RUN
    if status is None:
        print(
            f"run_status.py: expected a run's folder, got {folder} without events or checkpoints",
            file=sys.stderr,
        )
        return EXIT_NO_RUN
    print(json.dumps(status, indent=1) if arguments.json else "\n".join(lines_of(status)))
    return int(status["exit_code"])


def run_status(
    folder: Path, *, now: float, stale_seconds: float = STALE_SECONDS
) -> dict[str, Any] | None:
    """All that is known of the run in a folder as plain data, or None if there is no run.

    Args:
        now: unix seconds.
        stale_seconds: age from which on a heartbeat says that its run is dead.
    """
    events, heartbeat = read_events(folder), read_heartbeat(folder)
    checkpoint = newest_checkpoint(folder, events)
    if not events and heartbeat is None and checkpoint is None:
        return None
    sessions = split_sessions(events)
    session = sessions[-1]
    if heartbeat is not None and not _is_of(heartbeat, session):
        heartbeat = None
    state = _state(session, heartbeat, now, stale_seconds)
    progress = _progress(session, heartbeat, is_running=state["state"] in ("running", "saving"))
    if state["state"] == "finished" and _is_early(progress):
        state["state"] = "stopped"
    return {
        **state,
        "progress": progress,
        "checkpoint": _checkpoint(checkpoint, events, now),
        "restarts": _restarts(
            sessions, has_failed=state["state"] in ("preempted", "failed", "hung", "dead")
        ),
        "trouble": _trouble(events),
    }


def lines_of(status: dict[str, Any]) -> list[str]:
    """The five lines."""
    parts = {
        "state": _state_line(status),
        "progress": _progress_line(status["progress"]),
        "checkpoint": _checkpoint_line(status["checkpoint"]),
        "restarts": _restarts_line(status["restarts"]),
        "trouble": _trouble_line(status["trouble"]),
    }
    return [f"{name}: {printable(text, _MOST_CHARACTERS)}" for name, text in parts.items()]


def split_sessions(events: Iterable[Event]) -> list[Session]:
    """The run's starts, in order; one at least, which may be empty.

    The number of restarts tells whose a line is: a rank may outlive its session a little and write
    into the next one's, or have something to say before rank 0 has written the start.
    """
    sessions = [Session()]
    for event in events:
        current, restart = sessions[-1], _number(event, "restart")
        is_other = bool(current.events) and restart is not None and restart != current.restart
        if event.get("event") == "start":
            if current.start or is_other:
                sessions.append(Session())
            sessions[-1].start = event
        elif is_other:
            earlier = next(
                (session for session in reversed(sessions) if session.restart == restart), None
            )
            if earlier is not None:
                earlier.events.append(event)
                continue
            sessions.append(Session())
        sessions[-1].events.append(event)
    return sessions


def newest_checkpoint(folder: Path, events: Sequence[Event]) -> Published | None:
    """The newest published checkpoint: in the folder, or where the log says that the run saves."""
    logged = next(
        (event for event in reversed(events) if event.get("event") == "save_published"), {}
    )
    path = logged.get("checkpoint")
    # A URL is not absolute; and a relative path is one from where the run was started.
    elsewhere = [Path(path).parent] if isinstance(path, str) and Path(path).is_absolute() else []
    for place in (folder, *elsewhere):
        found = [(iteration, path) for path, iteration in _folders(place)]
        if found:
            iteration, newest = max(found)
            times = [_number(event, "time") for event in _publications(events, iteration)]
            return Published(iteration, times[-1] if times else newest.stat().st_mtime, True)
    known = _whole(_number(logged, "iteration"))
    return None if known is None else Published(known, _number(logged, "time"), False)


def _publications(events: Sequence[Event], iteration: int | None) -> list[Event]:
    """What the log says of the saves of an iteration that went well."""
    published = (event for event in events if event.get("event") == "save_published")
    return [event for event in published if _number(event, "iteration") == iteration]


def _folders(place: Path) -> list[tuple[Path, int]]:
    """Published checkpoints in a folder of the file system, with their iterations.

    There they get their names when they are whole.
    """
    if not place.is_dir():
        return []
    found = ((path, iteration_of(path.name)) for path in place.iterdir())
    return [
        (path, iteration) for path, iteration in found if iteration is not None and path.is_dir()
    ]


def _is_of(heartbeat: Event, session: Session) -> bool:
    """Whether a heartbeat is of this session; what is not known is taken to be so."""
    known: Event = {"restart": session.restart} if session.events else {}
    known |= {
        key: session.start[key] for key in ("pid", "host") if session.start.get(key) is not None
    }
    return all(heartbeat.get(key) in (None, value) for key, value in known.items())


def _state(
    session: Session, heartbeat: Event | None, now: float, stale_seconds: float
) -> dict[str, Any]:
    """What the first line says."""
    if not session.events and heartbeat is None:
        return _state_of("unknown", 0, None, now, "no events here")
    end = session.end()
    if end is not None:
        name, code = str(end.get("name")), _whole(_number(end, "code"))
        state = "preempted" if name.startswith("SIG") else _ENDS.get(name, "failed")
        detail = f"exit code {'unknown' if code is None else code} ({name})"
        left = _restarts_left(session) if state in ("failed", "hung") else None
        detail += f", {_count(left, 'restart')} left" if left else ""
        exit_code = EXIT_DEAD if code is None else code & 0xFF
        return _state_of(state, exit_code, _number(end, "time"), now, detail)
    life = _life(session, heartbeat, now, stale_seconds)
    if life.why_dead is not None:
        return _state_of("dead", EXIT_DEAD, life.seen, now, life.why_dead)
    save = _save_in_flight(session)
    since = _number(session.start if save is None else save, "time")
    return _state_of(
        "running" if save is None else "saving", 0, since, now, _heartbeat_text(heartbeat, now)
    )


def _restarts_left(session: Session) -> int | None:
    """How often torchrun may start the job again; None without it."""
    limit = _whole(_number(session.start, "max_restarts"))
    return None if limit is None else max(0, limit - int(session.restart))


def _save_in_flight(session: Session) -> Event | None:
    """The save that was begun last, unless it has come to an end."""
    ended = []
    for event in reversed(session.events):
        if event.get("event") in ("save_published", "save_failed"):
            ended.append(event.get("iteration"))
        elif event.get("event") == "save_begun":
            # The outcome of the save before may come when this one has begun. None: it does not say
            # of which it is.
            return None if None in ended or event.get("iteration") in ended else event
    return None


def _state_of(
    state: str, exit_code: int, since: float | None, now: float, detail: str
) -> dict[str, Any]:
    seconds = _age(now, since)
    return {
        "state": state,
        "exit_code": exit_code,
        "since": since,
        "seconds": seconds,
        "detail": detail,
    }


def _life(session: Session, heartbeat: Event | None, now: float, stale_seconds: float) -> Life:
    """Rank 0's process, if it is one of this machine; and the age of what was written last."""
    process = heartbeat or session.start
    times = [_number(event, "time") for event in (*session.events[-1:], process)]
    seen = max((each for each in times if each is not None), default=None)
    pid = process.get("pid")
    is_here = process.get("host") == socket.gethostname()
    if is_here and isinstance(pid, int) and not _is_process(pid):
        return Life(seen, f"process {pid} is gone and left no exit event")
    # A clock that went back, or that of another machine which is ahead, makes no run dead.
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


def _heartbeat_text(heartbeat: Event | None, now: float) -> str:
    if heartbeat is None:
        return "no heartbeat yet"
    age, phase = _age(now, _number(heartbeat, "time")), heartbeat.get("phase")
    text = "heartbeat" if age is None else f"heartbeat {_duration(age)} ago"
    text += "" if phase is None else f" in {phase}"
    if heartbeat.get("pid") is not None and heartbeat.get("host") is not None:
        text += f", process {heartbeat['pid']} on {heartbeat['host']}"
    return text


def _progress(session: Session, heartbeat: Event | None, *, is_running: bool) -> dict[str, Any]:
    """How far the session has come, by whatever says most."""
    beat = heartbeat or {}
    # Until a checkpoint is loaded, heartbeat and exit do not know where the run is.
    is_known = not session.events or session.last("resume", "step") is not None
    sources = [
        event
        for event in (beat, *session.events)
        if is_known or event.get("event") not in (None, "exit")
    ]
    # At least: a fault, a signal or an error comes in the iteration after those that have been
    # made.
    least = [(_number(event, "iteration"), _is_under_way(event)) for event in sources]
    known = [
        max(0.0, iteration - is_under_way)
        for iteration, is_under_way in least
        if iteration is not None
    ]
    iteration = max(known, default=None)
    totals = (_number(event, "train_iters") for event in (beat, *reversed(session.events)))
    train_iters = next((each for each in totals if each is not None), None)
    ms, left = _number(beat, "ms_per_iteration"), None
    if is_running and ms is not None and iteration is not None and train_iters is not None:
        left = max(0.0, train_iters - iteration) * ms / 1000.0
    return {
        "iteration": _whole(iteration),
        "train_iters": _whole(train_iters),
        "loss": _number(beat, "loss"),
        "loss_iteration": _whole(_number(beat, "iteration")),
        "ms_per_iteration": ms,
        "seconds_left": left,
    }


def _is_under_way(event: Event) -> bool:
    """Whether the iteration that an event names is one that is being made."""
    is_error = event.get("event") == "exit" and event.get("name") not in ("FINISHED", "PREEMPTED")
    return is_error or event.get("event") in ("inject", "signal")


def _is_early(progress: dict[str, Any]) -> bool:
    """Whether there would have been more to train."""
    return None not in (progress["iteration"], progress["train_iters"]) and (
        progress["iteration"] < progress["train_iters"]
    )


def _checkpoint(
    checkpoint: Published | None, events: Sequence[Event], now: float
) -> dict[str, Any] | None:
    if checkpoint is None and not any(event.get("event") == "save_failed" for event in events):
        return None
    iteration = None if checkpoint is None else checkpoint.iteration
    outcomes = [
        event for event in events if event.get("event") in ("save_published", "save_failed")
    ]
    failed = list(
        itertools.takewhile(lambda event: event["event"] == "save_failed", reversed(outcomes))
    )
    seconds = [_number(event, "seconds") for event in _publications(events, iteration)]
    return {
        "iteration": iteration,
        "age_seconds": None if checkpoint is None else _age(now, checkpoint.time),
        "save_seconds": seconds[-1] if seconds else None,
        "is_on_disk": checkpoint is not None and checkpoint.is_on_disk,
        "failed_since": len(failed),
        "failure": str(failed[0].get("reason")) if failed else None,
    }


def _restarts(sessions: Sequence[Session], *, has_failed: bool) -> dict[str, Any]:
    """How often the run was started again, and why it ended before its time: now, or else the time
    before.
    """
    session = sessions[-1]
    resume = session.last("resume") or {}
    world_size = _number(resume, "world_size") or _number(session.start, "world_size")
    ended = [session] if has_failed else sessions[-2:-1]
    return {
        "count": len(sessions) - 1,
        "iteration": _whole(_number(resume, "iteration")),
        "world_size": _whole(world_size),
        "last_end": _cause(ended[0]) if ended else None,
    }


def _cause(session: Session) -> str:
    """Why a session ended, in the words of who found out first."""
    found = next(
        (event for event in session.events if event.get("event") in ("lost", "hang")), None
    )
    end = session.end()
    for event, key in ((found, "cause"), (end, "reason"), (end, "name")):
        if event is not None and event.get(key):
            name = str(event.get("name"))
            return f"{name}: {event[key]}" if name.startswith("SIG") else str(event[key])
    return "not known: all ranks ended without a word"


def _trouble(events: Iterable[Event]) -> dict[str, Any]:
    """What went wrong since the run began. An iteration that was made again counts once."""
    trouble: dict[str, Any] = {
        "skipped": [],
        "nan": [],
        "damaged": [],
        "signals": [],
        "injected": [],
    }
    keys = {
        "skip": ("skipped", "iteration"),
        "nan": ("nan", "iteration"),
        "damaged": ("damaged", "checkpoint"),
    }
    keys |= {"signal": ("signals", "signal"), "inject": ("injected", "spec")}
    for event in events:
        name, key = keys.get(str(event.get("event")), (None, ""))
        value = event.get(key)
        if name is not None and isinstance(value, (int, str)):
            is_repeated = name in ("skipped", "nan", "damaged") and value in trouble[name]
            trouble[name] += [] if is_repeated else [value]
    return trouble


def _state_line(status: dict[str, Any]) -> str:
    since = status["since"]
    moment = "" if since is None else f" since {_date(since)} ({_duration(status['seconds'])})"
    return f"{status['state']}{moment}, {status['detail']}"


def _progress_line(progress: dict[str, Any]) -> str:
    if progress["iteration"] is None:
        return "none yet"
    total = "" if progress["train_iters"] is None else f"/{progress['train_iters']}"
    parts = [f"iteration {progress['iteration']}{total}"]
    if progress["loss"] is not None:
        where = progress["loss_iteration"]
        parts.append(
            f"loss {progress['loss']:.4g}"
            + (f" in {where}" if where != progress["iteration"] else "")
        )
    if progress["ms_per_iteration"] is not None:
        parts.append(f"{progress['ms_per_iteration']:.1f} ms per iteration")
    if progress["seconds_left"] is not None:
        parts.append(f"{_duration(progress['seconds_left'])} left")
    return ", ".join(parts)


def _checkpoint_line(checkpoint: dict[str, Any] | None) -> str:
    if checkpoint is None:
        return "none"
    parts = ["none" if checkpoint["iteration"] is None else f"iteration {checkpoint['iteration']}"]
    if checkpoint["age_seconds"] is not None:
        parts.append(f"{_duration(checkpoint['age_seconds'])} ago")
    if checkpoint["save_seconds"] is not None:
        parts.append(f"took {checkpoint['save_seconds']:.2f} s")
    if checkpoint["iteration"] is not None and not checkpoint["is_on_disk"]:
        parts.append("by the log alone")
    number = checkpoint["failed_since"]
    failed = "no save failed since"
    if number:
        failed = (
            f"{number} {'saves' if number > 1 else 'save'} failed since: {checkpoint['failure']}"
        )
    return f"{', '.join(parts)}; {failed}"


def _restarts_line(restarts: dict[str, Any]) -> str:
    text = str(restarts["count"] or "none")
    if restarts["count"] and restarts["iteration"] is not None:
        text += f", the last from iteration {restarts['iteration']}"
    if restarts["world_size"] is not None:
        text += f", with {_count(restarts['world_size'], 'rank')}"
    return text + ("" if restarts["last_end"] is None else f"; last end: {restarts['last_end']}")


def _trouble_line(trouble: dict[str, Any]) -> str:
    parts = []
    for name, noun in (
        ("skipped", "skipped iteration"),
        ("nan", "nan iteration"),
        ("damaged", "damaged checkpoint"),
    ):
        if trouble[name]:
            parts.append(f"{_count(len(trouble[name]), noun)} (last {trouble[name][-1]})")
    if trouble["signals"]:
        parts.append(f"signals {' '.join(dict.fromkeys(map(str, trouble['signals'])))}")
    if trouble["injected"]:
        parts.append(
            f"{_count(len(trouble['injected']), 'injected fault')} (last {trouble['injected'][-1]})"
        )
    return ", ".join(parts) or "none"


def _number(event: Event, key: str) -> float | None:
    """A field that is a finite number, or None."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _TOO_MUCH else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _age(now: float, moment: float | None) -> float | None:
    """Seconds since then; 0 if the clock went back in between."""
    return None if moment is None else max(0.0, now - moment)


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _duration(seconds: float) -> str:
    """Its two largest units: "12 s", "4 min 2 s", "3 d 1 h"."""
    total = int(seconds)
    for size, name, smaller, smaller_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= size:
            return f"{total // size} {name} {total % size // smaller} {smaller_name}"
    return f"{total} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", metavar="DIR", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--stale-seconds",
        type=float,
        default=STALE_SECONDS,
        metavar="S",
        help=f"age from which on a heartbeat says that its run is dead; default {STALE_SECONDS:.0f}",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
