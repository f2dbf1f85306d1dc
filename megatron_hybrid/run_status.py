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

DIR is the directory of --events-dir, or of --save without it. The state is one of

    running     and so is its heartbeat
    saving      the same, and a save is in flight
    finished    trained to the end
    stopped     ended before that, as told (--exit-interval, --exit-duration-in-mins); saved
    preempted   ended by a signal
    failed      ended by an error or the loss of a rank; torchrun restarts it if restarts are left
    hung        ended for want of progress; the same
    dead        left no exit event, and its process is gone or its heartbeat is too old
    unknown     there are checkpoints, but no events: of a run that wrote none

A run that is started again appends to the same files. State and progress describe its last start.

--html writes a page that needs no other file and no network: these lines, and curves of the loss,
speed, memory, lanes and experts, events, checkpoints, settings. --watch looks again until the run
has ended, and rewrites both; a browser loads the page again by itself as long as the run is live.

Exit code: that of the run if it has ended (docs/recovery.md lists them); 0 while it runs, and if it
is unknown; 1 if it is dead; 2 if the directory has no run.
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
from megatron.training.health.events import STOPPED, EventKind, read_events, read_heartbeat
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.run_history import (
    Event,
    Published,
    Session,
    age_of,
    as_whole,
    cause_of,
    date_text,
    duration_text,
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

if TYPE_CHECKING:
    from megatron_hybrid.report.page import RunPage

EXIT_DEAD, EXIT_NO_RUN, EXIT_INTERRUPTED = 1, 2, 130
WATCH_SECONDS = 10.0  # between two looks
# A heartbeat is written every few seconds, but a slow file system may hold one back.
STALE_SECONDS = 60.0
_RELAUNCH_SECONDS = 300.0  # that a launcher may need to start ranks again
_MOST_WATCH_SECONDS = 86400.0
_MOST_CHARACTERS = 1000  # of a line, since texts in the files may have any length
_CLEAR = "\x1b[H\x1b[2J"
# By name of `ExitCode`, whose module takes two seconds to import torch. Names of signals count as
# preempted, all others as failed.
_ENDS = {
    "FINISHED": "finished",
    STOPPED: "stopped",
    "PREEMPTED": "preempted",
    "PREEMPTED_UNSAVED": "preempted",
    "HANG": "hung",
}
# By name of the trouble: the event, the field that is told, and a noun for the values.
_TROUBLES = {
    "lost": (EventKind.LOST, "ranks", "lost rank"),
    "hung": (EventKind.HANG, "ranks", "hung rank"),
    "skipped": (EventKind.SKIP, "iteration", "skipped iteration"),
    "nan": (EventKind.NAN, "iteration", "nan iteration"),
    "damaged": (EventKind.DAMAGED, "checkpoint", "damaged checkpoint"),
    "signals": (EventKind.SIGNAL, "signal", "signal"),
    "injected": (EventKind.INJECT, "spec", "injected fault"),
}
_REPEATABLE = ("lost", "hung", "signals", "injected")  # others happen again when a run resumes


class View(NamedTuple):
    """The printed lines of a moment."""

    lines: Sequence[str]
    is_live: bool
    exit_code: int


def main(argv: Sequence[str] | None = None, program: str = "run_status.py") -> int:
    """Prints the status and writes the page; returns the exit code.

    Args:
        argv: Arguments; default: those of the command line.
        program: The name at the start of error messages.
    """
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
    """Shows views until one is of a run that has ended; returns that one's exit code.

    On a terminal, each view replaces the one before. A look that fails is shown too: a file system
    may be away for a moment, or a disk full. OSError if the first look fails.
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
            error = f"not seen: {caught}"


def _looks_of(arguments: argparse.Namespace) -> Callable[[], View]:
    """A function that looks at the run, and writes its page if the arguments ask for one.

    It raises OSError if there is no run, its files cannot be read, or the page cannot be written.
    """
    folder, is_watched = Path(arguments.dir), arguments.watch is not None
    page: RunPage | None = None
    if arguments.html is not None:
        # Not at the top: importing numpy takes longer than printing the five lines.
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
            # A page can be made again, so it need not survive a crash.
            with published(arguments.html, Sync.NOTHING) as stream:
                stream.write(text.encode())
        if arguments.json:
            lines = [json.dumps(status, indent=None if is_watched else 1)]
        return View(lines, bool(status["is_live"]), int(status["exit_code"]))

    return look


def run_status(
    folder: Path, *, now: float, stale_seconds: float = STALE_SECONDS
) -> dict[str, Any] | None:
    """The status of the run in a directory as plain data, or None without a run.

    Args:
        now: Unix seconds.
        stale_seconds: Age of a heartbeat from which on a run is dead.
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
        "trouble": {**_trouble(events), "silent": _num_silent(sessions, is_over=has_failed)},
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
    """The state of the run, for the first line."""
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
    """How far the session has come, by the source that is furthest ahead."""
    beat = heartbeat or {}
    # Until a checkpoint is loaded, heartbeat and exit do not have the run's iteration.
    is_known = not session.events or session.last(EventKind.RESUME, EventKind.STEP) is not None
    sources = [
        event
        for event in (beat, *session.events)
        if is_known or event.get("event") not in (None, EventKind.EXIT)
    ]

    # A fault, a signal or an error belongs to the iteration after the last complete one.
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
    ended = sessions[-1:] if has_failed else sessions[-2:-1]
    return {
        "count": relaunches,
        "by_hand": len(sessions) - 1 - relaunches,
        "iteration": sessions[-1].resumed_at,
        "world_size": sessions[-1].world_size,
        "last_end": cause_of(ended[0]) if ended else None,
    }


def _trouble(events: Iterable[Event]) -> dict[str, list[int | str]]:
    """Everything that went wrong in the run. An iteration that was made again counts once."""
    trouble: dict[str, list[int | str]] = {name: [] for name in _TROUBLES}
    for event in events:
        for name, (kind, key, _) in _TROUBLES.items():
            if is_kind(event, kind):
                value = event.get(key)
                for each in value if isinstance(value, list) else [value]:
                    is_new = name in _REPEATABLE or each not in trouble[name]
                    if isinstance(each, (int, str)) and is_new:
                        trouble[name].append(each)
    return trouble


def _num_silent(sessions: Sequence[Session], *, is_over: bool) -> int:
    """The number of starts that ended without an event. `is_over`: the last one has ended."""
    ended = sessions if is_over else sessions[:-1]
    kinds = (EventKind.LOST, EventKind.HANG, EventKind.EXIT)
    return sum(bool(session.events) and session.last(*kinds) is None for session in ended)


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
    parts += [f"{counted(silent, 'start')} that ended without a word"] if silent else []
    return ", ".join(parts) or "none"


def _known(*parts: tuple[str, Any]) -> str:
    """Every part whose value is known, formatted with its value."""
    return ", ".join(text.format(value) for text, value in parts if value is not None)


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
