"""How long a step updates the elements in host memory, by the fraction that the device updates.

Standard library only.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

_LEAST_GAIN = 1.05  # of the time of the host's pass; below, the device updates nothing


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
