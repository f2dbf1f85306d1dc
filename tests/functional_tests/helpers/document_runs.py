"""Runs on short documents, with a delta net among the layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.functional_tests.helpers.runs import losses_of

EOD = 63  # NullTokenizer's, of 63 tokens
APART = ["--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"]
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 4 --linear-value-head-dim 4 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2 --attention-dropout 0 "
    "--hidden-dropout 0"
).split()
TRAINING = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-iters 1 "
    "--lr 1e-2 --lr-decay-style constant --num-workers 0 --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --split 90,10"
).split()
OFFLOADED = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d".split()


def write_text(prefix: Path) -> str:
    """Documents of 1 to 12 tokens, and their end. Returns the prefix of the files."""
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in generator.integers(1, 13, size=200):
            builder.add_document([*generator.integers(0, 60, size=length).tolist(), EOD])
    return str(prefix)


def train(prefix: str, folder: Path, *flags: object, world_size: int = 2) -> dict[int, float]:
    """The loss of each iteration."""
    return losses_of([*MODEL, *TRAINING, "--data-path", prefix, *flags], folder, world_size)
