"""Time and memory of a rank's planning and of its description of a save, at two large numbers of
ranks.

    python -m benchmarks.many_ranks

One process, models on the meta device, no memory for tensors: Llama-3-70B, and DeepSeek-V3 with
671B parameters, whose experts 64 ranks divide among them. Weights and two moments in fp32, sharded
as ZeRO-3.

    plan            the plan before sharding: parameter groups, layouts, memory at rest
    another rank    in a save: its chunks, their offsets in its file, and their digest
    rank 0          in a save: the content of `.metadata` and `index.json`, with the offsets of all
                    chunks in all ranks' files
    manifests       in a save: rank 0's digests of the content that each rank writes
    open            in a load, on every rank: `index.json` is read and checked

The work of rank 0 and the reading of `index.json` grow with the number of ranks: their bars are
times for each chunk. The other bars compare the larger number of ranks with the smaller one. Sides
run interleaved. Seconds are processor time; memory is the peak of Python allocations, measured in a
separate run.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import on_meta
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from megatron.core.dist_checkpointing.format.index import Index, SavedAs, build_index
from megatron.core.dist_checkpointing.format.metadata import compose_metadata
from megatron.core.dist_checkpointing.layout.holdings import (
    FlatShards,
    RankMesh,
    section_holdings,
)
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.distributed.fsdp.placement import sharded_axes
from megatron.core.distributed.shard_plan import ShardPlan
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import config_from_hf, section_names
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.planned_memory import StateSettings, plan_memory
from megatron.core.transformer.fused_weight import fused_weights

BENCHMARK = Benchmark(
    name="many_ranks",
    question="What a rank plans and describes for 70B dense and 671B mixture models on 1,024 and "
    "4,096 simulated ranks: rank 0 by the chunk, others flat",
    ranks=1,
    full=("--ranks", "1024", "4096", "--rounds=3"),
    quick=("--ranks", "64", "256", "--layers=2", "--rounds=1"),
)

LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3-70B": (LLAMA_3_70B, 1),
    "DeepSeek-V3": (DEEPSEEK_V3, 64),
}
MANIFESTS, OPEN = "manifests", "open"
MOMENTS = ("exp_avg", "exp_avg_sq")


def planned(model: GPTModel, num_ranks: int, expert_size: int) -> ShardPlan:
    """The plan before sharding."""
    parallel = DataParallelConfig(expert_model_parallel_size=expert_size)
    settings = StateSettings(OptimizerConfig(), parallel, torch.bfloat16, num_ranks)
    return plan_memory(model, settings, None, num_ranks // 2).shards


def tensors_of(model: GPTModel, plan: ShardPlan, num_ranks: int) -> list[SavedAs]:
    """The weights and moments of a checkpoint, made anew for each save as `collect` does."""
    fused, alike = fused_weights(model), dict[FlatShards, FlatShards]()
    found = []
    for unit in plan.units:
        prefix = "" if unit.name == THE_MODEL else f"{unit.name}."
        for group in unit.groups:
            mesh = RankMesh(group.mesh_shape, range(num_ranks))
            shards = FlatShards(group.layout, mesh, sharded_axes(group.placements.optimizer))
            shards = alike.setdefault(shards, shards)
            for number, parameter in enumerate(group.parameters):
                name, shape = prefix + parameter.fqns[0], parameter.shape
                parts = [(name, shape, partial(shards.holdings, number))]
                if (own := fused.get(name)) is not None:
                    names = section_names(name, own)
                    rows = ((own.row_range(section)[0], size) for section, size in own.sections)
                    parts = [
                        (part, (size, *shape[1:]), partial(section_holdings, parts[0][2], *where))
                        for part, where in zip(names, rows, strict=True)
                        for size in where[1:]
                    ]
                keys = ("model.{}", *(f"optimizer.state.{{}}.{moment}" for moment in MOMENTS))
                found += [
                    SavedAs(key.format(part), torch.float32, sizes, held)
                    for key in keys
                    for part, sizes, held in parts
                ]
    return found


def sides_of(
    model: GPTModel, num_ranks: int, expert_size: int
) -> tuple[dict[str, Callable[[], object]], int]:
    """The measured functions by name, and the number of chunks."""
    plan, rank = planned(model, num_ranks, expert_size), num_ranks // 2
    index = build_index("a save", tensors_of(model, plan, num_ranks), {})
    content = index.to_bytes()

    def describe() -> object:
        own = build_index("a save", tensors_of(model, plan, num_ranks), {})
        return compose_metadata(own.in_blobs), own.to_bytes()

    def write() -> object:
        own = build_index("a save", tensors_of(model, plan, num_ranks), {}, rank)
        return own.layout_of(rank)

    def compare() -> object:
        vars(index).pop("layouts", None)
        return [index.layout_of(each) for each in range(num_ranks)]

    return {
        "plan": lambda: planned(model, num_ranks, expert_size),
        "another rank": write,
        "rank 0": describe,
        MANIFESTS: compare,
        OPEN: lambda: Index.from_bytes(content, None, "index.json"),
    }, sum(len(tensor.chunks) for tensor in index.tensors.values())


def processor_seconds(work: Callable[[], object]) -> float:
    """Of this process. What another side has left is not collected on this one's account."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_mib(work: Callable[[], object]) -> float:
    """The peak of Python allocations, in bytes."""
    tracemalloc.start()
    try:
        result = work()
        del result
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


class Found(NamedTuple):
    """All figures of one model."""

    measurements: list[Measurement]
    ratios: list[Ratio]
    facts: dict[str, object]


def measure(name: str, model: GPTModel, expert_size: int, ranks: list[int], rounds: int) -> Found:
    """Measures one model at two numbers of ranks."""
    sides = {num_ranks: sides_of(model, num_ranks, expert_size) for num_ranks in ranks}
    works = {
        (num_ranks, side): work
        for num_ranks, (own, _) in sides.items()
        for side, work in own.items()
    }
    # The warm-up as well.
    peaks = {
        which: peak_mib(work) for which, work in works.items() if which[1] not in (MANIFESTS, OPEN)
    }
    # Garbage collection of the others' objects is not timed.
    gc.collect()
    gc.freeze()
    times = report.interleaved(
        {which: partial(processor_seconds, work) for which, work in works.items()}, rounds
    )
    gc.unfreeze()

    found, medians = Found([], [], {}), report.medians(times)
    for num_ranks, (_, num_chunks) in sides.items():
        group = f"{name}, {num_ranks} ranks"
        own = {side: values for (at, side), values in times.items() if at == num_ranks}
        kept = {side: [peak] for (at, side), peak in peaks.items() if at == num_ranks}
        found.measurements.extend(measured(own, "s", group))
        found.measurements.extend(measured(kept, "MiB", f"{group}: memory"))
        found.facts[group] = {"chunks": num_chunks}
        both = medians[num_ranks, "rank 0"] + medians[num_ranks, MANIFESTS]
        a_chunk = 1e6 * both / num_chunks
        found.ratios.append(Ratio(f"{group}: rank 0, microseconds a chunk", a_chunk, at_most=5))
        a_chunk = 1e6 * medians[num_ranks, OPEN] / num_chunks
        found.ratios.append(Ratio(f"{group}: open, microseconds a chunk", a_chunk, at_most=5))
    found.ratios.extend(growth(name, medians, "", ranks))
    found.ratios.extend(growth(name, peaks, ", memory", ranks))
    return found


def growth(
    name: str, figures: Mapping[tuple[int, str], float], what: str, ranks: list[int]
) -> Iterator[Ratio]:
    """The ratios of figures at the larger number of ranks to the smaller one, where they must not
    grow.
    """
    fewer, more = ranks
    for side in ("plan", "another rank"):
        value = figures[more, side] / figures[fewer, side]
        yield Ratio(f"{name}, {side}: {more} ranks / {fewer} ranks{what}", value, at_most=1.25)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs=2, default=[1024, 4096])
    parser.add_argument("--layers", type=int, help="default: all of the models'")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)

    found = Found([], [], {})
    for name, (content, expert_size) in MODELS.items():
        if arguments.layers:
            fewer = {"num_hidden_layers": arguments.layers}
            fewer |= {"first_k_dense_replace": 1} if expert_size > 1 else {}
            content = {**content, **fewer}
        description = config_from_hf(content, name)
        model = on_meta(description.config, description.vocab_size)
        own = measure(name, model, expert_size, arguments.ranks, arguments.rounds)
        found.measurements.extend(own.measurements)
        found.ratios.extend(own.ratios)
        found.facts.update(own.facts)

    result = Result(
        tuple(found.measurements),
        tuple(found.ratios),
        settings=report.settings_of(arguments),
        facts=found.facts,
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
