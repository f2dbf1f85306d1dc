#!/usr/bin/env python3
"""Computed, not measured: how much longer a step takes with 0.8 of the optimizer in host memory, on
machines that are not here.

    python -m benchmarks.offload_model

The planner's model of a step, for published models, bf16 weights and gradients, fp32 main weights
and moments, a gradient norm that never exceeds its limit, and microbatches of one sequence of 8192
tokens. Collectives are not counted. Each side relative to everything on the device, whether or not
that fits there:

    host        the host updates the elements in its memory
    streamed    the device updates the share of it with the shortest step
    early       as well, and the host updates the last groups before the norm is known, with 32 GiB
                of spare memory per GPU

The machines are assumptions. The model is compared with the published cost of a whole optimizer in
host memory, Qwen3-30B-A3B on 8 H200 without clipping: 2.26 times the step at 8,192 tokens, and 1.11
at 16,384, taken as one sequence of that length on each GPU. There the host need not wait for the
norm, and updates groups as their gradients arrive.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Ratio, Result
from benchmarks.reporting.tables import COMPUTED
from megatron_hybrid.plan.planned_run import OFFLOADING, PlannedRun
from megatron_hybrid.plan.step_time import Machine, Work, step_time
from megatron_hybrid.plan.workload import work_of

BENCHMARK = Benchmark(
    name="offload_model",
    question="Computed for H200 and GH200: a step with 0.8 of the optimizer in host memory against "
    "a step with everything on the device",
    ranks=1,
    full=(),
    quick=("--models", "1B"),
)

_FLOPS, _MIXTURE_FLOPS = 400e12, 225e12  # of training, dense and with experts
_FRACTION, _TARGET_FRACTION, _SPARE_GIB = 0.8, 0.94, 32
_SEQUENCE = 8192
_TOKENS = (16384, 49152, 131072)  # of a step on each GPU


def _gpu(link: float, host: float, dram: float) -> Machine:
    """A rank's share of a machine, in GB/s."""
    return Machine(_FLOPS, 4e12, link * 1e9, host * 1e9, memory_bytes=dram * 1e9)


# Of each: GPUs, a rank's share, and the models that fit with 0.8 of the optimizer in host memory.
MACHINES = {
    "H200, 150 GB/s": (1, _gpu(50, 150, 300), ("1B", "3B", "8B")),
    "H200, 200 GB/s": (1, _gpu(50, 200, 300), ("1B", "3B", "8B")),
    "8 H200, 440 GB/s": (8, _gpu(50, 55, 55), ("1B", "3B", "8B", "30B-A3B")),
    "GH200, 400 GB/s": (1, _gpu(400, 400, 450), ("1B", "3B", "8B")),
}
_LLAMA = "--group-query-attention --num-query-groups 8 --position-embedding-type rope --swiglu "
MODELS = {
    "1B": _LLAMA
    + """--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192
        --num-attention-heads 32 --vocab-size 128255""",
    "3B": _LLAMA
    + """--num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192
        --num-attention-heads 24 --vocab-size 128255""",
    "8B": _LLAMA
    + """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 --vocab-size 128255 --untie-embeddings-and-output-weights""",
    "30B-A3B": """--group-query-attention --num-query-groups 4 --position-embedding-type rope
        --swiglu --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128
        --vocab-size 151935 --untie-embeddings-and-output-weights --num-experts 128
        --moe-router-topk 8 --moe-ffn-hidden-size 768""",
    "3.04B": """--swiglu --num-layers 26 --hidden-size 3072 --ffn-hidden-size 8192
        --num-attention-heads 24 --vocab-size 31999""",
}  # Llama 3.2 1B and 3B, Llama 3 8B, Qwen3-30B-A3B, and the model of `gpu_step`
PUBLISHED = {8192: 2.26, 16384: 1.11}  # by tokens


def planned_run(
    model: str, num_gpus: int, fraction: float, *, sequence: int = _SEQUENCE, spare_gib: int = 0
) -> PlannedRun:
    """A step of one sequence on each GPU."""
    flags = f"""{MODELS[model]} --normalization RMSNorm --disable-bias-linear
        --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
        --make-vocab-size-divisible-by 1 --mock-data --seq-length {sequence}
        --micro-batch-size 1 --global-batch-size {num_gpus}
        --bf16 --main-grads-dtype bf16 --train-iters 1 --lr 3e-4""".split()
    if fraction:
        flags += [*OFFLOADING, "--optimizer-offload-fraction", str(fraction)]
        flags += ["--optimizer-early-update-gib", str(spare_gib)]
    return PlannedRun(flags, num_gpus, "cuda")


def machine_for(name: str, model: str) -> Machine:
    """A rank's share of a machine, with the speed at which it computes a model."""
    machine = MACHINES[name][1]
    return dataclasses.replace(machine, flops=_MIXTURE_FLOPS) if "A3B" in model else machine


def sides(
    model: str, num_gpus: int, fraction: float = _FRACTION
) -> tuple[Work, dict[str, Work], float]:
    """The work of a step on the device, that of each side, and the share of its peak memory that
    offloading leaves.
    """
    alone = planned_run(model, num_gpus, 0.0)
    offloaded = planned_run(model, num_gpus, fraction)
    early = planned_run(model, num_gpus, fraction, spare_gib=_SPARE_GIB)
    peak = offloaded.memory(fraction).device_nbytes / alone.memory(None).device_nbytes
    host, *works = (work_of(run, fraction) for run in (offloaded, offloaded, early))
    auto = (dataclasses.replace(work, update_on_device=None) for work in works)
    named = dict(zip(("host", "streamed", "early"), (host, *auto), strict=True))
    return work_of(alone, None), named, peak


def ratios(on_device: Work, works: dict[str, Work], machine: Machine, tokens: int) -> list[float]:
    """The step of each side relative to that on the device."""
    number = tokens // _SEQUENCE
    seconds = [
        step_time(dataclasses.replace(work, num_microbatches=number), machine).seconds
        for work in (on_device, *works.values())
    ]
    return [one / seconds[0] for one in seconds[1:]]


def published_ratio(sequence: int) -> float:
    """The cost of the whole optimizer in host memory, updated as its gradients arrive."""
    machine = machine_for("8 H200, 440 GB/s", "30B-A3B")
    on_device, offloaded = (
        planned_run("30B-A3B", 8, fraction, sequence=sequence) for fraction in (0.0, 1.0)
    )
    work = work_of(offloaded, 1.0)
    # Without clipping, no old values are needed.
    groups = (dataclasses.replace(group, early_pass=group.host_pass) for group in work.groups)
    unclipped = dataclasses.replace(work, groups=tuple(groups))
    seconds = step_time(work_of(on_device, None), machine).seconds
    return step_time(unclipped, machine).seconds / seconds


def target() -> Iterator[Ratio]:
    """The model of `gpu_step` on an H200, with so much in host memory that 45 % of the peak go."""
    on_device, works, peak = sides("3.04B", 1, _TARGET_FRACTION)
    name = f"3.04B, {_TARGET_FRACTION:g} offloaded, on an H200 with 150 GB/s, 49,152 tokens"
    yield Ratio(f"{name}: peak memory / device", peak, at_most=0.55)
    found = ratios(on_device, works, machine_for("H200, 150 GB/s", "3.04B"), 49152)
    for side, value in zip(works, found, strict=True):
        yield Ratio(f"{name}: {side} / device", value, at_most=1.05 if side == "early" else None)


def rows(models: Sequence[str]) -> Iterator[list[str]]:
    """The rows of the table."""
    known: dict[tuple[str, int], tuple[Work, dict[str, Work], float]] = {}
    for name, (num_gpus, _, fitting) in MACHINES.items():
        for model in [model for model in fitting if model in models]:
            key = model, num_gpus
            known[key] = known.get(key) or sides(*key)
            on_device, works, peak = known[key]
            machine = machine_for(name, model)
            found = [ratios(on_device, works, machine, tokens) for tokens in _TOKENS]
            cells = [" / ".join(f"{one:.2f}" for one in each) for each in found]
            yield [name, model, *cells, f"{peak:.0%}"]


def computed(models: Sequence[str]) -> Result:
    """The table, and the figures that have a bar."""
    found: list[Ratio] = []
    if "30B-A3B" in models:
        for tokens, published in PUBLISHED.items():
            text = f"30B-A3B on 8 H200, {tokens:,} tokens: computed / published"
            value = published_ratio(tokens) / published
            found.append(Ratio(text, value, at_least=0.85, at_most=1.15))
    if "3.04B" in models:
        found += target()
    header = ["machine", "model", *(f"{tokens:,} tokens" for tokens in _TOKENS), "peak memory"]
    table = {"header": header, "rows": [*rows(models)]}
    return Result((), tuple(found), (), {"models": [*models]}, {COMPUTED: table})


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Computes."""
    arguments = parsed(argv)
    report.hand_over(computed(arguments.models), arguments.output)


if __name__ == "__main__":
    main()
