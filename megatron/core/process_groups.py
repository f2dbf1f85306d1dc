"""What is asked of torch's process groups besides collectives: their timeouts, connections, and
failures.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

# By the names of `ErrorType`, which only builds with NCCL have. A time that is over counts as a
# hang.
_FAILURES = {
    "TIMEOUT": "a collective timed out",
    "COMM_ERROR": "the communication of a collective failed",
    "REMOTE_ERROR": "a collective failed on another rank",
}


def inherit_timeouts(group: dist.ProcessGroup) -> None:
    """Gives a group the timeouts of the default one, which torch's `DeviceMesh` gives its groups
    defaults for.
    """
    default = _get_default_group()
    if group is default:
        return
    for device in group._device_types:
        own, inherited = _backend(group, device), _backend(default, device)
        if hasattr(own, "_set_default_timeout") and hasattr(inherited, "options"):
            own._set_default_timeout(inherited.options._timeout)


def set_timeout(device: torch.device, timeout: timedelta) -> None:
    """How long the default group's collectives on this kind of device may take, from when they are
    issued.
    """
    backend = _backend(_get_default_group(), device)
    if hasattr(backend, "_set_default_timeout"):
        backend._set_default_timeout(timeout)


def connect(device: torch.device) -> None:
    """Connects the ranks' devices now, if the backend would otherwise do so in the first
    collective.

    So ranks that cannot reach each other fail where the group is made.
    `init_process_group(device_id=...)` would do the same and bind the group to the device besides.
    A `DeviceMesh` then splits its groups off that one, in which torch 2.11 hands the options of
    NCCL to gloo.
    """
    backend = _backend(_get_default_group(), device)
    if getattr(backend, "supports_splitting", False):
        backend.eager_connect_single_device(device)


def failed_collective() -> str | None:
    """What failure of a collective the backend of some group has found, in words; None: none, or it
    finds none.

    Failures on an accelerator come after the collective was issued, when nobody may be there who is
    told.
    """
    for group in list(_world.pg_map):
        for device in group._device_types:
            # A wrapper that torch puts around backends for debugging has it, but what it wraps may
            # not.
            with suppress(RuntimeError, AttributeError):
                error = _backend(group, device).get_error()
                if error.name != "SUCCESS":
                    return f"{_FAILURES.get(error.name, error.name)}, in the group {group.group_desc!r}"
    return None


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What carries a group's tensors on this kind of device; None if nothing does."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)
