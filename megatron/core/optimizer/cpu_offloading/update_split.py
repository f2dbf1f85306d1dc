"""Chooses the buckets in host memory that the device updates, and the fastest fraction of them.

The split is a function of the buckets' global sizes and a fraction, so all ranks agree. Results are
bit-equal for every split: see streamed_pass.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.lane_timings import D2H, H2D, HOST, LANES, StepTimings
from megatron.core.mesh import all_reduce_over

logger = logging.getLogger(__name__)

# Parts of the measurement, and steps per part; the first step of a part is not measured.
_NUM_PARTS, _STEPS = 3, 3
_LEAST_GAIN = 1.05  # least speedup of the step for which the device updates buckets


def interleaved(numels: Sequence[float], fraction: float) -> list[bool]:
    """Chooses the buckets that the device updates. They are evenly spread, so that both passes
    deliver weights in forward order and end together.

    Args:
        numels: elements of the buckets in forward order; equal on all ranks.
        fraction: fraction of all elements, 0 to 1.

    Returns:
        A flag per bucket. For every prefix of the buckets, the device's elements differ from the
        fraction by at most half of the largest bucket.
    """
    flags, share = list[bool](), 0.0  # the device's share so far, minus its elements
    for numel in numels:
        share += fraction * numel
        flags.append(numel > 0 and 2 * share >= numel)
        share -= numel * flags[-1]
    return flags


class PassTimes(NamedTuple):
    """Seconds of a step's passes over all elements in host memory; see `balanced`.

    Attributes:
        host: seconds of the update on the host.
        weights_up: seconds to copy its compute weights to the device.
        states_up, states_down: seconds to copy main weights and states, if the device updates them.
    """

    host: float
    weights_up: float
    states_up: float
    states_down: float

    @property
    def _lines(self) -> tuple[tuple[float, float], ...]:
        """The seconds of each lane at the fractions 0 and 1; linear in between."""
        return (self.host, 0.0), (self.weights_up, self.states_up), (0.0, self.states_down)

    def seconds(self, fraction: float) -> float:
        """Returns the seconds of a step after the norm, if the device updates a fraction."""
        return max(begin * (1 - fraction) + end * fraction for begin, end in self._lines)

    def at_rates_of(self, host: float, up: float, fraction: float) -> PassTimes:
        """Returns the times of whole passes at the rates of a step with both passes.

        Args:
            host, up: seconds of the step's host pass and of its copies to the device.
            fraction: the fraction that the device updated in this step.
        """
        if not 0 < fraction < 1:
            return self
        rest = 1 - fraction
        # The weights and gradients of the host's pass are on the same lanes, at the same rate.
        expected = self.weights_up * rest + self.states_up * fraction
        slower = up / expected if expected else 1.0
        return PassTimes(
            host / rest,
            self.weights_up * slower,
            self.states_up * slower,
            self.states_down * slower,
        )

    def balanced(self) -> float:
        """Returns the fraction with the shortest step; 0 if none saves a twentieth."""
        # The maximum of linear functions is smallest where two of them cross, or at an end.
        crossings = [0.0, 1.0]
        for one, other in itertools.combinations(self._lines, 2):
            before, after = one[0] - other[0], other[1] - one[1]
            if before * after > 0:
                crossings.append(before / (before + after))
        best = min(crossings, key=self.seconds)
        return best if self.seconds(0.0) >= _LEAST_GAIN * self.seconds(best) else 0.0


class SplitChooser:
    """Finds the fraction in the first steps, which update all elements on the host, then all on the
    device, then a balanced fraction. Both passes share the memory bandwidth, so their rates differ
    in the last part. If one side alone is faster than the balance, it updates everything.

    Attributes:
        fraction: the fraction for the next step.
    """

    def __init__(self) -> None:
        self.fraction = 0.0
        self._num_steps = 0
        self._measured: list[StepTimings] = []
        self._on_host: dict[str, float] = {}
        self._times = PassTimes(0.0, 0.0, 0.0, 0.0)

    @property
    def is_done(self) -> bool:
        """Whether the fraction is final."""
        return self._num_steps == _NUM_PARTS * _STEPS

    def step_ended(
        self,
        timings: StepTimings,
        fraction: float,
        synchronize: Callable[[], None],
        mesh: DeviceMesh | None,
    ) -> None:
        """Counts a step. All ranks of the mesh call it together.

        Args:
            timings: the step's timings.
            fraction: the fraction that the device updated in the step, in whole buckets.
            synchronize: waits for the step's work; called at the end of a part.
        """
        part, number = divmod(self._num_steps, _STEPS)
        self._num_steps += 1
        self._measured += [timings] if number else []
        if number < _STEPS - 1:
            return

        synchronize()
        sums = [each.sums() for each in self._measured]
        seconds = {lane: sum(each[lane] for each in sums) / len(sums) for lane in LANES}
        self._measured.clear()
        if part == 0:
            self._on_host, self.fraction = seconds, 1.0
            return
        if part == 1:
            host, weights_up = self._on_host[HOST], self._on_host[H2D]
            times = PassTimes(host, weights_up, seconds[H2D], seconds[D2H])
        else:
            times = self._times.at_rates_of(seconds[HOST], seconds[H2D], fraction)
        alone, self._times = self._times, _slowest(times, mesh)
        self.fraction = self._times.balanced()
        if self.is_done:
            self.fraction = _fastest(alone, self._times, self.fraction)
            logger.info(
                "host pass %.3g s, states up %.3g s and down %.3g s: the device updates %.0f %% of "
                "the elements in host memory, and passes take %.3g s instead of %.3g s",
                *(times.host, times.states_up, times.states_down, 100 * self.fraction),
                *(_seconds(alone, self._times, self.fraction), alone.seconds(0.0)),
            )


def _seconds(alone: PassTimes, together: PassTimes, fraction: float) -> float:
    """Returns the times of a step after the norm: of one pass alone, or of both together."""
    return (together if 0 < fraction < 1 else alone).seconds(fraction)


def _fastest(alone: PassTimes, together: PassTimes, balance: float) -> float:
    """Returns the fastest of the three fractions; 0 if it saves less than a twentieth."""
    best = min((balance, 1.0), key=lambda fraction: _seconds(alone, together, fraction))
    gain = alone.seconds(0.0) / max(_seconds(alone, together, best), 1e-9)
    return best if gain >= _LEAST_GAIN else 0.0


def _slowest(times: PassTimes, mesh: DeviceMesh | None) -> PassTimes:
    """Returns the maximum over all ranks, the same on all ranks."""
    if mesh is None:
        return times
    most = torch.tensor(times, dtype=torch.float64, device=mesh.device_type)
    all_reduce_over(mesh, most, dist.ReduceOp.MAX, "the times of the update")
    return PassTimes(*most.tolist())
