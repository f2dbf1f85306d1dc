"""`Answer`: the plan of a run as values, which the table and `--json` show."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from megatron.core.activation_offload import moving_layers
from megatron.core.log import counted
from megatron.core.optimizer.state_memory import StateBytes
from megatron.core.options import ConfigError
from megatron.training.step_memory import NEEDING_LESS, RunMemory, first_fitting, rows_of
from megatron_hybrid.plan.planned_run import PlannedRun
from megatron_hybrid.plan.quantities import shown_size
from megatron_hybrid.plan.step_time import Machine, StepTime, step_time
from megatron_hybrid.plan.workload import (
    checkpoint_nbytes,
    flops_of_microbatch,
    newton_schulz_flops,
    work_of,
)


@dataclass(frozen=True)
class Limits:
    """The available memory in bytes; None is not checked.

    Attributes:
        device: the memory of each device that can be planned.
        host: the machine's host memory, for all of its ranks.
        device_reserve: the memory of each device that must stay free, in addition to `device`.
    """

    device: int | None = None
    host: int | None = None
    device_reserve: int = 0


@dataclass(frozen=True)
class Answer:
    """The plan of a run at one offload fraction.

    Attributes:
        fraction: the offload fraction; None: without offloading.
        is_chosen: whether the plan chose the fraction, because the run does not fit without it.
        smallest_fitting: the smallest fraction that fits; None if none does.
        largest_hidden: the largest fraction for which the computation never waits; None if none.
        time: the time of a step; None if the machine's rates are unknown.
    """

    run: PlannedRun
    limits: Limits
    machine: Machine | None
    fraction: float | None
    is_chosen: bool
    smallest_fitting: float | None
    largest_hidden: float | None
    time: StepTime | None

    @property
    def memory(self) -> RunMemory:
        return self.run.memory(self.fraction)

    @property
    def rows(self) -> dict[str, StateBytes]:
        """The first rank's bytes by kind."""
        return rows_of(self.memory)

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.run.tokens_per_step / self.time.seconds

    @property
    def flops_per_second(self) -> float | None:
        """FLOP per second of each rank, as a run reports them."""
        if self.time is None:
            return None
        return flops_of_microbatch(self.run) * self.run.num_microbatches / self.time.seconds

    @property
    def muon_share(self) -> float:
        """The FLOP of Muon relative to the FLOP of forward and backward."""
        run = self.run
        size = run.config.parallel.data_parallel_size(run.world_size)
        flops = flops_of_microbatch(run) * run.num_microbatches * size
        return newton_schulz_flops(run) / flops

    @property
    def activation_fraction(self) -> float | None:
        """The largest activation offload fraction that is hidden; None: no activations move, or
        the machine's rates are unknown.
        """
        if self.time is None or not self.time.activations:
            return None
        num_layers = len(self.memory.activations.layers)
        given = self.run.config.execution.activation_offload_fraction
        moving, movable = (len(moving_layers(num_layers, one)) for one in (given, 1.0))
        hidden = math.floor(moving * self.time.forward / self.time.activations)
        return round(min(movable, hidden) / movable, 2)

    @property
    def checkpoint_nbytes(self) -> int:
        return checkpoint_nbytes(self.run)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data in bytes, seconds and rates per second."""
        run, time, memory = self.run, self.time, self.memory
        return {
            "parameters": run.numel,
            "ranks": run.world_size,
            "engine": run.config.parallel.engine,
            "compute_dtype": run.config.training.compute_dtype,
            "tokens_per_step": run.tokens_per_step,
            "microbatches": run.num_microbatches,
            "fraction": self.fraction,
            "fraction_is_chosen": self.is_chosen,
            "smallest_fraction_that_fits": self.smallest_fitting,
            "largest_fraction_that_is_hidden": self.largest_hidden,
            "memory": {
                name: {"device": row.device, "host": row.host} for name, row in self.rows.items()
            },
            "loss_bytes": memory.activations.loss,
            "largest_activation_fraction_that_is_hidden": self.activation_fraction,
            "device_bytes": memory.device_nbytes,
            "device_reserve_bytes": self.limits.device_reserve,
            "host_bytes": memory.host_nbytes,
            "step": None
            if time is None
            else {
                "seconds": time.seconds,
                "parts": time.parts,
                "bound": time.bound,
                "update_on_device": time.update_on_device,
                "activation_copies": time.activations,
                "tokens_per_second": self.tokens_per_second,
                "flops_per_second": self.flops_per_second,
                "muon_share": self.muon_share,
            },
            "checkpoint_bytes": self.checkpoint_nbytes,
            "main_grads_dtype": run.config.parallel.main_grads_dtype,
        }


def answer(run: PlannedRun, limits: Limits, machine: Machine | None) -> Answer:
    """Plans a run.

    Raises:
        ConfigError: the run does not fit. The message has the sum.
    """
    fits = _smallest_that_fits(run, limits)
    fraction, is_chosen = run.fraction, False
    if run.must_choose and limits.device is None:
        raise ConfigError("--optimizer-offload-fraction: expected --gpu-memory for auto, got none.")
    if run.must_choose or not _fits(run, limits, fraction):
        if fraction is not None or fits is None:
            raise ConfigError(_refusal(run, limits, fits))
        fraction, is_chosen = fits, True

    time = None if machine is None else step_time(work_of(run, fraction), machine)
    hidden = None if machine is None else _largest_hidden(run, limits, machine)
    return Answer(run, limits, machine, fraction, is_chosen, fits, hidden, time)


def _needs(run: PlannedRun, fraction: float | None) -> StateBytes:
    """Returns the bytes to compare with the limits of a device and of the machine."""
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
    """Returns the smallest fraction that fits, or None."""
    number = _first_on_device(run, limits)
    if number == len(run.fractions) or not _fits(run, limits, run.fractions[number]):
        return None
    return run.fractions[number]


def _first_on_device(run: PlannedRun, limits: Limits) -> int:
    """Returns the index of the first fraction that fits the device, or their number."""
    return first_fitting(run.fractions, limits.device, run.memory)


def _largest_hidden(run: PlannedRun, limits: Limits, machine: Machine) -> float | None:
    """Returns the largest fraction whose offloading is hidden, or None."""

    # Host memory and the time of the host pass increase with the fraction.
    def is_too_much(fraction: float) -> bool:
        needs = _needs(run, fraction).host
        fits = limits.host is None or needs <= limits.host
        return not (fits and step_time(work_of(run, fraction), machine).hides_offloading)

    number = bisect_left(run.fractions, True, key=is_too_much)
    return run.fractions[number - 1] if number else None


def _refusal(run: PlannedRun, limits: Limits, fits: float | None) -> str:
    """Returns the message for a run that does not fit: the sum, and the fraction that fits."""
    fraction = run.fraction
    # If no fraction fits, the sum is for the closest one.
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
    return f"No offload fraction fits. {NEEDING_LESS}"


def _closest(run: PlannedRun, limits: Limits) -> float:
    """Returns the first fraction that fits the device, or the last one."""
    return run.fractions[min(_first_on_device(run, limits), len(run.fractions) - 1)]
