"""Saves and loads compared with PyTorch DCP, with the same names, shapes and values on the same
disk in one run.

    python -m benchmarks.checkpoint

A GPT of about 200M parameters on 2 ranks, fp32 main weights and moments in host memory (2.4 GB),
ZeRO-3. DCP saves as many bytes in evenly sharded DTensors, as with FSDP2. Digests are written and
verified throughout.

    raw                 the same number of bytes from three buffers of 8 MiB: sequential writes,
                        O_DIRECT where the file system supports it, and fsync; or reads through one
    ours, dcp           a save from the call until it is published, on disk and on tmpfs
    ours, dcp async     the time that the call blocks, and the peak growth of resident memory until
                        the save is done
    load                into the existing state; warm: all files are in the page cache; cold: none
    ours                a load at the start of a run, or into an engine without a step: each byte is
                        read once, and verified as it is copied to its destination
    ours, two passes    a load into an engine after a step: everything is read and verified, then
                        read again and copied
    2 -> 4, 4 -> 4      warm loads on 4 ranks of checkpoints of 2 and 4: seconds and bytes read

Each number is the slowest rank's; variants run in a new random order each round. Before the first
round, each save runs once untimed, and loads are checked to restore every value. Memory is kept in
use between variants: in a virtual machine the host may reclaim free memory, and the first variant
to touch it again would be slower.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.checkpoint.bench import Bench, Figures, Variant
from benchmarks.helpers.folders import add_folder_arguments, temporary_folders
from benchmarks.helpers.ranks import on_own_ranks
from benchmarks.helpers.result import Measurement, Ratio, Result

BENCHMARK = Benchmark(
    name="checkpoint",
    question="Saves and loads on 2 ranks, and loads on 4, against PyTorch DCP and raw I/O",
    ranks=1,
    full=("--rounds=3",),
    quick=("--layers=2", "--hidden=512", "--vocabulary=4096", "--rounds=3"),
)

ASYNC = "async save"
OURS, TWO_PASSES, DCP, RAW = "ours", "ours, two passes", "DCP", "raw"
Rounds = dict[Variant, list[Figures]]


class Found(NamedTuple):
    """The results of one rank."""

    rounds: Rounds
    num_parameters: int


def measure_two(bench: Bench, num_rounds: int) -> Rounds:
    """Measures saves, asynchronous saves, and loads on the same ranks."""
    own = bench.world_size
    saves: dict[Variant, Callable[[], Figures]] = {
        (ASYNC, OURS): bench.save_ours_async,
        (ASYNC, DCP): bench.save_dcp_async,
    }
    for where in bench.folders:
        saves[f"save to {where}", RAW] = partial(bench.write_raw, where)
        saves[f"save to {where}", OURS] = partial(bench.save_ours, where)
        saves[f"save to {where}", DCP] = partial(bench.save_dcp, where)

    loads: dict[Variant, Callable[[], Figures]] = {}
    for kind in ("warm", "cold"):
        load = partial(bench.load, num_ranks=own, is_cold=kind == "cold")
        loads[f"{kind} load", RAW] = partial(load, "raw")
        loads[f"{kind} load", DCP] = partial(load, "dcp")
        loads[f"{kind} load", OURS] = partial(load, "ours")
        loads[f"{kind} load", TWO_PASSES] = partial(load, "ours", checks=True)
        loads[f"{kind} load", "ours, without digests"] = partial(load, "ours", verify=False)

    bench.keep()
    bench.check_loads(own)
    bench.iteration = own + 1000  # later saves are discarded
    bench.run(saves, 1)
    return bench.run({**saves, **loads}, num_rounds)


def measure_four(bench: Bench, num_rounds: int) -> Rounds:
    """Measures loads of checkpoints of fewer ranks and of as many."""
    bench.keep()
    variants: dict[Variant, Callable[[], Figures]] = {}
    for num_ranks in (bench.world_size // 2, bench.world_size):
        bench.check_loads(num_ranks)
        for side, who in ((OURS, "ours"), (DCP, "dcp")):
            group = f"load {num_ranks} -> {bench.world_size}"
            variants[group, side] = partial(bench.load, who, num_ranks)
    return bench.run(variants, num_rounds)


def measure(rank: int, arguments: argparse.Namespace, folders: dict[str, Path]) -> Found:
    """Runs the measurements of one rank."""
    world_size = dist.get_world_size()
    bench = Bench(arguments, folders, rank, world_size)
    measure_some = measure_two if world_size == 2 else measure_four
    rounds = measure_some(bench, arguments.rounds)
    bench.close()
    return Found(rounds, bench.state.num_parameters)


def measurements(rounds: Rounds) -> Iterator[Measurement]:
    """Returns all seconds, the blocking time and memory of asynchronous saves, and the bytes that
    loads read.
    """
    kinds = (
        ("seconds", "", "s", 1.0),
        ("blocked_seconds", ": blocks", "ms", 1e3),
        ("growth_bytes", ": resident memory grows by", "MB", 1e-6),
        ("bytes_read", ": reads", "MB", 1e-6),
        ("disk_bytes_read", ": reads from the disk", "MB", 1e-6),
    )
    for figure, suffix, unit, factor in kinds:
        for (group, side), own in rounds.items():
            if figure in own[0]:
                values = tuple(one[figure] * factor for one in own)
                yield Measurement(group + suffix, side, unit, values)


def ratios(rounds: Rounds) -> Iterator[Ratio]:
    """Returns the ratios to the other variants, with their bars."""

    def median(group: str, side: str, figure: str) -> float:
        return statistics.median(one[figure] for one in rounds[group, side])

    def over_ours(group: str, side: str, ours: str = OURS, *, bar: float | None = None) -> Ratio:
        value = median(group, side, "seconds") / median(group, ours, "seconds")
        return Ratio(f"{group}: {side} / {ours}", value, at_least=bar)

    yield over_ours("save to disk", RAW, bar=0.9)
    yield over_ours("save to disk", DCP)
    yield over_ours("save to tmpfs", DCP, bar=1.4)
    blocked = median(ASYNC, OURS, "blocked_seconds") / median(ASYNC, DCP, "blocked_seconds")
    yield Ratio(f"{ASYNC}: blocks, {OURS} / {DCP}", blocked, at_most=0.05)
    grown = median(ASYNC, OURS, "growth_bytes") / 1e6
    yield Ratio(f"{ASYNC}: MB by which ours grows", grown, at_most=64)

    yield over_ours("warm load", DCP, bar=2.0)
    yield over_ours("warm load", RAW)
    yield over_ours("cold load", DCP, bar=1.3)
    yield over_ours("cold load", RAW, bar=0.9)
    for kind, side in itertools.product(("warm", "cold"), (DCP, RAW)):
        yield over_ours(f"{kind} load", side, TWO_PASSES)

    share = median("cold load", OURS, "disk_bytes_read") / median("cold load", OURS, "bytes_there")
    yield Ratio("cold load: ours, read from the disk / in the files", share, at_most=1.01)
    for figure, what in (("seconds", "time"), ("bytes_read", "bytes read")):
        value = median("load 2 -> 4", OURS, figure) / median("load 4 -> 4", OURS, figure)
        yield Ratio(f"ours, {what}: load 2 -> 4 / load 4 -> 4", value, at_most=1.2)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    add_folder_arguments(parser)
    arguments = parser.parse_args(argv)

    with temporary_folders(arguments) as folders:
        two = on_own_ranks(2, measure, arguments, folders)
        four = on_own_ranks(4, measure, arguments, folders)
    rounds = {**two.rounds, **four.rounds}
    result = Result(
        tuple(measurements(rounds)),
        tuple(ratios(rounds)),
        settings=report.settings_of(arguments),
        facts={
            "parameters": two.num_parameters,
            # The share of the files that was in the page cache before a load.
            "resident_share": {
                f"{group}, {side}": statistics.median(one["resident_share"] for one in own)
                for (group, side), own in rounds.items()
                if "resident_share" in own[0]
            },
        },
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
