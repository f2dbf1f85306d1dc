"""Prints the status of a run in five lines, from its files: events, heartbeat and checkpoints.

    python -m megatron_hybrid status runs/gpt_cpu
    python -m megatron_hybrid status runs/gpt_cpu --json
    python -m megatron_hybrid status runs/gpt_cpu --html report.html --watch

    state: running since 2026-11-21 20:16:01 (4 min 2 s), heartbeat 3 s ago in forward, process 4711
    on node1
    progress: iteration 320/500, loss 4.081, mean 385.9 ms per iteration, 1 min 9 s left
    checkpoint: iteration 300, 12 s ago, took 0.15 s; no save failed since
    restarts: 1 by the launcher, the last from iteration 200, with 2 ranks; last end: rank 1 was
    killed in iteration 217 (forward)
    trouble: 1 lost rank (last 1)

DIR is the directory of --events-dir, or of --save without it. The states:

    running     the heartbeat is recent
    saving      running, with a save in flight
    finished    trained to the end
    stopped     stopped before the end by --exit-interval or --exit-duration-in-mins; saved
    preempted   ended by a signal
    failed      ended by an error or a lost rank; torchrun restarts it if restarts are left
    hung        ended because it made no progress; torchrun restarts it likewise
    dead        no exit event, and its process is gone or its heartbeat is too old
    unknown     there are checkpoints, but no events

A restarted run appends to the same files. State and progress describe its last start.

--html writes a page that needs no other file and no network: these lines, and curves of the loss,
speed, memory, lanes and experts, events, checkpoints, settings. --watch repeats this until the run
has ended; the page reloads itself in the browser while the run is live.

Exit code: the run's code if it has ended (docs/recovery.md); 0 while it runs, and if its state is
unknown; 1 if it is dead; 2 if the directory has no run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from megatron.core.files import Sync, published
from megatron.core.help_format import ProgramParser
from megatron.core.log import counted, printable
from megatron.training.health.events import STOPPED, EventKind, read_heartbeat
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.run_history import (
    Event,
    Session,
    age_of,
    checked,
    checkpoint_folders,
    date_text,
    duration_text,
    is_gone,
    is_kind,
    is_of,
    is_relaunch,
    is_under_way,
    publication_of,
    publications,
    read_history,
    split_sessions,
)

if TYPE_CHECKING:
    from megatron_hybrid.report.page import RunPage

EXIT_DEAD, EXIT_NO_RUN, EXIT_INTERRUPTED = 1, 2, 130
WATCH_SECONDS = 10.0  # between two views
# A heartbeat is written every few seconds, but a slow file system may delay one.
STALE_SECONDS = 60.0
_RELAUNCH_SECONDS = 300.0  # for a launcher to start the ranks again
_MOST_WATCH_SECONDS = 86400.0
_MOST_CHARACTERS = 1000  # of a line
_CLEAR = "\x1b[H\x1b[2J"
# By name of `ExitCode`, whose module takes two seconds to import torch. Names of signals are
# preempted, all others failed.
_ENDS = {
    "FINISHED": "finished",
    STOPPED: "stopped",
    "PREEMPTED": "preempted",
    "PREEMPTED_UNSAVED": "preempted",
    "HANG": "hung",
}
# The event of each kind of trouble, the field to list, and a noun for its values.
_TROUBLES = {
    "lost": (EventKind.LOST, "ranks", "lost rank"),
    "hung": (EventKind.HANG, "ranks", "hung rank"),
    "skipped": (EventKind.SKIP, "iteration", "skipped iteration"),
    "nan": (EventKind.NAN, "iteration", "nan iteration"),
    "damaged": (EventKind.DAMAGED, "checkpoint", "damaged checkpoint"),
    "signals": (EventKind.SIGNAL, "signal", "signal"),
    "injected": (EventKind.INJECT, "spec", "injected fault"),
}
_REPEATABLE = ("lost", "hung", "signals", "injected")  # others repeat when a run resumes


class View(NamedTuple):
    """The printed lines of a moment."""

    lines: Sequence[str]
    is_live: bool
    exit_code: int


def main(argv: Sequence[str] | None = None, program: str = "status") -> int:
    """Prints the status, writes the page, and returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    look = _looks_of(arguments)
    try:
        with one_line_errors(program, (OSError,)):
            if arguments.watch is not None:
                return watch(look, sys.stdout, arguments.watch, time.sleep)
            view = look()
            print("\n".join(view.lines))
            return view.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_NO_RUN


def watch(
    look: Callable[[], View], stream: TextIO, seconds: float, sleep: Callable[[float], None]
) -> int:
    """Prints views until the run has ended; returns the last view's exit code.

    On a terminal, each view replaces the one before. Errors of later views are printed: a file
    system may be away for a moment, or a disk full. OSError if the first view fails.
    """
    clear = _CLEAR if stream.isatty() else ""
    view, error = look(), ""
    while True:
        shown = [*view.lines, error] if error else view.lines
        print(clear + "\n".join(shown), end="\n\n", file=stream, flush=True)
        if not view.is_live:
            return view.exit_code
        sleep(seconds)
        try:
            view, error = look(), ""
        except OSError as caught:
            error = f"cannot be read: {caught}"


def _looks_of(arguments: argparse.Namespace) -> Callable[[], View]:
    """Returns a function that reads the run, and writes its page if requested.

    It raises OSError without a run, for unreadable files, and for a page that cannot be written.
    """
    folder, is_watched = Path(arguments.dir), arguments.watch is not None
    page: RunPage | None = None
    if arguments.html is not None:
        # Importing numpy takes longer than printing the five lines.
        from megatron_hybrid.report.page import RunPage

        page = RunPage(folder, arguments.watch or WATCH_SECONDS)

    def look() -> View:
        now = time.time()
        status = run_status(folder, now=now, stale_seconds=arguments.stale_seconds)
        if status is None:
            got = f"got {folder} without events or checkpoints"
            raise FileNotFoundError(f"expected a run's directory, {got}")
        lines = lines_of(status)
        if page is not None:
            text = page.html(status, lines, now)
            with published(arguments.html, Sync.NOTHING) as stream:
                stream.write(text.encode())
        if arguments.json:
            lines = [json.dumps(status, indent=None if is_watched else 1)]
        return View(lines, bool(status["is_live"]), int(status["exit_code"]))

    return look


def run_status(
    folder: Path, *, now: float, stale_seconds: float = STALE_SECONDS
) -> dict[str, Any] | None:
    """Returns the status of the run in a directory as plain data; None without a run.

    Args:
        now: Unix seconds.
        stale_seconds: Age of the heartbeat of a dead run.
    """
    events, heartbeat = read_history(folder), read_heartbeat(folder)
    checkpoint = _checkpoint(folder, events, now)
    if not events and heartbeat is None and checkpoint is None:
        return None

    sessions = split_sessions(events)
    session = sessions[-1]

    beat = {} if heartbeat is None or not is_of(heartbeat, session) else checked(heartbeat)
    state = _state(session, beat, now, stale_seconds)
    has_failed = state["state"] in ("preempted", "failed", "hung", "dead")
    ended = sessions if has_failed else sessions[:-1]
    return {
        **state,
        "is_live": _is_live(state, session),
        "progress": _progress(session, beat, is_running=state["state"] in ("running", "saving")),
        "checkpoint": checkpoint,
        "restarts": _restarts(sessions, ended),
        "trouble": {**_trouble(events), "silent": sum(map(_is_silent, ended))},
    }


def lines_of(status: dict[str, Any]) -> list[str]:
    """Returns the five lines."""
    parts = {
        "state": _state_line(status),
        "progress": _progress_line(status["progress"]),
        "checkpoint": _checkpoint_line(status["checkpoint"]),
        "restarts": _restarts_line(status["restarts"]),
        "trouble": _trouble_line(status["trouble"]),
    }
    return [f"{name}: {printable(text, _MOST_CHARACTERS)}" for name, text in parts.items()]


def _state(session: Session, beat: Event, now: float, stale_seconds: float) -> dict[str, Any]:
    """Returns the contents of the first line."""

    def found(state: str, exit_code: int, since: float | None, detail: str) -> dict[str, Any]:
        when = {"since": since, "seconds": age_of(now, since)}
        return {"state": state, "exit_code": exit_code, **when, "detail": detail}

    if not session.events and not beat:
        return found("unknown", 0, None, "no events here")

    end = session.end()
    if end is not None:
        name, code = str(end.get("name")), end.get("code")
        state = "preempted" if name.startswith("SIG") else _ENDS.get(name, "failed")
        detail = f"exit code {'unknown' if code is None else code} ({name})"
        left = session.restarts_left if state in ("failed", "hung") else None
        detail += f", {counted(left, 'restart')} left" if left else ""
        exit_code = EXIT_DEAD if code is None else code & 0xFF
        return found(state, exit_code, end.get("time"), detail)

    process = beat or session.start
    times = [event["time"] for event in (*session.events[-1:], process) if "time" in event]
    seen = max(times, default=None)
    if is_gone(process):
        detail = f"process {process.get('pid')} is gone and left no exit event"
        return found("dead", EXIT_DEAD, seen, detail)
    # A clock that went back, or another machine's that is ahead, does not make a run dead.
    if seen is None or now - seen > stale_seconds:
        return found("dead", EXIT_DEAD, seen, "no exit event, and no heartbeat since")

    save = session.save_in_flight()
    since = (session.start if save is None else save).get("time")
    state = "running" if save is None else "saving"
    return found(state, 0, since, _heartbeat_text(beat, now))


def _heartbeat_text(beat: Event, now: float) -> str:
    if not beat:
        return "no heartbeat yet"
    age, phase = age_of(now, beat.get("time")), beat.get("phase")
    text = "heartbeat" if age is None else f"heartbeat {duration_text(age)} ago"
    text += "" if phase is None else f" in {phase}"
    if beat.get("pid") is not None and beat.get("host") is not None:
        text += f", process {beat['pid']} on {beat['host']}"
    return text


def _is_live(state: dict[str, Any], session: Session) -> bool:
    """Whether the run may continue: it runs, or its launcher may restart it."""
    if state["state"] in ("running", "saving"):
        return True
    may_restart = state["state"] in ("failed", "hung", "dead") and session.restarts_left
    seconds = state["seconds"]
    return bool(may_restart) and seconds is not None and seconds < _RELAUNCH_SECONDS


def _progress(session: Session, beat: Event, *, is_running: bool) -> dict[str, Any]:
    """Returns the session's progress, by the event that is furthest ahead."""
    # Until a checkpoint is loaded, heartbeat and exit do not have the run's iteration.
    is_known = not session.events or session.last(EventKind.RESUME, EventKind.STEP) is not None
    sources = [
        event
        for event in (beat, *session.events)
        if is_known or event.get("event") not in (None, EventKind.EXIT)
    ]

    # A fault, a signal or an error belongs to the iteration after the last complete one.
    iterations = [
        max(0, event["iteration"] - is_under_way(event))
        for event in sources
        if "iteration" in event
    ]
    iteration = max(iterations, default=None)
    totals = (event.get("train_iters") for event in (beat, *reversed(session.events)))
    train_iters = next((each for each in totals if each is not None), None)
    ms, left = beat.get("ms_per_iteration"), None
    if is_running and ms is not None and iteration is not None and train_iters is not None:
        left = max(0, train_iters - iteration) * ms / 1000.0

    return {
        "iteration": iteration,
        "train_iters": train_iters,
        "loss": beat.get("loss"),
        "loss_iteration": beat.get("iteration"),
        "ms_per_iteration": ms,
        "seconds_left": left,
    }


def _checkpoint(folder: Path, events: Sequence[Event], now: float) -> dict[str, Any] | None:
    """Returns the newest published checkpoint, in the directory or else by the events."""
    failed: list[Event] = []  # since the last successful save, the last one first
    for event in reversed(events):
        if is_kind(event, EventKind.SAVE_PUBLISHED):
            break
        failed += [event] if is_kind(event, EventKind.SAVE_FAILED) else []

    found, saves = checkpoint_folders(folder, events), publications(events)
    iteration = saves[-1].get("iteration") if saves else None
    iteration = found[-1][0] if found else iteration
    if iteration is None and not failed:
        return None

    save = publication_of(events, iteration)
    saved_at = save.get("time")
    if found and not save:
        saved_at = found[-1][1].stat().st_mtime
    return {
        "iteration": iteration,
        "age_seconds": age_of(now, saved_at),
        "save_seconds": save.get("seconds"),
        "is_on_disk": bool(found),
        "failed_since": len(failed),
        "failure": str(failed[0].get("reason")) if failed else None,
    }


def _restarts(sessions: Sequence[Session], ended: Sequence[Session]) -> dict[str, Any]:
    """Returns how often the run was restarted, and why it last ended before its last iteration."""
    relaunches = sum(is_relaunch(sessions, number) for number in range(len(sessions)))
    return {
        "count": relaunches,
        "by_hand": len(sessions) - 1 - relaunches,
        "iteration": sessions[-1].resumed_at,
        "world_size": sessions[-1].world_size,
        "last_end": ended[-1].cause() if ended else None,
    }


def _trouble(events: Iterable[Event]) -> dict[str, list[int | str]]:
    """Returns all trouble of the run. A repeated iteration counts once."""
    trouble: dict[str, list[int | str]] = {name: [] for name in _TROUBLES}
    for event in events:
        for name, (kind, key, _) in _TROUBLES.items():
            value = event.get(key) if is_kind(event, kind) else []
            for each in value if isinstance(value, list) else [value]:
                is_new = name in _REPEATABLE or each not in trouble[name]
                if isinstance(each, (int, str)) and is_new:
                    trouble[name].append(each)
    return trouble


def _is_silent(session: Session) -> bool:
    """Whether a session that has ended left no event of its end."""
    kinds = (EventKind.LOST, EventKind.HANG, EventKind.EXIT)
    return bool(session.events) and session.last(*kinds) is None


def _state_line(status: dict[str, Any]) -> str:
    since = status["since"]
    moment = (
        "" if since is None else f" since {date_text(since)} ({duration_text(status['seconds'])})"
    )
    return f"{status['state']}{moment}, {status['detail']}"


def _progress_line(progress: dict[str, Any]) -> str:
    if progress["iteration"] is None:
        return "none yet"
    total = "" if progress["train_iters"] is None else f"/{progress['train_iters']}"
    where, left = progress["loss_iteration"], progress["seconds_left"]
    suffix = "" if where == progress["iteration"] else f" in {where}"
    return _known(
        (f"iteration {{}}{total}", progress["iteration"]),
        (f"loss {{:.4g}}{suffix}", progress["loss"]),
        ("mean {:.1f} ms per iteration", progress["ms_per_iteration"]),
        ("{} left", None if left is None else duration_text(left)),
    )


def _checkpoint_line(checkpoint: dict[str, Any] | None) -> str:
    if checkpoint is None:
        return "none"
    iteration, age = checkpoint["iteration"], checkpoint["age_seconds"]
    is_logged = iteration is not None and not checkpoint["is_on_disk"]
    saved = _known(
        ("iteration {}", iteration),
        ("{} ago", None if age is None else duration_text(age)),
        ("took {:.2f} s", checkpoint["save_seconds"]),
        ("{}", "by the log alone" if is_logged else None),
    )
    number, failed = checkpoint["failed_since"], "no save failed since"
    if number:
        failed = f"{counted(number, 'save')} failed since: {checkpoint['failure']}"
    return f"{saved or 'none'}; {failed}"


def _restarts_line(restarts: dict[str, Any]) -> str:
    count, by_hand, size = restarts["count"], restarts["by_hand"], restarts["world_size"]
    made = _known(("{} by the launcher", count or None), ("{} by hand", by_hand or None))
    text = _known(
        ("{}", made or "none"),
        ("the last from iteration {}", restarts["iteration"] if made else None),
        ("with {}", None if size is None else counted(size, "rank")),
    )
    return text + ("" if restarts["last_end"] is None else f"; last end: {restarts['last_end']}")


def _trouble_line(trouble: dict[str, Any]) -> str:
    parts = [
        f"{counted(len(trouble[name]), noun)} (last {trouble[name][-1]})"
        for name, (_, _, noun) in _TROUBLES.items()
        if trouble[name]
    ]
    silent = trouble["silent"]
    parts += [f"{counted(silent, 'start')} that ended without an event"] if silent else []
    return ", ".join(parts) or "none"


def _known(*parts: tuple[str, Any]) -> str:
    """Joins the parts whose value is known, formatted with their value."""
    return ", ".join(text.format(value) for text, value in parts if value is not None)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("dir", metavar="DIR", help="the run's directory: --events-dir or --save")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--stale-seconds",
        type=float,
        default=STALE_SECONDS,
        metavar="SECONDS",
        help="age of the heartbeat at which a run counts as dead",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page about the run into this .html file",
    )
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help="repeat until the run has ended, every so many seconds (default: "
        f"{WATCH_SECONDS:.0f})",
    )
    arguments = parser.parse_args(argv)
    page, seconds = arguments.html, arguments.watch
    # `--html runs/gpt/events.jsonl` would overwrite a run's history.
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        parser.error(f"--html: expected a name that ends in .html, got {page}")
    if seconds is not None and not 0.1 <= seconds <= _MOST_WATCH_SECONDS:
        parser.error(f"--watch: expected 0.1 to {_MOST_WATCH_SECONDS:.0f} seconds, got {seconds}")
    return arguments
