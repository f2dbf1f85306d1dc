"""How much of what lanes do is hidden behind the computation.

    compute   ■■forward■■|wait|■■■backward■■■
    gather       ■■■■■■■■■■■■■                    busy 13, of which 9 are hidden: 69 %

The computation computes in its phases forward, backward, norm, step and evaluate, except while it
waits. A lane is busy while it works on something. The hidden share of a lane is the part of its
busy time during which the computation computes: 1 costs nothing, and what is missing to 1 either
held up the computation or ran beside a wait for something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron.core.trace_file import COMPUTE, PHASE, ROWS, WAIT, WORK, Slice, Trace

COMPUTING = ("forward", "backward", "norm", "step", "evaluate")
_WAIT_FOR = "wait for "

Interval = tuple[float, float]


class LaneShare(NamedTuple):
    """What a lane did in an iteration, in seconds."""

    lane: str
    busy: float
    hidden: float  # of it, beside the computation
    waited: float  # by the computation, for the lane
    nbytes: int  # of what began in the iteration

    @property
    def hidden_share(self) -> float | None:
        """None for a lane that was never busy."""
        return self.hidden / self.busy if self.busy else None


class StepShares(NamedTuple):
    """What a rank did in an iteration, in seconds."""

    seconds: float
    computing: float
    waiting: float
    phases: dict[str, float]  # by name, waits included
    lanes: tuple[LaneShare, ...]
    waited_for_ranks: float  # in collectives of the computation's own


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that are apart, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def shared(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments that are in both."""
    one, other = united(first), united(second)
    found, i, j = list[Interval](), 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments of the first that are not in the second."""
    holes = united(second)
    found: list[Interval] = []
    for begin, end in united(first):
        for hole_begin, hole_end in holes:
            if hole_end <= begin or end <= hole_begin:
                continue
            if begin < hole_begin:
                found.append((begin, hole_begin))
            begin = max(begin, hole_end)
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of all moments, each counted once."""
    return sum(end - begin for begin, end in united(intervals))


def computing_in(slices: Iterable[Slice]) -> list[Interval]:
    """When the computation computes."""
    own = [one for one in slices if one.row == COMPUTE]
    phases = [_times(one) for one in own if one.kind == PHASE and one.name in COMPUTING]
    return without(phases, [_times(one) for one in own if one.kind == WAIT])


def within(slices: Iterable[Slice], whole: Slice) -> list[Slice]:
    """The parts of slices that lie within another."""
    return [
        one._replace(begin=max(one.begin, whole.begin), end=min(one.end, whole.end))
        for one in slices
        if one.begin < whole.end and whole.begin < one.end
    ]


def shares_of(trace: Trace, iteration: int) -> StepShares:
    """What a rank did between the beginning and the end of an iteration, whatever it was for."""
    whole = trace.iterations[iteration]
    slices = within(trace.slices, whole)
    computing = computing_in(slices)
    waits = [one for one in slices if one.kind == WAIT]

    def waited(what: str) -> float:
        return length(_times(one) for one in waits if one.name == _WAIT_FOR + what)

    lanes = []
    for row in ROWS:
        own = [one for one in slices if one.row == row and one.kind == WORK]
        busy = united(map(_times, own))
        hidden = length(shared(busy, computing))
        nbytes = sum(one.nbytes for one in own if one.iteration == iteration)
        if own:
            lanes.append(LaneShare(row, length(busy), hidden, waited(row), nbytes))

    phases: dict[str, float] = {}
    for one in slices:
        if one.kind == PHASE:
            phases[one.name] = phases.get(one.name, 0.0) + one.end - one.begin
    return StepShares(
        whole.end - whole.begin,
        length(computing),
        length(map(_times, waits)),
        phases,
        tuple(lanes),
        waited("ranks"),
    )


def _times(one: Slice) -> Interval:
    return one.begin, one.end
