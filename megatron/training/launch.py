"""Where this process stands among the ranks, and the default process group.

The environment is torchrun's. Without torchrun a process is a world of one.

[Note: one store, many starts]
torchrun's agent keeps its store over restarts, and torch (2.13) uses the same keys in each. A rank that is started
again may thus read where its peers of the start before were listening, and fails to connect. Nothing in the environment
tells the starts apart: an agent counts only its own ranks' failures, so the counts of two machines differ. Hence the
ranks agree on a name for their start first, and all keys of the group get that prefix:

    each rank    hello/R = a number of its own, never used before
    rank 0       welcome = {"name": its own number, "to": everybody's numbers}, again whenever a hello has changed
    each rank    once "to" holds its number: ready/R = the name, and goes on
    rank 0       goes on once every ready/R is the name

What an earlier start has left cannot be mistaken for an answer, since it holds other numbers.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron.core.device import Device
from megatron.core.options import ConfigError

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Launch:
    """Ranks and sizes as the launcher set them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0  # how often the launcher has started this job anew
    is_elastic: bool = False  # torchrun's agent watches this process, and starts it anew if it ends with another than 0

    @classmethod
    def from_environment(cls) -> Launch:
        """Reads torchrun's variables, and Slurm's for the restarts. ConfigError if they are there but not numbers."""
        is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
        if "RANK" not in os.environ:
            return cls(restart_count=_restart_count(), is_elastic=is_elastic)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError):
            got = {name: os.environ.get(name) for name in names}
            raise ConfigError(f"torchrun: expected integers in {', '.join(names)}, got {got}.") from None
        return cls(rank, world_size, local_rank, local_world_size, _restart_count(), is_elastic)


def _restart_count() -> int:
    """torchrun's count of restarts (of this agent's ranks), else Slurm's (of the whole job), else 0."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise ConfigError(f"{name}: expected an integer, got {os.environ[name]!r}.") from None
    return 0


@contextmanager
def process_group(launch: Launch, device: Device, timeout_minutes: float) -> Iterator[None]:
    """The default process group over all ranks, for as long as the context is open.

    A group that already exists (a test's, or that of a program which embeds this one) is used and left standing. After
    an exception the group is left standing too: taking it down while others are inside a collective can block, and the
    launcher ends them all anyway.
    """
    if dist.is_initialized():
        if dist.get_world_size() != launch.world_size:
            raise RuntimeError(
                f"Expected a process group of {launch.world_size} ranks, got one of {dist.get_world_size()}."
            )
        yield
        return
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        store = _store_of_this_start(launch, timeout)
        dist.init_process_group(
            device.collective_backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(device.collective_backend, store=alone, rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def _store_of_this_start(launch: Launch, timeout: timedelta) -> Store:
    """The launcher's store, with a prefix that no earlier start of this job has used."""
    store, rank, world_size = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(agree_on_start(store, rank, world_size, timeout), store)


def agree_on_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this start of the job, the same on all ranks and never used before. [Note: one store, many starts]

    Raises:
        RuntimeError: not all ranks have come within `timeout`.
    """
    own_number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"start/hello/{rank}", own_number)
    if rank == 0:
        _welcome_all(store, own_number, world_size, deadline)
        return own_number
    while True:
        _wait_for(store, ["start/welcome"], deadline)
        welcome = json.loads(store.get("start/welcome"))
        if welcome["to"][rank : rank + 1] == [own_number]:
            store.set(f"start/ready/{rank}", welcome["name"])
            return str(welcome["name"])
        _pause(deadline, "rank 0 of this start, got one of an earlier start")


def _welcome_all(store: Store, name: str, world_size: int, deadline: float) -> None:
    """Rank 0's part: returns once all ranks of this start know its name."""
    hello_keys = [f"start/hello/{rank}" for rank in range(world_size)]
    ready_keys = [f"start/ready/{rank}" for rank in range(1, world_size)]
    welcomed: list[str] = []
    _wait_for(store, hello_keys, deadline)
    while True:
        numbers = [number.decode() for number in store.multi_get(hello_keys)]
        if numbers != welcomed:
            welcomed = numbers
            store.set("start/welcome", json.dumps({"name": name, "to": numbers}))
        answers = [store.get(key).decode() if store.check([key]) else "" for key in ready_keys]
        if answers.count(name) == len(ready_keys):
            return
        missing = ", ".join(str(rank) for rank, answer in enumerate(answers, 1) if answer != name)
        _pause(deadline, f"all {world_size} ranks, got none of rank(s) {missing}")


def _wait_for(store: Store, keys: list[str], deadline: float) -> None:
    """Waits until keys are there. RuntimeError at the deadline, naming those that are missing."""
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise RuntimeError(f"Expected all ranks to start, got no {missing} in the launcher's store.") from error


def _pause(deadline: float, what: str) -> None:
    """Lets a moment pass. RuntimeError at the deadline, saying what was expected."""
    if time.monotonic() > deadline:
        raise RuntimeError(f"Expected {what}, within the timeout of the process group.")
    time.sleep(_POLL_SECONDS)
