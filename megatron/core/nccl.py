"""Settings that keep PyTorch's NCCL watchdog from ending ranks that this project's watches over.

Each NCCL process group of PyTorch has two threads of its own. One looks for errors and timeouts of
collectives and ends the process for one; the other ends it if the first one hangs or has found an
error. Where both watchdogs run, a rank that is killed in the middle of a roll call looks like the
cause. With the settings below, PyTorch's threads still find errors, but only tell whoever asks
(`ProcessGroupNCCL.get_error`), as our watchdog does.

PyTorch reads them from the environment when a group is made. None of this has been seen on a GPU:
the settings' names are in PyTorch 2.11 and 2.13, and what they do was read in the sources of
another version.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import NamedTuple

logger = logging.getLogger(__name__)


class _Setting(NamedTuple):
    """An environment variable, and its value unless the user has set one."""

    name: str
    value: str
    other: str  # the effect of any other value; empty if that does not matter
    old_name: str = ""  # PyTorch reads this one if `name` is not set


_SETTINGS = (
    _Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "ends a rank for an error of a collective",
        "NCCL_ASYNC_ERROR_HANDLING",
    ),
    _Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "ends a rank some minutes after an error of a collective",
    ),
    # Otherwise an error of the device, a failed assertion say, ends the process before the main
    # thread can report it.
    _Setting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "ends a rank for an error of its device before it can be told",
    ),
    # A request for a dump goes through torchrun's store, without a prefix: the next start of the
    # job would find it.
    _Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", ""),
)

# As PyTorch reads them, in lower case.
_YES, _NO = ("1", "y", "yes", "t", "true"), ("0", "n", "no", "f", "false")


def leave_failures_to_watchdog(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has PyTorch find failures of collectives without ending a rank. Call it before the process
    group is made.

    What the user has set stays. If that lets PyTorch end ranks all the same, one warning says so.
    """
    disarming = []
    for setting in _SETTINGS:
        given = environment.get(setting.name, environment.get(setting.old_name))
        if given is None:
            environment[setting.name] = setting.value
        elif setting.other and given.lower() not in _NO:
            disarming.append(f"{setting.name}={given} {setting.other}")

    for name in ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"):
        if environment.get(name, "").lower() in _YES:
            disarming.append(f"{name}={environment[name]} turns error handling on again")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        disarming.append("TORCH_DISTRIBUTED_DEBUG=DETAIL turns error handling on again")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if environment.get(name, "").lower() in _YES:
            disarming.append(
                f"{name}={environment[name]} has nobody look for errors of collectives"
            )

    if disarming:
        logger.warning(
            "the environment works against the watchdog, which may then name the wrong rank, or "
            "none: %s",
            "; ".join(disarming),
        )
