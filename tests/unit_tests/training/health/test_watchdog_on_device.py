"""The rank that the watchdog blames with asynchronous collectives: rank 1 sleeps, and rank 0's host
blocks somewhere else.

With the training engine, on the simulated accelerator and on a GPU. No rank is ended: a thread
reads each watchdog's record while the main thread is blocked.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core import issued_collectives
from megatron.training.health.cause import Record, find_cause, stack_of
from megatron.training.health.events import EventLog
from megatron.training.health.watchdog import Watchdog
from megatron.training.launch import Launch
from tests.helpers.ranks import rank_device, run_ranks

# More than the launches of a forward, less than of forward and backward together.
_SHORT_QUEUE = 64
_STILL_SECONDS = 0.5
_DEADLINE_SECONDS = 20.0


class _Drill:
    """Runs a function in which rank 1 blocks, and reads the watchdog's record in a thread."""

    needs_collective = False  # whether rank 1 is blocked only after its device issues a collective

    def __init__(self, number: int) -> None:
        self._store, self._key = _get_default_store(), f"drill {number}"
        self._is_rank_1 = dist.get_rank() == 1
        self._stands = threading.Event()
        self._watchdog = Watchdog(
            launch=Launch(rank=dist.get_rank(), world_size=2),
            store=None,
            events=EventLog(None, rank=dist.get_rank()),
            hang_timeout_seconds=_STILL_SECONDS,
            long_timeout_seconds=_STILL_SECONDS,
        )
        self._watchdog._progress.idle_seconds = 2 * _STILL_SECONDS

    def run(self, way: Callable[[], object], then: Callable[[], object] = lambda: None) -> Record:
        """Returns the record while the main thread is blocked. `then` is called after both ranks
        have one.
        """
        said: list[Record] = []

        def look() -> None:
            self._wait_until_main_stands()
            # On a busy machine, the thread that follows the events may be slow.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(issued_collectives, "_LOOK_SECONDS", 30.0)
                said.append(self._watchdog._record(None))
            self._store.add(self._key, 1)
            self._wait_until_both_have_spoken()
            then()

        torch.accelerator.synchronize()
        dist.all_reduce(torch.zeros(1))  # over gloo: both ranks are here
        looking = threading.Thread(target=look)
        looking.start()
        way()
        looking.join()
        return said[0]

    def sleep_on_rank_1(self) -> None:
        if self._is_rank_1:
            self.stand()
            self._wait_until_both_have_spoken()

    def stand(self) -> None:
        """The main thread makes no progress after this."""
        self._stands.set()

    def _wait_until_both_have_spoken(self) -> None:
        while self._store.add(self._key, 0) < 2:
            time.sleep(0.05)

    def _wait_until_main_stands(self) -> None:
        if self._is_rank_1:
            assert self._stands.wait(_DEADLINE_SECONDS)
            while self.needs_collective and issued_collectives.OF_THIS_PROCESS.oldest() is None:
                time.sleep(0.05)
            return
        # Rank 0 is blocked once it waits for rank 1.
        deadline, last, since = time.monotonic() + _DEADLINE_SECONDS, None, 0.0
        while time.monotonic() < deadline:
            stack = stack_of(sys._current_frames()[self._watchdog._main])
            if stack != last or issued_collectives.OF_THIS_PROCESS.oldest() is None:
                last, since = stack, time.monotonic()
            if time.monotonic() - since > _STILL_SECONDS:
                return
            time.sleep(0.05)


def _short_queue(kind: str) -> AbstractContextManager[None]:
    """Limits launch queues, where their depth is a setting."""
    if kind == "cuda":
        return nullcontext()
    import tests.simulated_accelerator.device as sim

    return sim.configured(queue_depth=_SHORT_QUEUE)


def _sleep_before(where: str, number: int, case: str) -> tuple[Record, bool]:
    """Returns this rank's record while rank 1 sleeps, and whether all collectives finish later."""
    from tests.simulated_accelerator.helpers.engines import batches, forward_step, make_engine

    kind = rank_device().type
    engine = make_engine(case, kind)
    engine.train_batch(batches(0, kind), forward_step)
    drill = _Drill(number)

    def forward_and_sleep(model: Any, batch: Any) -> torch.Tensor:
        loss = forward_step(model, batch)
        drill.sleep_on_rank_1()
        return loss

    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: (
            drill.sleep_on_rank_1(),
            engine.train_batch(batches(1, kind, 4), forward_step),
        ),
        "backward": lambda: engine.train_batch(batches(1, kind, 1), forward_and_sleep),
        "evaluation": lambda: (
            drill.sleep_on_rank_1(),
            engine.eval_batch(batches(1, kind, 1), forward_step),
        ),
    }
    with nullcontext() if where == "evaluation" else _short_queue(kind):
        record = drill.run(ways[where])
    return record, issued_collectives.OF_THIS_PROCESS.oldest() is None


@pytest.mark.parametrize("case", ["zero3", pytest.param("fsdp2", marks=pytest.mark.wide)])
@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
def test_the_sleeping_rank_is_blamed_at_any_place_of_the_other_hosts(accelerator, where, case):
    """In a full launch queue, in the queue of the autograd thread, and in copying a loss."""
    number = time.monotonic_ns()
    (waiting, is_over), (sleeping, _) = run_ranks(
        2, _sleep_before, where, number, case, device=accelerator
    )
    assert waiting.waits, waiting
    assert "its device is waiting in the " in waiting.place
    assert not sleeping.waits, sleeping
    verdict = find_cause([waiting, sleeping])
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert is_over


def _be_stuck_on_the_device(number: int) -> Record:
    """Returns the record while a kernel on rank 1's device is stuck, and both hosts read a loss."""
    import tests.simulated_accelerator.device as sim
    from tests.simulated_accelerator.helpers.engines import batches, forward_step, make_engine

    engine = make_engine("zero3", "sim")
    engine.train_batch(batches(0, "sim"), forward_step)
    drill = _Drill(number)
    if dist.get_rank() == 0:
        return drill.run(lambda: engine.eval_batch(batches(1, "sim", 1), forward_step))

    drill.needs_collective = True
    stuck = sim.held(torch.accelerator.current_stream())

    def evaluate_with_a_kernel_that_does_not_end() -> None:
        stuck.__enter__()
        drill.stand()
        engine.eval_batch(batches(1, "sim", 1), forward_step)

    return drill.run(
        evaluate_with_a_kernel_that_does_not_end, then=lambda: stuck.__exit__(None, None, None)
    )


@pytest.mark.sim
def test_a_rank_whose_device_never_reaches_the_collective_is_blamed_though_its_host_waits():
    waiting, stuck = run_ranks(2, _be_stuck_on_the_device, time.monotonic_ns(), device="sim")
    assert waiting.waits, waiting
    verdict = find_cause([waiting, stuck])
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert "its device has not come to the " in verdict.text
