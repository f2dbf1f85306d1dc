"""This process's place among the ranks, and the default process group.

The environment is torchrun's. Without torchrun a process is a world of one.

[Note: one store, many starts]
torchrun's agent keeps its store across restarts, and torch (2.13) uses the same keys in each. A
restarted rank may therefore read where its peers of the previous start were listening, and fail to
connect. No environment variable identifies the start: an agent counts only its own ranks'
failures, so the counts of two machines differ. So the ranks first agree on a name for their start,
and all keys of the group get that prefix:

    each rank    hello/R = a new random number
    rank 0       welcome = {"name": rank 0's number, "to": the numbers of all ranks},
                 again whenever a hello has changed
    each rank    once "to" has its number: ready/R = the name, and continues
    rank 0       continues once every ready/R is the name

Records of an earlier start have other numbers, so they cannot be taken for responses. A malformed
record counts as missing.
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

from megatron.core import mesh
from megatron.core.device import Device
from megatron.core.options import ConfigError
from megatron.training.health.jsonl import parse_object

_POLL_SECONDS = 0.05
_TIMEOUT_MARGIN_SECONDS = 60.0


@dataclass(frozen=True)
class Launch:
    """Ranks and sizes as the launcher set them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0  # how often the launcher has restarted this job
    # torchrun's agent watches this process, and restarts it if it exits with another code than 0
    is_elastic: bool = False

    @classmethod
    def from_environment(cls) -> Launch:
        """Reads torchrun's variables, and Slurm's for restarts. ConfigError for a set variable that
        is not a number.
        """
        is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
        if "RANK" not in os.environ:
            return cls(restart_count=_restart_count(), is_elastic=is_elastic)

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            rank, world_size, local_rank, local_world_size = (
                int(os.environ[name]) for name in names
            )
        except (KeyError, ValueError):
            got = {name: os.environ.get(name) for name in names}
            raise ConfigError(
                f"torchrun: expected integers in {', '.join(names)}, got {got}."
            ) from None

        return cls(rank, world_size, local_rank, local_world_size, _restart_count(), is_elastic)


def _restart_count() -> int:
    """torchrun's restarts (of this agent's ranks), else Slurm's (of the whole job), else 0."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise ConfigError(
                    f"{name}: expected an integer, got {os.environ[name]!r}."
                ) from None
    return 0


@contextmanager
def process_group(
    launch: Launch, device: Device, timeout_minutes: float, *, watched_seconds: float | None = None
) -> Iterator[None]:
    """Initializes the default process group, and destroys it when the context exits.

    An existing group (of a test, or of a program that embeds this one) is used and not destroyed.
    Neither is the group after an exception: destroying it while other ranks are inside a collective
    can block, and the launcher ends all ranks anyway.

    Args:
        timeout_minutes: for ranks to find each other, and for collectives.
        watched_seconds: the longest time without progress that the watchdog allows; None if there
            is no watchdog. With one, the backend does not handle failed collectives.
    """
    if dist.is_initialized():
        if dist.get_world_size() != launch.world_size:
            raise RuntimeError(
                f"Expected a process group of {launch.world_size} ranks, got one of "
                f"{dist.get_world_size()}."
            )
        yield
        return

    timeout = timedelta(minutes=timeout_minutes)
    if watched_seconds is not None:
        device.prepare_collectives()

    if "RANK" in os.environ:
        store = _store_of_this_start(launch, timeout)
        dist.init_process_group(
            device.collective_backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(
            device.collective_backend, store=alone, rank=0, world_size=1, timeout=timeout
        )

    if device.is_accelerator:
        # Longer than the watchdog's limit, which excludes time in which a rank could not run.
        if watched_seconds is not None:
            longer = timedelta(seconds=2 * watched_seconds + _TIMEOUT_MARGIN_SECONDS)
            mesh.set_timeout(device.torch_device, max(timeout, longer))
        mesh.connect(device.torch_device)

    yield
    dist.destroy_process_group()


def _store_of_this_start(launch: Launch, timeout: timedelta) -> Store:
    """Returns the launcher's store with a prefix that no earlier start of this job used."""
    store, rank, world_size = next(
        rendezvous("env://", launch.rank, launch.world_size, timeout=timeout)
    )
    store.set_timeout(timeout)
    return PrefixStore(agree_on_start(store, rank, world_size, timeout), store)


def agree_on_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a new name for this start of the job, the same on all ranks. [Note: one store, many
    starts]

    Raises:
        RuntimeError: if not all ranks have joined within `timeout`.
    """
    own_number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    _put(store, f"start/hello/{rank}", {"number": own_number})
    if rank == 0:
        _welcome_all(store, own_number, world_size, deadline)
        return own_number

    welcome_key = f"start/welcome/{rank}"
    _wait_for(store, [welcome_key], deadline)
    while True:
        match _get(store, welcome_key):
            case {"name": str(name), "to": str(number)} if number == own_number:
                _put(store, f"start/ready/{rank}", {"name": name})
                return name
        _pause(deadline, "rank 0 of this start, got one of an earlier start")


def _welcome_all(store: Store, name: str, world_size: int, deadline: float) -> None:
    """Rank 0's part: returns once all ranks of this start have its name."""
    hello_keys = [f"start/hello/{rank}" for rank in range(world_size)]
    welcomed: dict[int, str | None] = {}
    _wait_for(store, hello_keys, deadline)
    while True:
        # A key for each rank: one for all would send the numbers of all ranks to each.
        for rank, key in enumerate(hello_keys):
            number = _text(store, key, "number")
            if number != welcomed.get(rank):
                welcomed[rank] = number
                _put(store, f"start/welcome/{rank}", {"name": name, "to": number})

        answers = [_text(store, f"start/ready/{rank}", "name") for rank in range(1, world_size)]
        if answers.count(name) == len(answers):
            return
        missing = ", ".join(
            f"rank {rank}" for rank, answer in enumerate(answers, 1) if answer != name
        )
        _pause(deadline, f"all {world_size} ranks, got no response from {missing}")


def _put(store: Store, key: str, content: dict[str, object]) -> None:
    store.set(key, json.dumps(content))


def _get(store: Store, key: str) -> dict[str, object]:
    """Returns the record under a key; an empty one if it is missing or malformed."""
    return parse_object(store.get(key)) or {} if store.check([key]) else {}


def _text(store: Store, key: str, field: str) -> str | None:
    """Returns a field of the record under a key; None unless it is a string."""
    value = _get(store, key).get(field)
    return value if isinstance(value, str) else None


def _wait_for(store: Store, keys: list[str], deadline: float) -> None:
    """Waits until the keys exist. RuntimeError at the deadline, naming the missing ones."""
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise RuntimeError(
            f"Expected all ranks to start, got no {missing} in the launcher's store."
        ) from error


def _pause(deadline: float, what: str) -> None:
    """Sleeps for a moment. Raises RuntimeError with the expectation after the deadline."""
    if time.monotonic() > deadline:
        raise RuntimeError(f"Expected {what}, within the timeout of the process group.")
    time.sleep(_POLL_SECONDS)
