#!/usr/bin/env python3
"""Context parallelism: a layer over two ranks' slices of a row, against one rank with the whole row
and against PyTorch's ring attention.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.context

Forward and backward of one layer, of attention or of a gated delta net, in fp32. This project
exchanges heads (a2a), or gathers keys, values and states (all_gather). `context_parallel` of
PyTorch has no kernel for the CPU, so the layer calls `_templated_ring_attention`, with the CPU's
kernel; its slices are balanced, as `context_parallel` cuts them. All sides have the same weights
and row, and their losses are compared. They run interleaved, in an order drawn anew each round; a
step ends when the slower rank ends. The peak is what torch allocates on the rank that allocates
most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.memory import peak_bytes
from benchmarks.helpers.models import SEED, llama_config
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Measurement, Ratio, measured
from megatron.core.distributed.config import A2A, ALL_GATHER
from megatron.core.distributed.context import divide_context
from megatron.core.models.gpt.gpt_model import Places, TransformerBlock
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.layer_specs import model_spec

BENCHMARK = Benchmark(
    name="context",
    question="Time and memory of long rows that two ranks divide, against one rank and against "
    "PyTorch's ring attention",
    ranks=2,
    full=("--sequences", "8192", "16384", "32768", "--rounds=3"),
    quick=("--sequences", "1024", "--rounds=3"),
)

WHOLE, RING = "one rank", "PyTorch's ring"
KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "gated delta net": {
        "linear_attention_freq": "2",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
Step = Callable[[], Tensor]


class _Ring(torch.autograd.Function):
    """PyTorch's ring over the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        output, total = _templated_ring_attention(
            dist.group.WORLD,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, output, total)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        gradients = _templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            gradient,
            "grad_out",
            query,
            key,
            value,
            output,
            total,
            True,
            dropout_p=0.0,
            scale=ctx.scale,
        )
        return *gradients[:3], None


class RingAttention(SelfAttention):
    """Attention over balanced slices: of 2n parts of a row rank r has r and 2n - 1 - r."""

    def core(self, mixed: tuple[Tensor, ...], documents: Documents | None) -> Tensor:
        """See `Attention`."""
        assert documents is None, "the benchmark has none"
        apply: Any = _Ring.apply
        output: Tensor = apply(*mixed, self.core_spec.scale)
        return output


def build(arguments: argparse.Namespace, kind: str, name: str) -> TransformerBlock:
    """A layer with the same weights for each side."""
    torch.manual_seed(SEED)
    config = llama_config(
        1,
        arguments.hidden,
        group_query_attention=True,
        num_query_groups=arguments.key_heads,
        **KINDS[kind],
    )
    block = TransformerBlock(model_spec(config), None)
    if name in (A2A, ALL_GATHER):
        divide_context(block, dist.group.WORLD, name)
    elif name == RING:
        block.layers[0].self_attention.__class__ = RingAttention
    return block


def part_of(name: str, whole: Tensor) -> Tensor:
    """This rank's part of [1, seq, ...]."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if name == WHOLE:
        return whole if rank == 0 else whole[:, :0]
    if name == RING:
        parts = whole.chunk(2 * num_ranks, dim=1)
        return torch.cat((parts[rank], parts[-1 - rank]), dim=1)
    return whole.chunk(num_ranks, dim=1)[rank].contiguous()


def step_of(arguments: argparse.Namespace, kind: str, name: str, length: int) -> Step:
    """Forward and backward of this rank's part of one row; returns its part of the loss."""
    block = build(arguments, kind, name)
    generator = torch.Generator().manual_seed(SEED)
    hidden, factors = (
        part_of(name, torch.randn(1, length, arguments.hidden, generator=generator))
        for _ in range(2)
    )
    places = Places(part_of(name, torch.arange(length)[None]))

    def step() -> Tensor:
        if not hidden.numel():
            return torch.zeros(())
        loss = (block(hidden, places)[0] * factors).sum()
        loss.backward()
        block.zero_grad()
        return loss.detach()

    return step


def seconds(step: Step) -> float:
    """Until the slower rank has ended."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


def total(figure: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
    """Of all ranks."""
    dist.all_reduce(figure, op)
    return float(figure)


def compare(
    arguments: argparse.Namespace, kind: str, names: Sequence[str], length: int
) -> tuple[tuple[Measurement, ...], tuple[Ratio, ...]]:
    """Times and peaks of the sides, for a row of this length."""
    steps = {name: step_of(arguments, kind, name, length) for name in names}
    losses: dict[str, float] = {}
    peaks: dict[str, list[float]] = {}
    for name, step in steps.items():  # which warms it up, too
        own: list[Tensor] = []
        peak = peak_bytes(lambda step=step, own=own: own.append(step()))  # type: ignore[misc]
        losses[name] = total(own[0].double())
        peaks[name] = [total(torch.tensor(peak / 2**20), dist.ReduceOp.MAX)]
        assert abs(losses[name] - losses[WHOLE]) < 1e-3 * length**0.5, (name, losses)

    works = {name: partial(seconds, step) for name, step in steps.items()}
    times = report.interleaved(works, arguments.rounds, seed=SEED)

    group = f"{kind}, {length} tokens"
    figures = {"time": report.medians(times), "peak": report.medians(peaks)}
    ratios = [
        Ratio(f"{group}: {what}, {name} / {WHOLE}", found[name] / found[WHOLE])
        for what, found in figures.items()
        for name in names
        if name != WHOLE
    ]
    if RING in names:
        medians = figures["time"]
        ratios.append(
            Ratio(f"{group}: time, {A2A} / {RING}", medians[A2A] / medians[RING], at_most=1.0)
        )
    return (*measured(times, "s", group), *measured(peaks, "MiB", group)), tuple(ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; rank 0 reports."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--key-heads", type=int, default=1)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    sides = {
        "attention": (WHOLE, A2A, ALL_GATHER, RING),
        "gated delta net": (WHOLE, A2A, ALL_GATHER),
    }

    with launched() as (launch, _):
        found = [
            compare(arguments, kind, names, length)
            for kind, names in sides.items()
            for length in arguments.sequences
        ]
    if launch.rank == 0:
        report.hand_over_all(found, arguments)


if __name__ == "__main__":
    main()
