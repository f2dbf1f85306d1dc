"""Settings that keep PyTorch's NCCL watchdog from ending ranks that this project's watches over.

Each NCCL process group of PyTorch has two separate threads. One looks for errors and timeouts of
collectives and ends the process for one; the other ends it if the first one hangs or has found an
error. Where both watchdogs run, a rank that is killed in the middle of a roll call looks like the
cause. With the settings below, PyTorch's threads still find errors, but only report them on request
(`ProcessGroupNCCL.get_error`), as our watchdog does.

PyTorch reads them from the environment when a group is made. This has not been run on a GPU:
the settings' names are in PyTorch 2.11 and 2.13, and their effects are from the sources of
another version.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

# With any of these on, PyTorch ends ranks for errors of collectives or of their device. Where two
# names are given, the second one is read if the first is not set.
_ENDING = (
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCH_NCCL_ENABLE_MONITORING",),
    ("TORCH_NCCL_RETHROW_CUDA_ERRORS",),
)
# These are off by default. They turn error handling on again, or search for errors off.
_OPPOSING = (
    ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"),
    ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
)
_NO = ("0", "n", "no", "f", "false")


def leave_failures_to_watchdog(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has PyTorch find failures of collectives without ending a rank. Call it before the process
    group is made.

    The user's settings stay. If that lets PyTorch end ranks all the same, one warning names the
    settings.
    """
    disarming = [
        f"{name}={environment[name]}"
        for name in itertools.chain(*_ENDING, *_OPPOSING)
        if environment.get(name, "0").lower() not in _NO
    ]
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        disarming.append("TORCH_DISTRIBUTED_DEBUG=DETAIL")
    if disarming:
        logger.warning(
            "with these settings PyTorch may end ranks for failures of collectives, or not find "
            "them, and the watchdog may name the wrong rank, or none: %s",
            ", ".join(disarming),
        )

    for names in _ENDING:
        if not any(name in environment for name in names):
            environment[names[0]] = "0"
    # A request for a dump goes through torchrun's store, without a prefix: the next start of the
    # job would find it.
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
