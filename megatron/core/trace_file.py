"""A recorded timeline of one rank as a file: a Chrome trace, which Perfetto opens.

    rank 0 ┬ compute   [iteration 20                                  ][iteration 21
           │           [data][forward          ][backward        ][norm][step]
           │                   [wait for gather]
           ├ gather    [layers.0][layers.1]
           └ reduce                              [layers.1][layers.0]

In the trace, a rank is a process, a row is a thread, and a slice is a complete event ("X").
Timestamps are microseconds since a moment that is the same for all ranks, by the wall clock of
each machine, so the files of a recording can be merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from megatron.core.json_reading import parse_json

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"
D2H, HOST, H2D = "d2h", "host", "h2d"
ACTIVATIONS = "activations "  # before D2H and H2D: the lanes of offloaded activations
CHECKPOINT, DISK = "checkpoint", "checkpoint disk"
# In the order in which they are shown.
ROWS = (
    COMPUTE,
    GATHER,
    REDUCE,
    D2H,
    HOST,
    H2D,
    ACTIVATIONS + D2H,
    ACTIVATIONS + H2D,
    CHECKPOINT,
    DISK,
)

# Kinds of slices. The first three are of the row COMPUTE.
ITERATION, PHASE, WAIT, WORK = KINDS = ("iteration", "phase", "wait", "work")

_OWN = "megatron_hybrid"  # the key of the file's other content
_FORMAT = 1
_NANOSECONDS = 1e9
_MOST_SECONDS = 1e10  # of a time: dates of some other centuries, which calendars still have
# An accelerator dates events to about a microsecond, so what touches may seem to overlap.
_ROUNDING_NS = 4000


class Slice(NamedTuple):
    """Something that a row does."""

    row: str
    kind: str
    name: str
    begin: float  # seconds since the recording's zero
    end: float
    iteration: int  # in which it started
    nbytes: int = 0  # that it moves; 0: not known
    about: str = ""  # of a wait: the group that is waited for


@dataclass(frozen=True)
class Trace:
    """What one rank has recorded.

    Attributes:
        zero: unix seconds, from which slices count; the same on all ranks.
        machine: on which it ran.
        slices: in the order of their beginnings.
    """

    rank: int
    world_size: int
    zero: float
    machine: str
    slices: tuple[Slice, ...]

    @property
    def iterations(self) -> dict[int, Slice]:
        """The slice of each iteration that was recorded."""
        return {one.iteration: one for one in self.slices if one.kind == ITERATION}

    def to_json(self) -> bytes:
        """The file's content."""
        own = {
            "format": _FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "zero_unix_seconds": self.zero,
            "machine": self.machine,
        }
        return _content({"displayTimeUnit": "ms", _OWN: own}, self._events())

    @classmethod
    def from_json(cls, content: bytes) -> Trace:
        """The trace that `to_json` gave. ValueError for anything else."""
        found = parse_json(content)
        try:
            own = found[_OWN]
            if own["format"] != _FORMAT:
                raise ValueError(f"format {own['format']!r} of timelines, not {_FORMAT}")
            slices = [_slice(event) for event in found["traceEvents"] if event["ph"] == "X"]
            zero = float(own["zero_unix_seconds"])
            if abs(zero) > _MOST_SECONDS:
                raise ValueError(f"no timeline: it counts from {zero:g} unix seconds")
            return cls(
                int(own["rank"]),
                int(own["world_size"]),
                zero,
                str(own["machine"]),
                tuple(sorted(slices, key=lambda one: (one.begin, -one.end))),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"no timeline: {type(error).__name__}: {error}") from None

    def _events(self, shift: float = 0.0) -> Iterator[dict[str, Any]]:
        """All of the file's, so many seconds later."""
        moved = (one._replace(begin=one.begin + shift, end=one.end + shift) for one in self.slices)
        return chain(self._names(), map(self._event, _nested(moved)))

    def _names(self) -> Iterator[dict[str, Any]]:
        process = {"ph": "M", "pid": self.rank, "tid": 0}
        yield {"name": "process_name", **process, "args": {"name": f"rank {self.rank}"}}
        yield {"name": "process_sort_index", **process, "args": {"sort_index": self.rank}}
        for number, row in enumerate(ROWS):
            if any(one.row == row for one in self.slices):
                thread = {"ph": "M", "pid": self.rank, "tid": number}
                yield {"name": "thread_name", **thread, "args": {"name": row}}
                yield {"name": "thread_sort_index", **thread, "args": {"sort_index": number}}

    def _event(self, nested: _Nested) -> dict[str, Any]:
        one, begin, end = nested
        args: dict[str, Any] = {"iteration": one.iteration}
        args |= {"bytes": one.nbytes} if one.nbytes else {}
        args |= {"about": one.about} if one.about else {}
        return {
            "name": one.name,
            "cat": one.kind,
            "ph": "X",
            "pid": self.rank,
            "tid": ROWS.index(one.row),
            # Microseconds, exact to the nanosecond.
            "ts": begin / 1000,
            "dur": (end - begin) / 1000,
            "args": args,
        }


def merged(traces: Sequence[Trace]) -> bytes:
    """The ranks of a recording as one Chrome trace, for Perfetto."""
    first = min(trace.zero for trace in traces)
    events = chain.from_iterable(trace._events(trace.zero - first) for trace in traces)
    return _content({"displayTimeUnit": "ms"}, events)


def _content(head: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> bytes:
    # An event a line: the file can be read by people and by line-based tools.
    lines = ",\n".join(map(json.dumps, events))
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'.encode()


class _Nested(NamedTuple):
    """A slice with its times in nanoseconds."""

    slice: Slice
    begin: int
    end: int


def _nested(slices: Iterable[Slice]) -> list[_Nested]:
    """Slices in order, of a row one in the other or one behind the other, as a trace needs
    them: what overlaps by no more than the clocks' rounding is cut by as much.
    """
    found = [
        _Nested(one, round(one.begin * _NANOSECONDS), round(one.end * _NANOSECONDS))
        for one in slices
    ]
    found.sort(key=lambda nested: (ROWS.index(nested.slice.row), nested.begin, -nested.end))

    around: list[int] = []  # the slices that the present one is in, the innermost last
    for number, own in enumerate(found):
        while around:
            outer = found[around[-1]]
            is_in = outer.slice.row == own.slice.row and own.begin < outer.end
            if is_in and own.end - outer.end > _ROUNDING_NS >= outer.end - own.begin:
                # The next one, which starts where this one ends.
                found[around[-1]] = outer._replace(end=own.begin)
                is_in = False
            if is_in:
                excess = own.end - outer.end
                if 0 < excess <= _ROUNDING_NS:
                    found[number] = own._replace(end=outer.end)
                break
            around.pop()
        around.append(number)
    return found


def _slice(event: Mapping[str, Any]) -> Slice:
    begin, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    args, row = event["args"], int(event["tid"])
    is_time = abs(begin) <= _MOST_SECONDS and 0 <= seconds <= _MOST_SECONDS
    is_known = event["cat"] in KINDS and 0 <= row < len(ROWS)
    is_work = event["cat"] == WORK
    if not is_known or not is_time or is_work == (ROWS[row] == COMPUTE):
        raise ValueError(f"no slice of a timeline: {str(event)[:200]}")
    return Slice(
        ROWS[row],
        str(event["cat"]),
        str(event["name"]),
        begin,
        begin + seconds,
        int(args["iteration"]),
        int(args.get("bytes", 0)),
        str(args.get("about", "")),
    )
