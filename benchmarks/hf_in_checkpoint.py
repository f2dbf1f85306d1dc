#!/usr/bin/env python3
"""What `hf/` costs in a checkpoint: saves with and without it, one after the other.

    python -m benchmarks.hf_in_checkpoint

A GPT of about 200M parameters on 2 ranks, fp32 main weights and moments in host memory (2.4 GB),
ZeRO-3, digests on.

    without   a checkpoint alone
    bf16      with hf/ in bf16: a sixth more to write
    fp32      with hf/ in fp32, where the weights then lie: as much to write

For each, in milliseconds and seconds:

    blocks    the call of an asynchronous save
    held      until the last group of the optimizer may be stepped again
    done      until the checkpoint is published

Each number is the slowest rank's; variants run in an order drawn anew each round.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.folders import add_folder_arguments, empty, temporary_folders
from benchmarks.helpers.models import OFFLOADED, llama_config, on_meta, shard
from benchmarks.helpers.ranks import Figures, on_own_ranks, slowest
from benchmarks.helpers.result import Measurement, Ratio, Result
from megatron.core.device import Device
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.lanes import Event
from megatron.core.mesh import build_mesh
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_weights import HfExport

BENCHMARK = Benchmark(
    name="hf_in_checkpoint",
    question="A save on 2 ranks with weights for Hugging Face in it, against one without",
    ranks=1,
    full=("--rounds=7",),
    quick=("--layers=2", "--hidden=512", "--vocabulary=4096", "--rounds=3"),
)

NUM_RANKS = 2
MOST = 1.3  # times what a save without hf/ takes
WITHOUT = "without"
DTYPES = {WITHOUT: None, "bf16": torch.bfloat16, "fp32": torch.float32}
UNITS = {"blocks": "ms", "held": "s", "done": "s"}
CPU = Device("cpu")
Variant = tuple[str, str]  # where, and in which dtype


class Bench:
    """One rank's side."""

    def __init__(self, arguments: argparse.Namespace, folders: dict[str, Path], rank: int) -> None:
        self.rank = rank
        config = llama_config(arguments.layers, arguments.hidden)
        self.model = on_meta(config, arguments.vocabulary)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        mesh = build_mesh("cpu", NUM_RANKS)
        built = shard(self.model, mesh, CPU, OFFLOADED, num_local_ranks=NUM_RANKS)
        assert built is not None, "it was asked for"
        self.optimizer = built.optimizer
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
        """A save's figures; its files are removed."""
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
        found["done"] = time.perf_counter() - start
        empty(*self.folders.values())
        return slowest(found)

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()


class Found(NamedTuple):
    """What one rank reports."""

    rounds: dict[Variant, list[Figures]]
    num_parameters: int


def measure(rank: int, arguments: argparse.Namespace, folders: dict[str, Path]) -> Found:
    """One rank's work. One round warms up."""
    bench = Bench(arguments, folders, rank)
    works = {
        (where, name): partial(bench.save, where, name) for where in folders for name in DTYPES
    }
    rounds = report.interleaved(works, arguments.rounds, warm_up=1)
    bench.close()
    return Found(rounds, bench.num_parameters)


def ratios(rounds: dict[Variant, list[Figures]]) -> Iterator[Ratio]:
    """Each dtype beside a save without."""

    def median(where: str, name: str, kind: str) -> float:
        return statistics.median(one[kind] for one in rounds[where, name])

    for where, name in rounds:
        for kind in UNITS if name != WITHOUT else ():
            value = median(where, name, kind) / median(where, WITHOUT, kind)
            yield Ratio(f"{where}, {kind}: {name} / {WITHOUT}", value, at_most=MOST)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    add_folder_arguments(parser)
    arguments = parser.parse_args(argv)

    with temporary_folders(arguments) as folders:
        found = on_own_ranks(NUM_RANKS, measure, arguments, folders)
    result = Result(
        tuple(
            Measurement(f"{where}, {kind}", name, unit, tuple(one[kind] for one in own))
            for kind, unit in UNITS.items()
            for (where, name), own in found.rounds.items()
        ),
        tuple(ratios(found.rounds)),
        settings=report.settings_of(arguments),
        facts={"parameters": found.num_parameters},
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
