"""Low-precision training: the loss of each recipe, and the time to quantise activations and updated
weights.

    python -m benchmarks.low_precision

First, each recipe quantises bf16 activations [tokens, hidden] on one thread, as a linear layer does
for its product and for its weight gradient. The layer's bf16 product is measured for comparison.
These times do not predict the speed of low precision on a GPU.

Then AdamW updates one matrix in host memory, with bf16 gradients. The update writes the new weights
in bf16, over the gradients as in training, or as codes; with tensorwise, the kernel makes the codes
after the update. For comparison, PyTorch operators do this with blockwise.

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
LARGEST_RATIO = 1.005  # validation loss, fp8 / bf16
LEAST_SPEED = 0.95  # of the pass that writes codes, of that of the pass that writes bf16
GATHERED = ("blockwise", "delayed", "mxfp8", "rowwise", "tensorwise")  # the pass makes the codes
STEP = AdamStep(10, lr=1e-4, weight_decay=0.01)
SEED = 5


def quantise(recipe: Recipe, activations: torch.Tensor) -> None:
    """Quantises activations as a layer's forward does."""
    recipe.inputs.quantize(activations)
    if recipe.inputs_t is not None:
        recipe.inputs_t.quantize(activations.t())


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the milliseconds of each side in each round."""
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


def run_pass(kernel: HostAdam, piece: Piece, encodes_again: bool) -> None:
    """Updates a matrix. As in training, few scales change from one step to the next.

    Args:
        encodes_again: whether the scale of all codes is known only after the update.
    """
    kernel.run([piece])
    if piece.codes is not None:
        piece.codes.last_maxima.copy_(piece.codes.maxima)
    if encodes_again:
        kernel.encode([piece])


def passes(arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Returns the update for each output format, by name, over the same arrays."""
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
        quantizer = recipe.weight_quantizer()
        maxima = torch.zeros(quantizer.maxima_shape(shape))
        last_maxima = torch.zeros_like(maxima)
        pieces[f"pass, {name}"] = plain._replace(
            codes=PieceCodes(codes, maxima, last_maxima, quantizer, 0, shape)
        )
    works: dict[str, Callable[[], object]] = {}
    for threads in arguments.threads:
        kernel, number = HostAdam(threads), f", threads {threads}"
        works |= {
            f"{name}{number}": partial(run_pass, kernel, one, name == "pass, tensorwise")
            for name, one in pieces.items()
        }
    scaling = recipe_named("blockwise").weight
    works["by torch, blockwise, threads 1"] = partial(scaling.quantize, weight.view(shape))
    return works


def measure_passes(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the milliseconds of each update in each round."""
    timed = {name: partial(report.seconds, work) for name, work in passes(arguments).items()}
    rounds = report.interleaved(timed, arguments.rounds, warm_up=1, seed=SEED)
    return {name: [1e3 * one for one in own] for name, own in rounds.items()}


def speeds_of_passes(times: dict[str, list[float]]) -> list[Ratio]:
    """Returns the speed of each update that writes codes, relative to one that writes bf16."""
    medians, ratios = report.medians(times), list[Ratio]()
    for name, median in medians.items():
        kind, recipe, threads = name.split(", ")
        if kind == "pass" and recipe != BF16:
            speed = medians[f"pass, {BF16}, {threads}"] / median
            bar = LEAST_SPEED if recipe == "blockwise" else None
            ratios.append(Ratio(f"speed, {recipe} / {BF16}, {threads}", speed, at_least=bar))
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all parts on this machine."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the activations")
    parser.add_argument("--hidden", type=int, default=1024, help="channels of the activations")
    parser.add_argument("--rows", type=int, default=8192, help="rows of the updated matrix")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the updated matrix")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="threads of the update"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--iterations", type=int, default=0, help="training iterations; 0: no training"
    )
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
