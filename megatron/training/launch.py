"""Where this process stands among the ranks, and the default process group.

The environment is torchrun's. Without torchrun a process is a world of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.options import ConfigError


@dataclass(frozen=True)
class Launch:
    """Ranks and sizes as the launcher set them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Launch:
        """Reads torchrun's variables. ConfigError if they are there but not numbers."""
        if "RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            return cls(*(int(os.environ[name]) for name in names))
        except (KeyError, ValueError):
            got = {name: os.environ.get(name) for name in names}
            raise ConfigError(f"torchrun: expected integers in {', '.join(names)}, got {got}.") from None


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
        dist.init_process_group(device.collective_backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(device.collective_backend, store=store, rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()
