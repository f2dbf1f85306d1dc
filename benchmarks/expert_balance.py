"""How the loads of experts become even: `examples/moe_cpu.yaml` trained without balancing, with the
balance loss and with the expert bias, from equal weights and on equal text.

    python -m benchmarks.expert_balance --svg plot.svg

Each training has two ranks, on text that is prepared as `make data` does. The figures are from its
last iterations; the facts have all iterations, of which `--svg` draws a plot.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers import report
from benchmarks.helpers.balance_plot import GOAL, draw
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Ratio, Result, measured
from benchmarks.helpers.text_runs import NUM_RANKS, prepare_text, train_on_text

BENCHMARK = Benchmark(
    name="expert_balance",
    question="How even the loads of experts become with the balance loss and with the expert bias, "
    "against no balancing",
    ranks=1,
    full=("--iterations=150",),
    quick=("--iterations=6", "--documents=60"),
)

NAMES = ("expert_load_cv", "expert_load_cv_max", "busiest_expert", "idle_experts", "loss")
LAST = 25  # iterations, of which the figures are
UNBALANCED, BY_LOSS, BY_BIAS = "no balancing", "balance loss", "expert bias"
SIDES = {
    UNBALANCED: ("--moe-aux-loss-coeff=0",),
    BY_LOSS: (),  # as the example is
    BY_BIAS: (
        "--moe-aux-loss-coeff=0",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate=1e-2",
    ),
}


def train(folder: Path, num_iterations: int, options: Sequence[str]) -> dict[str, list[float]]:
    """Returns, of each iteration of a training with these options: the mean of the layers'
    coefficients of variation, the largest one, the largest load in units of its layer's mean, the
    experts without tokens, and the loss.
    """
    records = train_on_text(
        folder,
        "moe_cpu.yaml",
        (
            f"--train-iters={num_iterations}",
            f"--lr-warmup-iters={num_iterations // 10}",
            "--eval-iters=0",
            *options,
        ),
    )
    steps = {r["iteration"]: r for r in records if r["kind"] == "train"}
    return {name: [round(steps[n][name], 4) for n in sorted(steps)] for name in NAMES}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and draws."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--documents", type=int, help="of text; default: all there are")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="where to draw a plot")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        prepare_text(folder, arguments.documents)
        runs = {
            side: train(folder, arguments.iterations, options) for side, options in SIDES.items()
        }
    if arguments.svg:
        arguments.svg.write_text(draw(runs))
    report.hand_over(result_of(runs, arguments), arguments.output)


def result_of(runs: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> Result:
    """Of the last iterations; the facts have all."""
    last = {name: {side: own[name][-LAST:] for side, own in runs.items()} for name in NAMES}
    evenness = measured(last["expert_load_cv"], "", "coefficient of variation")
    cv = {one.side: one.median for one in evenness}
    loss = report.medians(last["loss"])
    settings: dict[str, Any] = report.settings_of(arguments)
    del settings["svg"]
    return Result(
        (
            *evenness,
            *measured(last["busiest_expert"], "of mean", "busiest expert"),
            *measured(last["loss"], "nats", "loss"),
        ),
        (
            *(
                Ratio(f"coefficient of variation: {side}", cv[side], at_most=GOAL)
                for side in (BY_LOSS, BY_BIAS)
            ),
            Ratio(f"coefficient of variation: {UNBALANCED}", cv[UNBALANCED]),
            *(
                Ratio(f"loss: {side} / {UNBALANCED}", loss[side] / loss[UNBALANCED])
                for side in (BY_LOSS, BY_BIAS)
            ),
        ),
        settings=settings,
        facts={"ranks": NUM_RANKS, "runs": runs},
    )


if __name__ == "__main__":
    main()
