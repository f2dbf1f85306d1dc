"""The cost of describing a whole checkpoint that N ranks write, against DCP's planning from
gathered plans.

    python -m benchmarks.checkpoint_plan

One process, no memory for tensors: Llama-7B's weights and two moments in fp32, sharded as ZeRO-3
over N simulated ranks, a buffer for each layer; query, key and value, gate and up are fused there,
and separate keys here.

    rank 0              from layouts to the bytes of `.metadata`, with every blob's place in every
                        rank's file
    another rank        the places of the blobs in its file
    whole checkpoint    both again, with step counters, and the random states of each rank, which
                        only rank 0 describes
    DCP                 `DefaultSavePlanner.create_global_plan`, once it has every rank's plan;
                        gathering and unpickling them, and pickling the result, are left out

in two ways to shard: `flat` is this engine's, which cuts a layer's buffer as a whole, so that a
rank has a chunk of few of its tensors; `even` cuts every tensor into N, as FSDP2 does. There is no
other rank's column for what DCP does: its ranks wait for the first one.

All sides run interleaved, in an order drawn anew each round. DCP first runs once, for at most
`--timeout` seconds; where that is not enough, it is left out, and for more ranks as well.
"""

from __future__ import annotations

import gc
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.checkpoint.simulated import even_tensors, flat_tensors, layouts_for
from benchmarks.helpers.result import Measurement, NotRun, Ratio, Result, measured
from megatron.core.dist_checkpointing.format.index import Index, SavedAs, build_index
from megatron.core.dist_checkpointing.format.metadata import compose_metadata, nested_path

BENCHMARK = Benchmark(
    name="checkpoint_plan",
    question="Planning a checkpoint of 7B parameters on up to 1024 simulated ranks against DCP's "
    "global planning",
    ranks=1,
    full=("--ranks", "8", "64", "256", "1024", "--most-even=64", "--rounds=5"),
    quick=("--ranks", "8", "64", "--most-even=8", "--rounds=3"),
)

FLAT, EVEN = "flat", "even"
OURS = {FLAT: "rank 0", EVEN: "rank 0, even"}  # by the way to shard
DCP = {FLAT: "DCP", EVEN: "DCP, even"}


def compose(tensors: Sequence[SavedAs]) -> tuple[bytes, int]:
    """The work of rank 0: (the content of `.metadata` and of the index, number of chunks)."""
    index = build_index("a save", tensors, {})
    content = compose_metadata(index.tensors.values()) + index.to_bytes()
    return content, num_chunks(index)


def num_chunks(index: Index) -> int:
    return sum(len(tensor.chunks) for tensor in index.all_tensors)


def gathered_plans(tensors: Sequence[SavedAs], num_ranks: int) -> tuple[list[SavePlan], int]:
    """What DCP's coordinator holds once all ranks have sent their plans: (plans, bytes sent)."""
    items: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    for tensor in build_index("a save", tensors, {}).tensors.values():
        for chunk in tensor.chunks:
            offsets = torch.Size(chunk.box.offsets)
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, torch.Size(chunk.box.sizes)),
                TensorProperties(tensor.dtype),
                torch.Size(tensor.shape),
            )
            index = MetadataIndex(tensor.key, offsets)
            items[chunk.rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    paths = {tensor.key: nested_path(tensor.key) for tensor in tensors}
    plans, num_bytes = [], 0
    for own in items:
        sent = pickle.dumps(SavePlan(own, planner_data=paths))
        num_bytes += len(sent)
        plans.append(pickle.loads(sent))
    return plans, num_bytes


class TooLongError(Exception):
    """It took longer than it was given."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooLongError after so many seconds of plain Python."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_in_time(plans: list[SavePlan], timeout: float) -> bool:
    """Whether DCP's global planning takes at most `timeout` seconds."""
    try:
        with at_most(timeout):
            plan_with_dcp(plans)
    except TooLongError:
        return False
    return True


def plan_with_dcp(plans: list[SavePlan]) -> None:
    DefaultSavePlanner().create_global_plan(plans)


def seconds_without_garbage(work: Callable[[], object]) -> float:
    """Seconds of `work`, without collecting the garbage of earlier sides."""
    gc.collect()
    return report.seconds(work)


class Found(NamedTuple):
    """All figures for one number of ranks."""

    measurements: tuple[Measurement, ...]
    ratios: tuple[Ratio, ...]
    not_run: tuple[NotRun, ...]
    facts: dict[str, object]


def our_sides(num_ranks: int, *, with_even: bool) -> dict[str, Callable[[], object]]:
    """The work of this project's ranks, by name."""
    layouts, other = layouts_for(num_ranks), num_ranks // 2

    def tensors(is_whole: bool = False, rank: int | None = None) -> list[SavedAs]:
        return flat_tensors(layouts, num_ranks, is_whole=is_whole, rank=rank)

    def plan_own(is_whole: bool = False) -> Index:
        return build_index("a save", tensors(is_whole, other), {}, rank=other)

    sides: dict[str, Callable[[], object]] = {
        OURS[FLAT]: lambda: compose(tensors()),
        "another rank": plan_own,
        "rank 0, whole checkpoint": lambda: compose(tensors(is_whole=True)),
        "another rank, whole checkpoint": lambda: plan_own(is_whole=True),
    }
    if with_even:
        sides[OURS[EVEN]] = lambda: compose(even_tensors(num_ranks))
    return sides


def measure(
    num_ranks: int, num_rounds: int, timeouts: dict[str, float], *, with_even: bool
) -> Found:
    """
    Args:
        timeouts: seconds for DCP, by the way to shard; one that takes longer is taken out.
    """
    group = f"{num_ranks} ranks"
    kinds = {FLAT: flat_tensors(layouts_for(num_ranks), num_ranks)}
    if with_even:
        kinds[EVEN] = even_tensors(num_ranks)
    sides, not_run = our_sides(num_ranks, with_even=with_even), []
    gathered_bytes = {}
    for kind in kinds.keys() & timeouts.keys():
        plans, gathered_bytes[kind] = gathered_plans(kinds[kind], num_ranks)
        if is_in_time(plans, timeouts[kind]):
            sides[DCP[kind]] = partial(plan_with_dcp, plans)
        else:
            why = f"takes longer than {timeouts.pop(kind):g} s"
            not_run.append(NotRun(f"{group}: {DCP[kind]}", why))

    # Millions of objects that only DCP's side reads would make collections slow on all sides.
    gc.collect()
    gc.freeze()
    works = {name: partial(seconds_without_garbage, work) for name, work in sides.items()}
    times = report.interleaved(works, num_rounds, warm_up=1)
    gc.unfreeze()
    medians = report.medians(times)
    ratios = (
        Ratio(
            f"{group}: {DCP[kind]} / {OURS[kind]}",
            medians[DCP[kind]] / medians[OURS[kind]],
            at_least=1.0,
        )
        for kind in kinds
        if DCP[kind] in medians
    )
    facts: dict[str, object] = {
        "chunks": {kind: compose(tensors)[1] for kind, tensors in kinds.items()},
        "own_chunks": num_chunks(build_index("a save", kinds[FLAT], {}, rank=num_ranks // 2)),
        "metadata_bytes": len(compose(kinds[FLAT])[0]),
        "gathered_bytes": gathered_bytes,
    }
    return Found(measured(times, "s", group), tuple(ratios), tuple(not_run), facts)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for DCP; 0: ours alone"
    )
    parser.add_argument(
        "--most-even", type=int, default=256, help="ranks; more would take minutes and gigabytes"
    )
    arguments = parser.parse_args(argv)

    timeouts = {kind: arguments.timeout for kind in (FLAT, EVEN) if arguments.timeout}
    found = {
        num_ranks: measure(
            num_ranks, arguments.rounds, timeouts, with_even=num_ranks <= arguments.most_even
        )
        for num_ranks in arguments.ranks
    }
    result = Result(
        tuple(one for each in found.values() for one in each.measurements),
        tuple(ratio for each in found.values() for ratio in each.ratios),
        tuple(side for each in found.values() for side in each.not_run),
        settings=report.settings_of(arguments),
        facts={f"{num_ranks} ranks": each.facts for num_ranks, each in found.items()},
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
