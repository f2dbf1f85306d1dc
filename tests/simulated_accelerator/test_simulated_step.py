"""What must end before what in the planner's simulated step does so in a real one.

Every piece of work of a small step takes a while, on a separate lane of the device or the host, so
that work without a wait would overtake.
"""

from __future__ import annotations

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

UNIT = 0.05  # seconds
NUM_GROUPS = 4
# Units by kind of work. A pass of the host is longer than a forward and a backward of its group.
FORWARD, BACKWARD, DOWN, HOST, UP, STATES = 1, 2, 3, 4, 1, 3

Work = tuple[str, int]  # lane, and the number of the work on it


class _Recorder:
    """Lets work take its time, and records when it ends."""

    def __init__(self) -> None:
        self.done: list[str] = []  # lanes, as their work ends

    def on_host(self, lane: str, units: float) -> None:
        time.sleep(units * UNIT)
        self.done.append(lane)

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
    from megatron.core.optimizer.cpu_offloading import streamed_pass
    from megatron.core.optimizer.cpu_offloading.bucket import FsdpBucket
    from megatron.core.optimizer.kernels.piece import HostKernel

    copy, of = streamed_pass._copy, HostKernel.of

    def slow_kernel(kernel: Any) -> Any:
        submit = of(kernel).submit

        def slow(*arguments: Any) -> Any:
            recorder.on_host("host", HOST)
            return submit(*arguments)

        return HostKernel(slow)

    def copy_states(source: Any, target: Any) -> None:
        way = "down" if source.weight.device.type == "sim" else "up"
        recorder.on_stream(f"states {way}", STATES)
        copy(source, target)

    yield patch.object(HostKernel, "of", slow_kernel)
    yield patch.object(streamed_pass, "_copy", copy_states)
    for method, lane, units in (
        ("fetch_early", "gradients down", DOWN),
        ("send", "weights up", UP),
    ):
        slow = recorder.before(lane, units, getattr(FsdpBucket, method))
        yield patch.object(FsdpBucket, method, slow)


def _trained(share: float, early_bytes: int) -> list[Work]:
    """The work of two steps, starting with a backward."""
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
    # Early updates need the options of a step before.
    first = 2 if early_bytes else 1
    with ExitStack() as stack:
        for one in _patches(recorder):
            stack.enter_context(one)
        optimizer = HybridDeviceOptimizer(
            model.parameters(),
            offload_fraction=1.0,
            fetch_during_backward=True,
            overlap_step_with_forward=True,
            update_on_device=share,
            early_update_bytes=early_bytes,
        )
        for _ in range(first + 2):
            x = torch.ones(4, 8, dtype=torch.bfloat16, device="sim")
            model(x).float().square().mean().backward()
            float(global_grad_norm(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        # Work that the last step started is not recorded.
        done = [*recorder.done]
        optimizer.synchronize()
    begin = [at for at, lane in enumerate(done) if lane == "compute"]
    counts: Counter[str] = Counter()
    numbered = []
    for lane in done[begin[(2 * first - 1) * NUM_GROUPS] :]:
        numbered.append((lane, counts[lane]))
        counts[lane] += 1
    return numbered


def _orders(share: float, num_early: int) -> Iterator[tuple[Work, Work]]:
    """Pairs of work of the planner's step of which the first must end before the second."""
    from megatron_hybrid.plan.step_time import GroupWork, Machine, SimulatedStep, Work

    group = GroupWork(FORWARD, BACKWARD, HOST, DOWN, UP, states=STATES)
    early = replace(group, early_pass=HOST)
    work = Work((group,) * (NUM_GROUPS - num_early) + (early,) * num_early, 1)
    tasks = SimulatedStep(work, Machine(1.0, math.inf, 1.0, 1.0), share).tasks
    counts: Counter[str] = Counter()
    last: dict[str, int] = {}
    before: list[set[int]] = []  # of each task, all that lead to it
    numbered: dict[int, tuple[str, int]] = {}
    for index, task in enumerate(tasks):
        direct = {*task.after, *([last[task.lane]] if task.lane in last else [])}
        before.append(direct.union(*(before[other] for other in direct)))
        last[task.lane] = index
        if task.seconds:
            numbered[index] = task.lane, counts[task.lane]
            counts[task.lane] += 1
            yield from (
                (numbered[other], numbered[index]) for other in before[index] & numbered.keys()
            )


@pytest.mark.parametrize(("share", "num_early"), [(0.0, 0), (0.5, 0), (1.0, 0), (0.0, 1)])
def test_work_ends_in_every_order_that_the_planners_step_has(share: float, num_early: int) -> None:
    # Of a group's 72 elements, 14 bytes each.
    early_bytes = num_early * 1500
    (done,) = run_ranks(1, _trained, share, early_bytes, device="sim")
    place = {(lane, number): at for at, (lane, number) in enumerate(done)}
    orders = [pair for pair in _orders(share, num_early) if place.keys() >= {*pair}]
    assert {lane for pair in orders for lane, _ in pair} == {lane for lane, _ in place}
    for first, second in orders:
        assert place[first] < place[second], (first, second)
