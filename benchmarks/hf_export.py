#!/usr/bin/env python3
"""Weights for Hugging Face from two ranks: each writes its rows into the files, beside a checkpoint
of weights that rank 0 rewrites.

    OMP_NUM_THREADS=1 python benchmarks/hf_export.py --write

A GPT of about 250M parameters with fp32 main weights (1.0 GB) under ZeRO-3. Both ways end with
every file on disk (fsync), under the final name.

    rows       `save_hf`: the ranks write side by side, in the files' dtype
    rewritten  the ranks write a checkpoint of weights; rank 0 writes the files from it
               (`export_hf`) and deletes it

Each way runs once, untimed, in each dtype on each file system, and the files of both are compared.
Then the variants run in an order drawn anew each round. A time is that of both ranks together, from
one barrier to the next; medians are printed with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.helpers import report
from benchmarks.helpers.models import swiglu_config
from megatron.core.device import Device
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.checkpoint.hf_weights import save_hf

NUM_RANKS = 2
VOCABULARY = 50304
LEAST_RATIO = 2.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU = Device("cpu")


class Bench:
    """One rank's side."""

    def __init__(self, arguments: argparse.Namespace, folders: dict[str, Path], rank: int) -> None:
        self.folders = folders
        self.rank = rank
        self.config = swiglu_config(arguments.layers, arguments.hidden)
        with torch.device("meta"):
            self.model = GPTModel(self.config, VOCABULARY)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        megatron_fsdp.shard_model(
            self.model,
            build_mesh("cpu", NUM_RANKS),
            CPU,
            DataParallelConfig(),
            compute_dtype=torch.bfloat16,
            reset_parameters=seeded_reset(self.model, torch.device("cpu"), 0),
        )

    def variants(self) -> dict[str, Callable[[], None]]:
        """By file system, dtype and way."""
        return {
            f"{where}, {dtype}, {name}": partial(way, self.folders[where], DTYPES[dtype])
            for where in self.folders
            for dtype in DTYPES
            for name, way in (("rows", self.rows), ("rewritten", self.rewritten))
        }

    def rows(self, root: Path, dtype: torch.dtype) -> None:
        save_hf(self.model, root / "rows", CPU, dtype=dtype)

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
                root / "rewritten",
                ModelDescription(self.config, VOCABULARY),
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
                names = [path.name for path in sorted((root / "rewritten").iterdir())]
                if any(not self._is_same(root, name) for name in names):
                    raise RuntimeError(f"Expected equal files in {root}, got {names} that differ.")
                self._remove(root)

    def time(self, work: Callable[[], None]) -> float:
        """Seconds until both ranks are done."""

        def together() -> None:
            work()
            dist.barrier()

        dist.barrier()
        found = report.seconds(together)
        for root in self.folders.values():
            self._remove(root)
        return found

    def _is_same(self, root: Path, name: str) -> bool:
        one, other = (root / way / name for way in ("rows", "rewritten"))
        return one.read_bytes() == other.read_bytes()

    def _remove(self, root: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            for path in root.iterdir():
                shutil.rmtree(path)
            os.sync()
        dist.barrier()


def serve(
    rank: int, arguments: argparse.Namespace, folders: dict[str, Path], results: Any, store: str
) -> None:
    """A rank's life."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS
    )
    bench = Bench(arguments, folders, rank)
    bench.check()
    variants = bench.variants()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name in report.schedule(list(variants), arguments.rounds):
        times[name].append(bench.time(variants[name]))
    if rank == 0:
        results.put((times, bench.num_parameters))
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """(seconds by variant, number of parameters)."""
    results = mp.get_context("spawn").SimpleQueue()
    with (
        tempfile.TemporaryDirectory(dir=arguments.disk) as disk,
        tempfile.TemporaryDirectory(dir=arguments.tmpfs) as memory,
        tempfile.TemporaryDirectory() as meeting,
    ):
        folders = {"tmpfs": Path(memory), "disk": Path(disk)}
        mp.spawn(serve, (arguments, folders, results, f"{meeting}/store"), nprocs=NUM_RANKS)
        found: tuple[dict[str, list[float]], int] = results.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1152)
    parser.add_argument("--disk", default=None, help="a folder on disk; default: the temporary one")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--write", action="store_true", help="write the results")
    arguments = parser.parse_args()

    times, num_parameters = measure(arguments)
    medians = report.medians(times)
    print(f"{num_parameters} parameters, {4 * num_parameters / 1e9:.2f} GB of fp32 main weights")
    for name, values in times.items():
        print(f"{name:>24} {medians[name]:7.3f} s  ({min(values):.3f} to {max(values):.3f})")

    ratios = {}
    for pair in dict.fromkeys(name.rpartition(", ")[0] for name in times):
        ratios[pair] = medians[f"{pair}, rewritten"] / medians[f"{pair}, rows"]
        missed = "" if ratios[pair] >= LEAST_RATIO else "  MISSED"
        print(f"{pair}: rewritten over rows {ratios[pair]:.2f}, >= {LEAST_RATIO:g}{missed}")

    if arguments.write:
        content = {
            "num_parameters": num_parameters,
            "num_ranks": NUM_RANKS,
            "seconds": times,
            "medians": medians,
            "ratios": ratios,
        }
        print(report.write("hf_export", content))


if __name__ == "__main__":
    main()
