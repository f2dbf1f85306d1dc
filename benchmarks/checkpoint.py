"""Saving and loading against PyTorch DCP: the same names, shapes and values, on the same disk, in
one run.

    python -m benchmarks.checkpoint

A GPT of about 200M parameters on 2 ranks, fp32 main weights and moments in host memory (2.4 GB),
ZeRO-3. DCP gets as many bytes as DTensors that are sharded evenly, as FSDP2 does it. Digests are
written and verified throughout.

    raw                 the same number of bytes from three buffers of 8 MiB: O_DIRECT where the
                        file system has it, one write after the other, fsync; or read through one
    ours, dcp           a save from the call until it is published, on disk and on tmpfs
    ours, dcp async     how long the call blocks, and the most that resident memory grows by until
                        the save is done
    load                into the existing state; warm: all files are in the page cache; cold: no
                        file is
    ours                a load at the start of a run, or into an engine without a step: each byte is
                        read once, and verified as it is put into place
    ours, two passes    a load into an engine after a step: everything is read and verified, then
                        read again and put into place
    2 -> 4, 4 -> 4      loads on 4 ranks of what 2 and 4 have saved, warm: seconds and bytes read

Each number is the slowest rank's; variants run in an order drawn anew each round. Before the first
round each save runs once, untimed, and that loads bring back every value is checked. Between
variants their memory is kept busy: in a virtual machine the host may reclaim free memory, and
touching it again is slow, which would be charged to the first variant.
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
    """What one rank reports."""

    rounds: Rounds
    num_parameters: int


def measure_two(bench: Bench, num_rounds: int) -> Rounds:
    """Saves, asynchronous saves and loads on the ranks that have saved."""
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
    """Loads of what fewer ranks, and what as many have saved."""
    bench.keep()
    variants: dict[Variant, Callable[[], Figures]] = {}
    for num_ranks in (bench.world_size // 2, bench.world_size):
        bench.check_loads(num_ranks)
        for side, who in ((OURS, "ours"), (DCP, "dcp")):
            group = f"load {num_ranks} -> {bench.world_size}"
            variants[group, side] = partial(bench.load, who, num_ranks)
    return bench.run(variants, num_rounds)


def measure(rank: int, arguments: argparse.Namespace, folders: dict[str, Path]) -> Found:
    """One rank's work."""
    world_size = dist.get_world_size()
    bench = Bench(arguments, folders, rank, world_size)
    measure_some = measure_two if world_size == 2 else measure_four
    rounds = measure_some(bench, arguments.rounds)
    bench.close()
    return Found(rounds, bench.state.num_parameters)


def measurements(rounds: Rounds) -> Iterator[Measurement]:
    """Seconds of everything; how long asynchronous saves block and how much memory they take; and
    what loads read.
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
    """This project against the others, with the bars."""

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
    """Measures."""
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
            # Of the files before a load: how much of them was in the page cache.
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
