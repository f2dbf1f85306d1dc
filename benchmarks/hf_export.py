#!/usr/bin/env python3
"""Weights for Hugging Face from two ranks: each writes its rows into the files, against a
checkpoint of weights that rank 0 rewrites.

    python -m benchmarks.hf_export

A GPT of about 250M parameters with fp32 main weights (1.0 GB) under ZeRO-3. Both ways end with
every file on disk (fsync), under the final name.

    rows       `save_hf`: the ranks write side by side, in the files' dtype
    rewritten  the ranks write a checkpoint of weights; rank 0 writes the files from it
               (`export_hf`) and deletes it

Each way runs once, untimed, in each dtype on each file system, and the files of both are compared.
Then the variants run in an order drawn anew each round. A time is that of both ranks together, from
one barrier to the next.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.folders import add_folder_arguments, empty, temporary_folders
from benchmarks.helpers.models import llama_config, on_meta, shard
from benchmarks.helpers.ranks import on_own_ranks
from benchmarks.helpers.result import Measurement, Ratio, Result
from megatron.core.device import Device
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.mesh import build_mesh
from megatron.core.models.description import ModelDescription
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.checkpoint.hf_weights import save_hf

BENCHMARK = Benchmark(
    name="hf_export",
    question="Weights for Hugging Face: each of 2 ranks writes its rows, against a checkpoint that "
    "rank 0 rewrites",
    ranks=1,
    full=("--rounds=5",),
    quick=("--layers=2", "--hidden=512", "--vocabulary=4096", "--rounds=3"),
)

NUM_RANKS = 2
LEAST_RATIO = 2.0
ROWS, REWRITTEN = "rows", "rewritten"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU = Device("cpu")
Variant = tuple[str, str]  # where and in which dtype, and how


class Bench:
    """One rank's side."""

    def __init__(self, arguments: argparse.Namespace, folders: dict[str, Path], rank: int) -> None:
        self.folders = folders
        self.rank = rank
        self.config = llama_config(arguments.layers, arguments.hidden)
        self.model = on_meta(self.config, arguments.vocabulary)
        self.description = ModelDescription(self.config, arguments.vocabulary)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        mesh = build_mesh("cpu", NUM_RANKS)
        shard(self.model, mesh, CPU, None, num_local_ranks=NUM_RANKS)

    def variants(self) -> dict[Variant, Callable[[], None]]:
        """By file system and dtype, and by way."""
        return {
            (f"{where}, {dtype}", side): partial(way, self.folders[where], DTYPES[dtype])
            for where in self.folders
            for dtype in DTYPES
            for side, way in ((ROWS, self.rows), (REWRITTEN, self.rewritten))
        }

    def rows(self, root: Path, dtype: torch.dtype) -> None:
        save_hf(self.model, root / ROWS, CPU, dtype=dtype)

    def rewritten(self, root: Path, dtype: torch.dtype) -> None:
        contents = collect(self.model, rank=self.rank, world_size=NUM_RANKS)
        with CheckpointManager.start(str(root), CPU, self.rank, NUM_RANKS) as manager:
            manager.save(1, contents, {}, name="weights")
            manager.finish()

        dist.barrier()
        if self.rank == 0:
            checkpoint = open_checkpoint(LocalStore(root), "weights")
            export_hf(
                checkpoint,
                root / REWRITTEN,
                self.description,
                dtype=dtype,
            )
            shutil.rmtree(root / "weights")

    def check(self) -> None:
        """Warms up. RuntimeError if the two ways write different files."""
        for root in self.folders.values():
            for dtype in DTYPES.values():
                self.rows(root, dtype)
                self.rewritten(root, dtype)
                dist.barrier()
                names = [path.name for path in sorted((root / REWRITTEN).iterdir())]
                if any(not self._is_same(root, name) for name in names):
                    raise RuntimeError(f"Expected equal files in {root}, got {names} that differ.")
                empty(root)

    def seconds(self, work: Callable[[], None]) -> float:
        """Until both ranks are done."""

        def together() -> None:
            work()
            dist.barrier()

        dist.barrier()
        found = report.seconds(together)
        empty(*self.folders.values())
        return found

    def _is_same(self, root: Path, name: str) -> bool:
        one, other = (root / way / name for way in (ROWS, REWRITTEN))
        return one.read_bytes() == other.read_bytes()


class Found(NamedTuple):
    """What one rank reports."""

    seconds: dict[Variant, list[float]]
    num_parameters: int


def measure(rank: int, arguments: argparse.Namespace, folders: dict[str, Path]) -> Found:
    """One rank's work."""
    bench = Bench(arguments, folders, rank)
    bench.check()
    works = {key: partial(bench.seconds, work) for key, work in bench.variants().items()}
    return Found(report.interleaved(works, arguments.rounds), bench.num_parameters)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1152)
    parser.add_argument("--vocabulary", type=int, default=50304)
    add_folder_arguments(parser)
    arguments = parser.parse_args(argv)

    with temporary_folders(arguments) as folders:
        found = on_own_ranks(NUM_RANKS, measure, arguments, folders)
    medians = report.medians(found.seconds)
    result = Result(
        tuple(
            Measurement(group, side, "s", tuple(values))
            for (group, side), values in found.seconds.items()
        ),
        tuple(
            Ratio(
                f"{group}: {REWRITTEN} / {ROWS}",
                medians[group, REWRITTEN] / medians[group, ROWS],
                at_least=LEAST_RATIO,
            )
            for group in dict.fromkeys(group for group, _ in medians)
        ),
        settings=report.settings_of(arguments),
        facts={"parameters": found.num_parameters},
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
