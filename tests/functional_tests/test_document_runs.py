"""Runs whose samples hold documents that do not see each other."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.functional_tests.helpers.runs import losses
from tests.helpers.ranks import run_ranks

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
    "--tokenizer-type NullTokenizer --vocab-size 63 --split 90,10 --main-grads-dtype fp32"
).split()
OFFLOADED = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d".split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of documents of 1 to 12 tokens, and their end."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in generator.integers(1, 13, size=200):
            builder.add_document([*generator.integers(0, 60, size=length).tolist(), EOD])
    return str(prefix)


def run(argv: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain_gpt.run(argv)


def train(prefix: str, folder: Path, *flags: object, world_size: int = 2) -> dict[int, float]:
    """The loss of each iteration."""
    metrics = folder / "metrics.jsonl"
    argv = [*MODEL, *TRAINING, "--data-path", prefix, "--metrics-jsonl", metrics, *flags]
    run_ranks(world_size, run, [str(word) for word in argv])
    return losses(metrics)


def test_documents_that_do_not_see_each_other_train_alike_on_any_number_of_ranks(
    prefix: str, tmp_path: Path
) -> None:
    expected = train(prefix, tmp_path / "one", *APART, world_size=1)
    assert len(set(expected.values())) == 4
    assert train(prefix, tmp_path / "two", *APART) == pytest.approx(expected, rel=1e-6)
    fsdp2 = train(prefix, tmp_path / "fsdp2", *APART, "--use-torch-fsdp2")
    assert fsdp2 == pytest.approx(expected, rel=1e-6)


def test_each_flag_matters(prefix: str, tmp_path: Path) -> None:
    flags = [[], *([flag] for flag in APART), APART[:2]]
    found = [
        tuple(train(prefix, tmp_path / str(number), *some, world_size=1).values())
        for number, some in enumerate(flags)
    ]
    # Rotations know differences of positions alone, and a document has the same either way.
    assert found[1] == pytest.approx(found[4], rel=1e-5)
    assert len(set(found[:4])) == 4


def test_offloaded_and_resumed_runs_have_the_bits_of_an_undisturbed_one(
    prefix: str, tmp_path: Path
) -> None:
    expected = train(prefix, tmp_path / "device", *APART)
    saving = ["--save", tmp_path / "run", "--save-interval", 2]
    assert train(prefix, tmp_path / "host", *APART, *OFFLOADED, *saving) == expected
    load = ["--load", tmp_path / "run" / "iter_0000002"]
    resumed = train(prefix, tmp_path / "resumed", *APART, *OFFLOADED, *load)
    assert resumed == {n: expected[n] for n in (3, 4)}
