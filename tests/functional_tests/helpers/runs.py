"""Small runs of `pretrain_gpt.py`: flags, launching, faults, and output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.options import ConfigError
from megatron.training.health.exits import ExitError
from tests.helpers.checkpoints import chunks_of
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 600.0  # seconds
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# The same arguments for `megatron_hybrid launch`.
LAUNCHER = [sys.executable, "-m", "megatron_hybrid", "launch", *TORCHRUN[3:]]
SETTINGS = [
    *(
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data"
    ).split(),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "63", "--num-workers", "0"),
    *"--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 1".split(),
    *("--lr", "1e-2", "--lr-decay-style", "cosine"),
]


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment, without the variables of a surrounding launcher."""
    launchers = tuple("RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ TORCHELASTIC_ SLURM_".split())
    own = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**own, "OMP_NUM_THREADS": "1", **variables}


def execute(
    command: Sequence[str], timeout: float = TIMEOUT, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, in `cwd`, by default the repository's root."""
    env = environment(**variables)
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


class Run(NamedTuple):
    """The end of a run on one rank."""

    error: str  # type and message; empty without an error
    log: str


def _undisturbed(_: pytest.MonkeyPatch) -> None:
    pass


def pretrain(
    *flags: object,
    world_size: int = 1,
    disturb: Callable[[pytest.MonkeyPatch], None] = _undisturbed,
) -> list[Run]:
    """Runs `pretrain_gpt.py` after calling `disturb` on each rank."""
    answers = run_ranks(world_size, _run, [*SETTINGS, *map(str, flags)], disturb)
    return [Run(*answer) for answer in answers]


def train(*flags: object, world_size: int = 1) -> str:
    """Runs `pretrain_gpt.py`, expects success, and returns rank 0's log."""
    runs = pretrain(*flags, world_size=world_size)
    assert [run.error for run in runs] == [""] * world_size
    return runs[0].log


def refusal(*flags: object, world_size: int = 1) -> str:
    """Returns the error of a run, which must be the same on all ranks."""
    (error,) = {run.error for run in pretrain(*flags, world_size=world_size)}
    return error


def _run(argv: list[str], disturb: Callable[[pytest.MonkeyPatch], None]) -> tuple[str, str]:
    log, error = io.StringIO(), ""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(log):
        disturb(patch)
        try:
            pretrain_gpt.run(argv)
        except (CheckpointError, ConfigError, ExitError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return error, log.getvalue()


def logged(argv: list[str], program: ModuleType = pretrain_gpt) -> str:
    """Runs a program on this rank and returns its log."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        program.run(argv)
    return log.getvalue()


def losses_of(
    argv: Sequence[object], folder: Path, world_size: int, program: ModuleType = pretrain_gpt
) -> dict[int, float]:
    """The losses of a run by iteration; a directory gets its metrics."""
    metrics = folder / "metrics.jsonl"
    words = [str(word) for word in (*argv, "--metrics-jsonl", metrics)]
    run_ranks(world_size, logged, words, program)
    return losses(metrics)


def losses(path: Path) -> dict[int, float]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["iteration"]: record["loss"] for record in records if record["kind"] == "train"}


def published(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def trained(metrics: Path) -> list[int]:
    """Returns the iterations of a run."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["iteration"] for record in records if record["kind"] == "train"]


def flip_last_weight(folder: Path, rank: int) -> None:
    """Flips a bit of the last weight in the data file of one rank."""
    tensor, chunk = next(
        each for each in reversed(chunks_of(folder, rank)) if each[0].key.startswith("model.")
    )
    last = chunk.offset + tensor.chunk_nbytes(chunk) - 1
    with (folder / chunk.file).open("r+b") as stream:
        stream.seek(last)
        byte = stream.read(1)[0]
        stream.seek(last)
        stream.write(bytes([byte ^ 1]))


DAMAGE = {
    "a bit of one rank's data": lambda folder: flip_last_weight(folder, 1),
    "no data": lambda folder: (folder / "__1_0.distcp").unlink(),
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "no marker": lambda folder: (folder / "published.json").unlink(),
    "a short manifest": lambda folder: os.truncate(folder / "manifest_1.json", 100),
    "an empty state": lambda folder: (folder / "train_state.json").write_text(""),
    "nothing": lambda folder: [file.unlink() for file in folder.iterdir()],
}
