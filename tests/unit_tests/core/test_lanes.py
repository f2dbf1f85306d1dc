from __future__ import annotations

import gc
import threading
import traceback
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device, delays

CPU = Device("cpu")


@pytest.fixture
def lanes():
    made = [CPU.lane(f"lane-{number}") for number in range(3)]
    yield made
    for lane in made:
        lane.close()


def test_work_on_a_lane_runs_in_its_order_and_beside_the_thread_that_queued_it(lanes):
    order, gate = [], threading.Event()
    first = lanes[0].enqueue(lambda: (gate.wait(), order.append(1)))
    second = lanes[0].enqueue(lambda: order.append(2))
    assert order == [], "nothing ran in this thread, and the first is held up"
    gate.set()
    second.wait()
    first.wait()
    assert order == [1, 2]


def test_work_waits_for_events_of_other_lanes(lanes):
    gate, seen = threading.Event(), []
    slow = lanes[0].enqueue(lambda: (gate.wait(), seen.append("slow")))
    dependent = lanes[1].enqueue(lambda: seen.append("dependent"), after=[slow])
    free = lanes[2].enqueue(lambda: seen.append("free"))
    free.wait()
    assert seen == ["free"]
    gate.set()
    dependent.synchronize()
    assert seen == ["free", "slow", "dependent"]


def fail() -> None:
    raise ValueError("the cause")


def test_an_error_surfaces_where_it_is_waited_for_with_the_traceback_of_the_work(lanes):
    event = lanes[0].enqueue(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="the cause") as raised:
            event.wait()
        assert "in fail" in "".join(traceback.format_exception(raised.value))


def test_what_depends_on_failed_work_does_not_run_and_fails_alike_and_the_lane_goes_on(lanes):
    ran = []
    failed = lanes[0].enqueue(fail)
    dependent = lanes[1].enqueue(lambda: ran.append("dependent"), after=[failed])
    independent = lanes[1].enqueue(lambda: ran.append("independent"))
    independent.wait()
    with pytest.raises(ValueError, match="the cause"):
        dependent.wait()
    assert ran == ["independent"]


def test_the_present_moment_is_an_event_that_is_done():
    CPU.event().wait()
    CPU.event().synchronize()


def test_autograd_does_not_record_the_work(lanes):
    weight = torch.ones(2, requires_grad=True)
    made = []
    lanes[0].enqueue(lambda: made.append(weight * 2)).wait()
    assert not made[0].requires_grad


def test_a_lane_lets_go_of_work_that_is_done(lanes):
    class Buffer:
        pass

    buffer = Buffer()
    alive = weakref.ref(buffer)
    lanes[0].enqueue(partial(id, buffer)).wait()
    # The worker lets go after it has told; the next work begins after that.
    lanes[0].enqueue(lambda: None).wait()
    del buffer
    gc.collect()
    assert alive() is None


def test_a_closed_lane_has_finished_its_work_and_takes_no_more():
    done = []
    lane = CPU.lane("short")
    lane.enqueue(lambda: done.append(1))
    lane.close()
    lane.close()
    assert done == [1]
    with pytest.raises(RuntimeError, match="Expected an open lane, got short"):
        lane.enqueue(lambda: None)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), plan=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12))
def test_delays_change_when_work_runs_but_never_what_it_sees(seed, plan):
    """Each piece of work doubles and adds to a buffer after the one before it; only the order makes the result."""
    made = [CPU.lane(f"lane-{number}") for number in range(3)]
    try:
        with delays(seed):
            buffer, event, expected = torch.ones(4), CPU.event(), 1.0
            for lane, addend in plan:
                event = made[lane].enqueue(lambda a=addend: buffer.mul_(2).add_(a), after=[event])
                expected = expected * 2 + addend
            event.wait()
        assert buffer.tolist() == [expected] * 4
    finally:
        for lane in made:
            lane.close()


def test_without_its_events_the_same_plan_goes_wrong_under_delays():
    """The test above would notice: here the work of two lanes is not ordered."""
    results = set()
    for seed in range(20):
        first, second = CPU.lane("first"), CPU.lane("second")
        with delays(seed):
            buffer = torch.ones(1)
            events = [first.enqueue(lambda b=buffer: b.mul_(2)), second.enqueue(lambda b=buffer: b.add_(1))]
            for event in events:
                event.wait()
        results.add(float(buffer))
        first.close()
        second.close()
    assert results == {3.0, 4.0}
