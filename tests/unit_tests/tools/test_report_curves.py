from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatron_hybrid.report import curves
from megatron_hybrid.report.curves import NARROW, NUM_BINS, Chart, Curve, figure_of

VALUES = st.floats(-1e100, 1e100, allow_nan=False) | st.just(math.nan)


def curve_of(iterations, values, num_bins: int = NUM_BINS) -> Curve:
    return curves.curve_of("a curve", 0, iterations, values, num_bins)


@st.composite
def columns(draw):
    """Ascending iterations, and a value for each, which may be none."""
    iterations = draw(st.lists(st.integers(0, 2**53), min_size=1, max_size=60, unique=True))
    count = len(iterations)
    values = draw(arrays.arrays(np.float64, count, elements=VALUES))
    return np.array(sorted(iterations)), values


@given(columns(), st.integers(1, 20))
def test_every_value_is_in_a_bin_and_every_extreme_is_kept(given_columns, num_bins):
    iterations, values = given_columns
    curve = curve_of(iterations, values, num_bins)
    known = np.isfinite(values)
    x, y = iterations[known], values[known]
    assert len(curve) <= max(num_bins, 0)
    if not len(x):
        assert len(curve) == 0
        return

    assert (curve.low.min(), curve.high.max()) == (y.min(), y.max())
    assert np.all(curve.first <= curve.last)
    assert np.all(curve.last[:-1] < curve.first[1:])
    for n in range(len(curve)):
        inside = y[(curve.first[n] <= x) & (x <= curve.last[n])]
        assert (curve.low[n], curve.high[n]) == (inside.min(), inside.max())
        assert curve.low[n] <= curve.mean[n] <= curve.high[n]
    covered = sum(((f <= x) & (x <= e)).sum() for f, e in zip(curve.first, curve.last, strict=True))
    assert covered == len(x)


def test_a_spike_of_one_iteration_in_a_million_survives():
    values = np.ones(10**6)
    values[612_345] = 50.0
    curve = curve_of(np.arange(1, 10**6 + 1), values)
    assert len(curve) == 560
    assert curve.high.max() == 50.0
    assert curve.mean.max() < 1.1


def test_few_values_are_kept_as_they_are():
    curve = curve_of(np.array([3, 9]), np.array([1.5, 2.5]))
    assert curve.first.tolist() == curve.last.tolist() == [3, 9]
    assert curve.mean.tolist() == [1.5, 2.5]


def note_of(*values: float) -> str:
    curve = curve_of(np.arange(len(values)), np.array(values))
    return figure_of(Chart("a chart", []), [curve], (0, len(values)), [], NARROW)["note"]


def test_only_a_curve_with_spikes_far_above_the_rest_gets_a_logarithm():
    assert note_of(1, 1, 1, 1000) == "logarithmic"
    assert note_of(1, 1, 1, 10) == ""
    assert note_of(0, 1, 1, 1000) == "", "0 has none"


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=9), st.integers(0, 2**52))
def test_any_curve_can_be_drawn_inside_of_its_plot(values, first):
    curve = curve_of(np.arange(first, first + len(values)), np.array(values))
    figure = figure_of(Chart("a chart", [], "", True), [curve], (first, first), [], NARROW)
    left, right = figure["data"]["plot"]
    (line,) = figure["data"]["lines"]
    assert all(left <= x <= right for x in line["x"])
    assert all(curves.TOP <= y <= curves.BOTTOM for y in line["y"])
    assert "nan" not in figure["svg"]
