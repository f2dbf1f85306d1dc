"""Which buckets in host memory the device updates, and how large a share of them is the fastest.

The split follows from the buckets' global sizes and a fraction, so it is the same on all ranks. It
never changes a bit: see streamed_pass.py.
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

# Parts of a measurement, and the steps of each; the first of a part is not measured.
_NUM_PARTS, _STEPS = 3, 3
_LEAST_GAIN = 1.05  # of the time of the host's pass; below, the device updates nothing


def interleaved(numels: Sequence[float], fraction: float) -> list[bool]:
    """Which of the buckets the device updates: every so many-th, so that both passes serve the
    forward evenly and end together.

    Args:
        numels: of the buckets, in the order of forward; equal on all ranks.
        fraction: of all elements, 0 to 1.

    Returns:
        A flag for each bucket. Up to any of them, the elements that the device updates differ from
        the fraction by at most half of the largest bucket.
    """
    flags, share = list[bool](), 0.0  # of the elements so far, those that the device still lacks
    for numel in numels:
        share += fraction * numel
        flags.append(numel > 0 and 2 * share >= numel)
        share -= numel * flags[-1]
    return flags


class PassTimes(NamedTuple):
    """Seconds of one step's passes over all of the host's elements; see `balanced`.

    Attributes:
        host: of the host's own pass.
        weights_up: of the compute weights that it sends to the device.
        states_up, states_down: of main weights and states, if the device updates them.
    """

    host: float
    weights_up: float
    states_up: float
    states_down: float

    @property
    def _lines(self) -> tuple[tuple[float, float], ...]:
        """The seconds of each lane at the fractions 0 and 1. Between these they are straight."""
        return (self.host, 0.0), (self.weights_up, self.states_up), (0.0, self.states_down)

    def seconds(self, fraction: float) -> float:
        """Of a step after the norm is known, where the device updates a fraction."""
        return max(begin * (1 - fraction) + end * fraction for begin, end in self._lines)

    def at_rates_of(self, host: float, up: float, fraction: float) -> PassTimes:
        """The times of whole passes at the rates of a step in which both passes ran.

        Args:
            host, up: seconds of the step's pass on the host, and of all its copies up.
            fraction: that the device updated in it.
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
        """The fraction with the shortest step; 0 where no fraction gains a twentieth."""
        # The longest of straight lines is the shortest where two of them cross, or at an end.
        crossings = [0.0, 1.0]
        for one, other in itertools.combinations(self._lines, 2):
            before, after = one[0] - other[0], other[1] - one[1]
            if before * after > 0:
                crossings.append(before / (before + after))
        best = min(crossings, key=self.seconds)
        return best if self.seconds(0.0) >= _LEAST_GAIN * self.seconds(best) else 0.0


class SplitChooser:
    """Finds the fraction in the first steps: all on the host, all on the device, and the balance of
    both, whose rates differ since they share the memory's bandwidth. Where they share so much of it
    that the balance is slower than one of them alone, the faster one has all.

    Attributes:
        fraction: of the next step.
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
            timings: of the step.
            fraction: that the device updated in it, in whole buckets.
            synchronize: waits until its work is over; called where a part ends.
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
    """Of a step after the norm: with all elements in one pass, or in both together."""
    return (together if 0 < fraction < 1 else alone).seconds(fraction)


def _fastest(alone: PassTimes, together: PassTimes, balance: float) -> float:
    """The fastest of three fractions; 0 where that gains less than a twentieth."""
    best = min((balance, 1.0), key=lambda fraction: _seconds(alone, together, fraction))
    gain = alone.seconds(0.0) / max(_seconds(alone, together, best), 1e-9)
    return best if gain >= _LEAST_GAIN else 0.0


def _slowest(times: PassTimes, mesh: DeviceMesh | None) -> PassTimes:
    """The longest of all ranks' times, the same on all ranks."""
    if mesh is None:
        return times
    most = torch.tensor(times, dtype=torch.float64, device=mesh.device_type)
    all_reduce_over(mesh, most, dist.ReduceOp.MAX, "the times of the update")
    return PassTimes(*most.tolist())
