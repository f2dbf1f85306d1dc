#!/usr/bin/env python3
"""The host kernel's pass of AdamW against implementations with torch, on flat arrays of one size.

    python -m benchmarks.host_adam --threads 2

bf16 gradients, fp32 weights and moments unless the name has others; every side gives the same
threads the same arrays, in huge pages as the optimizer's own are; sides in `ordinary pages` have
their own. `skeleton` reads and writes the memory of the side above it by the same code, without
arithmetic. `logged` keeps the old values of rows that are written over and sums the new ones, as
`--keep-host-state` does. All sides run interleaved, in an order drawn anew each round. Where
medians and fastest rounds are far apart, the machine was busy. Runs in DeepSpeed's environment
(`make peers`) where that has been made: its CPU Adam then is one of the sides.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import NotRun, Ratio, Result, measured
from megatron.core.device import Device
from megatron.core.local_ranks import num_usable_cores
from megatron.core.optimizer.cpu_offloading.kept_updates import CHUNK_NUMEL, slot_bytes
from megatron.core.optimizer.kernels import torch_adam
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.kernels.piece import COUNTER_STRIDE, ROW_NUMEL, Piece, RowLog
from megatron_hybrid.plan.measure import host_array

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

BENCHMARK = Benchmark(
    name="host_adam",
    question="The host kernel's pass of AdamW against torch's fused AdamW and DeepSpeed's CPU Adam",
    ranks=1,
    full=("--elements=67108864", "--rounds=21"),
    quick=("--elements=4194304", "--rounds=5"),
    environment="deepspeed",
)

STEP = AdamStep(10, lr=1e-4, weight_decay=0.01)
NUM_TENSORS = 200
ONE_PASS, SKELETON = "one pass", "skeleton"
DEEPSPEED = "DeepSpeed CPUAdam, fp32 grad, no out"
FUSED = "torch fused, fp32 grad, no out"
OVER_GRAD = f"{ONE_PASS}, out over grad"
LOGGED = f"{OVER_GRAD}, logged"
FUSED_BY_TENSOR = f"torch fused on {NUM_TENSORS} tensors, fp32 grad, no out"
FUSED_WITH_CASTS = "casts and torch fused"
IN_ORDINARY_PAGES = ", ordinary pages"

LEAST_OF_SKELETON = 0.9
MOST_WITH_LOG = 1.05
# The least that others take of the pass's time. torch's own have the pages that torch gives its
# users; in huge pages, and without a weight in bf16 to write, they have no bar.
BARS = {
    f"{FUSED}{IN_ORDINARY_PAGES}": 1.05,
    f"{FUSED_BY_TENSOR}{IN_ORDINARY_PAGES}": 1.4,
    FUSED_WITH_CASTS: 1.4,
    DEEPSPEED: 1.0,
}


class Side(NamedTuple):
    """One of the things compared."""

    work: Callable[[], object]
    num_bytes: int  # read and written, an element
    skeleton: str | None = None  # the side with the same memory pattern


class Arrays:
    """What all sides work on: [numel] each, in huge pages as the optimizer's own or where torch
    puts them.
    """

    def __init__(self, numel: int, *, in_slabs: bool) -> None:
        self.in_slabs = in_slabs
        self.grad = self.make(numel, torch.bfloat16).normal_().mul_(1e-2)
        self.over = self.make(numel, torch.bfloat16).copy_(self.grad)  # is written over
        self.out = self.make(numel, torch.bfloat16)
        self.grad_fp32 = self.make(numel, torch.float32).copy_(self.grad)
        self.weight = self.make(numel, torch.float32).normal_()
        self.split = [
            self.make(numel, dtype).copy_(self.weight) for dtype in (torch.bfloat16, torch.int16)
        ]
        self.moments = [self.make(numel, torch.float32).fill_(1e-4) for _ in range(2)]
        self.bf16_moments = [self.make(numel, torch.bfloat16).fill_(1e-4) for _ in range(2)]

    def make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.in_slabs:
            return torch.empty(numel, dtype=dtype)
        return host_array(numel, dtype, Device.for_rank("cpu", 0, 1))

    def piece(
        self, *, over_grad: bool = False, split: bool = False, bf16_moments: bool = False
    ) -> Piece:
        """The pass in one of its forms. With a remainder, the weight is the one that other forms
        write to `out`.
        """
        grad = self.over if over_grad else self.grad
        exp_avg, exp_avg_sq = self.bf16_moments if bf16_moments else self.moments
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if split:
            weight, remainder = self.split
            return Piece(STEP, grad, weight, states, remainder=remainder)
        return Piece(STEP, grad, self.weight, states, out=grad if over_grad else self.out)


def kernel_sides(kernel: HostAdam, arrays: Arrays) -> dict[str, Side]:
    """The pass in all its forms, each with its skeleton."""
    forms = {
        ONE_PASS: (arrays.piece(), 28),
        OVER_GRAD: (arrays.piece(over_grad=True), 28),
        f"{ONE_PASS}, remainder": (arrays.piece(split=True), 26),
        f"{ONE_PASS}, bf16 moments": (arrays.piece(bf16_moments=True), 20),
        f"{ONE_PASS}, remainder, bf16 moments": (arrays.piece(split=True, bf16_moments=True), 18),
    }
    sides = {}
    for name, (piece, num_bytes) in forms.items():
        skeleton = name.replace(ONE_PASS, SKELETON)
        sides[name] = Side(lambda piece=piece: kernel.run([piece]), num_bytes, skeleton)
        sides[skeleton] = Side(
            lambda piece=piece: kernel.submit([piece], touch=True).wait(), num_bytes
        )
    return sides


def logged_side(kernel: HostAdam, piece: Piece, num_threads: int) -> Side:
    """The pass with a log of old values."""
    count = -(-piece.numel // CHUNK_NUMEL)
    counters = torch.zeros(count, COUNTER_STRIDE, dtype=torch.int64)[:, 0]
    sums = torch.zeros(count, dtype=torch.int64)
    slots = torch.zeros(2 * num_threads, slot_bytes(ROW_NUMEL), dtype=torch.uint8)
    log = RowLog(counters, sums, slots, CHUNK_NUMEL, step=1, bucket=0)

    def run() -> None:
        counters.zero_()
        kernel.submit([piece], log=log).wait()

    return Side(run, 28)


def fused_adamw(
    weight: torch.Tensor, grad: torch.Tensor, arrays: Arrays, start: int = 0
) -> torch.optim.Optimizer:
    """torch's fused AdamW on a weight, its moments being a part of the arrays' from `start` on."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], STEP.lr, weight_decay=STEP.weight_decay, fused=True)
    part = slice(start, start + weight.numel())
    optimizer.state[parameter] = {
        "step": torch.tensor(float(STEP.step)),
        "exp_avg": arrays.moments[0][part],
        "exp_avg_sq": arrays.moments[1][part],
    }
    return optimizer


def uneven_cuts(numel: int) -> list[int]:
    """The starts of NUM_TENSORS tensors with sizes as uneven as a model's, and the end."""
    generator = random.Random(0)
    sizes = [generator.paretovariate(1.0) for _ in range(NUM_TENSORS)]
    sizes = [min(size, 20.0) for size in sizes]
    cuts, total = [0], 0.0
    for size in sizes:
        total += size
        cuts.append(int(numel * total / sum(sizes)))
    return cuts


def torch_sides(arrays: Arrays) -> dict[str, Side]:
    """The same work by torch."""
    whole = fused_adamw(arrays.weight, arrays.grad_fp32, arrays)
    each = [
        fused_adamw(arrays.weight[start:stop], arrays.grad_fp32[start:stop], arrays, start)
        for start, stop in itertools.pairwise(uneven_cuts(arrays.weight.numel()))
    ]

    def with_casts() -> None:
        arrays.grad_fp32.copy_(arrays.grad)
        whole.step()
        arrays.out.copy_(arrays.weight)

    piece = arrays.piece()
    sides = {
        FUSED: Side(whole.step, 28),
        FUSED_BY_TENSOR: Side(lambda: [optimizer.step() for optimizer in each], 28),
        FUSED_WITH_CASTS: Side(with_casts, 40),
        "torch in chunks (no library)": Side(lambda: torch_adam.run([piece], 1.0), 28),
    }
    if DeepSpeedCPUAdam is not None:
        parameter = torch.nn.Parameter(arrays.weight)
        parameter.grad = arrays.grad_fp32
        deepspeed = DeepSpeedCPUAdam([parameter], lr=STEP.lr, weight_decay=STEP.weight_decay)
        sides[DEEPSPEED] = Side(deepspeed.step, 28)
    return sides


def ordinary_sides(numel: int) -> dict[str, Side]:
    """torch's fused AdamW, whole and by tensors, on memory as torch allocates it for its users."""
    arrays = Arrays(numel, in_slabs=False)
    return {
        f"{name}{IN_ORDINARY_PAGES}": side
        for name, side in torch_sides(arrays).items()
        if name in (FUSED, FUSED_BY_TENSOR)
    }


def measure(sides: dict[str, Side], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round. Two rounds warm up: first touches of memory are slow."""

    def milliseconds(work: Callable[[], object]) -> float:
        return report.seconds(work) * 1e3

    works = {name: partial(milliseconds, side.work) for name, side in sides.items()}
    return report.interleaved(works, num_rounds, warm_up=2)


def ratios(sides: dict[str, Side], medians: dict[str, float]) -> Iterator[Ratio]:
    """The ratios of each form of the pass to its memory pattern, and of others to the pass."""
    for name, side in sides.items():
        if side.skeleton:
            value = medians[side.skeleton] / medians[name]
            yield Ratio(f"{side.skeleton} / {name}", value, at_least=LEAST_OF_SKELETON)
    yield Ratio(
        f"{LOGGED} / {OVER_GRAD}", medians[LOGGED] / medians[OVER_GRAD], at_most=MOST_WITH_LOG
    )
    for name in sides:
        if not name.startswith((ONE_PASS, SKELETON)):
            value = medians[name] / medians[ONE_PASS]
            yield Ratio(f"{name} / {ONE_PASS}", value, at_least=BARS.get(name))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--body", default="auto", help="of the host kernel")
    parser.add_argument(
        "--ordinary-pages", action="store_true", help="allocate as torch does, without huge pages"
    )
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)

    kernel = HostAdam(arguments.threads, body=arguments.body)
    arrays = Arrays(arguments.elements, in_slabs=not arguments.ordinary_pages)
    sides = {
        **kernel_sides(kernel, arrays),
        LOGGED: logged_side(kernel, arrays.piece(over_grad=True), arguments.threads),
        **torch_sides(arrays),
    }
    if not arguments.ordinary_pages:
        sides |= ordinary_sides(arguments.elements)
    times = measure(sides, arguments.rounds)

    result = Result(
        measured(times, "ms"),
        tuple(ratios(sides, report.medians(times))),
        not_run=() if DeepSpeedCPUAdam else (NotRun(DEEPSPEED, "not installed: make peers"),),
        settings=report.settings_of(arguments),
        facts={
            "body": kernel.body,
            "bytes_per_element": {name: side.num_bytes for name, side in sides.items()},
        },
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
