from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.report.metrics import MOST_LINE_BYTES, TRAIN, MetricsReader
from megatron_hybrid.report.page import TIMING, VALIDATION

TABLES = {TRAIN: ["loss"], VALIDATION: ["loss"], TIMING: ["host_ms", "d2h_ms"]}


def line(iteration: object, loss: object = 1.0, **fields: object) -> str:
    return json.dumps({"kind": "train", "iteration": iteration, "loss": loss, **fields}) + "\n"


def read(path: Path, table: str = TRAIN) -> dict[int, float]:
    reader = MetricsReader(TABLES)
    reader.read(path)
    return losses(reader, table)


def losses(reader: MetricsReader, table: str = TRAIN) -> dict[int, float]:
    columns = reader.columns()[table]
    assert np.all(np.diff(columns.iterations) > 0), "each iteration once"
    pairs = zip(columns.iterations.tolist(), columns.values["loss"].tolist(), strict=True)
    return dict(pairs)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def evaluation(iteration: int, loss: float) -> str:
    record = {"kind": "eval", "split": "validation", "iteration": iteration, "loss": loss}
    return json.dumps(record) + "\n"


def test_repeated_iterations_of_a_resumed_run_replace_all_from_there_on(path):
    path.write_text(line(1, 9.0) + line(2, 8.0) + line(3, 7.0) + line(2, 5.0))
    assert read(path) == {1: 9.0, 2: 5.0}, "iteration 3 is yet to be made again"
    path.write_text(line(1, 9.0) + line(2, 8.0) + line(2, 7.0) + line(3, 6.0))
    assert read(path) == {1: 9.0, 2: 7.0, 3: 6.0}


def test_an_evaluation_beyond_where_the_run_has_resumed_is_forgotten(path):
    before = line(1) + evaluation(1, 9.0) + line(2) + evaluation(2, 8.0)
    path.write_text(before)
    assert read(path, VALIDATION) == {1: 9.0, 2: 8.0}
    # Resumed from iteration 1, whose evaluation may be made again, or not.
    path.write_text(before + line(2))
    assert read(path, VALIDATION) == {1: 9.0}
    path.write_text(before + evaluation(1, 9.5) + line(2) + evaluation(2, 7.0))
    assert read(path, VALIDATION) == {1: 9.5, 2: 7.0}


def test_evaluations_and_lane_times_have_separate_tables(path):
    records = [
        {"kind": "eval", "iteration": 4, "split": "validation", "loss": 2.5},
        {"kind": "eval", "iteration": 4, "split": ["odd"], "loss": 3.5},
        {"kind": "timing", "iteration": 4, "host_ms": 1.25},
        {"kind": "another", "iteration": 4},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(path, VALIDATION) == {4: 2.5}
    assert read(path) == {}
    reader = MetricsReader(TABLES)
    reader.read(path)
    timing = reader.columns()[TIMING]
    assert timing.values["host_ms"].tolist() == [1.25]
    assert (timing.last("host_ms"), timing.last("d2h_ms")) == (1.25, None)


def test_damaged_lines_are_skipped(path):
    torn = line(2)[:20]
    long = "x" * (2 * MOST_LINE_BYTES) + "\n"
    path.write_text(line(1) + torn + "\n" + long + line(3) + "[]\n\n7\nnull\n" + line(4) + torn)
    assert list(read(path)) == [1, 3, 4]


def test_the_end_of_a_line_that_is_too_long_is_no_record(path):
    start = b"x" * MOST_LINE_BYTES
    path.write_bytes(line(1).encode() + start)
    reader = MetricsReader(TABLES)
    reader.read(path)
    with path.open("ab") as stream:
        stream.write(line(2).encode() + line(3).encode())
    reader.read(path)
    assert list(losses(reader)) == [1, 3]
    assert list(read(path)) == [1, 3]


def test_rows_of_another_path_are_forgotten_even_if_there_is_no_file_yet(path):
    path.write_text(line(1))
    reader = MetricsReader(TABLES)
    reader.read(path)
    with pytest.raises(FileNotFoundError):
        reader.read(path.with_name("other"))
    assert losses(reader) == {}
    reader.read(path)
    assert list(losses(reader)) == [1]


@pytest.mark.parametrize("value", [None, "1.5", [1], True, 10**400, math.nan, -math.inf])
def test_a_value_that_is_no_finite_number_is_none(path, value):
    path.write_text(line(1, 1.5) + line(2, value))
    found = read(path)
    assert found[1] == 1.5
    assert math.isnan(found[2])


@pytest.mark.parametrize("iteration", [None, -1, 1.5, "2", True, 10**400, 2.0**53, [2], math.nan])
def test_a_record_without_a_plausible_iteration_is_skipped(path, iteration):
    path.write_text(line(1) + line(iteration))
    assert list(read(path)) == [1]


def test_appended_lines_are_read_later_and_another_file_from_its_beginning(path):
    whole = line(2, 7.0)
    path.write_text(line(1) + whole[:9])
    reader = MetricsReader(TABLES)
    reader.read(path)
    assert losses(reader) == {1: 1.0}
    with path.open("a") as stream:
        stream.write(whole[9:])
    for _ in range(2):
        reader.read(path)
        assert losses(reader) == {1: 1.0, 2: 7.0}
    path.write_text(line(3))
    reader.read(path)
    assert list(losses(reader)) == [3], "a shorter one"
    other = path.with_name("other")
    other.write_text(line(4) + line(5) + line(6))
    reader.read(other)
    assert list(losses(reader)) == [4, 5, 6], "a longer one"


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=6) | st.just(b"\n"), max_size=12))
def test_other_bytes_are_skipped(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(line(1).encode() + b"".join(pieces) + b"\n" + line(2).encode())
    assert list(read(path)) == [1, 2]
