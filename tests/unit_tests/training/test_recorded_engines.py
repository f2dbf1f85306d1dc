"""Timelines of engines: work of every lane is in the iteration in which it ran, and slow work is in
its lane.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed.fsdp.gradients import GroupGradients
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.optimizer.cpu_offloading.bucket import FsdpBucket
from megatron.core.optimizer.kernels.host_adam import Ticket
from megatron.core.timeline import NoTimeline, Timeline
from megatron.core.trace_file import (
    ACTIVATIONS,
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
    Slice,
)
from megatron.training.engines import ModuleEngine
from tests.helpers.ranks import on_ranks
from tests.simulated_accelerator.helpers.engines import batches, forward_step, make_engine

INJECTED = 0.02  # seconds
SLOWED = {
    GATHER: (FsdpParameterGroup, "_move"),
    REDUCE: (GroupGradients, "_carry_out"),
    D2H: (FsdpBucket, "fetch_early"),
    HOST: (Ticket, "wait"),
    H2D: (FsdpBucket, "send"),
}


@contextmanager
def slow(owner: type, name: str) -> Iterator[None]:
    """Delays a method by INJECTED seconds."""
    original = getattr(owner, name)

    def slowed(*args: object, **kwargs: object) -> object:
        time.sleep(INJECTED)
        return original(*args, **kwargs)

    setattr(owner, name, slowed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def record(engine: ModuleEngine, timeline: Timeline, number: int) -> list[Slice]:
    """Runs an iteration and waits for all of its work."""
    timeline.begin_iteration(number)
    engine.train_batch(batches(number, "cpu"), forward_step, mark=timeline.phase)
    engine.state.optimizer.synchronize()
    timeline.end_iteration()
    slices = timeline.slices(0.0)
    assert slices is not None
    timeline.forget()
    return slices


@on_ranks(2)
def test_every_lane_is_in_its_iteration_with_its_bytes() -> None:
    engine = make_engine("activations offload forward", "cpu", records_timings=True)
    timeline = Timeline(engine.device)
    engine.train_batch(batches(0, "cpu"), forward_step)
    engine.record_to(timeline)
    slices = record(engine, timeline, 1)
    rows = {one.row for one in slices}
    activations = {ACTIVATIONS + D2H, ACTIVATIONS + H2D}
    assert rows == {COMPUTE, GATHER, REDUCE, D2H, HOST, H2D} | activations

    (whole,) = (one for one in slices if one.kind == ITERATION)
    assert all(whole.begin <= one.begin and one.end <= whole.end for one in slices)
    phases = [one.name for one in slices if one.kind == PHASE]
    assert phases == [*["data", "forward", "backward"] * 2, "norm", "step"]
    waits = {one.name for one in slices if one.kind == WAIT}
    assert {"wait for gather", "wait for reduce", "wait for ranks", "wait for d2h"} <= waits

    groups = {"the model", *(f"decoder.layers.{number}" for number in range(3))}
    for row in (GATHER, REDUCE):
        work = [one for one in slices if one.row == row and one.kind == WORK]
        assert {one.name for one in work} == groups
        assert all(one.nbytes > 0 for one in work)
    backwards = [one for one in slices if one.name == "backward"]
    for one in slices:
        if one.row == REDUCE:
            assert any(phase.begin <= one.begin < phase.end for phase in backwards)


@on_ranks(2)
def test_slow_work_is_in_its_lane_and_recording_is_bit_equal() -> None:
    plain = make_engine("offload forward", "cpu")
    engine = make_engine("offload forward", "cpu", records_timings=True)
    timeline = Timeline(engine.device)
    engine.record_to(timeline)
    for number, (row, (owner, name)) in enumerate(SLOWED.items()):
        before = record(engine, timeline, 2 * number)
        with slow(owner, name):
            slices = record(engine, timeline, 2 * number + 1)
        # Gradients that were fetched in the backward are not fetched again.
        work = [one for one in slices if one.row == row and (one.nbytes or row != D2H)]
        assert len(work) >= 4
        assert all(one.end - one.begin >= INJECTED for one in work), row
        assert min(one.end - one.begin for one in before if one.row == row) < INJECTED
    for number in range(2 * len(SLOWED)):
        loss = plain.train_batch(batches(number, "cpu"), forward_step).loss
    recorded = engine.train_batch(batches(number, "cpu"), forward_step)
    again = plain.train_batch(batches(number, "cpu"), forward_step)
    assert loss != again.loss
    assert (recorded.loss, recorded.grad_norm) == (again.loss, again.grad_norm)


@on_ranks(1)
def test_engines_have_no_timeline_by_default_and_a_timeline_keeps_no_engine_alive() -> None:
    engine = make_engine("offload forward", "cpu", records_timings=True)
    groups = {group_of(parameter) for parameter in engine.model.parameters()}
    assert all(isinstance(group.timeline, NoTimeline) for group in groups)
    assert isinstance(engine.state.optimizer.timeline, NoTimeline)

    timeline = Timeline(engine.device)
    engine.record_to(timeline)
    assert all(group.timeline is timeline for group in groups)
    record(engine, timeline, 1)
    timeline.begin_iteration(2)
    engine.train_batch(batches(2, "cpu"), forward_step)
    timeline.end_iteration()
    engine.state.optimizer.synchronize()
    references = [weakref.ref(engine), weakref.ref(engine.model), *map(weakref.ref, groups)]
    del engine, groups
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert len(timeline.slices(0.0)) > 10
