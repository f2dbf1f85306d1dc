"""Says in five lines how a run is doing, from the files that it leaves: events, heartbeat and
checkpoints.

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

DIR is the folder of --events-dir, or of --save without it. The state is one of

    running     and so is its heartbeat
    saving      the same, and a save is in flight
    finished    trained to the end
    stopped     ended before that, as told (--exit-interval, --exit-duration-in-mins); saved
    preempted   ended by a signal
    failed      ended by an error or the loss of a rank; torchrun restarts it if restarts are left
    hung        ended for want of progress; the same
    dead        left no exit event, and its process is gone or its heartbeat is too old
    unknown     there are checkpoints, but no events: of a run that wrote none

A run that is started again goes on with the same files: state and progress are those of its last
start.

--html writes a page that needs no other file and no network: these lines, and curves of the loss,
speed, memory, lanes and experts, events, checkpoints, settings. --watch looks again until the run
has ended, and rewrites both; a browser loads the page again by itself as long as the run is live.

Exit code: that of the run if it has ended (docs/recovery.md lists them); 0 while it runs, and if it
is unknown; 1 if it is dead; 2 if the folder holds no run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.help_format import ProgramParser
from megatron.core.log import counted, printable
from megatron.training.health.events import STOPPED, EventKind, read_events, read_heartbeat
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.run_history import (
    Event,
    Published,
    Session,
    age_of,
    as_whole,
    cause_of,
    is_kind,
    is_of,
    is_relaunch,
    is_under_way,
    life_of,
    newest_checkpoint,
    number_in,
    publications,
    restarts_left,
    save_in_flight,
    split_sessions,
)
from megatron_hybrid.run_watch import View, watch

if TYPE_CHECKING:
    from megatron_hybrid.report.writer import PageWriter

EXIT_DEAD, EXIT_NO_RUN, EXIT_INTERRUPTED = 1, 2, 130
WATCH_SECONDS = 10.0  # between two looks
# A heartbeat is written every few seconds, but a slow file system may hold one back.
STALE_SECONDS = 60.0
# For so long a launcher that has restarts left may take to start the next ranks.
_RELAUNCH_SECONDS = 300.0
_MOST_WATCH_SECONDS = 86400.0
_MOST_CHARACTERS = 1000  # of a line: what the files say may be of any length
# By name of `ExitCode`, whose module imports torch: that would take two seconds. A signal that is
# not handled gives its own name; all others are failures.
_ENDS = {
    "FINISHED": "finished",
    STOPPED: "stopped",
    "PREEMPTED": "preempted",
    "PREEMPTED_UNSAVED": "preempted",
    "HANG": "hung",
}
_LOSSES = (EventKind.LOST, EventKind.HANG)
# What goes wrong, by name: the event, and its field that is told.
_TROUBLES = {
    "skipped": (EventKind.SKIP, "iteration"),
    "nan": (EventKind.NAN, "iteration"),
    "damaged": (EventKind.DAMAGED, "checkpoint"),
    "signals": (EventKind.SIGNAL, "signal"),
    "injected": (EventKind.INJECT, "spec"),
}


def main(argv: Sequence[str] | None = None, program: str = "run_status.py") -> int:
    """Prints the status, and writes the page; returns the exit code.

    Args:
        argv: the arguments; default: the command line's.
        program: the name that error messages begin with.
    """
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    look = _Look(arguments)
    try:
        with one_line_errors(program, (OSError,)):
            if arguments.watch is None:
                view = look()
                print("\n".join(view.lines))
                return view.exit_code
            return watch(look, sys.stdout, arguments.watch)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_NO_RUN


class _Look:
    """Looks at the run that the arguments name, and writes its page if they ask for one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._folder = Path(arguments.dir)
        self._page: PageWriter | None = None
        if arguments.html is not None:
            # Not at the top: the page needs numpy, whose import takes longer than the five lines.
            from megatron_hybrid.report.writer import PageWriter

            self._page = PageWriter(
                self._folder,
                arguments.html,
                refresh_seconds=arguments.watch or WATCH_SECONDS,
                date=date_text,
                duration=duration_text,
            )

    def __call__(self) -> View:
        """OSError if there is no run, or its files cannot be read, or the page not written."""
        now, arguments = time.time(), self._arguments
        status = run_status(self._folder, now=now, stale_seconds=arguments.stale_seconds)
        if status is None:
            got = f"got {self._folder} without events or checkpoints"
            raise FileNotFoundError(f"expected a run's folder, {got}")

        lines = lines_of(status)
        if self._page is not None:
            self._page.write(status, lines, now)
        if arguments.json:
            # One line each time, if there are several.
            lines = [json.dumps(status, indent=1 if arguments.watch is None else None)]
        return View(lines, bool(status["is_live"]), int(status["exit_code"]))


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
    if heartbeat is not None and not is_of(heartbeat, session):
        heartbeat = None
    state = _state(session, heartbeat, now, stale_seconds)
    progress = _progress(session, heartbeat, is_running=state["state"] in ("running", "saving"))
    has_failed = state["state"] in ("preempted", "failed", "hung", "dead")
    return {
        **state,
        "is_live": _is_live(state, session),
        "progress": progress,
        "checkpoint": _checkpoint(checkpoint, events, now),
        "restarts": _restarts(sessions, has_failed=has_failed),
        "trouble": _trouble(events) | _lost(sessions, is_over=has_failed),
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


def _state(
    session: Session, heartbeat: Event | None, now: float, stale_seconds: float
) -> dict[str, Any]:
    """What the first line says."""
    if not session.events and heartbeat is None:
        return _state_of("unknown", 0, None, now, "no events here")

    end = session.end()
    if end is not None:
        name, code = str(end.get("name")), as_whole(number_in(end, "code"))
        state = "preempted" if name.startswith("SIG") else _ENDS.get(name, "failed")
        detail = f"exit code {'unknown' if code is None else code} ({name})"
        left = restarts_left(session) if state in ("failed", "hung") else None
        detail += f", {counted(left, 'restart')} left" if left else ""
        exit_code = EXIT_DEAD if code is None else code & 0xFF
        return _state_of(state, exit_code, number_in(end, "time"), now, detail)

    life = life_of(session, heartbeat, now, stale_seconds)
    if life.why_dead is not None:
        return _state_of("dead", EXIT_DEAD, life.seen, now, life.why_dead)

    save = save_in_flight(session)
    since = number_in(session.start if save is None else save, "time")
    state = "running" if save is None else "saving"
    return _state_of(state, 0, since, now, _heartbeat_text(heartbeat, now))


def _state_of(
    state: str, exit_code: int, since: float | None, now: float, detail: str
) -> dict[str, Any]:
    when = {"since": since, "seconds": age_of(now, since)}
    return {"state": state, "exit_code": exit_code, **when, "detail": detail}


def _heartbeat_text(heartbeat: Event | None, now: float) -> str:
    if heartbeat is None:
        return "no heartbeat yet"
    age, phase = age_of(now, number_in(heartbeat, "time")), heartbeat.get("phase")
    text = "heartbeat" if age is None else f"heartbeat {duration_text(age)} ago"
    text += "" if phase is None else f" in {phase}"
    if heartbeat.get("pid") is not None and heartbeat.get("host") is not None:
        text += f", process {heartbeat['pid']} on {heartbeat['host']}"
    return text


def _is_live(state: dict[str, Any], session: Session) -> bool:
    """Whether more may come: it runs, or its launcher may start it again."""
    if state["state"] in ("running", "saving"):
        return True
    may_restart = state["state"] in ("failed", "hung", "dead") and restarts_left(session)
    seconds = state["seconds"]
    return bool(may_restart) and seconds is not None and seconds < _RELAUNCH_SECONDS


def _progress(session: Session, heartbeat: Event | None, *, is_running: bool) -> dict[str, Any]:
    """How far the session has come, by whatever says most."""
    beat = heartbeat or {}
    # Until a checkpoint is loaded, heartbeat and exit do not know where the run is.
    is_known = not session.events or session.last(EventKind.RESUME, EventKind.STEP) is not None
    sources = [
        event
        for event in (beat, *session.events)
        if is_known or event.get("event") not in (None, EventKind.EXIT)
    ]

    # A fault, a signal or an error comes in the iteration after those that have been made.
    known = [
        max(0.0, iteration - is_under_way(event))
        for event in sources
        if (iteration := number_in(event, "iteration")) is not None
    ]
    made = max(known, default=None)
    totals = (number_in(event, "train_iters") for event in (beat, *reversed(session.events)))
    train_iters = next((each for each in totals if each is not None), None)
    ms, left = number_in(beat, "ms_per_iteration"), None
    if is_running and ms is not None and made is not None and train_iters is not None:
        left = max(0.0, train_iters - made) * ms / 1000.0

    return {
        "iteration": as_whole(made),
        "train_iters": as_whole(train_iters),
        "loss": number_in(beat, "loss"),
        "loss_iteration": as_whole(number_in(beat, "iteration")),
        "ms_per_iteration": ms,
        "seconds_left": left,
    }


def _checkpoint(
    checkpoint: Published | None, events: Sequence[Event], now: float
) -> dict[str, Any] | None:
    if checkpoint is None and not any(is_kind(event, EventKind.SAVE_FAILED) for event in events):
        return None

    failed: list[Event] = []  # since the last save that went well, the last one first
    for event in reversed(events):
        if is_kind(event, EventKind.SAVE_PUBLISHED):
            break
        failed += [event] if is_kind(event, EventKind.SAVE_FAILED) else []

    iteration = None if checkpoint is None else checkpoint.iteration
    seconds = [number_in(event, "seconds") for event in publications(events, iteration)]
    return {
        "iteration": iteration,
        "age_seconds": None if checkpoint is None else age_of(now, checkpoint.time),
        "save_seconds": seconds[-1] if seconds else None,
        "is_on_disk": checkpoint is not None and checkpoint.is_on_disk,
        "failed_since": len(failed),
        "failure": str(failed[0].get("reason")) if failed else None,
    }


def _restarts(sessions: Sequence[Session], *, has_failed: bool) -> dict[str, Any]:
    """How often the run was started again, by whom, and why it last ended before its time."""
    relaunches = sum(is_relaunch(sessions, number) for number in range(len(sessions)))
    session = sessions[-1]
    resume = session.last(EventKind.RESUME) or {}
    world_size = number_in(resume, "world_size") or number_in(session.start, "world_size")
    ended = [session] if has_failed else sessions[-2:-1]
    return {
        "count": relaunches,
        "by_hand": len(sessions) - 1 - relaunches,
        "iteration": as_whole(number_in(resume, "iteration")),
        "world_size": as_whole(world_size),
        "last_end": cause_of(ended[0]) if ended else None,
    }


def _trouble(events: Iterable[Event]) -> dict[str, Any]:
    """What went wrong since the run began. An iteration that was made again counts once."""
    trouble: dict[str, list[Any]] = {name: [] for name in _TROUBLES}
    for event in events:
        for name, (kind, key) in _TROUBLES.items():
            value = event.get(key)
            if is_kind(event, kind) and isinstance(value, (int, str)):
                is_repeated = name not in ("signals", "injected") and value in trouble[name]
                trouble[name] += [] if is_repeated else [value]
    return trouble


def _lost(sessions: Sequence[Session], *, is_over: bool) -> dict[str, Any]:
    """The ranks that were lost or hung, and the starts of which nobody could say how they ended.

    Args:
        is_over: whether the last start has ended.
    """
    lost: list[Any] = []
    hung: list[Any] = []
    silent = 0
    for session in sessions:
        named = [event for event in session.events if is_kind(event, *_LOSSES)]
        for event in named:
            ranks, found = event.get("ranks"), lost if is_kind(event, EventKind.LOST) else hung
            known = ranks if isinstance(ranks, list) else []
            found += [rank for rank in known if isinstance(rank, int)]
        has_ended = is_over or session is not sessions[-1]
        is_silent = bool(session.events) and not named and session.end() is None
        silent += has_ended and is_silent
    return {"lost": lost, "hung": hung, "silent": silent}


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
    parts = [f"iteration {progress['iteration']}{total}"]
    if progress["loss"] is not None:
        where = progress["loss_iteration"]
        suffix = "" if where == progress["iteration"] else f" in {where}"
        parts.append(f"loss {progress['loss']:.4g}{suffix}")
    if progress["ms_per_iteration"] is not None:
        parts.append(f"mean {progress['ms_per_iteration']:.1f} ms per iteration")
    if progress["seconds_left"] is not None:
        parts.append(f"{duration_text(progress['seconds_left'])} left")
    return ", ".join(parts)


def _checkpoint_line(checkpoint: dict[str, Any] | None) -> str:
    if checkpoint is None:
        return "none"
    parts = ["none" if checkpoint["iteration"] is None else f"iteration {checkpoint['iteration']}"]
    if checkpoint["age_seconds"] is not None:
        parts.append(f"{duration_text(checkpoint['age_seconds'])} ago")
    if checkpoint["save_seconds"] is not None:
        parts.append(f"took {checkpoint['save_seconds']:.2f} s")
    if checkpoint["iteration"] is not None and not checkpoint["is_on_disk"]:
        parts.append("by the log alone")

    number, failed = checkpoint["failed_since"], "no save failed since"
    if number:
        failed = f"{counted(number, 'save')} failed since: {checkpoint['failure']}"
    return f"{', '.join(parts)}; {failed}"


def _restarts_line(restarts: dict[str, Any]) -> str:
    kinds = ((restarts["count"], "by the launcher"), (restarts["by_hand"], "by hand"))
    made = [f"{number} {by}" for number, by in kinds if number]
    text = ", ".join(made) or "none"
    if made and restarts["iteration"] is not None:
        text += f", the last from iteration {restarts['iteration']}"
    if restarts["world_size"] is not None:
        text += f", with {counted(restarts['world_size'], 'rank')}"
    return text + ("" if restarts["last_end"] is None else f"; last end: {restarts['last_end']}")


def _trouble_line(trouble: dict[str, Any]) -> str:
    def told(name: str, noun: str) -> list[str]:
        found = trouble[name]
        return [f"{counted(len(found), noun)} (last {found[-1]})"] if found else []

    parts = told("lost", "lost rank") + told("hung", "hung rank")
    if trouble["silent"]:
        parts.append(f"{counted(trouble['silent'], 'start')} that ended without a word")
    parts += told("skipped", "skipped iteration") + told("nan", "nan iteration")
    parts += told("damaged", "damaged checkpoint")
    if trouble["signals"]:
        parts.append(f"signals {' '.join(dict.fromkeys(map(str, trouble['signals'])))}")
    parts += told("injected", "injected fault")
    return ", ".join(parts) or "none"


def date_text(moment: float) -> str:
    """In local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def duration_text(seconds: float) -> str:
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument(
        "dir", metavar="DIR", help="the run's directory: that of --events-dir or --save"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--stale-seconds",
        type=float,
        default=STALE_SECONDS,
        metavar="SECONDS",
        help="age of the heartbeat from which on a run counts as dead",
    )
    parser.add_argument(
        "--html",
        type=_page_path,
        metavar="FILE",
        help="also write a page about the run into this .html file",
    )
    parser.add_argument(
        "--watch",
        type=_interval,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help="repeat until the run has ended, every so many seconds (default: "
        f"{WATCH_SECONDS:.0f})",
    )
    return parser.parse_args(argv)


def _page_path(text: str) -> Path:
    """Only a name of a page: `--html runs/gpt/events.jsonl` would end a run's history."""
    path = Path(text)
    if path.suffix.lower() not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .html, got {text!r}")
    return path


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= _MOST_WATCH_SECONDS:
        limits = f"from 0.1 to {_MOST_WATCH_SECONDS:.0f}"
        raise argparse.ArgumentTypeError(f"expected seconds {limits}, got {text!r}")
    return seconds
