"""`Answer`: everything that a plan says about a run, as values; the table and `--json` show it."""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.log import counted
from megatron.core.optimizer.state_memory import COMPUTE, GRADIENTS, MAIN, StateBytes
from megatron.core.options import ConfigError
from megatron_hybrid.plan.planned_run import PlannedRun, RunMemory
from megatron_hybrid.plan.quantities import shown_size
from megatron_hybrid.plan.step_time import Machine, StepTime, step_time
from megatron_hybrid.plan.workload import checkpoint_nbytes, flops_of_microbatch, work_of

WHOLE_LAYERS, ACTIVATIONS, LOSS = "whole layers in use", "activations", "logits and loss"
IN_BACKWARD = "gradients in backward"
MOMENTS, MOMENTUM = "moments", "momentum"
_KINDS = {"exp_avg": MOMENTS, "exp_avg_sq": MOMENTS, "momentum_buffer": MOMENTUM}


@dataclass(frozen=True)
class Limits:
    """The memory that there is, in bytes. None: it is not checked.

    Attributes:
        device: of each device, for what is planned.
        host: of the machine, for all of its ranks.
        device_reserve: of each device, what a run must leave free: on top of `device`.
    """

    device: int | None = None
    host: int | None = None
    device_reserve: int = 0


class Fractions(NamedTuple):
    """Answers about the share of the optimizer in host memory; None where there is none.

    Attributes:
        fits: the smallest that fits.
        hidden: the largest at which the computation waits for nothing.
    """

    fits: float | None
    hidden: float | None


@dataclass(frozen=True)
class Answer:
    """See the module's docstring.

    Attributes:
        fraction: that the rest is about; None: without offloading.
        is_chosen: whether the plan chose it, since the run does not fit without offloading.
        rows: bytes by kind on device and host, of the first rank.
        time: of a step; None if the machine's rates are not known.
        other_main_grads: the other dtype that main gradients may have; None: there is no other.
        other: the plan with it; None if that does not fit.
        disk_bytes: a second, of all ranks together.
    """

    run: PlannedRun
    limits: Limits
    machine: Machine | None
    disk_bytes: float | None
    fraction: float | None
    is_chosen: bool
    fractions: Fractions
    time: StepTime | None
    other_main_grads: str | None = None
    other: Answer | None = None

    @property
    def memory(self) -> RunMemory:
        return self.run.memory(self.fraction)

    @property
    def rows(self) -> dict[str, StateBytes]:
        return rows_of(self.memory)

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.run.tokens_per_step / self.time.seconds

    @property
    def flops_per_second(self) -> float | None:
        """Of each rank, as a run reports them."""
        if self.time is None:
            return None
        return flops_of_microbatch(self.run) * self.run.num_microbatches / self.time.seconds

    @property
    def checkpoint_nbytes(self) -> int:
        return checkpoint_nbytes(self.run)

    @property
    def checkpoint_seconds(self) -> float | None:
        return None if self.disk_bytes is None else self.checkpoint_nbytes / self.disk_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data, in bytes, seconds and numbers a second."""
        run, time, memory, other = self.run, self.time, self.memory, self.other
        return {
            "parameters": run.numel,
            "ranks": run.world_size,
            "engine": run.config.parallel.engine,
            "compute_dtype": run.config.training.compute_dtype,
            "tokens_per_step": run.tokens_per_step,
            "microbatches": run.num_microbatches,
            "fraction": self.fraction,
            "fraction_is_chosen": self.is_chosen,
            "smallest_fraction_that_fits": self.fractions.fits,
            "largest_fraction_that_is_hidden": self.fractions.hidden,
            "memory": {
                name: {"device": row.device, "host": row.host} for name, row in self.rows.items()
            },
            "loss_bytes": memory.activations.loss,
            "device_bytes": memory.device_nbytes,
            "device_reserve_bytes": self.limits.device_reserve,
            "host_bytes": memory.host_nbytes,
            "step": None
            if time is None
            else {
                "seconds": time.seconds,
                "parts": time.parts,
                "bound": time.bound,
                "tokens_per_second": self.tokens_per_second,
                "flops_per_second": self.flops_per_second,
            },
            "checkpoint": {"bytes": self.checkpoint_nbytes, "seconds": self.checkpoint_seconds},
            "main_grads_dtype": run.config.parallel.main_grads_dtype,
            "other_main_grads_dtype": None if other is None else other.to_json(),
        }


def answer(
    run: PlannedRun, limits: Limits, machine: Machine | None, disk_bytes: float | None
) -> Answer:
    """Plans a run, and what it would be with the other dtype of main gradients.

    Raises:
        ConfigError: for a run that does not fit, with the sum.
    """
    found, other = _answer(run, limits, machine, disk_bytes), run.with_other_gradients()
    if other is None:
        return found
    planned = None
    with contextlib.suppress(ConfigError):
        planned = _answer(other, limits, machine, disk_bytes)
    dtype = other.config.parallel.main_grads_dtype
    return dataclasses.replace(found, other_main_grads=dtype, other=planned)


def _answer(
    run: PlannedRun, limits: Limits, machine: Machine | None, disk_bytes: float | None
) -> Answer:
    fits = _smallest_that_fits(run, limits)
    fraction, is_chosen = run.fraction, False
    if not _fits(run, limits, fraction):
        if fraction is not None or fits is None:
            raise ConfigError(_refusal(run, limits, fits))
        fraction, is_chosen = fits, True

    time = None if machine is None else step_time(work_of(run, fraction), machine)
    hidden = None if machine is None else _largest_hidden(run, limits, machine)
    return Answer(
        run, limits, machine, disk_bytes, fraction, is_chosen, Fractions(fits, hidden), time
    )


def rows_of(memory: RunMemory) -> dict[str, StateBytes]:
    """Bytes by kind; they add up to those of the step's peak."""
    rows = dict.fromkeys((COMPUTE, MAIN, GRADIENTS), StateBytes(0, 0))
    for name, row in memory.states.at_rest.items():
        kind = _KINDS.get(name, name)
        before = rows.get(kind, StateBytes(0, 0))
        rows[kind] = StateBytes(before.device + row.device, before.host + row.host)

    # Where weights are whole at rest, on one rank for example, only gradients come on top.
    in_use = WHOLE_LAYERS if memory.in_use.root_weights else IN_BACKWARD
    rows[in_use] = StateBytes(memory.whole_layers, 0)
    rows[ACTIVATIONS] = StateBytes(memory.activations_on_device, memory.activations_room)
    rows[LOSS] = StateBytes(memory.loss, 0)
    return {name: row for name, row in rows.items() if any(row)}


def _needs(run: PlannedRun, fraction: float | None) -> StateBytes:
    """What is held against the limits: of a device, and of the machine."""
    memory = run.memory(fraction)
    on_host = memory.host_nbytes
    if run.device_kind == "cpu":
        on_host += memory.device_nbytes
    return StateBytes(memory.device_nbytes, on_host * run.world_size)


def _fits(run: PlannedRun, limits: Limits, fraction: float | None) -> bool:
    needs = _needs(run, fraction)
    fits_device = limits.device is None or needs.device <= limits.device
    return fits_device and (limits.host is None or needs.host <= limits.host)


def _smallest_that_fits(run: PlannedRun, limits: Limits) -> float | None:
    """The larger the fraction, the less the device needs, and the more the host."""
    fractions, most = run.fractions, limits.device
    number = 0
    if most is not None:
        number = bisect_left(fractions, True, key=lambda one: _needs(run, one).device <= most)
    if number == len(fractions) or not _fits(run, limits, fractions[number]):
        return None
    return fractions[number]


def _largest_hidden(run: PlannedRun, limits: Limits, machine: Machine) -> float | None:
    """The more is in host memory, the longer its pass takes."""

    def is_too_much(fraction: float) -> bool:
        needs = _needs(run, fraction).host
        fits = limits.host is None or needs <= limits.host
        return not (fits and step_time(work_of(run, fraction), machine).hides_offloading)

    number = bisect_left(run.fractions, True, key=is_too_much)
    return run.fractions[number - 1] if number else None


def _refusal(run: PlannedRun, limits: Limits, fits: float | None) -> str:
    """Why a run does not fit: the sum that is too large, and what would fit."""
    fraction = run.fraction
    # Where no fraction fits, the sum is that of the one that comes closest.
    if fits is None and fraction is None and run.fractions:
        fraction = _closest(run, limits)
    needs, rows = _needs(run, fraction), rows_of(run.memory(fraction))
    where = "without offloading" if fraction is None else f"at the offload fraction {fraction:g}"

    if limits.device is not None and needs.device > limits.device:
        terms = [f"{name} {shown_size(row.device)}" for name, row in rows.items() if row.device]
        reserve = limits.device_reserve
        reserved = f", of which {shown_size(reserve)} are reserved (--gpu-reserve)" * bool(reserve)
        text = (
            f"Expected device memory for {' + '.join(terms)} = {shown_size(needs.device)} a rank "
            f"{where}, got {shown_size(limits.device + reserve)}{reserved}."
        )
    else:
        assert limits.host is not None, "one of the two does not fit"
        is_shared = run.device_kind == "cpu"
        terms = [
            f"{name} {shown_size(row.host + (row.device if is_shared else 0))}"
            for name, row in rows.items()
            if row.host or (is_shared and row.device)
        ]
        text = (
            f"Expected host memory for {' + '.join(terms)}, times "
            f"{counted(run.world_size, 'rank')} = {shown_size(needs.host)} {where}, got "
            f"{shown_size(limits.host)}."
        )
    return f"{text} {_advice(run, fits)}"


def _advice(run: PlannedRun, fits: float | None) -> str:
    if fits is not None:
        return f"The smallest fraction that fits is {fits:g}."
    if run.refusal:
        return f"These flags do not offload: {run.refusal}"
    return (
        "No offload fraction fits: more ranks, shorter or fewer sequences a microbatch, "
        "--recompute-granularity full or --activation-offload need less."
    )


def _closest(run: PlannedRun, limits: Limits) -> float:
    """The first fraction that fits the device; all of it if none does."""
    fractions, most = run.fractions, limits.device
    if most is None:
        return fractions[0]
    number = bisect_left(fractions, True, key=lambda one: _needs(run, one).device <= most)
    return fractions[min(number, len(fractions) - 1)]
