"""What happened to a run, for its page: a row for each event, and marks for the curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.core.log import counted
from megatron.training.health.events import EventKind
from megatron_hybrid.report.svg import RESTART, SAVE, SKIP, TROUBLE, Mark
from megatron_hybrid.run_history import (
    Event,
    Session,
    as_whole,
    cause_of,
    is_kind,
    is_relaunch,
    number_in,
)

_SECONDS_DIGITS = 2


@dataclass(frozen=True)
class EventRow:
    """An event as the page tells it. What a file says is in it as it stands there, not escaped."""

    time: float | None  # unix seconds
    what: str
    mark: str  # the kind of its mark; empty: it has none
    iteration: int | None
    rank: int | None
    detail: str


@dataclass(frozen=True)
class StartRow:
    """One start of the run."""

    time: float | None
    started_by: str
    world_size: int | None
    iteration: int | None  # from which it went on
    last_iteration: int | None
    end: str


def event_rows(events: Sequence[Event]) -> list[EventRow]:
    """Those that tell something on their own: an evaluation is in the curves, for example."""
    return [_row(event, _WORDS[kind]) for event in events if (kind := _kind(event)) in _WORDS]


def marks_of(events: Sequence[Event]) -> list[Mark]:
    """Where to mark the curves."""
    rows = event_rows(events)
    return [Mark(row.iteration, row.mark) for row in rows if row.mark and row.iteration is not None]


def start_rows(sessions: Sequence[Session], *, is_running: bool) -> list[StartRow]:
    """The run's starts, in order.

    Args:
        is_running: whether the last one is under way.
    """
    rows = []
    for number, session in enumerate(sessions):
        if not session.events:
            continue
        resume = session.last(EventKind.RESUME) or {}
        iterations = [number_in(event, "iteration") for event in session.events]
        size = number_in(resume, "world_size") or number_in(session.start, "world_size")
        is_under_way = is_running and session is sessions[-1]
        rows.append(
            StartRow(
                time=number_in(session.start or session.events[0], "time"),
                started_by="launcher" if is_relaunch(sessions, number) else "hand",
                world_size=as_whole(size),
                iteration=as_whole(number_in(resume, "iteration")),
                last_iteration=as_whole(
                    max((n for n in iterations if n is not None), default=None)
                ),
                end="under way" if is_under_way else cause_of(session),
            )
        )
    return rows


@dataclass(frozen=True)
class _Words:
    """How the events of a kind are told."""

    what: str
    mark: str
    detail: Callable[[Event], str]


def _kind(event: Event) -> EventKind | None:
    kind = event.get("event")
    return next((each for each in EventKind if each == kind), None)


def _row(event: Event, words: _Words) -> EventRow:
    iteration = as_whole(number_in(event, "iteration"))
    mark = words.mark
    if is_kind(event, EventKind.DAMAGED):
        iteration = iteration_of(PurePath(_text(event, "checkpoint")).name)
    if is_kind(event, EventKind.RESUME) and not iteration:
        mark = ""  # the beginning needs none
    if is_kind(event, EventKind.EXIT) and number_in(event, "code") == 0:
        mark = ""
    return EventRow(
        time=number_in(event, "time"),
        what=words.what,
        mark=mark,
        iteration=iteration,
        rank=_rank(event),
        detail=words.detail(event),
    )


def _rank(event: Event) -> int | None:
    """The rank that an event is about; by default the one that has written it."""
    ranks = event.get("ranks") if is_kind(event, EventKind.LOST, EventKind.HANG) else None
    if isinstance(ranks, list):
        return ranks[0] if len(ranks) == 1 and type(ranks[0]) is int else None
    return as_whole(number_in(event, "rank"))


def _text(event: Mapping[str, Any], key: str) -> str:
    value = event.get(key)
    return "" if value is None else str(value)


def _field(key: str) -> Callable[[Event], str]:
    return lambda event: _text(event, key)


def _seconds(event: Event) -> str:
    seconds = number_in(event, "seconds")
    return "" if seconds is None else f"{seconds:.{_SECONDS_DIGITS}f} s"


def _started(event: Event) -> str:
    size = as_whole(number_in(event, "world_size"))
    ranks = "" if size is None else f"{counted(size, 'rank')}, "
    return f"{ranks}process {_text(event, 'pid')} on {_text(event, 'host')}"


def _resumed(event: Event) -> str:
    checkpoint = _text(event, "checkpoint")
    if not checkpoint:
        return "from the beginning"
    return f"from {PurePath(checkpoint).name}, loaded in {_seconds(event)}"


def _published(event: Event) -> str:
    return f"{PurePath(_text(event, 'checkpoint')).name}, took {_seconds(event)}"


def _damaged(event: Event) -> str:
    return f"{PurePath(_text(event, 'checkpoint')).name}: {_text(event, 'reason')}"


def _skipped(event: Event) -> str:
    norm = number_in(event, "grad_norm")
    return f"no step was taken; gradient norm {'not finite' if norm is None else norm}"


def _nan(event: Event) -> str:
    ranks = event.get("ranks")
    found = " ".join(map(str, ranks)) if isinstance(ranks, list) else ""
    return f"the loss was not finite, on ranks {found}"


def _injected(event: Event) -> str:
    return f"{_text(event, 'spec')}, in {_text(event, 'phase')}"


def _exit(event: Event) -> str:
    return f"{_text(event, 'code')} ({_text(event, 'name')}): {_text(event, 'reason')}"


_WORDS = {
    EventKind.START: _Words("start", "", _started),
    EventKind.RESUME: _Words("resume", RESTART, _resumed),
    EventKind.DAMAGED: _Words("damaged checkpoint", TROUBLE, _damaged),
    EventKind.SET_ASIDE: _Words("set aside", "", _field("what")),
    EventKind.SAVE_PUBLISHED: _Words("save", SAVE, _published),
    EventKind.SAVE_FAILED: _Words("save failed", TROUBLE, _field("reason")),
    EventKind.SAVE_SKIPPED: _Words("save left out", TROUBLE, _field("reason")),
    EventKind.SKIP: _Words("skipped iteration", SKIP, _skipped),
    EventKind.NAN: _Words("nan iteration", SKIP, _nan),
    EventKind.SIGNAL: _Words("signal", TROUBLE, _field("signal")),
    EventKind.LOST: _Words("rank lost", TROUBLE, _field("cause")),
    EventKind.HANG: _Words("hang", TROUBLE, _field("cause")),
    EventKind.INJECT: _Words("injected fault", TROUBLE, _injected),
    EventKind.EXIT: _Words("exit", TROUBLE, _exit),
}
