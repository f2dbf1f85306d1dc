#!/usr/bin/env python3
"""The output projection with the loss: ours by chunks of tokens, against a linear layer with
PyTorch's cross entropy.

    OMP_NUM_THREADS=2 python benchmarks/output_loss.py --tokens 2048 --vocab 151936 --hidden 1024

Forward and backward, interleaved, in an order drawn anew each round; memory in a round of its own.
Prints medians and ratios and writes benchmarks/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.helpers import report
from benchmarks.helpers.memory import peak_bytes
from megatron.core.transformer.linear_cross_entropy import (
    HeadOptions,
    linear_cross_entropy,
    weighted_cross_entropy,
)

WARM_UP = 1  # rounds that are not counted
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
REFERENCE = "PyTorch"


def variants(num_tokens: int, options: HeadOptions) -> dict[str, Loss]:
    """Each way to compute the mean loss, by its name."""
    weights = torch.full((num_tokens,), 1 / num_tokens)
    return {
        "weighted sum": lambda hidden, weight, labels: (
            weighted_cross_entropy(hidden, weight, labels, weights, options).loss
        ),
        "token by token": lambda hidden, weight, labels: linear_cross_entropy(
            hidden, weight, labels, options
        ).mean(),
        # As models of the transformers library do it.
        REFERENCE: lambda hidden, weight, labels: F.cross_entropy(
            F.linear(hidden, weight).float(), labels
        ),
    }


def measure(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Median milliseconds of forward and backward, and peak bytes, of each variant."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    weight = torch.randn(arguments.vocab, arguments.hidden, generator=generator) * 0.02
    labels = torch.randint(arguments.vocab, (arguments.tokens,), generator=generator)
    inputs = [part.to(dtype).requires_grad_() for part in (hidden, weight)]
    ways = variants(arguments.tokens, HeadOptions(chunk_numel=arguments.chunk_numel))

    def run(name: str) -> None:
        for part in inputs:
            part.grad = None
        ways[name](*inputs, labels).backward()

    def measure_peak(name: str) -> int:
        for part in inputs:
            part.grad = None
        return peak_bytes(lambda: ways[name](*inputs, labels).backward())

    peaks = {name: measure_peak(name) for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number, name in enumerate(report.schedule(list(ways), arguments.rounds + WARM_UP)):
        taken = report.seconds(lambda name=name: run(name))
        if number >= WARM_UP * len(ways):
            times[name].append(taken * 1e3)
    medians = report.medians(times)
    return {name: {"ms": medians[name], "peak_bytes": peaks[name]} for name in ways}


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936, help="rows of the weight")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the hidden states")
    parser.add_argument("--chunk-numel", type=int, help="elements of logits that there are")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()

    found = {name: measure(arguments, getattr(torch, name)) for name in arguments.dtypes}
    for dtype, ways in found.items():
        for name, figures in ways.items():
            speed = ways[REFERENCE]["ms"] / figures["ms"]
            memory = figures["peak_bytes"] / ways[REFERENCE]["peak_bytes"]
            print(
                f"{dtype:>9} {name:>15} {figures['ms']:9.0f} ms {speed:5.2f}x speed "
                f"{figures['peak_bytes'] / 2**20:9.0f} MiB {memory:5.2f}x memory"
            )
    print(report.write("output_loss", {"settings": vars(arguments), "found": found}))


if __name__ == "__main__":
    main()
