"""Rows of the page's tables: what happened to a run, its starts, its checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.core.log import counted
from megatron.training.health.events import EventKind
from megatron_hybrid.report.curves import RESTART, SAVE, SKIP, TROUBLE
from megatron_hybrid.run_history import (
    Event,
    Session,
    as_whole,
    cause_of,
    is_kind,
    is_relaunch,
    number_in,
    publications,
)


class EventRow(NamedTuple):
    """An event. Text from the file is not escaped."""

    time: float | None  # unix seconds
    what: str
    iteration: int | None
    rank: int | None
    detail: str
    mark: str  # kind of its mark in charts, or empty


# The name of a kind of events, its mark, and its detail. Evaluations, for example, are in charts.
_KINDS = {
    EventKind.START: ("start", "", "{world_size}process {pid} on {host}"),
    EventKind.RESUME: ("resume", RESTART, "from {folder}, loaded in {duration}"),
    EventKind.DAMAGED: ("damaged checkpoint", TROUBLE, "{folder}: {reason}"),
    EventKind.SET_ASIDE: ("set aside", "", "{what}"),
    EventKind.SAVE_PUBLISHED: ("save", SAVE, "{folder}, took {duration}"),
    EventKind.SAVE_FAILED: ("save failed", TROUBLE, "{reason}"),
    EventKind.SAVE_SKIPPED: ("save left out", TROUBLE, "{reason}"),
    EventKind.SKIP: ("skipped iteration", SKIP, "no step was taken; gradient norm {grad_norm}"),
    EventKind.NAN: ("nan iteration", SKIP, "the loss was not finite, on ranks {ranks}"),
    EventKind.SIGNAL: ("signal", TROUBLE, "{signal}"),
    EventKind.LOST: ("rank lost", TROUBLE, "{cause}"),
    EventKind.HANG: ("hang", TROUBLE, "{cause}"),
    EventKind.INJECT: ("injected fault", TROUBLE, "{spec}, in {phase}"),
    EventKind.EXIT: ("exit", TROUBLE, "{code} ({name}): {reason}"),
}


def event_rows(events: Sequence[Event]) -> list[EventRow]:
    """The rows of events that the page shows, in order."""
    return [_row(event, kind) for event in events for kind in _KINDS if is_kind(event, kind)]


def _row(event: Event, kind: EventKind) -> EventRow:
    what, mark, detail = _KINDS[kind]
    texts = defaultdict(str, {key: str(each) for key, each in event.items() if each is not None})
    size, seconds = as_whole(number_in(event, "world_size")), _seconds(event)
    texts["world_size"] = "" if size is None else f"{counted(size, 'rank')}, "
    texts["folder"] = PurePath(texts["checkpoint"]).name
    texts["duration"] = "" if seconds is None else seconds
    texts["ranks"] = " ".join(map(str, _ranks(event)))
    norm = number_in(event, "grad_norm")
    texts["grad_norm"] = "not finite" if norm is None else str(norm)

    iteration = as_whole(number_in(event, "iteration"))
    if kind is EventKind.DAMAGED:
        iteration = iteration_of(texts["folder"])
    if kind is EventKind.RESUME and not texts["folder"]:
        detail = "from the beginning"
    is_first_start = kind is EventKind.RESUME and not iteration
    if is_first_start or (kind is EventKind.EXIT and number_in(event, "code") == 0):
        mark = ""
    shown, time = detail.format_map(texts), number_in(event, "time")
    return EventRow(time, what, iteration, _rank(event), shown, mark)


def _rank(event: Event) -> int | None:
    """The rank that the event is about. By default, it is the rank that wrote the event."""
    if is_kind(event, EventKind.LOST, EventKind.HANG) and isinstance(event.get("ranks"), list):
        ranks = _ranks(event)
        return ranks[0] if len(ranks) == 1 and type(ranks[0]) is int else None
    return as_whole(number_in(event, "rank"))


def _ranks(event: Event) -> list[object]:
    ranks = event.get("ranks")
    return ranks if isinstance(ranks, list) else []


def start_rows(sessions: Sequence[Session], *, is_running: bool) -> list[tuple[object, ...]]:
    """The run's starts, in order: time, who made it, ranks, iterations from and to, end.

    Args:
        is_running: Whether the last one has not ended.
    """
    rows: list[tuple[object, ...]] = []
    for number, session in enumerate(sessions):
        if session.events:
            time = number_in(session.start or session.events[0], "time")
            started_by = "launcher" if is_relaunch(sessions, number) else "hand"
            iterations = [number_in(event, "iteration") for event in session.events]
            last = as_whole(max((each for each in iterations if each is not None), default=None))
            is_under_way = is_running and session is sessions[-1]
            end = "under way" if is_under_way else cause_of(session)
            rows.append((time, started_by, session.world_size, session.resumed_at, last, end))
    return rows


def checkpoint_row(iteration: int, path: Path, events: Sequence[Event]) -> tuple[object, ...]:
    """A published checkpoint: iteration, time, how long the save took, name."""
    event = next(iter(publications(events, iteration)[-1:]), {})
    return iteration, number_in(event, "time"), _seconds(event), path.name


def _seconds(event: Event) -> str | None:
    seconds = number_in(event, "seconds")
    return None if seconds is None else f"{seconds:.2f} s"
