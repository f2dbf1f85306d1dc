"""The error of a gradient's mean over N ranks, by the dtype in which the ranks add it up, against
fp64.

    python -m benchmarks.reduction_error

The gradients are real: a small GPT is trained on the bytes of the standard library for some steps,
and then each emulated rank runs a bf16 backward of another microbatch. The ranks add up as the ring
of an NCCL reduce-scatter: the sum of a part starts at one rank, and each other rank adds its
gradient to it and sends the result on.

    bf16 ring                   every sum is rounded to bf16 before it is sent on
    fp32 ring, bf16 result      gradients are widened first, and the mean is rounded once
    fp32 ring, fp32 result      gradients are widened first; the mean is not rounded
    all-to-all, bf16 result     bf16 gradients are sent, added in fp32 and rounded once, as this
                                engine does it on the CPU

A round gives the ranks another order in the ring. `error` is the norm of the difference from the
fp64 mean of the same gradients, in percent of the mean's norm; `worst tensor` is that of the tensor
with the largest one.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import SEED, llama_config
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from megatron.core.models.gpt.gpt_model import GPTModel

BENCHMARK = Benchmark(
    name="reduction_error",
    question="The error of gradients that ranks add up in bf16 or in fp32, in an emulated ring, "
    "against fp64",
    ranks=1,
    full=("--ranks", "8", "64", "--steps=60", "--rounds=5"),
    quick=("--ranks", "2", "4", "--steps=2", "--rounds=2", "--hidden-size=64", "--seq-length=32"),
)

BF16_RING = "bf16 ring"
FP32_ROUNDED = "fp32 ring, bf16 result"
FP32 = "fp32 ring, fp32 result"
ALL_TO_ALL = "all-to-all, bf16 result"
VOCABULARY = 256


def ring_mean(gradients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mean over ranks as an NCCL ring computes it, which rounds every sum to `dtype`.

    Args:
        gradients: [ranks, elements], whose number the ranks divide.
    """
    num_ranks = len(gradients)
    parts = torch.arange(num_ranks)
    each = gradients.to(dtype).unflatten(1, (num_ranks, -1))  # [ranks, parts, elements of a part]
    total = each[(parts + 1) % num_ranks, parts]
    for hop in range(1, num_ranks):
        total = total + each[(parts + 1 + hop) % num_ranks, parts]  # torch rounds it to `dtype`
    return (total / num_ranks).flatten()


def mean_rounded_once(gradients: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, added up in fp32 and rounded to the gradients' dtype."""
    total = torch.zeros(gradients.shape[1])
    for own in gradients:
        total += own
    return (total / len(gradients)).to(gradients.dtype)


MEANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    BF16_RING: partial(ring_mean, dtype=torch.bfloat16),
    FP32_ROUNDED: lambda gradients: ring_mean(gradients, torch.float32).to(gradients.dtype),
    FP32: partial(ring_mean, dtype=torch.float32),
    ALL_TO_ALL: mean_rounded_once,
}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference, in percent of the exact norm."""
    return 100 * float((found.double() - exact).norm() / exact.norm())


def worst_error(found: torch.Tensor, exact: torch.Tensor, numels: Sequence[int]) -> float:
    """The error of the tensor with the largest one, among tensors that have a gradient."""
    pairs = zip(found.split(numels), exact.split(numels), strict=True)
    return max(error(own, true) for own, true in pairs if true.norm() > 0)


def text(numel: int) -> torch.Tensor:
    """So many bytes of the standard library's sources."""
    content = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= numel:
            break
    return torch.frombuffer(content[:numel], dtype=torch.uint8).long()


def backward(model: nn.Module, rows: torch.Tensor) -> None:
    """Adds the gradients of rows of text: [rows, length + 1]."""
    model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).mean().backward()


def gradients_of_ranks(
    num_ranks: int, num_steps: int, hidden_size: int, seq_length: int
) -> tuple[torch.Tensor, list[int]]:
    """([ranks, elements] in bf16, the elements of each tensor) after some steps of training."""
    torch.manual_seed(SEED)
    model = GPTModel(llama_config(2, hidden_size), VOCABULARY)
    num_rows = 4 * (num_steps + num_ranks)
    rows = text(num_rows * (seq_length + 1)).view(num_rows, -1)
    rows = rows[torch.randperm(num_rows)]
    microbatches = rows.unflatten(0, (-1, 4))

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for microbatch in microbatches[:num_steps]:
        optimizer.zero_grad()
        backward(model, microbatch)
        optimizer.step()

    model.bfloat16()
    gradients = []
    for microbatch in microbatches[num_steps:]:
        model.zero_grad()
        backward(model, microbatch)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(gradients), [parameter.numel() for parameter in model.parameters()]


def measure(
    gradients: torch.Tensor, numels: Sequence[int], num_rounds: int
) -> tuple[list[Measurement], list[Ratio]]:
    """The errors of all sides for these ranks."""
    num_ranks = len(gradients)
    exact = gradients.double().mean(0)
    errors: dict[str, list[float]] = {side: [] for side in MEANS}
    worst: dict[str, list[float]] = {side: [] for side in MEANS}
    generator = torch.Generator().manual_seed(SEED)
    padding = -gradients.shape[1] % num_ranks
    for _ in range(num_rounds):
        ring = gradients[torch.randperm(num_ranks, generator=generator)]
        ring = nn.functional.pad(ring, (0, padding))
        for side, mean in MEANS.items():
            found = mean(ring)[: gradients.shape[1]]
            errors[side].append(error(found, exact))
            worst[side].append(worst_error(found, exact, numels))

    group = f"{num_ranks} ranks"
    medians = report.medians(errors)
    return (
        [
            *measured(errors, "%", f"{group}, error"),
            *measured(worst, "%", f"{group}, worst tensor"),
        ],
        [
            Ratio(
                f"{group}: error, {BF16_RING} / {ALL_TO_ALL}",
                medians[BF16_RING] / medians[ALL_TO_ALL],
            )
        ],
    )


def sampling_error(gradients: torch.Tensor) -> float:
    """The standard error of the mean over ranks, in percent of its norm: the effect of the choice
    of microbatches.
    """
    wide = gradients.double()
    variance = wide.var(0).sum() / len(wide)
    return 100 * float(variance.sqrt() / wide.mean(0).norm())


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=60, help="of training before the gradients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=256)
    arguments = parser.parse_args(argv)

    gradients, numels = gradients_of_ranks(
        max(arguments.ranks), arguments.steps, arguments.hidden_size, arguments.seq_length
    )
    measurements, ratios = list[Measurement](), list[Ratio]()
    for num_ranks in arguments.ranks:
        found = measure(gradients[:num_ranks], numels, arguments.rounds)
        measurements += found[0]
        ratios += found[1]
    report.hand_over(
        Result(
            tuple(measurements),
            tuple(ratios),
            settings=report.settings_of(arguments),
            facts={
                "elements": sum(numels),
                "sampling_error_percent": {
                    f"{num_ranks} ranks": sampling_error(gradients[:num_ranks])
                    for num_ranks in arguments.ranks
                },
            },
        ),
        arguments.output,
    )


if __name__ == "__main__":
    main()
