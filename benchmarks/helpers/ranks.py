"""The ranks of a benchmark: started by torchrun, or by the benchmark itself."""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.core.device import Device, kind_of
from megatron.training.launch import Launch

_T = TypeVar("_T")


@contextmanager
def launched() -> Iterator[tuple[Launch, Device]]:
    """This rank, as started by torchrun, in the process group of all ranks, and its device."""
    launch = Launch.from_environment()
    device = Device.for_rank(kind_of(), launch.local_rank, launch.local_world_size)
    dist.init_process_group(device.collective_backend)
    try:
        yield launch, device
    finally:
        dist.destroy_process_group()


def on_own_ranks(num_ranks: int, work: Callable[..., _T], *arguments: Any) -> _T:
    """Returns the result of `work(rank, *arguments)` on rank 0 of newly started ranks, over gloo.

    `work` is a function of a module, and its result can be pickled. An error of a rank is raised
    here.
    """
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory(prefix="benchmark-ranks-") as folder:
        store = str(Path(folder) / "store")
        context = mp.spawn(
            _serve,
            (num_ranks, store, results, work, arguments),
            nprocs=num_ranks,
            join=False,
        )
        # A large result blocks the writer of the queue, so it is read before the ranks are joined.
        while True:
            with suppress(queue.Empty):
                found: _T = results.get(timeout=1)
                break
            context.join(timeout=0)  # raises the error of a rank
        while not context.join():
            pass
    return found


def _serve(
    rank: int,
    num_ranks: int,
    store: str,
    results: Any,
    work: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # ranks that share cores slow each other down otherwise
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    try:
        found = work(rank, *arguments)
        if rank == 0:
            results.put(found)
        dist.barrier()
    finally:
        dist.destroy_process_group()
