#!/usr/bin/env python3
"""What `hf/` costs in a checkpoint: saves with and without it, one after the other.

    OMP_NUM_THREADS=1 python benchmarks/hf_in_checkpoint.py --write

A GPT of about 200M parameters on 2 ranks, fp32 main weights and moments in host memory (2.4 GB),
ZeRO-3, digests on.

    without   a checkpoint alone
    bf16      with hf/ in bf16: a sixth more to write
    fp32      with hf/ in fp32, where the weights then lie: as much to write

For each, in milliseconds and seconds:

    blocks    the call of an asynchronous save
    held      until the last group of the optimizer may be stepped again
    done      until the checkpoint is published

Each number is the slowest rank's; variants run in an order drawn anew each round, and medians are
printed with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.helpers import report
from benchmarks.helpers.models import swiglu_config
from megatron.core.device import Device
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.lanes import Event
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import (
    build_optimizer,
    offloaded_modules,
    plan_offload,
)
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.checkpoint.hf_in_checkpoint import HfExport

NUM_RANKS = 2
VOCABULARY = 50304
MOST = 1.3  # times what a save without hf/ takes
DTYPES = {"without": None, "bf16": torch.bfloat16, "fp32": torch.float32}
CPU = Device("cpu")
OFFLOADED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)
Figures = dict[str, float]


class Bench:
    """One rank's side."""

    def __init__(self, arguments: argparse.Namespace, folders: dict[str, Path], rank: int) -> None:
        self.rank = rank
        with torch.device("meta"):
            self.model = GPTModel(swiglu_config(arguments.layers, arguments.hidden), VOCABULARY)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        plan = plan_offload(self.model, OFFLOADED)
        megatron_fsdp.shard_model(
            self.model,
            build_mesh("cpu", NUM_RANKS),
            CPU,
            DataParallelConfig(),
            compute_dtype=torch.bfloat16,
            reset_parameters=seeded_reset(self.model, torch.device("cpu"), 0),
            offloaded=offloaded_modules(self.model, plan),
        )
        self.optimizer = build_optimizer(
            self.model, OFFLOADED, 1e-4, NUM_RANKS, plan=plan
        ).optimizer
        self.exports = {
            name: None if dtype is None else HfExport.of(self.model, dtype, FolderExtras())
            for name, dtype in DTYPES.items()
        }
        self.managers = {
            where: CheckpointManager.start(str(folder), CPU, rank, NUM_RANKS)
            for where, folder in folders.items()
        }
        self.folders = folders
        self.iteration = 0

    def save(self, where: str, name: str) -> Figures:
        self.iteration += 1
        contents = collect(self.model, self.optimizer, rank=self.rank, world_size=NUM_RANKS)
        # Instead of the optimizer, this waits until each group has been read.
        held: list[Event] = []
        groups = [
            group._replace(unit=group.unit and group.unit._replace(hold=held.append))
            for group in contents.groups
        ]
        contents = dataclasses.replace(contents, groups=groups, export=self.exports[name])
        dist.barrier()

        start = time.perf_counter()
        self.managers[where].save(self.iteration, contents, {})
        found = {"blocks": 1e3 * (time.perf_counter() - start)}
        for event in held:
            event.synchronize()
        found["held"] = time.perf_counter() - start
        self.managers[where].finish()
        return {**found, "done": time.perf_counter() - start}

    def slowest(self, figures: Figures) -> Figures:
        gathered: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(gathered, figures)
        if self.rank == 0:
            for folder in self.folders.values():
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        return {name: max(own[name] for own in gathered) for name in figures}


def serve(
    rank: int, arguments: argparse.Namespace, folders: dict[str, Path], results: Any, store: str
) -> None:
    """A rank's life."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS
    )
    bench = Bench(arguments, folders, rank)
    variants = {
        f"{where}, {name}": partial(bench.save, where, name) for where in folders for name in DTYPES
    }
    for variant in variants.values():
        bench.slowest(variant())
    figures: dict[str, list[Figures]] = {name: [] for name in variants}
    for name in report.schedule(list(variants), arguments.rounds):
        figures[name].append(bench.slowest(variants[name]()))

    if rank == 0:
        results.put((figures, bench.num_parameters))
    for manager in bench.managers.values():
        manager.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[Figures]], int]:
    """(figures by variant, number of parameters)."""
    results = mp.get_context("spawn").SimpleQueue()
    with (
        tempfile.TemporaryDirectory(dir=arguments.disk) as disk,
        tempfile.TemporaryDirectory(dir=arguments.tmpfs) as memory,
        tempfile.TemporaryDirectory() as meeting,
    ):
        folders = {"tmpfs": Path(memory), "disk": Path(disk)}
        mp.spawn(serve, (arguments, folders, results, f"{meeting}/store"), nprocs=NUM_RANKS)
        found: tuple[dict[str, list[Figures]], int] = results.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--disk", default=None, help="a folder on disk; default: the temporary one")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument("--write", action="store_true", help="write the results")
    arguments = parser.parse_args()

    figures, num_parameters = measure(arguments)
    print(f"{num_parameters} parameters, {12 * num_parameters / 1e9:.2f} GB of weights and moments")
    medians: dict[str, Figures] = {}
    for name, rounds in figures.items():
        columns = {kind: [each[kind] for each in rounds] for kind in rounds[0]}
        medians[name] = report.medians(columns)
        cells = (
            f"{kind} {medians[name][kind]:7.3f} ({min(values):.3f} to {max(values):.3f})"
            for kind, values in columns.items()
        )
        print(f"{name:>16}  {'  '.join(cells)}")

    ratios = {}
    for name, own in medians.items():
        where, _, dtype = name.partition(", ")
        for kind in own if dtype != "without" else ():
            ratio = ratios[f"{name}, {kind}"] = own[kind] / medians[f"{where}, without"][kind]
            missed = "" if ratio <= MOST else "  MISSED"
            print(f"{name}, {kind}: {ratio:.2f} of without, <= {MOST:g}{missed}")

    if arguments.write:
        content = {"num_parameters": num_parameters, "num_ranks": NUM_RANKS, "figures": figures}
        path = report.write("hf_in_checkpoint", {**content, "medians": medians, "ratios": ratios})
        print(path)


if __name__ == "__main__":
    main()
