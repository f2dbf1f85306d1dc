"""Hidden shares: the arithmetic of intervals, against counting cell by cell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.trace_file import (
    COMPUTE,
    GATHER,
    HOST,
    ITERATION,
    PHASE,
    WAIT,
    WORK,
    Slice,
    Trace,
)
from megatron_hybrid.timeline import length, shares_of, united, without

CELLS = 24
intervals = st.lists(
    st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(lambda pair: tuple(sorted(pair))),
    max_size=6,
)


def cells(spans) -> set[int]:
    return {cell for begin, end in spans for cell in range(begin, end)}


@given(intervals, intervals)
def test_intervals_are_sets_of_moments(first, second):
    for found, expected in (
        (united(first), cells(first)),
        (without(first, second), cells(first) - cells(second)),
    ):
        assert cells(found) == expected
        assert length(found) == len(expected)
        assert found == sorted(found)
        assert all(begin < end for begin, end in found)


@given(phases=intervals, waits=intervals, busy=intervals, other=intervals)
def test_a_hidden_share_is_busy_time_during_computation(phases, waits, busy, other):
    whole = (4, 20)

    def slices(row: str, kind: str, name: str, spans) -> list[Slice]:
        return [Slice(row, kind, name, begin, end, 7, 10) for begin, end in spans]

    trace = Trace(
        0,
        1,
        0.0,
        "a machine",
        (
            *slices(COMPUTE, ITERATION, "iteration 7", [whole]),
            *slices(COMPUTE, PHASE, "forward", phases),
            *slices(COMPUTE, PHASE, "data", other),
            *slices(COMPUTE, WAIT, "wait for gather", waits),
            *slices(GATHER, WORK, "layers.0", busy),
        ),
    )
    shares = shares_of(trace, 7)
    inside = set(range(*whole))
    computing = (cells(phases) - cells(waits)) & inside
    assert (shares.seconds, shares.computing_seconds) == (16, len(computing))
    assert shares.waiting_seconds == len(cells(waits) & inside)

    seen = [(begin, end) for begin, end in busy if begin < 20 and end > 4]
    assert [lane.lane for lane in shares.lanes] == ([GATHER] if seen else [])
    for lane in shares.lanes:
        assert lane.busy_seconds == len(cells(busy) & inside)
        assert lane.hidden_seconds == len(cells(busy) & computing)
        assert lane.waited_seconds == shares.waiting_seconds
        if lane.busy_seconds:
            assert lane.hidden_share == pytest.approx(lane.hidden_seconds / lane.busy_seconds)
            assert 0 <= lane.hidden_share <= 1


def test_work_of_another_iteration_counts_where_it_is_done_and_its_bytes_where_it_began():
    trace = Trace(
        0,
        1,
        0.0,
        "a machine",
        (
            Slice(COMPUTE, ITERATION, "iteration 1", 0.0, 10.0, 1),
            Slice(COMPUTE, PHASE, "forward", 0.0, 10.0, 1),
            Slice(HOST, WORK, "layers.0", 8.0, 13.0, 1, 100),
            Slice(COMPUTE, ITERATION, "iteration 2", 10.0, 20.0, 2),
            Slice(COMPUTE, PHASE, "data", 10.0, 11.0, 2),
            Slice(COMPUTE, PHASE, "forward", 11.0, 20.0, 2),
        ),
    )
    (first,), (second,) = (shares_of(trace, number).lanes for number in (1, 2))
    assert (first.busy_seconds, first.hidden_seconds, first.bytes) == (2.0, 2.0, 100)
    assert (second.busy_seconds, second.hidden_seconds, second.bytes) == (3.0, 2.0, 0)
    assert second.hidden_share == pytest.approx(2 / 3)
