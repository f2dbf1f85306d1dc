"""Figures as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reporting.rounding import bar, figure, figures, number, ratio, spread


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0067, "s", "6.70 ms"),
        (335.5, "ms", "336 ms"),
        (1142.8, "ms", "1.14 s"),
        (55.8, "us", "55.8 µs"),
        (0, "s", "0 s"),
        (1163886592, "bytes", "1.08 GiB"),
        (768, "MiB", "768 MiB"),
        (1234.5, "tokens/s", "1,230 tokens/s"),
        (2048, "MiB/s", "2 GiB/s"),
        (133.4, "us/token", "133 µs/token"),
        (28, "", "28"),
        (1e-7, "", "1.00e-07"),
        (-2.5, "s", "-2.50 s"),
    ],
)
def test_a_figure_has_three_digits_and_a_unit_of_its_size(
    value: float, unit: str, shown: str
) -> None:
    assert figure(value, unit) == shown


def test_figures_that_are_compared_share_a_unit_unless_one_would_be_unreadable() -> None:
    assert figures([700, 1340], "MiB") == ["700 MiB", "1,340 MiB"]
    assert figures([0.0067, 0.566], "s") == ["6.70 ms", "566 ms"]
    assert figures([1e-6, 10], "s") == ["1 µs", "10 s"]


def test_a_spread_names_a_common_unit_once() -> None:
    assert spread(0.0061, 0.0072, "s") == "6.10 to 7.20 ms"
    assert spread(0.9, 1.1, "s") == "900 ms to 1.10 s"


def test_a_ratio_that_misses_its_bar_by_little_is_not_rounded_up_to_it() -> None:
    assert ratio(0.7996) == "0.800"
    assert ratio(0.7996, 0.8) == "0.7996"
    assert ratio(1.0000001, None, 1.0) == "1.0000001"
    assert ratio(1.0, 1.0) == "1.00"
    assert ratio(0, None, 0) == "0"


def test_a_bar_is_written_as_it_is_stated() -> None:
    assert bar(1.5, None) == "≥ 1.5"
    assert bar(0.95, 1.05) == "≥ 0.95 and ≤ 1.05"
    assert bar(None, None) == ""


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    FINITE,
    FINITE,
    st.sampled_from(["s", "ms", "us", "bytes", "MiB", "tokens/s", "us/token", "", "x"]),
)
def test_any_finite_figure_can_be_written_in_a_few_characters(
    value: float, other: float, unit: str
) -> None:
    for text in (number(value), figure(value, unit), *figures([value, other], unit)):
        assert len(text) <= 23
        assert not {"nan", "inf"} & {*text.split()}
    if abs(value) < 1e308:  # rounded up, more would be no float
        assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


@given(FINITE, FINITE)
def test_a_ratio_is_shown_on_its_side_of_the_bar(value: float, limit: float) -> None:
    shown = float(ratio(value, limit).replace(",", ""))
    assert (shown < limit, shown > limit) == (value < limit, value > limit)
