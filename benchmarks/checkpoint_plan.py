#!/usr/bin/env python3
"""What it takes to know the whole of a checkpoint that N ranks write, beside DCP's planning from
gathered plans.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_plan.py

One process, no memory for tensors: Llama-7B's weights and two moments in fp32, sharded as ZeRO-3
over N simulated ranks, a buffer for each layer; query, key and value, gate and up are fused there,
and keys of their own here.

    rank 0              from layouts to the bytes of `.metadata`, with every blob's place in every
                        rank's file
    another rank        the places of the blobs in its own file
    whole checkpoint    both again with what a real one holds besides: step counters, and random
                        states of each rank
    DCP                 `DefaultSavePlanner.create_global_plan`, once it has every rank's plan;
                        gathering and unpickling them, and pickling the result, are left out

in two ways to shard: `flat` is this engine's, which cuts a layer's buffer as a whole, so that a
rank has a chunk of few of its tensors; `even` cuts every tensor into N, as FSDP2 does. There is no
other rank's column for what DCP does: its ranks wait for the first one.

Ours runs interleaved, in an order drawn anew each round, and medians are printed. DCP runs once,
for at most `--timeout` seconds, and not for more ranks once they were not enough.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.helpers import report
from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.metadata import compose_metadata, nested_path
from megatron.core.dist_checkpointing.plan.chunks import (
    EvenShards,
    FlatShards,
    FlatTensor,
    Holdings,
    RankMesh,
    Replicated,
    Section,
)
from megatron.core.dist_checkpointing.plan.file_plan import SavedAs, plan_index
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.transformer.fused_weight import FusedWeight

NUM_LAYERS, HIDDEN, FFN, VOCABULARY = 32, 4096, 11008, 32000
MOMENTS = ("exp_avg", "exp_avg_sq")
RANDOM_STATES = {"torch": 5056, "python": 20048}  # bytes, of each rank


class Weight(NamedTuple):
    """A parameter, by its name in its unit; sections take the place of the last part before
    `.weight`.
    """

    name: str
    shape: tuple[int, ...]
    fused: FusedWeight | None = None


ROOT = [
    Weight("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN)),
    Weight("decoder.final_layernorm.weight", (HIDDEN,)),
    Weight("output_layer.weight", (VOCABULARY, HIDDEN)),
]
QKV = FusedWeight([("query", HIDDEN), ("key", HIDDEN), ("value", HIDDEN)])
GATE_UP = FusedWeight([("gate", FFN), ("up", FFN)])
LAYER = [
    Weight("input_layernorm.weight", (HIDDEN,)),
    Weight("self_attention.linear_qkv.weight", (QKV.num_rows, HIDDEN), QKV),
    Weight("self_attention.linear_proj.weight", (HIDDEN, HIDDEN)),
    Weight("pre_mlp_layernorm.weight", (HIDDEN,)),
    Weight("mlp.linear_fc1.weight", (GATE_UP.num_rows, HIDDEN), GATE_UP),
    Weight("mlp.linear_fc2.weight", (HIDDEN, FFN)),
]
UNITS = {"": ROOT, **{f"decoder.layers.{number}.": LAYER for number in range(NUM_LAYERS)}}


class Named(NamedTuple):
    """A weight, or a section of one, as the checkpoint knows it."""

    fqn: str
    shape: tuple[int, ...]
    holdings: Holdings


def named(prefix: str, weight: Weight, whole: Holdings) -> list[Named]:
    """The weight, or its sections."""
    if weight.fused is None:
        return [Named(prefix + weight.name, weight.shape, whole)]
    parent = prefix + weight.name.rsplit(".", 2)[0]
    found = []
    for name, num_rows in weight.fused.sections:
        first_row = weight.fused.row_range(name)[0]
        shape = (num_rows, *weight.shape[1:])
        found.append(Named(f"{parent}.{name}.weight", shape, Section(whole, first_row, num_rows)))
    return found


def tensors_of(weights: Sequence[Named]) -> list[SavedAs]:
    """Weights and moments."""
    keys = ("model.{}", *(f"optimizer.state.{{}}.{moment}" for moment in MOMENTS))
    return [
        SavedAs(key.format(w.fqn), torch.float32, w.shape, w.holdings)
        for key in keys
        for w in weights
    ]


def flat_tensors(
    layouts: dict[str, GlobalLayout], num_ranks: int, *, is_whole: bool = False
) -> list[SavedAs]:
    """All tensors in the order of a save, made anew for each as `collect` does.

    Args:
        is_whole: with step counters, and with every rank's random states.
    """
    mesh, everyone = RankMesh((num_ranks,), tuple(range(num_ranks))), range(num_ranks)
    alike: dict[FlatShards, FlatShards] = {}
    found = []
    for prefix, weights in UNITS.items():
        shards = FlatShards(layouts[prefix], mesh, (True,))
        shards = alike.setdefault(shards, shards)
        for number, weight in enumerate(weights):
            parts = named(prefix, weight, FlatTensor(shards, number))
            found += tensors_of(parts)
            if is_whole:
                keys = [f"optimizer.state.{part.fqn}.step" for part in parts]
                found += [SavedAs(key, torch.float32, (), Replicated((), everyone)) for key in keys]
    if is_whole:
        for kind, nbytes in RANDOM_STATES.items():
            shape = (nbytes,)
            found += [
                SavedAs(f"rng.{r}.{kind}", torch.uint8, shape, Replicated(shape, (r,)))
                for r in everyone
            ]
    return found


def even_tensors(num_ranks: int) -> list[SavedAs]:
    """All tensors, each with its rows divided among all ranks, fused weights by their sections."""
    mesh = RankMesh((num_ranks,), tuple(range(num_ranks)))
    found = []
    for prefix, weights in UNITS.items():
        for weight in weights:
            for part in named(prefix, weight, Replicated(weight.shape, (0,))):
                found += tensors_of([part._replace(holdings=EvenShards(part.shape, mesh, [0]))])
    return found


def compose(tensors: Sequence[SavedAs]) -> tuple[bytes, int]:
    """What rank 0 does: (the content of `.metadata` and of the index, number of chunks)."""
    index = plan_index("a save", tensors, {})
    content = compose_metadata(index.tensors.values()) + index.to_bytes()
    return content, num_chunks(index)


def num_chunks(index: Index) -> int:
    return sum(len(tensor.chunks) for tensor in index.all_tensors)


def gathered_plans(tensors: Sequence[SavedAs], num_ranks: int) -> tuple[list[SavePlan], int]:
    """What DCP's coordinator holds once all ranks have sent their plans: (plans, bytes sent)."""
    items: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    for tensor in plan_index("a save", tensors, {}).tensors.values():
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


def time_dcp(plans: list[SavePlan], timeout: float) -> float | None:
    """Seconds of global planning; None for more than `timeout`."""
    planner = DefaultSavePlanner()
    gc.collect()
    try:
        with at_most(timeout):
            return report.seconds(lambda: planner.create_global_plan(plans))
    except TooLongError:
        return None


def measure_ours(
    layouts: dict[str, GlobalLayout], num_ranks: int, num_rounds: int, *, with_even: bool
) -> dict[str, float]:
    """Median seconds of each side."""

    def tensors(is_whole: bool = False) -> list[SavedAs]:
        return flat_tensors(layouts, num_ranks, is_whole=is_whole)

    other = num_ranks // 2
    sides: dict[str, Callable[[], object]] = {
        "rank 0": lambda: compose(tensors()),
        "another rank": lambda: plan_index("a save", tensors(), {}, rank=other),
        "rank 0, whole checkpoint": lambda: compose(tensors(is_whole=True)),
        "another rank, whole checkpoint": lambda: plan_index(
            "a save", tensors(is_whole=True), {}, rank=other
        ),
    }
    if with_even:
        sides["rank 0, even"] = lambda: compose(even_tensors(num_ranks))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in enumerate(report.schedule(list(sides), num_rounds + 1)):
        gc.collect()
        elapsed = report.seconds(sides[name])
        if number >= len(sides):  # the first round warms up
            times[name].append(elapsed)
    return report.medians(times)


def measure(
    num_ranks: int, num_rounds: int, timeouts: dict[str, float], *, with_even: bool
) -> dict[str, Any]:
    """All figures for one number of ranks.

    Args:
        timeouts: seconds for DCP, by the way to shard; one that takes longer is taken out.
    """
    layouts = {
        prefix: GlobalLayout.build([weight.shape for weight in weights], num_ranks)
        for prefix, weights in UNITS.items()
    }
    kinds = {"flat": flat_tensors(layouts, num_ranks)}
    if with_even:
        kinds["even"] = even_tensors(num_ranks)
    found: dict[str, Any] = {
        "ranks": num_ranks,
        "chunks": {kind: compose(tensors)[1] for kind, tensors in kinds.items()},
        "own_chunks": num_chunks(plan_index("a save", kinds["flat"], {}, rank=num_ranks // 2)),
        "metadata_bytes": len(compose(kinds["flat"])[0]),
        "median_s": measure_ours(layouts, num_ranks, num_rounds, with_even=with_even),
        "dcp": {},
    }
    for kind, tensors in kinds.items():
        if kind in timeouts:
            plans, num_bytes = gathered_plans(tensors, num_ranks)
            seconds = time_dcp(plans, timeouts[kind])
            found["dcp"][kind] = {
                "seconds": seconds,
                "gathered_bytes": num_bytes,
                "timeout_s": timeouts[kind],
            }
            if seconds is None:
                del timeouts[kind]
    return found


def show(found: dict[str, Any]) -> None:
    """Prints the figures for one number of ranks."""
    medians = found["median_s"]
    chunks = ", ".join(f"{number} if {kind}" for kind, number in found["chunks"].items())
    print(
        f"{found['ranks']} ranks: chunks {chunks}, {found['own_chunks']} of another rank's own; "
        f"{found['metadata_bytes'] / 1e6:.1f} MB of metadata"
    )
    for name, seconds in medians.items():
        num_chunks = found["chunks"].get({"rank 0": "flat", "rank 0, even": "even"}.get(name))
        each = f"  {seconds / num_chunks * 1e6:.1f} us a chunk" if num_chunks else ""
        print(f"{name:>32} {seconds * 1e3:10.1f} ms{each}")
    for kind, dcp in found["dcp"].items():
        seconds, ours = dcp["seconds"], medians["rank 0" if kind == "flat" else "rank 0, even"]
        if seconds is None:
            shown = f"{dcp['timeout_s'] * 1e3:10.1f} ms and not done, "
        else:
            shown = f"{seconds * 1e3:10.1f} ms  {seconds / ours:.1f}x ours, "
            shown += f"{seconds / medians['rank 0']:.1f}x rank 0, "
        print(f"{f'DCP, {kind}':>32} {shown}{dcp['gathered_bytes'] / 1e6:.1f} MB gathered")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for DCP; 0: ours alone"
    )
    parser.add_argument(
        "--most-even", type=int, default=256, help="ranks; more would take minutes and gigabytes"
    )
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    timeouts = {kind: arguments.timeout for kind in ("flat", "even") if arguments.timeout}
    results = []
    for num_ranks in arguments.ranks:
        with_even = num_ranks <= arguments.most_even
        results.append(measure(num_ranks, arguments.rounds, timeouts, with_even=with_even))
        show(results[-1])
    if arguments.write:
        print(report.write("checkpoint_plan", {"settings": vars(arguments), "results": results}))


if __name__ == "__main__":
    main()
