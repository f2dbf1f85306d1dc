from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hybrid.charts import (
    Canvas,
    figures,
    fixed_axis,
    logarithmic_axis,
    value_axis,
)


def test_text_and_attributes_are_escaped():
    canvas = Canvas(100, 50)
    canvas.text(1, 2, 'a < b & "c"', "#000000")
    canvas.add("path", d="M0 0", class_='"><script/>')
    text, path = ET.fromstring(canvas.svg())
    assert text.text == 'a < b & "c"'
    assert path.get("class") == '"><script/>'


@given(st.floats(-1e100, 1e100), st.floats(0, 1e100))
def test_a_value_axis_holds_its_values_and_has_few_ticks_each_once(low, span):
    axis = value_axis(low, low + span, 200.0, 10.0)
    rounding = 1e-8 * (axis.high - axis.low)
    assert axis.low - rounding <= low <= low + span <= axis.high + rounding
    assert 2 <= len(axis.ticks) <= 8
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 10.0 <= axis.place(low + span) <= axis.place(low) <= 200.0


@given(st.floats(5e-324, 1e299), st.floats(0, 1e300))
@example(5e-324, 1.0)
@example(5e-324, 1e-310)
@example(1e-300, 1e300)
def test_a_logarithmic_axis_holds_any_range(low, high):
    axis = logarithmic_axis(low, max(high, 50 * low), 200.0, 10.0)
    assert 2 <= len(axis.ticks) <= 8
    assert all(0 < tick < math.inf for tick in axis.ticks)
    assert 10.0 <= axis.place(high) <= axis.place(low) <= 200.0 or high < low


@given(st.integers(0, 2**52), st.integers(0, 2**52))
@example(2**52, 0)
def test_an_axis_of_iterations_has_whole_ticks(first, length):
    axis = fixed_axis(first, first + max(length, 1), 50.0, 588.0, least_step=1.0)
    assert all(tick == int(tick) for tick in axis.ticks)
    assert len(axis.ticks) <= 8
    assert axis.place(first) == 50.0
    assert axis.place(first + max(length, 1)) == 588.0


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
