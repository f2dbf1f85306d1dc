#!/usr/bin/env python3
"""The output projection with the loss: ours by chunks of tokens, against a linear layer with
PyTorch's cross entropy.

    python -m benchmarks.output_loss --tokens 2048 --vocab 151936 --hidden 1024

Forward and backward, interleaved, in an order drawn anew each round; memory in a round of its own.
The full run has half of those tokens and half of that width: the logits are as large beside the
weight, and it takes a quarter of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.memory import peak_bytes
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from megatron.core.local_ranks import num_usable_cores
from megatron.core.transformer.linear_cross_entropy import (
    HeadOptions,
    linear_cross_entropy,
    weighted_cross_entropy,
)

BENCHMARK = Benchmark(
    name="output_loss",
    question="The loss by chunks of tokens, without logits, against F.linear and F.cross_entropy",
    ranks=1,
    full=("--tokens=1024", "--hidden=512", "--rounds=5"),
    quick=("--tokens=256", "--vocab=32000", "--hidden=128", "--rounds=3"),
)

WEIGHTED, BY_TOKEN, REFERENCE = "weighted sum", "token by token", "PyTorch"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def variants(num_tokens: int, options: HeadOptions) -> dict[str, Loss]:
    """Each way to compute the mean loss, by its name."""
    weights = torch.full((num_tokens,), 1 / num_tokens)
    return {
        WEIGHTED: lambda hidden, weight, labels: (
            weighted_cross_entropy(hidden, weight, labels, weights, options).loss
        ),
        BY_TOKEN: lambda hidden, weight, labels: linear_cross_entropy(
            hidden, weight, labels, options
        ).mean(),
        # As models of the transformers library do it.
        REFERENCE: lambda hidden, weight, labels: F.cross_entropy(
            F.linear(hidden, weight).float(), labels
        ),
    }


def measure(
    arguments: argparse.Namespace, dtype: torch.dtype
) -> tuple[tuple[Measurement, ...], tuple[Ratio, ...]]:
    """Forward and backward of each variant, and its peak of memory, which is a round of its own."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    weight = torch.randn(arguments.vocab, arguments.hidden, generator=generator) * 0.02
    labels = torch.randint(arguments.vocab, (arguments.tokens,), generator=generator)
    inputs = [part.to(dtype).requires_grad_() for part in (hidden, weight)]
    ways = variants(arguments.tokens, HeadOptions(chunk_numel=arguments.chunk_numel))

    def step(way: Loss) -> None:
        way(*inputs, labels).backward()

    def measure_with(meter: Callable[[Callable[[], None]], float], way: Loss) -> float:
        for part in inputs:
            part.grad = None
        return meter(partial(step, way))

    # Measuring memory warms up.
    peaks = {name: [measure_with(peak_bytes, way) / 2**20] for name, way in ways.items()}
    works = {name: partial(measure_with, report.seconds, way) for name, way in ways.items()}
    times = report.interleaved(works, arguments.rounds)

    group = str(dtype).removeprefix("torch.")
    measurements = (*measured(times, "s", group), *measured(peaks, "MiB", group))
    ratios = (
        Ratio(f"{group}: {what}, {WEIGHTED} / {REFERENCE}", found[WEIGHTED] / found[REFERENCE])
        for what, found in (("time", report.medians(times)), ("peak", report.medians(peaks)))
    )
    return measurements, tuple(ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936, help="rows of the weight")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the hidden states")
    parser.add_argument("--chunk-numel", type=int, help="elements of logits that there are")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)

    found = [measure(arguments, getattr(torch, name)) for name in arguments.dtypes]
    result = Result(
        tuple(one for sides, _ in found for one in sides),
        tuple(ratio for _, ratios in found for ratio in ratios),
        settings=report.settings_of(arguments),
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
