"""torchrun without its own tracebacks: `python -m megatron_hybrid launch`.

    python -m megatron_hybrid launch --standalone --nproc-per-node 2 pretrain_gpt.py --config ...

Takes torchrun's arguments and runs its agent in this process, so ranks are launched, monitored and
restarted as by torchrun. When a rank fails, or on Ctrl-C, torchrun prints a traceback of its code
after the output of the ranks, and exits with 1. This program prints none, and exits with the status
of the rank that failed first.

With `--fallback-nproc-per-node 6,4`, a restart on a machine that has lost devices has fewer ranks.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from megatron.core.device import kind_of
from megatron.core.drivers import kernels_of
from megatron.core.help_format import HelpFormatter

# Exits with 0 if the first visible device computes: a lost one may hang, or make others unusable
# for a process.
_TRIES = "import sys, torch; sys.exit(torch.ones(1, device=sys.argv[1]).add_(1).item() != 2)"
TRY_DEVICE = [sys.executable, "-c", _TRIES]
_SECONDS_OF_A_TRY = 120


def main(argv: Sequence[str] | None = None, program: str = "launch") -> int:
    """Launches the ranks of this machine. Returns the status to exit with.

    That is 0 if all ranks ended well, else the status of the first that failed, 128 and the
    signal's number if a signal ended it or this program.
    """
    parser = torchrun.get_args_parser()
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "--fallback-nproc-per-node",
        type=_numbers,
        metavar="N,N",
        help="fewer ranks, with --standalone: a restart after the loss of devices has the largest "
        "of these numbers that the remaining devices suffice for",
    )
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    if arguments.fallback_nproc_per_node is not None:
        kind = kind_of()
        variable = kernels_of(torch.device(kind)).visible_devices
        if not arguments.standalone or not variable:
            parser.error("--fallback-nproc-per-node needs --standalone and CUDA devices")
        agent = partial(_FallbackAgent, arguments.fallback_nproc_per_node, kind, variable)
        api.LocalElasticAgent = agent  # type: ignore[assignment, attr-defined]
    if "LOGLEVEL" not in os.environ:
        # The agent's warnings and its report would hide the messages of the ranks.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    try:
        torchrun.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"{program}: rank {rank} ended with status {status}", file=sys.stderr)
        return status
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # before the agent installs its handlers
        return 128 + 2
    return 0


class _FallbackAgent(LocalElasticAgent):
    """An agent that restarts fewer ranks once devices are lost."""

    def __init__(self, numbers: Sequence[int], kind: str, variable: str, **arguments: Any) -> None:
        """
        Args:
            numbers: how many ranks there may be.
            kind: of the devices.
            variable: see `Driver.visible_devices`.
        """
        super().__init__(**arguments)
        self._numbers, self._kind, self._variable = numbers, kind, variable

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        # A restart. The earlier ranks have ended, and torchrun numbers the new ones next.
        if worker_group.state is WorkerState.STOPPED:
            self._fall_back(worker_group.spec)
        super()._initialize_workers(worker_group)

    def _fall_back(self, spec: WorkerSpec) -> None:
        present = spec.local_world_size
        default = ",".join(map(str, range(present)))
        names = (os.environ.get(self._variable) or default).split(",")
        usable = self._usable(names)
        # There may be more devices than ranks.
        most = min(present, len(usable))
        number = max((each for each in (*self._numbers, present) if each <= most), default=None)
        if usable != names and number is not None:
            os.environ[self._variable] = ",".join(usable)
            spec.local_world_size = number
            text = f"launch: {len(usable)} devices can be used, continuing with {number} ranks"
            print(text, file=sys.stderr)

    def _usable(self, names: Sequence[str]) -> list[str]:
        """The devices that compute."""
        deadline = time.monotonic() + _SECONDS_OF_A_TRY
        tries = [
            subprocess.Popen(
                [*TRY_DEVICE, self._kind],
                env={**os.environ, self._variable: name},
                stderr=subprocess.DEVNULL,
            )
            for name in names
        ]
        return [name for name, own in zip(names, tries, strict=True) if _succeeds(own, deadline)]


def _succeeds(process: subprocess.Popen[bytes], deadline: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(0, deadline - time.monotonic())) == 0
    process.kill()  # without a wait: a process that its device blocks may not end
    return False


def _numbers(text: str) -> list[int]:
    """ValueError unless these are positive numbers."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"Expected positive numbers, got {text}.")
    return found
