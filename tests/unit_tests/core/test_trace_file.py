"""Recorded timelines as files: complete, nested as Perfetto needs it, and read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

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
    merged,
)

SLICES = (
    Slice(COMPUTE, ITERATION, "iteration 20", 1.0, 4.0, 20),
    Slice(COMPUTE, PHASE, "forward", 1.0, 2.5, 20),
    Slice(COMPUTE, WAIT, "wait for gather", 1.25, 1.5, 20, about="layers.0"),
    Slice(GATHER, WORK, "layers.0", 1.25, 1.5, 20, 1024),
    Slice(HOST, WORK, "layers.1", 3.0, 5.0, 20, 2048),
)


def trace_of(slices: tuple[Slice, ...] = SLICES, rank: int = 1, zero: float = 1e9) -> Trace:
    return Trace(rank, 2, zero, "a machine", slices)


def events_of(content: bytes, ph: str) -> list[Mapping[str, Any]]:
    return [event for event in json.loads(content)["traceEvents"] if event["ph"] == ph]


def test_a_trace_is_what_perfetto_opens():
    content = trace_of().to_json()
    assert json.loads(content)["displayTimeUnit"] == "ms"
    first, *_ = events_of(content, "X")
    assert first == {
        "name": "iteration 20",
        "cat": "iteration",
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "ts": 1e6,
        "dur": 3e6,
        "args": {"iteration": 20},
    }
    names = {(event["name"], event["tid"]): event["args"] for event in events_of(content, "M")}
    assert names["process_name", 0] == {"name": "rank 1"}
    threads = {key[1]: args["name"] for key, args in names.items() if key[0] == "thread_name"}
    assert threads == {0: COMPUTE, 1: GATHER, 4: HOST}
    moved = next(event for event in events_of(content, "X") if event["tid"] == 1)
    assert moved["args"] == {"iteration": 20, "bytes": 1024}


def test_what_is_written_is_what_is_read():
    found = Trace.from_json(trace_of().to_json())
    assert found == trace_of()
    assert found.iterations == {20: SLICES[0]}


@given(
    cuts=st.lists(st.integers(0, 10**6), min_size=2, max_size=8, unique=True).map(sorted),
    shifts=st.lists(st.integers(-1500, 1500), min_size=16, max_size=16),
)
def test_what_touches_is_nested_regardless_of_the_clocks_round(cuts: list[int], shifts: list[int]):
    # Phases end to end, each with a wait that fills it, in microseconds with an error of 1.5.
    times = [1000 * cut for cut in cuts]
    parts = [(a, b) for a, b in pairwise(times) if b - a > 20_000]
    noise = iter(shifts * 4)
    slices = [
        Slice(COMPUTE, kind, "x", (a + next(noise)) / 1e9, (b + next(noise)) / 1e9, 1)
        for a, b in parts
        for kind in (PHASE, WAIT)
    ]
    events = events_of(trace_of(tuple(slices)).to_json(), "X")
    spans = [(round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in events]
    for number, (begin, end) in enumerate(spans):
        for other_begin, other_end in spans[number + 1 :]:
            is_apart = other_begin >= end
            is_inside = begin <= other_begin and other_end <= end
            assert is_apart or is_inside, spans


def test_what_really_overlaps_is_left_as_it_is():
    slices = (
        Slice(GATHER, WORK, "first", 0.0, 1.0, 1),
        Slice(GATHER, WORK, "second", 0.5, 1.5, 1),
    )
    assert Trace.from_json(trace_of(slices).to_json()).slices == slices


def test_merged_ranks_count_from_one_moment():
    early, late = trace_of(rank=0, zero=1e9), trace_of(rank=1, zero=1e9 + 2)
    events = events_of(merged([late, early]), "X")
    begins = {event["pid"]: event["ts"] for event in events if event["cat"] == ITERATION}
    assert begins == {0: 1e6, 1: 3e6}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "no timeline"),
        (b'{"traceEvents": []}', "no timeline"),
        (trace_of().to_json().replace(b'"format": 1', b'"format": 2'), "format 2"),
        (trace_of().to_json().replace(b'"cat": "wait"', b'"cat": "hope"'), "no slice"),
        (trace_of().to_json().replace(b'"cat": "wait"', b'"cat": "work"'), "no slice"),
        (trace_of().to_json().replace(b'"tid": 4', b'"tid": 99'), "no slice"),
        (trace_of().to_json().replace(b'"dur": 3000000.0', b'"dur": -1.0'), "no slice"),
        (trace_of().to_json().replace(b'"dur": 3000000.0', b'"dur": NaN'), "NaN"),
        (trace_of().to_json().replace(b'"dur": 3000000.0', b'"dur": 1e300'), "no slice"),
        (trace_of().to_json().replace(b'"ts": 1000000.0', b'"ts": -1e300'), "no slice"),
        (trace_of(zero=1e300).to_json(), "counts from 1e.300 unix seconds"),
    ],
)
def test_anything_else_is_rejected(content: bytes, reason: str):
    with pytest.raises(ValueError, match=reason):
        Trace.from_json(content)
