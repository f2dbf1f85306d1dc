#!/usr/bin/env python3
"""What a window saves: attention in blocks, against one call of PyTorch's attention with a mask of
all pairs of positions, and against attention without a window.

    OMP_NUM_THREADS=1 python benchmarks/window_attention.py --length 4096 --window 512

Forward and backward, interleaved, in an order drawn anew each round. Prints medians and writes
benchmarks/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.helpers import report
from megatron.core.transformer.attention_core import attend
from megatron.core.transformer.spec import AttentionSpec

WARM_UP = 1  # rounds that are not counted
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
        "blocks": lambda query, key, value: attend(query, key, value, windowed),
        "mask of all pairs": masked,
        "no window": lambda query, key, value: attend(query, key, value, spec),
    }


def measure(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """Median milliseconds of forward and backward of each variant."""
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
    torch.testing.assert_close(
        ways["blocks"](*inputs), ways["mask of all pairs"](*inputs), rtol=2e-2, atol=2e-2
    )

    times: dict[str, list[float]] = {name: [] for name in ways}
    for number, name in enumerate(report.schedule(list(ways), arguments.rounds + WARM_UP)):
        taken = report.seconds(lambda name=name: ways[name](*inputs).sum().backward())
        if number >= WARM_UP * len(ways):
            times[name].append(taken * 1e3)
    return report.medians(times)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096, help="positions")
    parser.add_argument("--window", type=int, default=512, help="positions that each one sees")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--groups", type=int, default=2, help="key and value heads")
    parser.add_argument("--head-dim", type=int, default=64, help="channels of a head")
    parser.add_argument("--rounds", type=int, default=7, help="that are counted")
    arguments = parser.parse_args()

    found = {
        str(dtype).removeprefix("torch."): measure(arguments, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for dtype, milliseconds in found.items():
        for name, median in milliseconds.items():
            ratio = median / milliseconds["blocks"]
            print(f"{dtype:>9} {name:>18} {median:9.1f} ms {ratio:5.1f}x")
    print(report.write("window_attention", {"settings": vars(arguments), "median_ms": found}))


if __name__ == "__main__":
    main()
