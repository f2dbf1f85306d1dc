"""One rank of a drill: `pretrain_gpt.py` as it is, or on the simulated accelerator."""

from __future__ import annotations

import os
import sys

import pretrain_gpt
from megatron.training.health.exits import exit_process

SIMULATE = "GPU_CHECK_SIMULATE"

if __name__ == "__main__":
    if os.environ.get(SIMULATE):
        from tools.gpu_check import simulated  # noqa: F401  makes the device known
    exit_process(pretrain_gpt.main(sys.argv[1:]))
