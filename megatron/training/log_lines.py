"""The log's lines on training steps and evaluations, in two formats.

long    Megatron's line: every number by its full name, some 330 columns; for files.
short   at most 100 columns with the time in front; for terminals:

    16:18:18 200/500  loss 4.6962  grad 0.880  lr 1.49e-3  5421 tok/s  mem 0.43 GiB  eta 1m53s
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.training.expert_load import CV, IDLE, WORST_CV


class PeakMemory(NamedTuple):
    """The most memory that a process has held so far, in bytes."""

    device: int | None  # on its accelerator; None without one
    host: int  # resident


@dataclass(frozen=True)
class LoggedSteps:
    """The training steps between two log lines.

    Attributes:
        record: of the last step, as sinks get it.
        loss: the mean of the finite losses; NaN without any.
        seconds: of a step, without evaluations and saves; the mean.
        tokens_per_second: over all devices.
        tflops: TFLOP/s of one device.
        auxiliary: other losses of the last step by name.
        pace: seconds of a recent step, without the first of this start, which takes longer.
    """

    record: dict[str, Any]
    train_iters: int
    global_batch_size: int  # sequences
    loss: float
    seconds: float
    tokens_per_second: float
    tflops: float
    memory: PeakMemory
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    pace: float | None = None

    @property
    def seconds_left(self) -> float:
        """Until the last step, at the pace of recent steps or else of this interval."""
        seconds = self.seconds if self.pace is None else self.pace
        return float(seconds * (self.train_iters - self.record["iteration"]))


def long_line(interval: LoggedSteps) -> str:
    """Megatron's line."""
    record, train_iters = interval.record, interval.train_iters
    width = len(str(train_iters))
    parts = [
        f"iteration {record['iteration']:{width}}/{train_iters}",
        f"consumed samples: {record['consumed_samples']:8}",
        f"elapsed time per iteration (ms): {1000.0 * interval.seconds:.1f}",
        f"throughput per device (TFLOP/s): {interval.tflops:.3f}",
        f"tokens per second: {interval.tokens_per_second:.0f}",
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {interval.global_batch_size}",
        f"lm loss: {interval.loss:.6E}",
        *(f"{name} loss: {loss:.6E}" for name, loss in interval.auxiliary.items()),
        *([f"loss scale: {record['loss_scale']:.1f}"] if "loss_scale" in record else []),
        f"grad norm: {record['grad_norm']:.3f}",
        *([f"num zeros: {record['num_zeros']}"] if "num_zeros" in record else []),
        *_experts(record),
        f"number of skipped iterations: {record['skipped_iterations']:3}",
        f"number of nan iterations: {record['nan_iterations']:3}",
    ]
    return " | ".join(parts) + " |"


def _experts(record: dict[str, Any]) -> list[str]:
    """How even the experts' loads are: in the mean of the layers, and in the worst one."""
    if CV not in record:
        return []
    cv = f"expert load cv: {record[CV]:.3f} (max {record[WORST_CV]:.3f})"
    return [cv, f"idle experts: {record[IDLE]}"]


def short_line(interval: LoggedSteps) -> str:
    """What one looks for first. Skipped and nan iterations only if there were any."""
    record, width = interval.record, len(str(interval.train_iters))
    parts = [
        f"{record['iteration']:{width}}/{interval.train_iters}",
        f"loss {loss_digits(interval.loss)}",
        f"grad {_digits(record['grad_norm'])}",
        *([f"cv {record[WORST_CV]:.2f}"] if WORST_CV in record else []),
        f"lr {_rate(record['learning_rate'])}",
        f"{thousands(interval.tokens_per_second)} tok/s",
        f"mem {_gibibytes(interval.memory)} GiB",
        f"eta {duration(interval.seconds_left)}",
    ]
    # The rare ones come last, where they may run over the edge.
    rare = {
        "idle": record.get(IDLE) or None,
        "scale": record.get("loss_scale"),
        "zeros": record.get("num_zeros"),
        "skipped": record["skipped_iterations"] or None,
        "nan": record["nan_iterations"] or None,
    }
    parts += [f"{name} {_plain(number)}" for name, number in rare.items() if number is not None]
    return "  ".join(parts)


def long_evaluation(split: str, iteration: int, loss: float, perplexity: float) -> str:
    """Megatron's line for an evaluation."""
    return (
        f"{split} loss at iteration {iteration} | lm loss: {loss:.6E} | "
        f"lm loss PPL: {perplexity:.6E}"
    )


def short_evaluation(split: str, iteration: int, loss: float, perplexity: float) -> str:
    """The same in fewer columns."""
    found = f"loss {loss_digits(loss)}, perplexity {_digits(perplexity)}"
    return f"{split} at iteration {iteration}: {found}"


def loss_digits(value: float) -> str:
    """`4.6962`"""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 10 else _digits(value, 4)


def _digits(value: float, number: int = 3) -> str:
    """With so many significant digits; in powers of ten only if it is far from 1."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -3 <= exponent <= 4:
        return _rate(value)
    return f"{value:.{max(0, number - 1 - exponent)}f}"


def _rate(value: float) -> str:
    """`1.49e-3`"""
    mantissa, found, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if found and value else f"{value:g}"


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def thousands(value: float) -> str:
    """`5421`, `12.3k`, `1.23M`"""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{_digits(value / size)}{unit}"
    return f"{value:.0f}"


def _gibibytes(memory: PeakMemory) -> str:
    """The device's and the host's: `1.2+34`."""
    numbers = (memory.device, memory.host)
    return "+".join(_digits(number / 2**30, 2) for number in numbers if number is not None)


def milliseconds(seconds: float) -> str:
    """Of a step: `378 ms`, `12.3 s`"""
    if seconds < 1:
        return f"{_digits(1000.0 * seconds)} ms"
    return f"{_digits(seconds)} s"


def duration(seconds: float) -> str:
    """Its two largest units: `53s`, `1m53s`, `2h05m`, `12d03h`."""
    if not math.isfinite(seconds):
        return "?"
    total = round(seconds)
    for size, unit, smaller, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if total >= size:
            return f"{total // size}{unit}{total % size // smaller:02}{smaller_unit}"
    return f"{total}s"
