#!/usr/bin/env python3
"""What long sequences cost, and what brings the cost down: the loss without logits, activations in
host memory, recomputation, compiled layers, each alone and all together.

    python -m benchmarks.long_context --sequences 1024 2048 4096 8192

Forward and backward of a Llama-shaped model in bf16, one row. All sides have the same weights and
text, and their losses are compared. They run interleaved, in an order drawn anew each round. The
peak is what torch allocates besides weights and gradients; ratios are to the plain side (the loss
of F.cross_entropy, on logits). On the CPU "host memory" is the machine's memory, too: copies take
time, and the peak is of the memory that would be on a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.memory import peak_bytes
from benchmarks.helpers.models import SEED, llama_config
from benchmarks.helpers.result import Measurement, Ratio, measured
from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.layer_execution import prepare_layers
from megatron.core.local_ranks import num_usable_cores
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.model_loss import mean_of_all

BENCHMARK = Benchmark(
    name="long_context",
    question="Time and memory of a long row with the fused loss, recomputation, activation offload "
    "and compiled layers",
    ranks=1,
    full=("--sequences", "1024", "4096", "--rounds=3"),
    quick=("--layers=1", "--vocabulary=8000", "--sequences", "512", "--rounds=3"),
)

LOSSES_DIFFER = 0.02  # at most, as shares of the loss, of sides that compute the same in bf16
PLAIN = "F.cross_entropy"
Step = Callable[[], float]


@dataclass(frozen=True)
class Side:
    """The options of a side that trade memory and time."""

    has_fused_loss: bool = True
    recomputes: bool = False
    offloads: bool = False
    compiles: bool = False


SIDES = {
    PLAIN: Side(has_fused_loss=False),
    "fused loss": Side(),
    "recompute": Side(recomputes=True),
    "activation offload": Side(offloads=True),
    "compile": Side(compiles=True),
    "recompute, offload": Side(recomputes=True, offloads=True),
    "all": Side(recomputes=True, offloads=True, compiles=True),
}


def build(arguments: argparse.Namespace, side: Side) -> GPTModel:
    """A model as this side has it, with gradients to add to."""
    torch.manual_seed(SEED)
    config = llama_config(
        arguments.layers,
        arguments.hidden,
        ffn_hidden_size=arguments.ffn,
        recompute_granularity="full" if side.recomputes else None,
    )
    model = GPTModel(config, arguments.vocabulary).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    execution = ExecutionConfig(
        activation_offload=side.offloads,
        **({"activation_offload_gib": arguments.gib} if side.offloads else {}),
        compile_layers=side.compiles,
    )
    prepare_layers(model, execution, Device("cpu"))
    return model


def step_of(model: GPTModel, side: Side, arguments: argparse.Namespace, length: int) -> Step:
    """Forward and backward of one row; returns the loss."""
    generator = torch.Generator().manual_seed(SEED)
    text = torch.randint(arguments.vocabulary, (1, length + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step() -> float:
        if side.has_fused_loss:
            loss = model(tokens, labels, loss_weights=mean_of_all(labels)).loss
        else:
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        return float(loss.detach())

    return step


def measure(
    models: dict[str, GPTModel], arguments: argparse.Namespace, length: int
) -> tuple[tuple[Measurement, ...], tuple[Ratio, ...]]:
    """Times and peaks of all sides, for rows of this length."""
    steps = {name: step_of(model, SIDES[name], arguments, length) for name, model in models.items()}
    # Warm, and compiled.
    losses = {name: step() for name, step in steps.items()}
    for name, loss in losses.items():
        assert abs(loss / losses[PLAIN] - 1) < LOSSES_DIFFER, (name, losses)

    works = {name: partial(report.seconds, step) for name, step in steps.items()}
    times = report.interleaved(works, arguments.rounds, seed=SEED)
    peaks = {name: [peak_bytes(step) / 2**20] for name, step in steps.items()}

    group = f"{length} tokens"
    figures = {"time": report.medians(times), "peak": report.medians(peaks)}
    ratios = (
        Ratio(f"{group}: {what}, {name} / {PLAIN}", found[name] / found[PLAIN])
        for what, found in figures.items()
        for name in steps
        if name != PLAIN
    )
    return (*measured(times, "s", group), *measured(peaks, "MiB", group)), tuple(ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=704, help="width inside the MLP")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=4.0, help="host memory for activations")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)

    models = {name: build(arguments, side) for name, side in SIDES.items()}
    found = [measure(models, arguments, length) for length in arguments.sequences]
    report.hand_over_all(found, arguments)


if __name__ == "__main__":
    main()
