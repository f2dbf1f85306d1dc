#!/usr/bin/env python3
"""What a window saves: attention in blocks, against one call of PyTorch's attention with a mask of
all pairs of positions, and against attention without a window.

    python -m benchmarks.window_attention --length 4096 --window 512

Forward and backward, interleaved, in an order drawn anew each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from megatron.core.transformer.attention_core import attend
from megatron.core.transformer.spec import AttentionSpec

BENCHMARK = Benchmark(
    name="window_attention",
    question="Attention with a window, in blocks, against PyTorch's with a mask of all pairs",
    ranks=1,
    full=("--length=4096", "--window=512", "--rounds=7"),
    quick=("--length=1024", "--window=128", "--rounds=5"),
)

BLOCKS, MASK, NO_WINDOW = "blocks", "mask of all pairs", "no window"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def variants(spec: AttentionSpec, length: int, window: int) -> dict[str, Attention]:
    """Each way to compute attention, by its name."""
    # Outside of what is timed: a model would share the mask among its layers.
    positions = torch.arange(length)
    distance = positions.unsqueeze(1) - positions
    mask = (distance >= 0) & (distance < window)

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=spec.scale, enable_gqa=True
        )

    windowed = replace(spec, window=window)
    return {
        BLOCKS: lambda query, key, value: attend(query, key, value, windowed),
        MASK: masked,
        NO_WINDOW: lambda query, key, value: attend(query, key, value, spec),
    }


def measure(
    arguments: argparse.Namespace, dtype: torch.dtype
) -> tuple[tuple[Measurement, ...], tuple[Ratio, ...]]:
    """Forward and backward of each variant."""
    spec = AttentionSpec(
        arguments.heads, arguments.groups, arguments.head_dim, scale=arguments.head_dim**-0.5
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, arguments.length, spec.head_dim, generator=generator)
        .to(dtype)
        .requires_grad_()
        for heads in (spec.num_heads, spec.num_key_value_heads, spec.num_key_value_heads)
    ]
    ways = variants(spec, arguments.length, arguments.window)
    torch.testing.assert_close(ways[BLOCKS](*inputs), ways[MASK](*inputs), rtol=2e-2, atol=2e-2)

    def milliseconds(way: Attention) -> float:
        return report.seconds(lambda: way(*inputs).sum().backward()) * 1e3

    works = {name: partial(milliseconds, way) for name, way in ways.items()}
    times = report.interleaved(works, arguments.rounds, warm_up=1)
    group = str(dtype).removeprefix("torch.")
    medians = report.medians(times)
    ratios = (
        Ratio(f"{group}: {name} / {BLOCKS}", medians[name] / medians[BLOCKS])
        for name in (MASK, NO_WINDOW)
    )
    return measured(times, "ms", group), tuple(ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="positions")
    parser.add_argument("--window", type=int, default=512, help="positions that each one sees")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--groups", type=int, default=2, help="key and value heads")
    parser.add_argument("--head-dim", type=int, default=64, help="channels of a head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)

    found = [measure(arguments, dtype) for dtype in (torch.float32, torch.bfloat16)]
    result = Result(
        tuple(one for sides, _ in found for one in sides),
        tuple(ratio for _, ratios in found for ratio in ratios),
        settings=report.settings_of(arguments),
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
