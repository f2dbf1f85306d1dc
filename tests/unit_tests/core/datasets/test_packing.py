"""Samples packed into rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.packing import pack_first_fit


@given(st.lists(st.integers(1, 20), max_size=400), st.integers(20, 60))
def test_each_sample_is_in_one_row_and_no_row_is_too_full(lengths: list[int], row: int) -> None:
    rows = pack_first_fit(lengths, row)
    assert sorted(number for own in rows for number in own) == list(range(len(lengths)))
    for own in rows:
        assert own == sorted(own)
        assert 1 <= sum(lengths[number] for number in own) <= row


@given(st.lists(st.integers(1, 20), max_size=120), st.integers(20, 60))
def test_few_rows_are_filled_as_by_first_fit(lengths: list[int], row: int) -> None:
    expected: list[list[int]] = []
    for number, length in enumerate(lengths):
        fits = (own for own in expected if sum(lengths[n] for n in own) + length <= row)
        own = next(fits, None)
        if own is None:
            expected.append([number])
        else:
            own.append(number)
    if len(expected) <= 64:
        assert pack_first_fit(lengths, row) == expected


def test_a_row_that_has_been_closed_gets_no_more() -> None:
    # Of 100 rows with room for 4 more, only the newest 64 are still open.
    rows = pack_first_fit([6] * 100 + [4], 10)
    assert len(rows) == 100
    assert rows[36] == [36, 100]


@pytest.mark.parametrize(("lengths", "got"), [([3, 11], "11 of sample 1"), ([0], "0 of sample 0")])
def test_samples_that_fit_into_no_row_are_rejected(lengths: list[int], got: str) -> None:
    with pytest.raises(ValueError, match=f"samples of 1 to 10 tokens, got {got}"):
        pack_first_fit(lengths, 10)
