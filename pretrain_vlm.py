#!/usr/bin/env python3
"""Trains a model that reads images and text. Run it alone or under torchrun; `--help` lists the
flags, examples/qwen3_5_vl_proxy/ shows all of it.

python -m megatron_hybrid launch --nproc-per-node 2 pretrain_vlm.py \\
        --config examples/qwen3_5_vl_proxy/train.yaml

Runs megatron_hybrid/pretrain_vlm.py, as does `python -m megatron_hybrid pretrain-vlm`.
"""

from __future__ import annotations

import signal
import sys

from megatron_hybrid.parsers import show_help_if_asked

if __name__ == "__main__":
    # Until the run begins, Ctrl-C ends the process as it would a C program: a traceback from the
    # middle of an import tells nobody anything. The run's watchdog takes over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before torch is imported, which takes seconds.
    show_help_if_asked("pretrain-vlm", "pretrain_vlm.py", sys.argv[1:])

from megatron.training.health.exits import exit_process
from megatron_hybrid.pretrain_vlm import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    exit_process(main())
