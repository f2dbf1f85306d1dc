"""Timelines on an accelerator: spans of streams, dated on the host's clock, without a wait."""

from __future__ import annotations

import gc
import time

import pytest

from megatron.core.timeline import Timeline
from megatron.core.trace_file import (
    COMPUTE,
    D2H,
    GATHER,
    H2D,
    HOST,
    ITERATION,
    PHASE,
    REDUCE,
    WAIT,
    WORK,
)
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.sim

CLOSE = 0.2  # seconds, between two clocks and two threads of a busy machine


@on_ranks(1, device="sim")
def test_spans_of_streams_are_dated_on_the_hosts_clock_however_late_the_device_is() -> None:
    import torch

    import tests.simulated_accelerator.device as sim
    from megatron.core.device import Device

    device = Device("sim", 0)
    timeline = Timeline(device)
    lane = device.lane("held")
    stream = lane._stream
    with sim.held(stream):
        asked = time.perf_counter()
        # Behind what holds up the computation's stream, too.
        lane.enqueue(lambda: None)
        timeline.begin_iteration(1)
        work = timeline.timed(GATHER, "late", lambda: torch.ones(8, device="sim").add_(1))
        event = lane.enqueue(work)
        timeline.phase("forward")
        with timeline.waiting("gather"):
            event.wait()
        timeline.end_iteration()
        assert timeline.slices(0.0) is None, "which has not waited"
        time.sleep(0.5)  # more than the clocks may differ by
        let_go = time.perf_counter()
    torch.accelerator.synchronize()
    done = time.perf_counter()

    zero = time.time() - time.perf_counter()
    slices = {one.name: one for one in timeline.slices(zero)}
    late, wait = slices["late"], slices["wait for gather"]
    # Of the lane: from where its stream was let go. Of the computation: from where it was asked.
    assert let_go - CLOSE <= late.begin <= late.end <= done + CLOSE
    assert asked - CLOSE <= wait.begin <= asked + CLOSE
    assert late.end <= wait.end + CLOSE
    assert slices["forward"].end - slices["forward"].begin > 0.5 - CLOSE


@on_ranks(1, device="sim")
def test_a_wait_for_the_host_lasts_as_long_as_the_computations_stream_idles() -> None:
    import torch

    import tests.simulated_accelerator.device as sim
    from megatron.core.device import Device
    from megatron.core.lane_timings import TimingRecorder
    from megatron.core.lanes import relay

    device = Device("sim", 0)
    timeline, recorder = Timeline(device), TimingRecorder(device, has_lanes=True)
    recorder.record_to(timeline)
    host, gather = device.host_lane("host"), device.lane("gather")
    step = recorder.begin()

    with sim.held(torch.accelerator.current_stream()):
        timeline.begin_iteration(1)
        timeline.phase("forward")
        updated = relay(host, device.event)
        # Blocks this thread, while the stream that computes still has all of its work to do.
        gather.enqueue(lambda: None, [step.awaited(updated)]).wait()
        timeline.end_iteration()
    torch.accelerator.synchronize()

    slices = {one.kind: one for one in timeline.slices(0.0)}
    forward, wait = slices[PHASE], slices[WAIT]
    assert wait.name == "wait for host"
    assert forward.begin <= wait.begin <= wait.end <= forward.end
    host.close()


@on_ranks(2, device="sim")
def test_recording_an_engine_waits_no_more_and_changes_no_bit() -> None:
    import torch

    import tests.simulated_accelerator.device as sim
    from tests.simulated_accelerator.helpers.engines import batches, forward_step, make_engine

    results, syncs = [], []
    for records in (False, True):
        # Lanes of earlier engines, which wait for their streams as they end, end now.
        engine = None
        gc.collect()
        engine = make_engine("activations offload forward", "sim", records_timings=records)
        timeline = Timeline(engine.device)
        if records:
            engine.record_to(timeline)
        for number in range(4):
            prepared, before = batches(number, "sim"), sim.counters()
            if records:
                timeline.begin_iteration(number)
            result = engine.train_batch(prepared, forward_step, mark=timeline.phase)
            syncs.append((sim.counters() - before).stream_syncs)
        timeline.end_iteration()
        results.append((result.loss, result.grad_norm))
        engine.state.optimizer.synchronize()
    assert results[0] == results[1]
    assert syncs[1:4] == syncs[5:8] == [1] * 3, "one transfer to the host in each step"

    torch.accelerator.synchronize()
    slices = timeline.slices(0.0)
    assert {one.row for one in slices} >= {COMPUTE, GATHER, REDUCE, D2H, HOST, H2D}
    wholes = {one.iteration: one for one in slices if one.kind == ITERATION}
    assert list(wholes) == [0, 1, 2, 3]
    for one in slices:
        if one.kind in (PHASE, WORK) and one.row in (COMPUTE, GATHER, REDUCE):
            whole = wholes[one.iteration]
            assert whole.begin - CLOSE <= one.begin <= one.end <= whole.end + CLOSE
    # The update runs on a thread on any device: both clocks agree on the order.
    updates = [one for one in slices if one.row == HOST]
    for name in {one.name for one in updates}:
        host = [one for one in updates if one.name == name]
        fetched = [one for one in slices if (one.row, one.name) == (D2H, name) and one.nbytes]
        assert len(fetched) == 4 >= len(host) >= 3, "the last update may start after the recording"
        for down, update in zip(fetched, host, strict=False):
            assert down.end <= update.begin + CLOSE
