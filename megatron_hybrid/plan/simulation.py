"""A discrete-event model of tasks that wait for each other and share resources.

A lane runs one task at a time, in the order of the list. Tasks of different lanes overlap. If they
demand more of a resource, such as host memory bandwidth, than it provides, each gets the same
fraction of its demand. Speeds change only when a task starts or ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# Fraction of a task's seconds: rounding errors must not separate tasks that end together.
_ROUNDING = 1e-9


class Task(NamedTuple):
    """A task of one lane.

    Attributes:
        kind: category for `waits`.
        seconds: duration at full speed.
        after: indices of earlier tasks in the list that must end first.
        uses: amounts of shared resources, by name.
    """

    lane: str
    kind: str
    seconds: float
    after: Sequence[int] = ()
    uses: Mapping[str, float] = {}


class Span(NamedTuple):
    """Start and end of a task.

    Attributes:
        cause: index of the task whose end started this one; None: the task starts at 0.
    """

    begin: float
    end: float
    cause: int | None


def simulate(tasks: Sequence[Task], rates: Mapping[str, float]) -> list[Span]:
    """Returns the time of each task.

    Args:
        rates: capacity of each shared resource per second; other resources are unlimited.
    """
    return _Simulation(tasks, rates).run()


class _Simulation:
    """Running and waiting tasks."""

    def __init__(self, tasks: Sequence[Task], rates: Mapping[str, float]) -> None:
        self._tasks, self._rates = tasks, rates
        self._waits_for: list[set[int]] = []
        self._next: list[list[int]] = [[] for _ in tasks]
        self._now = 0.0
        self._left: dict[int, float] = {}  # seconds of running tasks, at full speed
        self._demands = [self._demanded(task) for task in tasks]
        self._begins: dict[int, tuple[float, int | None]] = {}
        self._spans: dict[int, Span] = {}
        last: dict[str, int] = {}
        for index, task in enumerate(tasks):
            before = {*task.after, *([last[task.lane]] if task.lane in last else [])}
            last[task.lane] = index
            self._waits_for.append(before)
            for other in before:
                self._next[other].append(index)

    def run(self) -> list[Span]:
        """Runs all tasks."""
        self._begin([(index, None) for index, before in enumerate(self._waits_for) if not before])
        while self._left:
            speeds = _speeds({index: self._demands[index] for index in self._left}, self._rates)
            elapsed = min(left / speeds[index] for index, left in self._left.items())
            self._now += elapsed
            for index in self._left:
                self._left[index] -= elapsed * speeds[index]
            done = [i for i, s in self._left.items() if s <= _ROUNDING * self._tasks[i].seconds]
            for index in done:
                del self._left[index]
            self._begin([new for index in done for new in self._end(index)])
        return [self._spans[index] for index in range(len(self._tasks))]

    def _demanded(self, task: Task) -> dict[str, float]:
        """Returns the demand for each limited resource per second at full speed."""
        return {
            name: amount / task.seconds
            for name, amount in task.uses.items()
            if amount and task.seconds and name in self._rates
        }

    def _begin(self, ready: list[tuple[int, int | None]]) -> None:
        """Starts tasks, given with their causes, and the successors of empty tasks."""
        while ready:
            index, cause = ready.pop()
            self._begins[index] = self._now, cause
            if self._tasks[index].seconds > 0:
                self._left[index] = self._tasks[index].seconds
            else:
                ready += self._end(index)

    def _end(self, index: int) -> list[tuple[int, int | None]]:
        """Ends a task and returns the tasks that can start now."""
        begin, cause = self._begins.pop(index)
        self._spans[index] = Span(begin, self._now, cause)
        ready = list[tuple[int, int | None]]()
        for other in self._next[index]:
            self._waits_for[other].discard(index)
            if not self._waits_for[other]:
                ready.append((other, index))
        return ready


def _speeds(
    demands: Mapping[int, Mapping[str, float]], rates: Mapping[str, float]
) -> dict[int, float]:
    """Returns the speed of each running task; 1 is full speed.

    All speeds rise together until a resource is exhausted. Tasks that use it keep this speed, and
    the speeds of the others rise further.
    """
    speeds: dict[int, float] = {}
    rising, free = dict(demands), dict(rates)
    while rising:
        asked: dict[str, float] = {}
        for needs in rising.values():
            for name, amount in needs.items():
                asked[name] = asked.get(name, 0.0) + amount
        reached = {name: free[name] / total for name, total in asked.items() if total > free[name]}
        if not reached:
            return {**speeds, **dict.fromkeys(rising, 1.0)}
        scarce = min(reached, key=lambda name: reached[name])
        for index in [index for index, needs in rising.items() if scarce in needs]:
            speeds[index] = reached[scarce]
            for name, amount in rising.pop(index).items():
                free[name] -= amount * speeds[index]
    return speeds


def waits(
    tasks: Sequence[Task], spans: Sequence[Span], lane: str
) -> Iterator[tuple[int, str, float]]:
    """Yields (index, kind, seconds) for each task of a lane that starts after an idle period.

    The idle time is divided among tasks of other lanes, in proportion to their durations: the chain
    of causes back to the lane's last own task.
    """
    free = 0.0
    for index, (task, span) in enumerate(zip(tasks, spans, strict=True)):
        if task.lane != lane:
            continue
        idle, cause = span.begin - free, span.cause
        free = span.end
        chain: dict[str, float] = {}
        while idle > 0 and cause is not None and tasks[cause].lane != lane:
            begin, end, before = spans[cause]
            kind = tasks[cause].kind
            chain[kind] = chain.get(kind, 0.0) + end - begin
            cause = before
        total = sum(chain.values())
        yield from ((index, kind, idle * own / total) for kind, own in chain.items() if own)
