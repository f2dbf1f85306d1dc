"""Work takes place in the order and the time of the planner's simulated step.

Every piece of work of a small step takes a time that is long compared with what surrounds it, on
its own lane of the device or of the host.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.sim

UNIT = 0.1  # seconds
NUM_GROUPS = 4
# Units by kind of work. A pass of the host is longer than a forward and a backward of its group.
FORWARD, BACKWARD, DOWN, HOST, UP, STATES = 1, 2, 3, 4, 1, 3

Done = tuple[str, int, float]  # lane, the number of the work on it, and when it ended


class _Recorder:
    """Lets work take its time, and records when it ends."""

    def __init__(self) -> None:
        self.done: list[tuple[str, float]] = []

    def on_host(self, lane: str, units: float) -> None:
        time.sleep(units * UNIT)
        self.done.append((lane, time.perf_counter()))

    def on_stream(self, lane: str, units: float) -> None:
        """Has the current stream idle for so long once it gets here."""
        import tests.simulated_accelerator.device as sim

        stream = torch.accelerator.current_stream()
        reached = torch.Event("sim")
        reached.record(stream)
        held = sim.held(stream)
        held.__enter__()

        def let_go() -> None:
            reached.synchronize()
            self.on_host(lane, units)
            held.__exit__(None, None, None)

        threading.Thread(target=let_go, daemon=True).start()

    def before(self, lane: str, units: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            self.on_stream(lane, units)
            return work(*arguments)

        return slow


class _Slow(torch.autograd.Function):
    """The computation of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorder: _Recorder) -> torch.Tensor:
        ctx.recorder = recorder
        recorder.on_stream("compute", FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.recorder.on_stream("compute", BACKWARD)
        return grad.clone(), None


class _Layer(nn.Module):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._recorder = recorder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # After its weights have come, and before its gradients are there.
        return _Slow.apply(self.linear(x), self._recorder)


def _patches(recorder: _Recorder) -> Iterator[Any]:
    from megatron.core.lanes import ThreadLane
    from megatron.core.optimizer.cpu_offloading import streamed_pass
    from megatron.core.optimizer.cpu_offloading.bucket import FsdpBucket

    enqueue, copy = ThreadLane.enqueue, streamed_pass._copy

    def on_lane(lane: Any, work: Callable[[], object], after: Any = ()) -> Any:
        def slow() -> object:
            recorder.on_host("host", HOST)
            return work()

        return enqueue(lane, slow if lane._name.endswith("host start") else work, after)

    def copy_states(source: Any, target: Any) -> None:
        way = "down" if source.weight.device.type == "sim" else "up"
        recorder.on_stream(f"states {way}", STATES)
        copy(source, target)

    yield patch.object(ThreadLane, "enqueue", on_lane)
    yield patch.object(streamed_pass, "_copy", copy_states)
    for method, lane, units in (
        ("fetch_early", "gradients down", DOWN),
        ("send", "weights up", UP),
    ):
        slow = recorder.before(lane, units, getattr(FsdpBucket, method))
        yield patch.object(FsdpBucket, method, slow)


def _trained(share: float, early_bytes: int) -> list[Done]:
    """What was done from a backward on in two steps."""
    from torch.distributed.device_mesh import init_device_mesh

    from megatron.core.distributed.fsdp import (
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )
    from megatron.core.optimizer.clip_grads import global_grad_norm
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    recorder = _Recorder()
    layers = [_Layer(recorder).to("sim") for _ in range(NUM_GROUPS)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("sim", (1,))
    for module in (*layers, model):
        fully_shard(
            module,
            mesh=mesh,
            mixed_precision_policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16),
            offload_policy=OffloadPolicy(main_weights_on_host=True, pin_memory=True),
        )
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        offload_fraction=1.0,
        fetch_during_backward=True,
        overlap_step_with_forward=True,
        update_on_device=share,
        early_update_bytes=early_bytes,
    )
    # Early updates need the options of a step before.
    first = 2 if early_bytes else 1
    with ExitStack() as stack:
        for one in _patches(recorder):
            stack.enter_context(one)
        for _ in range(first + 2):
            x = torch.ones(4, 8, dtype=torch.bfloat16, device="sim")
            model(x).float().square().mean().backward()
            float(global_grad_norm(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        # What the last step began is not recorded.
        done = [*recorder.done]
        optimizer.synchronize()
    counts: Counter[str] = Counter()
    numbered = []
    begin = [at for at, (lane, _) in enumerate(done) if lane == "compute"]
    for lane, end in done[begin[(2 * first - 1) * NUM_GROUPS] :]:
        numbered.append((lane, counts[lane], end))
        counts[lane] += 1
    return numbered


def _simulated(share: float, num_early: int) -> list[Done]:
    """As above, but all that the last backward begins."""
    from megatron_hybrid.plan.simulation import simulate
    from megatron_hybrid.plan.step_time import GroupWork, Machine, SimulatedStep, Work

    group = GroupWork(FORWARD, BACKWARD, HOST, DOWN, UP, states=STATES)
    early = replace(group, early_pass=HOST)
    work = Work((group,) * (NUM_GROUPS - num_early) + (early,) * num_early, 1)
    tasks = SimulatedStep(work, Machine(1.0, math.inf, 1.0, 1.0), share).tasks
    counts: Counter[str] = Counter()
    found = []
    # Two lanes that idle share no link.
    for task, span in zip(tasks, simulate(tasks, {}), strict=True):
        if task.seconds:
            found.append((task.lane, counts[task.lane], span.end * UNIT))
            counts[task.lane] += 1
    return found


@pytest.mark.parametrize(("share", "num_early"), [(0.0, 0), (0.5, 0), (1.0, 0), (0.0, 1)])
def test_a_step_takes_the_order_and_the_time_of_the_simulated_one(
    share: float, num_early: int
) -> None:
    # Of a group's 72 elements, 14 bytes each.
    early_bytes = num_early * 1500
    (done,) = run_ranks(1, _trained, share, early_bytes, device="sim")
    ends = {(lane, number): end for lane, number, end in done}
    planned = {(lane, number): end for lane, number, end in _simulated(share, num_early)}
    assert {lane for lane, _ in ends} == {lane for lane, _ in planned}
    assert ends.keys() <= planned.keys()
    for one, other in itertools.permutations(ends, 2):
        # Slow threads of a busy machine move work by less.
        if planned[one] + 2.5 * UNIT < planned[other]:
            assert ends[one] < ends[other], (one, other)
    before, after = (("compute", number * NUM_GROUPS - 1) for number in (3, 5))
    expected = planned[after] - planned[before]
    assert 0.8 * expected <= ends[after] - ends[before] <= 1.5 * expected
