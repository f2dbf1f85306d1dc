"""The discrete-event model: lanes in order, shared resources, and the causes of waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.plan.simulation import Span, Task, simulate, waits

RATES = {"link": 3.0, "memory": 5.0}


def times(*tasks: Task, **rates: float) -> list[tuple[float, float]]:
    return [(span.begin, span.end) for span in simulate(tasks, rates)]


def test_a_lane_works_in_order_and_lanes_run_concurrently():
    tasks = Task("a", "", 2.0), Task("b", "", 3.0), Task("a", "", 1.0, (1,)), Task("a", "", 1.0)
    assert times(*tasks) == [(0.0, 2.0), (0.0, 3.0), (3.0, 4.0), (4.0, 5.0)]


def test_tasks_that_ask_for_too_much_are_equally_slow_until_one_ends():
    # They request 12 of 8 a second: the first ends after 3 s, when the other has half of its work.
    first, other = Task("a", "", 2.0, (), {"m": 16.0}), Task("b", "", 4.0, (), {"m": 16.0})
    assert times(first, other, m=8.0) == [(0.0, 3.0), (0.0, 5.0)]
    assert times(first, other, m=12.0) == times(first, other) == [(0.0, 2.0), (0.0, 4.0)]
    alone = Task("a", "", 2.0, (), {"m": 32.0})
    assert times(alone, Task("b", "", 7.0), m=8.0) == [(0.0, 4.0), (0.0, 7.0)]


def test_tasks_slowed_by_one_resource_leave_others_more_of_the_rest():
    # Memory slows the first to a half; the second then has all of the link that it requests.
    both = Task("a", "", 1.0, (), {"memory": 10.0, "link": 2.0})
    link = Task("b", "", 1.0, (), {"link": 2.0})
    assert times(both, link, **RATES) == [(0.0, 2.0), (0.0, 1.0)]


def test_idle_time_belongs_to_the_work_along_the_chain_of_causes():
    tasks = [
        Task("compute", "own", 1.0),
        Task("host", "host", 3.0, (0,)),
        Task("up", "link", 1.0, (1,)),
        Task("compute", "own", 2.0),  # during the first three seconds
        Task("compute", "own", 1.0, (2,)),
    ]
    spans = simulate(tasks, {})
    assert spans[4] == Span(5.0, 6.0, 2)
    found = [
        (index, kind, pytest.approx(seconds))
        for index, kind, seconds in waits(tasks, spans, "compute")
    ]
    assert sorted(found) == [(4, "host", 1.5), (4, "link", 0.5)]


@st.composite
def graphs(draw: st.DrawFn, shared: Sequence[str] = (*RATES,)) -> list[Task]:
    """Tasks on three lanes that wait for earlier ones."""
    tasks: list[Task] = []
    amounts = st.one_of(st.just(0.0), st.floats(0.01, 100.0))
    for index in range(draw(st.integers(1, 20))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else ()
        uses = (
            {name: draw(amounts) for name in draw(st.sets(st.sampled_from(shared)))}
            if shared
            else {}
        )
        tasks.append(Task(draw(st.sampled_from("abc")), "", draw(amounts), (*after,), uses))
    return tasks


def before(tasks: Sequence[Task], index: int) -> list[int]:
    """The tasks that must end before one starts."""
    same = [i for i in range(index) if tasks[i].lane == tasks[index].lane]
    return [*tasks[index].after, *same[-1:]]


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_no_task_starts_too_early_or_takes_less_than_its_time(tasks):
    spans = simulate(tasks, RATES)
    for index, (task, span) in enumerate(zip(tasks, spans, strict=True)):
        ends = [spans[other].end for other in before(tasks, index)]
        assert span.begin == max(ends, default=0.0), "and no task waits without a cause"
        assert span.cause is None or spans[span.cause].end == span.begin
        assert span.end - span.begin >= task.seconds * (1 - 1e-6)


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_the_whole_takes_at_least_what_each_lane_and_each_resource_needs(tasks):
    end = max(span.end for span in simulate(tasks, RATES)) * (1 + 1e-6)
    for lane in "abc":
        assert end >= sum(task.seconds for task in tasks if task.lane == lane)
    for name, rate in RATES.items():
        assert end >= sum(task.uses.get(name, 0.0) for task in tasks if task.seconds) / rate
    path: list[float] = []
    for index, task in enumerate(tasks):
        path.append(task.seconds + max((path[i] for i in before(tasks, index)), default=0.0))
    assert end >= max(path)
    if not any(task.uses for task in tasks):
        assert end == pytest.approx(max(path))


@settings(max_examples=50, deadline=None)
@given(graphs(), st.floats(0.1, 10.0))
def test_twice_all_rates_is_half_the_time(tasks, factor):
    slower = [task._replace(seconds=task.seconds * factor) for task in tasks]
    rates = {name: rate / factor for name, rate in RATES.items()}
    for one, other in zip(simulate(tasks, RATES), simulate(slower, rates), strict=True):
        assert other.end == pytest.approx(factor * one.end, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(graphs(shared=()), st.data())
def test_a_faster_task_delays_no_other_where_nothing_is_shared(tasks, data):
    index = data.draw(st.integers(0, len(tasks) - 1))
    faster = [*tasks]
    faster[index] = tasks[index]._replace(seconds=tasks[index].seconds / 2)
    for one, other in zip(simulate(tasks, {}), simulate(faster, {}), strict=True):
        assert other.end <= one.end * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_waits_add_up_to_the_idle_time_of_a_lane(tasks):
    spans = simulate(tasks, RATES)
    own = [span for task, span in zip(tasks, spans, strict=True) if task.lane == "a"]
    idle = max((span.end for span in own), default=0.0) - sum(s.end - s.begin for s in own)
    assert sum(seconds for _, _, seconds in waits(tasks, spans, "a")) == pytest.approx(
        idle, abs=1e-6
    )
