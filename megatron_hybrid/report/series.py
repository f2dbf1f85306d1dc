"""Thins a curve to what a picture can show, so that no spike is lost.

A million values become a few hundred bins of equal width. Each keeps its least, its greatest and
its mean value, so a single bad iteration is as high in the picture as it was in the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SPIKE = 40.0  # times the median: beside it a linear picture shows nothing else
NUM_BINS = 560  # about a pixel and a half each


@dataclass(frozen=True)
class Curve:
    """Bins of a curve, in ascending order; each holds a value at least.

    Attributes:
        first, last: the iterations of a bin's first and last values.
        low, high, mean: of its values.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def is_thinned(self) -> bool:
        """Whether a bin holds several values."""
        return bool(np.any(self.first != self.last))


def curve_of(
    iterations: NDArray[np.int64], values: NDArray[np.float64], num_bins: int = NUM_BINS
) -> Curve:
    """The curve of values by iteration, without what is not finite.

    Args:
        iterations: ascending, each once.
        values: one for each.
        num_bins: into which the iterations from the first to the last are divided. No more values
            than that are kept as they are.
    """
    is_known = np.isfinite(values)
    x, y = iterations[is_known], values[is_known]
    if len(x) <= num_bins:
        return Curve(x, x, y, y, y)

    # Not x * num_bins // span: iterations may be as large as integers are.
    span = float(x[-1] - x[0] + 1)
    bins = np.minimum(((x - x[0]) / span * num_bins).astype(np.int64), num_bins - 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    # Values are divided before they are added: the sum of the largest would overflow.
    counts = (ends - starts + 1).astype(np.float64)
    mean = np.add.reduceat(y / np.repeat(counts, ends - starts + 1), starts)
    # Rounding must not put a mean outside of what it is the mean of.
    return Curve(x[starts], x[ends], low, high, np.clip(mean, low, high))


def value_domain(curves: list[Curve]) -> tuple[float, float]:
    """The least and the greatest value of the curves; (0, 1) if they have none."""
    lows = [float(curve.low.min()) for curve in curves if len(curve)]
    highs = [float(curve.high.max()) for curve in curves if len(curve)]
    return (min(lows), max(highs)) if lows else (0.0, 1.0)


def wants_logarithm(curves: list[Curve]) -> bool:
    """Whether most of what there is to see would lie flat on the axis of a linear picture."""
    low, high = value_domain(curves)
    if low <= 0:
        return False
    typical = float(np.median(np.concatenate([curve.mean for curve in curves])))
    return high > _SPIKE * typical
