from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import traceback
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.lanes import delays

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
    depths = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="the cause") as raised:
            event.wait()
        trace = traceback.format_exception(raised.value)
        assert "in fail" in "".join(trace)
        depths.add(len(trace))
    assert len(depths) == 1, "waiting again does not pile up tracebacks"


def test_a_failed_lane_and_its_dependents_stop_and_other_lanes_continue(lanes):
    """A rank that has missed one collective must not send another one in its place."""
    ran = []
    lanes[0].enqueue(fail)
    later = lanes[0].enqueue(lambda: ran.append("later"))
    dependent = lanes[1].enqueue(lambda: ran.append("dependent"), after=[later])
    lanes[2].enqueue(lambda: ran.append("other lane")).wait()
    for event in (later, dependent, lanes[0].enqueue(lambda: ran.append("much later"))):
        with pytest.raises(ValueError, match="the cause"):
            event.wait()
    assert ran == ["other lane"]


def test_autograd_does_not_record_the_work(lanes):
    weight = torch.ones(2, requires_grad=True)
    made = []
    lanes[0].enqueue(lambda: made.append(weight * 2)).wait()
    assert not made[0].requires_grad


class Buffer:
    """Something to be let go of."""


def fail_with(_buffer: Buffer) -> None:
    raise ValueError("the cause")


@pytest.mark.parametrize("work", [id, fail_with])
def test_a_lane_lets_go_of_work_that_is_done_or_has_failed(lanes, work):
    buffer = Buffer()
    alive = weakref.ref(buffer)
    before = CPU.lane("before")
    event = lanes[0].enqueue(partial(work, buffer), after=[before.enqueue(partial(id, buffer))])
    before.close()
    if work is id:
        event.wait()
    else:
        with pytest.raises(ValueError, match="the cause"):
            event.wait()
        # The error has the frames it came through, and they the buffer: an owner of the lane
        # keeps the error.
        lanes[0].close()
        lanes[0] = CPU.lane("lane-0")
    del buffer, event
    deadline = time.monotonic() + 300.0
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive() is None


def test_work_queued_in_inference_mode_runs_in_it(lanes):
    with torch.inference_mode():
        buffer = torch.zeros(2)
        lanes[0].enqueue(lambda: buffer.add_(1)).wait()
    assert buffer.tolist() == [1.0, 1.0]
    lanes[0].enqueue(lambda: None).wait()


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
@given(
    seed=st.integers(0, 2**16),
    plan=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12),
)
def test_delays_change_when_work_runs_but_never_what_it_sees(seed, plan):
    """Each piece of work doubles and adds to a buffer after the one before it; only the order makes
    the result.
    """
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


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_lanes_that_share_a_thread_run_in_the_order_of_queueing_and_fail_alone():
    first, second = (CPU.lane("shared", is_shared=True) for _ in range(2))
    assert len(threads_named("shared")) == 1
    order, gate = [], threading.Event()
    first.enqueue(lambda: (gate.wait(), order.append("first")))
    event = second.enqueue(lambda: order.append("second"))
    failed = first.enqueue(fail)
    last = second.enqueue(lambda: order.append("last"))
    assert order == [], "the second lane waits for the first's work"
    gate.set()
    last.wait()
    event.wait()
    assert order == ["first", "second", "last"]
    with pytest.raises(ValueError, match="the cause"):
        failed.wait()
    with pytest.raises(ValueError, match="the cause"):
        first.enqueue(lambda: order.append("never")).wait()
    assert order == ["first", "second", "last"]


def test_a_thread_ends_when_the_last_lane_on_it_is_let_go_of():
    first, second = (CPU.lane("let go", is_shared=True) for _ in range(2))
    (thread,) = threads_named("let go")
    done = first.enqueue(lambda: None)
    del first
    done.wait()
    second.enqueue(lambda: None).wait()
    assert thread.is_alive()
    del second
    thread.join(timeout=600)
    assert not thread.is_alive()
    CPU.lane("let go", is_shared=True).enqueue(lambda: None).wait()


_PROGRAMS = """
import json, os, sys, time
from datetime import timedelta
import torch.distributed as dist
from megatron.core import device, lanes

class SlowToGo:  # holds the interpreter in its shutdown, in which the thread comes back from C++
    def __del__(self, sleep=time.sleep):
        sleep(0.8)

def wait_in_cpp(seconds):
    dist.HashStore().wait(["never"], timedelta(seconds=seconds))

begin, children = time.monotonic(), {}
for name in ("queued", "let go", "stuck", "failed", "none"):
    if name == "none" or (child := os.fork()) == 0:
        break
    children[name] = child

if name == "none":
    results = {}
    for each, child in children.items():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        results[each] = [status, time.monotonic() - begin]
    print(json.dumps(results))
else:
    slow_to_go = SlowToGo()
    lane = device.Device("cpu").lane("the lane")
    lane.enqueue(lambda: wait_in_cpp(0.3 if name in ("queued", "let go") else 60))
    time.sleep(0.05)
if name == "let go":
    del lane
if name == "stuck":
    lanes._EXIT_SECONDS = 0.1
if name == "failed":
    raise ValueError("the program's own")
"""


def test_a_program_that_ends_with_work_on_a_lane_lets_it_end_and_is_not_killed_by_it():
    """See [Note: the end of the program]. Each is forked, since importing torch takes seconds."""
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAMS], capture_output=True, text=True, timeout=600
    )
    results = json.loads(run.stdout)
    assert {name: status for name, (status, _) in results.items()} == {
        "queued": 0, "let go": 0, "stuck": 0, "failed": 1,
    }  # fmt: skip
    # Of the 60 seconds that the work would take. A busy machine takes ten for a program that ends
    # at once.
    assert results["stuck"][1] < 40, "a program does not wait for ever"
    assert results["failed"][1] < 40, "nor one that fails at all: its peers may wait for it"
    assert run.stderr.count("The program ended with pending work on 1 lane (the lane") == 1
    assert "ValueError: the program's own" in run.stderr
