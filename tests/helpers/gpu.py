"""A GPU in tests: ranks that share one, pauses before the work of its lanes, and waits of its host.

Only ranks with `device="cuda"` call this. None of it has been run on a GPU.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from megatron.core.device import Device
from megatron.core.lanes import Event, StreamLane

_DETERMINISTIC = ExitStack()
_LONGEST_PAUSE_CYCLES = 3_400_000  # about 2 ms
_SYNC_WARNING = "called a synchronizing"  # of torch.cuda.set_sync_debug_mode


def shared_gpu_environment(rank: int) -> dict[str, str]:
    """Variables with which ranks that share a GPU communicate by NCCL.

    NCCL rejects two ranks of one host on one GPU. Ranks with different host ids count as ranks of
    different hosts, which communicate by sockets.
    """
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def prepare_rank(rank: int, world_size: int) -> None:
    """Prepares a rank for NCCL on a shared GPU, and for kernels that give the same bits twice."""
    count = torch.cuda.device_count()
    if world_size > count:
        os.environ.update(shared_gpu_environment(rank), LOCAL_RANK=str(rank % count))
    # For as long as the rank lives. Memory is not filled, which would hide too early reads.
    _DETERMINISTIC.enter_context(Device("cuda").deterministic())


@contextmanager
def pauses(seed: int) -> Iterator[None]:
    """While open, the GPU pauses for up to 2 ms before the work of every lane."""
    generator, enqueue = random.Random(seed), StreamLane.enqueue

    def enqueue_later(
        lane: StreamLane, work: Callable[[], object], after: Sequence[Event] = ()
    ) -> Event:
        cycles = int(generator.random() * _LONGEST_PAUSE_CYCLES)

        def paused() -> None:
            torch.cuda._sleep(cycles)
            work()

        return enqueue(lane, paused, after)

    with mock.patch.object(StreamLane, "enqueue", enqueue_later):
        yield


@contextmanager
def counted_waits() -> Iterator[Callable[[], int]]:
    """Yields a function that returns how often the main thread has waited for the GPU.

    torch warns of operators that synchronise: `item`, copies from pageable memory. Waits for events
    and streams are counted where they are called.
    """
    main, count = threading.get_ident(), 0

    def add() -> None:
        nonlocal count
        count += threading.get_ident() == main

    def show(message: Warning | str, *_arguments: Any, **_options: Any) -> None:
        if _SYNC_WARNING in str(message):
            add()

    def adding(owner: type) -> Any:
        original = vars(owner)["synchronize"]

        def synchronize(self: Any) -> None:
            add()
            original(self)

        return mock.patch.object(owner, "synchronize", synchronize)

    with warnings.catch_warnings(), ExitStack() as patches:
        warnings.simplefilter("always")
        warnings.showwarning = show
        for owner in (torch.cuda.Event, torch.cuda.Stream):
            patches.enter_context(adding(owner))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: count
        finally:
            torch.cuda.set_sync_debug_mode("default")
