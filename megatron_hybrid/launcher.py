"""torchrun without its own tracebacks: `python -m megatron_hybrid launch`.

    python -m megatron_hybrid launch --standalone --nproc-per-node 2 pretrain_gpt.py --config ...

Takes torchrun's arguments and runs its agent in this process, so ranks are launched, monitored and
restarted as by torchrun. When a rank fails, or on Ctrl-C, torchrun prints a traceback of its code
after the output of the ranks, and exits with 1. This program prints none, and exits with the status
of the rank that failed first.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megatron.core.help_format import HelpFormatter


def main(argv: Sequence[str] | None = None, program: str = "launch") -> int:
    """Launches the ranks of this machine. Returns the status to exit with.

    That is 0 if all ranks ended well, else the status of the first that failed, 128 and the
    signal's number if a signal ended it or this program.
    """
    parser = torchrun.get_args_parser()
    parser.formatter_class = HelpFormatter
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
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
