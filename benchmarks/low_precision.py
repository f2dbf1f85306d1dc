"""Training in low precision: the loss of each recipe, and the time to quantise operands.

    python -m benchmarks.low_precision

First, activations [tokens, hidden] in bf16 are quantised by each recipe as a linear layer does, for
its own product and for the gradient of its weight, on one thread. The layer's product in bf16 is
there to compare. Nothing here says how fast low precision is on a GPU.

Then, with `--iterations`, examples/gpt_cpu.yaml is trained in bf16 and with each recipe on the text
of `make data`, on two ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from benchmarks.helpers.text_runs import losses_on_text, measured_losses, prepare_text
from megatron.core.low_precision.recipes import Recipe, recipe_named
from megatron.core.products import linear

BENCHMARK = Benchmark(
    name="low_precision",
    question="The loss in fp8 and fp4 against bf16, and the time to quantise activations",
    ranks=1,
    full=("--rounds=10", "--iterations=500"),
    quick=("--tokens=256", "--hidden=256", "--rounds=2"),
)

BF16 = "bf16"
FP8 = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
NVFP4 = "nvfp4"
FLAGS = {
    BF16: (),
    **{name: ("--fp8-format=hybrid", f"--fp8-recipe={name}") for name in FP8},
    NVFP4: ("--fp4-format=e2m1",),
}
LARGEST_RATIO = 1.005  # of the validation losses of fp8 and bf16
SEED = 5


def quantise(recipe: Recipe, activations: torch.Tensor) -> None:
    """Quantises activations as a layer's forward does."""
    recipe.inputs.quantize(activations)
    if recipe.inputs_t is not None:
        recipe.inputs_t.quantize(activations.t())


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each side in each round."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    activations = torch.randn(arguments.tokens, arguments.hidden, generator=generator).bfloat16()
    weight = torch.randn(arguments.hidden, arguments.hidden, generator=generator).bfloat16()
    works: dict[str, Callable[[], object]] = {
        f"quantised, {name}": partial(quantise, recipe_named(name), activations)
        for name in (*FP8, NVFP4)
    }
    works[f"product, {BF16}"] = partial(linear, activations, weight)
    timed = {name: partial(report.seconds, work) for name, work in works.items()}
    rounds = report.interleaved(timed, arguments.rounds, warm_up=1, seed=SEED)
    return {name: [1e3 * one for one in own] for name, own in rounds.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and trains."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the activations")
    parser.add_argument("--hidden", type=int, default=1024, help="channels of the activations")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=0, help="of the trainings on text")
    arguments = parser.parse_args(argv)

    times, runs = measure(arguments), dict[str, dict[str, Any]]()
    if arguments.iterations:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            prepare_text(Path(name), None)
            runs = {
                side: losses_on_text(Path(name), arguments.iterations, flags)
                for side, flags in FLAGS.items()
            }
    report.hand_over(result_of(times, runs, arguments), arguments.output)


def result_of(
    times: dict[str, list[float]], runs: dict[str, dict[str, Any]], arguments: argparse.Namespace
) -> Result:
    size = f"activations of {arguments.tokens} x {arguments.hidden}"
    measurements: list[Measurement] = [*measured(times, "ms", size)]
    ratios: list[Ratio] = []
    if runs:
        measurements += measured_losses(runs, arguments.iterations)
        losses = {side: run["validation"] for side, run in runs.items()}
        for name in (*FP8, NVFP4):
            bar = LARGEST_RATIO if name in FP8 else None
            ratio = losses[name] / losses[BF16]
            ratios.append(Ratio(f"validation loss, {name} / {BF16}", ratio, at_most=bar))
    return Result(
        tuple(measurements),
        tuple(ratios),
        settings=report.settings_of(arguments),
        facts={"runs": runs},
    )


if __name__ == "__main__":
    main()
