"""torchrun without its own tracebacks: `python -m megatron_hybrid launch`.

    python -m megatron_hybrid launch --standalone --nproc-per-node 2 pretrain_gpt.py --config ...

Takes torchrun's arguments and runs its agent in this process, so ranks are launched, monitored and
restarted as by torchrun. When a rank fails, or on Ctrl-C, torchrun prints a traceback of its code
after the output of the ranks, and exits with 1. This program prints none, and exits with the status
of the rank that failed first.

With `--fallback-nproc-per-node 6,4`, a restart on a machine that has lost devices has fewer ranks.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from megatron.core.help_format import HelpFormatter


def main(argv: Sequence[str] | None = None, program: str = "launch") -> int:
    """Launches the ranks of this machine. Returns the status to exit with.

    That is 0 if all ranks ended well, else the status of the first that failed, 128 and the
    signal's number if a signal ended it or this program.
    """
    parser = torchrun.get_args_parser()
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "--fallback-nproc-per-node",
        type=lambda text: [int(number) for number in text.split(",")],
        metavar="N,N",
        help="fewer ranks, with --standalone: a restart after the loss of devices has the largest "
        "of these numbers that the remaining devices suffice for",
    )
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    if arguments.fallback_nproc_per_node:
        if not arguments.standalone:
            parser.error("--fallback-nproc-per-node needs --standalone")
        agent = partial(_FallbackAgent, arguments.fallback_nproc_per_node)
        api.LocalElasticAgent = agent  # type: ignore[assignment, misc]
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

    def __init__(self, numbers: Sequence[int], **arguments: Any) -> None:
        """`numbers`: how many ranks there may be."""
        super().__init__(**arguments)
        self._numbers = numbers

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)  # their memory is needed
        spec, usable = worker_group.spec, usable_devices()
        for variable, names in (usable or {}).items():
            count = len(names.split(",")) if names else 0
            fewer = max((number for number in self._numbers if 0 < number <= count), default=None)
            if count < spec.local_world_size and fewer is not None:
                os.environ[variable] = names
                spec.local_world_size = fewer
                print(
                    f"launch: {count} devices can be used, going on with {fewer} ranks",
                    file=sys.stderr,
                )
        super()._restart_workers(worker_group)


def usable_devices() -> dict[str, str] | None:
    """What `usable_devices.py` prints; None if it fails."""
    command = [sys.executable, "-m", "megatron_hybrid.usable_devices"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    found: dict[str, str] | None = None if done.returncode else json.loads(done.stdout)
    return found
