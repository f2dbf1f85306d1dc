"""The share of the lanes' work that is hidden behind the computation.

    compute   ■■forward■■|wait|■■■backward■■■
    gather       ■■■■■■■■■■■■■                    busy 13, of which 9 are hidden: 69 %

The computation computes in its phases forward, backward, norm, step and evaluate, except while it
waits. The hidden share of a lane is the part of its busy time during which the computation
computes. A lane with a share of 1 costs no time; the exposed rest delayed the computation, or ran
while it waited for another lane.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.trace_file import COMPUTE, PHASE, ROWS, WAIT, WORK, Slice, Trace

COMPUTING = ("forward", "backward", "norm", "step", "evaluate")

Interval = tuple[float, float]


class LaneShare(NamedTuple):
    """The work of a lane in an iteration."""

    lane: str
    busy_seconds: float
    hidden_seconds: float
    waited_seconds: float  # by the computation, for this lane
    bytes: int  # of work that started in the iteration

    @property
    def hidden_share(self) -> float | None:
        """None for a lane that was never busy."""
        return self.hidden_seconds / self.busy_seconds if self.busy_seconds else None


class StepShares(NamedTuple):
    """The times of a rank in an iteration."""

    seconds: float
    computing_seconds: float
    waiting_seconds: float
    waited_for_ranks_seconds: float  # in collectives that no lane runs
    phases_seconds: dict[str, float]  # by name, waits included
    lanes: tuple[LaneShare, ...]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def near(intervals: Sequence[Interval], begin: float, end: float) -> Sequence[Interval]:
    """Returns the ordered, disjoint intervals that overlap [begin, end)."""
    first = bisect_right(intervals, begin, key=lambda interval: interval[1])
    stop = bisect_left(intervals, end, key=lambda interval: interval[0])
    return intervals[first:stop]


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments of the first that are not in the second."""
    holes, found = united(second), list[Interval]()
    for begin, end in united(first):
        for hole_begin, hole_end in near(holes, begin, end):
            if begin < hole_begin:
                found.append((begin, hole_begin))
            begin = max(begin, hole_end)
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The time that intervals cover, overlaps counted once."""
    return sum(end - begin for begin, end in united(intervals))


def computing_in(slices: Iterable[Slice]) -> list[Interval]:
    """When the computation computes."""
    own = [one for one in slices if one.row == COMPUTE]
    phases = [_times(one) for one in own if one.kind == PHASE and one.name in COMPUTING]
    return without(phases, [_times(one) for one in own if one.kind == WAIT])


def within(slices: Iterable[Slice], whole: Slice) -> list[Slice]:
    """The parts of slices during another slice."""
    return [
        one._replace(begin=max(one.begin, whole.begin), end=min(one.end, whole.end))
        for one in slices
        if one.begin < whole.end and whole.begin < one.end
    ]


def shares_of(trace: Trace, iteration: int) -> StepShares:
    """The times between the start and the end of an iteration, of work for any iteration."""
    whole = trace.iterations[iteration]
    slices = within(trace.slices, whole)
    computing = computing_in(slices)
    waits = [one for one in slices if one.kind == WAIT]

    def waited(what: str) -> float:
        return length(_times(one) for one in waits if one.name == f"wait for {what}")

    lanes = []
    for row in ROWS:
        own = [one for one in slices if one.row == row and one.kind == WORK]
        busy = length(map(_times, own))
        hidden = busy - length(without(map(_times, own), computing))
        num_bytes = sum(one.nbytes for one in own if one.iteration == iteration)
        lanes += [LaneShare(row, busy, hidden, waited(row), num_bytes)] if own else []

    phases: dict[str, float] = {}
    for one in slices:
        if one.kind == PHASE:
            phases[one.name] = phases.get(one.name, 0.0) + one.end - one.begin
    computing_seconds, waiting = length(computing), length(map(_times, waits))
    seconds, for_ranks = whole.end - whole.begin, waited("ranks")
    return StepShares(seconds, computing_seconds, waiting, for_ranks, phases, tuple(lanes))


def _times(one: Slice) -> Interval:
    return one.begin, one.end
