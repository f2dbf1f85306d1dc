"""Timeouts, connections and failures of process groups."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

# By the names of `ErrorType`, which only builds with NCCL have.
_FAILURES = {
    "TIMEOUT": "a collective timed out",
    "COMM_ERROR": "the communication of a collective failed",
    "REMOTE_ERROR": "a collective failed on another rank",
}

# Of launchers. Slurm sets its own in an allocation too, where a single process may run.
_NUM_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def ensure_default_group(backend: str) -> None:
    """Makes a missing default process group: of the launcher's ranks, or of this process
    alone if no launcher has started it.

    Args:
        backend: for `init_process_group`.

    Raises:
        RuntimeError: another launcher, unknown to torch, has started several ranks.
    """
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    elif several := [name for name in _NUM_RANKS if os.environ.get(name, "1") != "1"]:
        raise RuntimeError(
            f"Expected RANK, since {several[0]} says that there are several ranks, got none: call "
            "torch.distributed.init_process_group first, or launch with torchrun."
        )
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)


def inherit_timeouts(group: dist.ProcessGroup) -> None:
    """Gives a group the timeouts of the default group."""
    # torch's `DeviceMesh` gives the groups it makes torch's own default timeouts.
    default = _get_default_group()
    if group is default:
        return

    for device in group._device_types:
        own, inherited = _backend(group, device), _backend(default, device)
        if hasattr(own, "_set_default_timeout") and hasattr(inherited, "options"):
            own._set_default_timeout(inherited.options._timeout)


def set_timeout(device: torch.device, timeout: timedelta) -> None:
    """Limits how long the default group's collectives on this kind of device take once issued."""
    backend = _backend(_get_default_group(), device)
    if hasattr(backend, "_set_default_timeout"):
        backend._set_default_timeout(timeout)


def connect(device: torch.device) -> None:
    """Connects the ranks' devices now if the backend would do so in the first collective.

    Ranks that cannot reach each other then fail where the group is made.
    """
    # Not by `init_process_group(device_id=...)`, which binds the group to the device as well: a
    # `DeviceMesh` then splits its groups off that one, and torch 2.11 hands NCCL's options to gloo.
    backend = _backend(_get_default_group(), device)
    if getattr(backend, "supports_splitting", False):
        backend.eager_connect_single_device(device)


def failed_collective() -> str | None:
    """The failure of a collective that a group's backend has found, in words; None without one, or
    if the backend does not look.

    On an accelerator a collective fails after it was issued, and the thread that issued it may not
    be told.
    """
    for group in list(_world.pg_map):
        for device in group._device_types:
            # Not every backend has `get_error`, though torch's debugging wrapper always does.
            with suppress(RuntimeError, AttributeError):
                error = _backend(group, device).get_error()
                if error.name != "SUCCESS":
                    failure = _FAILURES.get(error.name, error.name)
                    return f"{failure}, in the group {group.group_desc!r}"
    return None


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group's tensors on this kind of device; None without one."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)
