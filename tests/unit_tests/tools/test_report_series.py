from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatron_hybrid.report.axis import figures, iteration_axis, tick_labels, value_axis
from megatron_hybrid.report.series import Curve, curve_of, value_domain, wants_logarithm

VALUES = st.floats(-1e300, 1e300, allow_nan=False) | st.just(math.nan)


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
    assert curve.is_thinned
    assert curve.high.max() == 50.0
    assert curve.mean.max() < 1.1


def test_few_values_are_kept_as_they_are():
    curve = curve_of(np.array([3, 9]), np.array([1.5, 2.5]))
    assert not curve.is_thinned
    assert curve.mean.tolist() == [1.5, 2.5]


def curve(*values: float) -> Curve:
    return curve_of(np.arange(len(values)), np.array(values))


def test_only_a_curve_with_spikes_far_above_the_rest_gets_a_logarithm():
    assert wants_logarithm([curve(1, 1, 1, 1000)])
    assert not wants_logarithm([curve(1, 1, 1, 10)])
    assert not wants_logarithm([curve(0, 1, 1, 1000)]), "0 has none"
    assert not wants_logarithm([])
    assert value_domain([]) == (0.0, 1.0)
    assert value_domain([curve(3, 1), curve(7)]) == (1.0, 7.0)


@pytest.mark.parametrize(("low", "high"), [(3.9, 10.8), (0.31, 2.2), (1.71, 5.58)])
def test_a_curve_far_above_0_fills_most_of_its_axis(low, high):
    axis = value_axis(low, high, 200.0, 10.0)
    assert (high - low) / (axis.high - axis.low) > 0.75


@given(st.floats(-1e299, 1e299), st.floats(0, 1e299))
def test_a_value_axis_holds_its_values_and_has_few_ticks_each_once(low, span):
    axis = value_axis(low, low + span, 200.0, 10.0)
    rounding = 1e-8 * (axis.high / 2 - axis.low / 2)
    assert axis.low - rounding <= low <= low + span <= axis.high + rounding
    assert 2 <= len(axis.ticks) <= 8
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 10.0 <= axis.place(low + span) <= axis.place(low) <= 200.0


@given(st.floats(5e-324, 1e299), st.floats(0, 1e300))
@example(5e-324, 1.0)
@example(5e-324, 1e-310)
@example(1e-300, 1e300)
def test_a_logarithmic_axis_holds_any_range(low, high):
    axis = value_axis(low, max(high, 50 * low), 200.0, 10.0, is_logarithmic=True)
    assert 2 <= len(axis.ticks) <= 8
    assert all(0 < tick < math.inf for tick in axis.ticks)
    assert 10.0 <= axis.place(high) <= axis.place(low) <= 200.0 or high < low


@given(st.integers(0, 2**52), st.integers(0, 2**52))
@example(2**52, 0)
def test_an_axis_of_iterations_has_whole_ticks(first, length):
    axis = iteration_axis(first, first + length, 50.0, 588.0)
    assert all(tick == int(tick) for tick in axis.ticks)
    assert len(axis.ticks) <= 8
    assert axis.place(first) == 50.0
    assert axis.place(first + max(length, 1)) == 588.0


@given(st.floats(1e-30, 1e30), st.floats(1.0, 1e30))
def test_an_axis_of_logarithms_has_powers_of_ten(low, factor):
    axis = value_axis(low, low * factor * 50, 200.0, 10.0, is_logarithmic=True)
    assert axis.low <= low * 1.000001
    assert axis.high >= low * factor * 49.9
    assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in axis.ticks)
    assert len(axis.ticks) <= 8
    assert len(set(axis.labels())) == len(axis.ticks)


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ((0.0, 100.0, 200.0), ["0", "100", "200"]),
        ((0.0, 0.5, 1.0), ["0", "0.5", "1.0"]),
        ((0.8, 0.85, 0.9), ["0.80", "0.85", "0.90"]),
        ((0.0, 20000.0), ["0", "20k"]),
        ((0.0, 400_000.0, 1_000_000.0), ["0", "0.4M", "1.0M"]),
        ((0.0, 2e-4, 4e-4), ["0", "2e-4", "4e-4"]),
        ((0.0,), ["0"]),
        ((), []),
    ],
)
def test_ticks_have_as_many_digits_as_their_distance_needs(ticks, labels):
    assert tick_labels(ticks) == labels


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (4.0812, "4.081"),
        (0.0015, "0.001500"),
        (1.5e-4, "1.5e-4"),
        (5421.3, "5421"),
        (-12.345, "-12.35"),
        (12345.0, "12.35k"),
        (9_876_543.0, "9.877M"),
        (1e300, "1e300"),
        (5e-324, "4.94e-324"),
    ],
)
def test_a_figure_has_four_significant_digits(value, text):
    assert figures(value) == text
