"""Training in low precision: the loss of each recipe, and the times to quantise operands and to
make codes of new weights.

    python -m benchmarks.low_precision

First, activations [tokens, hidden] in bf16 are quantised by each recipe as a linear layer does, for
its own product and for the gradient of its weight, on one thread. The layer's product in bf16 is
there to compare. Nothing here says how fast low precision is on a GPU.

Then the host's pass of AdamW over one matrix, with bf16 gradients, writes the new weights in bf16,
over the gradients as it does in training, or as codes. The third side makes codes of the weights by
torch's operators, after the pass.

Finally, with `--iterations`, examples/gpt_cpu.yaml is trained in bf16 and with each recipe on the
text of `make data`, on two ranks.
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
from megatron.core.device import Device
from megatron.core.low_precision.formats import E4M3
from megatron.core.low_precision.recipes import Recipe, recipe_named
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.kernels.piece import Piece, PieceCodes
from megatron.core.products import linear
from megatron_hybrid.plan.measure import host_array

BENCHMARK = Benchmark(
    name="low_precision",
    question="The loss in fp8 and fp4 against bf16, and the times to quantise activations and "
    "to write new weights as codes",
    ranks=1,
    full=("--rounds=10", "--iterations=500"),
    quick=("--tokens=256", "--hidden=256", "--rows=512", "--columns=512", "--rounds=2"),
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
LEAST_SPEED = 0.95  # of the pass that writes codes, of that of the pass that writes bf16
GATHERED = ("blockwise", "delayed", "mxfp8", "rowwise")  # whose codes the pass can make
STEP = AdamStep(10, lr=1e-4, weight_decay=0.01)
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


def run_pass(kernel: HostAdam, piece: Piece) -> None:
    """Steps a matrix. Few scales change from one step to the next, here as in training."""
    kernel.run([piece])
    if piece.codes is not None:
        piece.codes.last_maxima.copy_(piece.codes.maxima)


def passes(arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The work of each form of the pass, by name, over the same arrays."""
    shape = (arguments.rows, arguments.columns)
    numel, device = arguments.rows * arguments.columns, Device.for_rank("cpu", 0, 1)
    grad = host_array(numel, torch.bfloat16, device).normal_().mul_(1e-2)
    weight = host_array(numel, torch.float32, device).normal_()
    states = {
        name: host_array(numel, torch.float32, device).fill_(1e-4)
        for name in ("exp_avg", "exp_avg_sq")
    }
    codes = host_array(numel, E4M3.dtype, device)
    plain = Piece(STEP, grad, weight, states)
    over = plain._replace(grad=host_array(numel, torch.bfloat16, device).copy_(grad))
    pieces = {f"pass, {BF16}": over._replace(out=over.grad)}
    for name in GATHERED:
        recipe = recipe_named(name).with_one_plane()
        quantizer, is_delayed = recipe.weight_quantizer(), recipe.history is not None
        maxima = torch.zeros(quantizer.maxima_shape(shape))
        last_maxima = torch.zeros_like(maxima)
        pieces[f"pass, {name}"] = plain._replace(
            codes=PieceCodes(codes, maxima, last_maxima, quantizer, 0, shape, is_delayed)
        )
    works: dict[str, Callable[[], object]] = {}
    for threads in arguments.threads:
        kernel, number = HostAdam(threads), f", threads {threads}"
        works |= {f"{n}{number}": partial(run_pass, kernel, one) for n, one in pieces.items()}
    scaling = recipe_named("blockwise").weight
    works["by torch, blockwise, threads 1"] = partial(scaling.quantize, weight.view(shape))
    return works


def measure_passes(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each form of the pass in each round."""
    timed = {name: partial(report.seconds, work) for name, work in passes(arguments).items()}
    rounds = report.interleaved(timed, arguments.rounds, warm_up=1, seed=SEED)
    return {name: [1e3 * one for one in own] for name, own in rounds.items()}


def speeds_of_passes(times: dict[str, list[float]]) -> list[Ratio]:
    """The speed of each pass that writes codes, as a part of the other's."""
    medians, ratios = report.medians(times), list[Ratio]()
    for name, median in medians.items():
        kind, recipe, threads = name.split(", ")
        if kind == "pass" and recipe != BF16:
            speed = medians[f"pass, {BF16}, {threads}"] / median
            bar = LEAST_SPEED if recipe == "blockwise" else None
            ratios.append(Ratio(f"speed, {recipe} / {BF16}, {threads}", speed, at_least=bar))
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and trains."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the activations")
    parser.add_argument("--hidden", type=int, default=1024, help="channels of the activations")
    parser.add_argument("--rows", type=int, default=8192, help="of the matrix of the passes")
    parser.add_argument("--columns", type=int, default=4096, help="of the matrix of the passes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the passes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=0, help="of the trainings on text")
    arguments = parser.parse_args(argv)

    times, of_passes = measure(arguments), measure_passes(arguments)
    runs = dict[str, dict[str, Any]]()
    if arguments.iterations:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            prepare_text(Path(name), None)
            runs = {
                side: losses_on_text(Path(name), arguments.iterations, flags)
                for side, flags in FLAGS.items()
            }
    report.hand_over(result_of(times, of_passes, runs, arguments), arguments.output)


def result_of(
    times: dict[str, list[float]],
    of_passes: dict[str, list[float]],
    runs: dict[str, dict[str, Any]],
    arguments: argparse.Namespace,
) -> Result:
    size = f"activations of {arguments.tokens} x {arguments.hidden}"
    matrix = f"passes over {arguments.rows} x {arguments.columns}"
    measurements: list[Measurement] = [
        *measured(times, "ms", size),
        *measured(of_passes, "ms", matrix),
    ]
    ratios: list[Ratio] = speeds_of_passes(of_passes)
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
