#!/usr/bin/env python3
"""The host kernel's pass of AdamW beside the ways to do the same with torch, on flat arrays of one size.

    OMP_NUM_THREADS=2 python benchmarks/host_adam.py

bf16 gradients, fp32 weights and moments unless the name says otherwise; every side gives the same threads the same
arrays. `skeleton` reads and writes what the side above it does, by the same code, without the arithmetic. All sides run
interleaved, in an order drawn anew each round; prints medians. `--write` keeps them in benchmarks/results.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import report
import torch

from megatron.core.optimizer.kernels import torch_adam
from megatron.core.optimizer.kernels.adam import AdamPiece, AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

STEP = AdamStep(10, lr=1e-4, weight_decay=0.01)
NUM_TENSORS = 200


class Side(NamedTuple):
    """One of the things compared."""

    work: Callable[[], object]
    num_bytes: int  # read and written, an element
    skeleton: str | None = None  # the side with the same memory pattern


class Arrays:
    """What all sides work on: [numel] each, warm after a first round."""

    def __init__(self, numel: int) -> None:
        self.grad = torch.randn(numel, dtype=torch.bfloat16).mul_(1e-2)
        self.grad_fp32 = self.grad.float()
        self.weight = torch.randn(numel)
        self.exp_avg = torch.zeros(numel)
        self.exp_avg_sq = torch.full((numel,), 1e-4)
        self.out = torch.empty_like(self.grad)
        self.over = self.grad.clone()  # a gradient to be written over: not one to learn from twice

    def piece(self, *, over_grad: bool = False, split: bool = False, bf16_moments: bool = False) -> AdamPiece:
        """The pass in one of its forms. The smaller arrays are the beginnings of the larger ones' memory."""
        moments = [self.exp_avg, self.exp_avg_sq]
        if bf16_moments:
            moments = [torch.full_like(moment, 1e-4, dtype=torch.bfloat16) for moment in moments]
        grad = self.over if over_grad else self.grad
        if split:
            weight, remainder = self.weight.bfloat16(), torch.zeros_like(self.grad, dtype=torch.int16)
            return AdamPiece(STEP, grad, weight, *moments, remainder=remainder)
        return AdamPiece(STEP, grad, self.weight, *moments, out=grad if over_grad else self.out)


def kernel_sides(kernel: HostAdam, arrays: Arrays) -> dict[str, Side]:
    """The pass in all its forms, each with its skeleton."""
    forms = {
        "one pass": (arrays.piece(), 28),
        "one pass, out over grad": (arrays.piece(over_grad=True), 28),
        "one pass, remainder": (arrays.piece(split=True), 26),
        "one pass, bf16 moments": (arrays.piece(bf16_moments=True), 20),
        "one pass, remainder, bf16 moments": (arrays.piece(split=True, bf16_moments=True), 18),
    }
    sides = {}
    for name, (piece, num_bytes) in forms.items():
        skeleton = name.replace("one pass", "skeleton")
        sides[name] = Side(lambda piece=piece: kernel.run([piece]), num_bytes, skeleton)
        sides[skeleton] = Side(lambda piece=piece: kernel.submit([piece], touch=True).wait(), num_bytes)
    return sides


def fused_adamw(weight: torch.Tensor, grad: torch.Tensor, arrays: Arrays, start: int = 0) -> torch.optim.Optimizer:
    """torch's fused AdamW on a weight, its moments being a part of the arrays' from `start` on."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], STEP.lr, weight_decay=STEP.weight_decay, fused=True)
    part = slice(start, start + weight.numel())
    optimizer.state[parameter] = {
        "step": torch.tensor(float(STEP.step)),
        "exp_avg": arrays.exp_avg[part],
        "exp_avg_sq": arrays.exp_avg_sq[part],
    }
    return optimizer


def uneven_cuts(numel: int) -> list[int]:
    """Where NUM_TENSORS tensors of a model's unevenness begin, and the end."""
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
        "torch fused, fp32 grad, no out": Side(whole.step, 28),
        f"torch fused on {NUM_TENSORS} tensors, fp32 grad, no out": Side(
            lambda: [optimizer.step() for optimizer in each], 28
        ),
        "casts and torch fused": Side(with_casts, 40),
        "torch in chunks (no library)": Side(lambda: torch_adam.run([piece]), 28),
    }
    if DeepSpeedCPUAdam is not None:
        parameter = torch.nn.Parameter(arrays.weight)
        parameter.grad = arrays.grad_fp32
        deepspeed = DeepSpeedCPUAdam([parameter], lr=STEP.lr, weight_decay=STEP.weight_decay)
        sides["DeepSpeed CPUAdam, fp32 grad, no out"] = Side(deepspeed.step, 28)
    return sides


def measure(sides: dict[str, Side], num_rounds: int) -> dict[str, float]:
    """Median milliseconds. Each runs twice before, untimed: first touches of memory are slow."""
    for side in sides.values():
        side.work()
        side.work()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in report.schedule(list(sides), num_rounds):
        times[name].append(report.seconds(sides[name].work) * 1e3)
    return report.medians(times)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--body", default="auto")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    kernel = HostAdam(arguments.threads, body=arguments.body)
    arrays = Arrays(arguments.elements)
    sides = {**kernel_sides(kernel, arrays), **torch_sides(arrays)}
    milliseconds = measure(sides, arguments.rounds)
    print(f"{arguments.elements} elements, {arguments.threads} threads, {kernel.body}")
    print(f"{'':>52} {'B/el':>4} {'ms':>7} {'Gel/s':>6} {'GB/s':>6}  of its skeleton")
    for name, side in sides.items():
        time, rate = milliseconds[name], arguments.elements / milliseconds[name] / 1e6
        ceiling = f"{milliseconds[side.skeleton] / time:6.1%}" if side.skeleton else ""
        print(f"{name:>52} {side.num_bytes:4} {time:7.1f} {rate:6.2f} {rate * side.num_bytes:6.1f}  {ceiling}")
    ratios = {name: time / milliseconds["one pass"] for name, time in milliseconds.items() if "torch" in name}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} times as long as the one pass")
    if arguments.write:
        content = {
            "settings": vars(arguments),
            "body": kernel.body,
            "median_ms": milliseconds,
            "bytes_per_element": {name: side.num_bytes for name, side in sides.items()},
            "times_the_one_pass": ratios,
        }
        print(report.write("host_adam", content))


if __name__ == "__main__":
    main()
