"""DeepSpeed ZeRO-3 as in `deepspeed_zero3.py`, for checkpoints that have been converted to its
universal format.
"""

from __future__ import annotations

import deepspeed

from benchmarks.peers.deepspeed_zero3 import DeepSpeedTrainer
from benchmarks.peers.trainer import Training


def build(training: Training) -> DeepSpeedTrainer:
    """This rank's trainer."""
    deepspeed.init_distributed("gloo")
    return DeepSpeedTrainer(training, loads_universal=True)
