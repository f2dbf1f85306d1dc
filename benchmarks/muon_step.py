"""Steps of Muon: matrices divided over the ranks, against whole matrices gathered on every rank.

    python -m benchmarks.muon_step

The same GPTs of about 30M and 120M parameters on two ranks, from the same weights: bf16 compute,
fp32 main weights and momentum, gradients reduced in fp32, Newton-Schulz in bf16, AdamW for other
weights. A step is a forward and a backward of few tokens and an update, of which the update alone
is measured, too. Both sides update the same matrices, and their losses must agree.

    ours        each matrix goes to one rank, and its update back to the ranks of its rows
    FSDP2       as users of PyTorch FSDP2 write it: each rank gathers every update in bf16, runs
                the same Newton-Schulz function, and writes its own rows

Then, with `--iterations`, examples/gpt_cpu.yaml is trained with AdamW and with Muon on the text of
`make data`. AdamW is trained at three learning rates, of which the best counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import SEED, llama_config, on_meta, shard
from benchmarks.helpers.ranks import on_own_ranks
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from benchmarks.helpers.text_runs import (
    NUM_RANKS,
    losses_on_text,
    measured_losses,
    prepare_text,
)
from megatron.core.device import Device
from megatron.core.distributed import torch_fsdp2
from megatron.core.materialize import materialize
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.kernels.newton_schulz import MuonStep, orthogonalize
from megatron.core.optimizer.torch_optimizer import parameter_groups

BENCHMARK = Benchmark(
    name="muon_step",
    question="A step of Muon with its matrices divided over 2 ranks, against FSDP2 with whole "
    "matrices gathered on every rank",
    ranks=1,
    full=("--rounds=5", "--iterations=500"),
    quick=("--sizes", "2x128", "--rounds=2"),
)

OURS, FSDP2 = "ours", "FSDP2, gathered"
LARGEST_RATIO = 0.8
VOCABULARY = 8192
MUON = OptimizerConfig(optimizer="muon")
RATE, MOMENTUM = 1e-3, MUON.muon_momentum
LOSSES_DIFFER = 0.01  # of losses of about 9: the sides round differently
STEP = MuonStep(RATE)
CPU = Device("cpu")
# Muon's is the best of 2e-3, 4e-3 and 8e-3 after 150 iterations.
RATES = {"AdamW": (1e-3, 2e-3, 4e-3), "Muon": (4e-3,)}


class GatheredMuon:
    """Muon over FSDP2's parameters, whose matrices every rank gathers whole.

    Attributes:
        num_sent: bytes that this rank has sent.
    """

    def __init__(self, model: nn.Module) -> None:
        groups = parameter_groups(model, MUON)
        self._decay = MUON.weight_decay
        self._matrices: dict[nn.Parameter, tuple[int, ...]] = {}
        for group in groups:
            rows = group.pop("matrix_rows", ())
            self._matrices.update(zip(group["params"], rows, strict=False))
        others = [group for group in groups if not group.pop("use_muon")]
        self._momentum = {p: torch.zeros_like(p) for p in self._matrices}
        self._adam = torch.optim.AdamW(others, lr=RATE, fused=True)
        self.num_sent = 0

    @torch.no_grad()
    def step(self) -> None:
        """Steps all parameters."""
        for parameter, rows in self._matrices.items():
            grad, momentum = parameter.grad, self._momentum[parameter]
            assert isinstance(grad, DTensor), "sharded, after a backward"
            momentum.lerp_(grad, 1 - MOMENTUM)
            mixed = grad.lerp(momentum, MOMENTUM).bfloat16()
            self.num_sent += mixed.to_local().nbytes * (dist.get_world_size() - 1)
            whole = mixed.full_tensor()
            parts = [
                orthogonalize(matrix.clone(), STEP)
                * _adjust_lr(RATE, "match_rms_adamw", matrix.shape)
                for matrix in whole.split(rows)
            ]
            own = parameter.to_local()
            first = dist.get_rank() * -(-len(whole) // dist.get_world_size())
            own.mul_(1 - RATE * self._decay)
            own.sub_(torch.cat(parts).narrow(0, first, len(own)))
        self._adam.step()


class Side(NamedTuple):
    """A model and the update of its weights."""

    model: nn.Module
    update: Callable[[], object]
    num_sent: Callable[[], int]  # bytes that this rank has sent


class Round(NamedTuple):
    """Milliseconds of a step and of its update, and the loss before it."""

    step: float
    update: float
    loss: float


class Size(NamedTuple):
    """The measurements of a model of one size."""

    num_parameters: int
    rounds: dict[str, list[Round]]
    sent: dict[str, int]  # bytes of rank 0 in a step


@contextmanager
def counting_exchanges() -> Iterator[Callable[[], int]]:
    """Counts the bytes that this rank sends to others by all-to-all."""
    original, total = dist.all_to_all_single, 0

    def counted(received: Any, sent: Any, to: Any, numels: Any, **options: Any) -> Any:
        nonlocal total
        total += (sum(numels) - numels[dist.get_rank()]) * sent.element_size()
        return original(received, sent, to, numels, **options)

    dist.all_to_all_single = counted
    try:
        yield lambda: total
    finally:
        dist.all_to_all_single = original


def measure(rank: int, arguments: argparse.Namespace) -> dict[str, Size]:
    """Measures all sizes on one rank of two."""
    found = {}
    for shape in arguments.sizes:
        with counting_exchanges() as sent:
            found[shape] = _measure(shape, rank, arguments, sent)
    return found


def _measure(shape: str, rank: int, arguments: argparse.Namespace, sent: Callable[[], int]) -> Size:
    sides = _sides(shape, sent)
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(VOCABULARY, (1, arguments.tokens + 1), generator=generator)
    works = {name: partial(_timed, side, text) for name, side in sides.items()}
    rounds = report.interleaved(works, arguments.rounds, warm_up=1, seed=SEED)

    last = [own[-1].loss for own in rounds.values()]
    if max(last) - min(last) > LOSSES_DIFFER:
        raise RuntimeError(f"Expected sides with the same losses, got {last} in the end.")
    num_steps = arguments.rounds + 1
    num_parameters = sum(p.numel() for p in sides[OURS].model.parameters())
    return Size(
        num_parameters, rounds, {name: side.num_sent() // num_steps for name, side in sides.items()}
    )


def _sides(shape: str, sent: Callable[[], int]) -> dict[str, Side]:
    layers, hidden = map(int, shape.split("x"))
    ours, theirs = (on_meta(llama_config(layers, hidden), VOCABULARY) for _ in range(2))
    mesh = build_mesh("cpu", NUM_RANKS)
    optimizer = shard(ours, mesh, CPU, MUON, num_local_ranks=NUM_RANKS)
    assert optimizer is not None, "as asked for"
    for group in optimizer.param_groups:
        group["lr"] = RATE

    torch_fsdp2.shard_model(theirs, mesh, compute_dtype=torch.bfloat16, reshard_after_forward=True)
    materialize(theirs, CPU.torch_device, SEED)
    gathered = GatheredMuon(theirs)
    return {
        OURS: Side(ours, optimizer.optimizer.step, sent),
        FSDP2: Side(theirs, gathered.step, lambda: gathered.num_sent),
    }


def _timed(side: Side, text: torch.Tensor) -> Round:
    dist.barrier()
    start = time.perf_counter()
    loss = side.model(text[:, :-1], text[:, 1:]).mean()
    loss.backward()
    before = time.perf_counter()
    side.update()
    end = time.perf_counter()
    side.model.zero_grad()
    dist.all_reduce(mean := loss.detach() / NUM_RANKS)
    return Round((end - start) * 1e3, (end - before) * 1e3, float(mean))


def train(folder: Path, num_iterations: int, side: str, rate: float) -> dict[str, Any]:
    """Returns the last training losses and the last validation loss of a training.

    Args:
        side: a key of `RATES`.
    """
    options = (
        *("--no-optimizer-cpu-offload", "--no-overlap-cpu-optimizer-d2h-h2d"),
        *("--no-overlap-optimizer-with-forward", f"--lr={rate}"),
        f"--optimizer={'muon' if side == 'Muon' else 'adam'}",
    )
    return {"rate": rate, **losses_on_text(folder, num_iterations, options)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures steps, and trains."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["8x512", "16x768"], metavar="LAYERSxHIDDEN")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank's microbatch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=0, help="of the trainings on text")
    arguments = parser.parse_args(argv)

    sizes = on_own_ranks(NUM_RANKS, measure, arguments)
    runs: dict[str, list[dict[str, Any]]] = {}
    if arguments.iterations:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            prepare_text(Path(name), None)
            for side, rates in RATES.items():
                runs[side] = [train(Path(name), arguments.iterations, side, r) for r in rates]
    report.hand_over(result_of(sizes, runs, arguments), arguments.output)


def result_of(
    sizes: dict[str, Size], runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace
) -> Result:
    measurements: list[Measurement] = []
    ratios: list[Ratio] = []
    for size in sizes.values():
        name = f"{size.num_parameters / 1e6:.0f}M"
        for what in ("step", "update"):
            times = {side: [getattr(one, what) for one in own] for side, own in size.rounds.items()}
            measurements += measured(times, "ms", f"{name}, {what}")
            medians = report.medians(times)
            bar = LARGEST_RATIO if what == "step" else None
            ratio = medians[OURS] / medians[FSDP2]
            ratios.append(Ratio(f"{what} of {name}, ours / FSDP2", ratio, at_most=bar))
        sent = {side: [nbytes / 2**20] for side, nbytes in size.sent.items()}
        measurements += measured(sent, "MiB", f"{name}, sent in an update")

    if runs:
        best = {side: min(own, key=lambda run: run["validation"]) for side, own in runs.items()}
        measurements += measured_losses(best, arguments.iterations)
        losses = {side: run["validation"] for side, run in best.items()}
        ratios.append(Ratio("validation loss, Muon / AdamW", losses["Muon"] / losses["AdamW"]))
    return Result(
        tuple(measurements),
        tuple(ratios),
        settings=report.settings_of(arguments),
        facts={
            "ranks": NUM_RANKS,
            "parameters": {shape: size.num_parameters for shape, size in sizes.items()},
            "losses": {
                shape: {side: [one.loss for one in own] for side, own in size.rounds.items()}
                for shape, size in sizes.items()
            },
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
