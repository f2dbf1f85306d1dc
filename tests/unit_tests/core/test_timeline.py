"""A timeline shows when lanes work and the computation waits, and without one there is no cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from megatron.core.device import Device
from megatron.core.lane_timings import D2H, HOST, TimingRecorder
from megatron.core.lanes import Awaited
from megatron.core.spans import Origin
from megatron.core.timeline import NO_TIMELINE, Timeline
from megatron.core.trace_file import COMPUTE, GATHER, ITERATION, PHASE, WAIT, WORK, Slice
from tests.unit_tests.core.helpers.clock import Clock

CPU = Device("cpu")


def recorded(timeline: Timeline, clock: Callable[[], float]) -> list[Slice]:
    """All slices, in seconds since the iteration that was recorded first."""
    slices = timeline.slices(time.time() - clock())
    assert slices is not None
    first = slices[0].begin
    return [
        one._replace(begin=round(one.begin - first, 6), end=round(one.end - first, 6))
        for one in slices
    ]


def test_phases_and_waits_lie_in_their_iteration():
    clock = Clock()
    timeline = Timeline(CPU, clock)
    for number in (20, 21):
        timeline.begin_iteration(number)
        timeline.phase("forward")
        clock.now += 1.0
        with timeline.waiting("gather", "layers.0"):
            clock.now += 0.5
        timeline.phase("backward")
        clock.now += 2.0
    timeline.end_iteration()
    timeline.phase("of an iteration that is not recorded")

    def expected(number: int, begin: float) -> list[Slice]:
        def slice_of(kind: str, name: str, first: float, last: float, about: str = "") -> Slice:
            return Slice(COMPUTE, kind, name, begin + first, begin + last, number, about=about)

        return [
            slice_of(ITERATION, f"iteration {number}", 0.0, 3.5),
            slice_of(PHASE, "forward", 0.0, 1.5),
            slice_of(WAIT, "wait for gather", 1.0, 1.5, "layers.0"),
            slice_of(PHASE, "backward", 1.5, 3.5),
        ]

    assert recorded(timeline, clock) == [*expected(20, 0.0), *expected(21, 3.5)]


def test_work_is_recorded_if_the_timeline_is_open_when_it_starts():
    clock = Clock()
    timeline = Timeline(CPU, clock)
    before, within, after = (
        timeline.timed(GATHER, name, clock.taking(1.0), 8) for name in ("before", "within", "after")
    )
    before()
    timeline.begin_iteration(3)
    within()
    timeline.end_iteration()
    after()
    work = [one for one in recorded(timeline, clock) if one.kind == WORK]
    assert work == [Slice(GATHER, WORK, "within", 0.0, 1.0, 3, 8)]


def test_slices_are_there_once_all_of_it_is_over_and_asking_does_not_wait():
    timeline, gate = Timeline(CPU), threading.Event()
    lane = CPU.lane("slow")
    timeline.begin_iteration(1)
    begun = threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(600)

    event = lane.enqueue(timeline.timed(GATHER, "late", work))
    assert begun.wait(600)
    timeline.end_iteration()
    assert timeline.slices(0.0) is None
    early = timeline.slices(0.0, is_final=True)
    assert [one.kind for one in early] == [ITERATION], "what is over"
    gate.set()
    event.wait()
    assert {one.name for one in timeline.slices(0.0)} == {"iteration 1", "late"}
    timeline.forget()
    assert timeline.slices(0.0) == []
    lane.close()


def test_work_that_starts_between_two_recorded_iterations_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
):
    timeline = Timeline(CPU)
    work = timeline.timed(GATHER, "between", lambda: None)

    def origin() -> Origin:
        work()  # as a lane's thread may, at that very moment
        return Origin(0.0)

    timeline.begin_iteration(1)
    monkeypatch.setattr(timeline, "_origins", origin)
    timeline.begin_iteration(2)
    timeline.end_iteration()
    assert [one.name for one in timeline.slices(0.0) if one.kind == WORK] == ["between"]


def test_work_that_fails_is_recorded_and_raises_what_it_raised():
    timeline = Timeline(CPU)
    timeline.begin_iteration(1)

    def fail() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        timeline.timed(GATHER, "failing", fail)()
    timeline.end_iteration()
    assert [one.name for one in timeline.slices(0.0) if one.kind == WORK] == ["failing"]


def test_waiting_for_an_event_is_a_wait_of_the_computation():
    clock = Clock()
    timeline = Timeline(CPU, clock)
    timeline.begin_iteration(1)
    timeline.awaited(Awaited(CPU.event(), clock.taking(2.0)), GATHER, "layers.0").wait()
    timeline.end_iteration()
    _, wait = recorded(timeline, clock)
    assert wait == Slice(COMPUTE, WAIT, "wait for gather", 0.0, 2.0, 1, about="layers.0")


def test_without_a_timeline_nothing_is_made():
    work, event = (lambda: None), CPU.event()
    assert NO_TIMELINE.timed(GATHER, "layers.0", work, 8) is work
    assert NO_TIMELINE.awaited(event, GATHER) is event
    assert NO_TIMELINE.waiting(GATHER) is NO_TIMELINE.waiting(D2H)
    closed = Timeline(CPU)
    assert closed.awaited(event, GATHER) is event
    assert closed.waiting(GATHER) is NO_TIMELINE.waiting(GATHER)


def test_without_lanes_work_is_a_wait_of_the_computation():
    clock = Clock()
    recorder, timeline = TimingRecorder(CPU, has_lanes=False, clock=clock), Timeline(CPU, clock)
    recorder.record_to(timeline)
    timeline.begin_iteration(1)
    recorder.begin().timed(HOST, clock.taking(1.0), 8, "layers.1")()
    timeline.end_iteration()
    _, wait, work = recorded(timeline, clock)
    assert (work.row, wait.name) == (HOST, "wait for host")
    assert (work.begin, work.end) == (wait.begin, wait.end)


def test_the_spans_that_are_added_up_match_the_timeline():
    clock = Clock()
    recorder, timeline = TimingRecorder(CPU, has_lanes=True, clock=clock), Timeline(CPU, clock)
    recorder.record_to(timeline, "activations ")
    step = recorder.begin()
    timeline.begin_iteration(4)
    step.timed(D2H, clock.taking(1.0), 64, "layers.1")()
    with step.waiting(HOST):
        clock.now += 2.0
    timeline.end_iteration()
    step.timed(D2H, clock.taking(4.0), 64, "not recorded")()
    recorder.end()
    own = [one for one in recorded(timeline, clock) if one.kind != ITERATION]
    assert own == [
        Slice("activations d2h", WORK, "layers.1", 0.0, 1.0, 4, 64),
        Slice(COMPUTE, WAIT, "wait for activations host", 1.0, 3.0, 4),
    ]
    timings = recorder.collect()
    assert (timings.d2h, timings.waited_host) == (5.0, 2.0)
