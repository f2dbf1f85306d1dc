from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.report import metrics_file
from megatron_hybrid.report.metrics_file import TRAIN, MetricsReader
from megatron_hybrid.report.page import TIMING, VALIDATION

TABLES = {TRAIN: ["loss"], VALIDATION: ["loss"], TIMING: ["host_ms", "d2h_ms"]}


def line(iteration: object, loss: object = 1.0, **fields: object) -> str:
    return json.dumps({"kind": "train", "iteration": iteration, "loss": loss, **fields}) + "\n"


def read(path: Path, table: str = TRAIN) -> dict[int, float]:
    reader = MetricsReader(path, TABLES)
    reader.read()
    return losses(reader, table)


def losses(reader: MetricsReader, table: str = TRAIN) -> dict[int, float]:
    columns = reader.columns(table)
    pairs = zip(columns.iterations.tolist(), columns.values["loss"].tolist(), strict=True)
    return dict(pairs)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def evaluation(iteration: int, loss: float) -> str:
    record = {"kind": "eval", "split": "validation", "iteration": iteration, "loss": loss}
    return json.dumps(record) + "\n"


def test_what_a_resumed_run_makes_again_replaces_all_from_there_on(path):
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


def test_evaluations_and_lane_times_have_tables_of_their_own(path):
    records = [
        {"kind": "eval", "iteration": 4, "split": "validation", "loss": 2.5},
        {"kind": "eval", "iteration": 4, "split": ["odd"], "loss": 3.5},
        {"kind": "timing", "iteration": 4, "host_ms": 1.25},
        {"kind": "another", "iteration": 4},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(path, VALIDATION) == {4: 2.5}
    assert read(path) == {}
    reader = MetricsReader(path, TABLES)
    reader.read()
    assert reader.columns(TIMING).values["host_ms"].tolist() == [1.25]
    assert reader.columns(TIMING).last("host_ms") == 1.25
    assert reader.columns(TIMING).last("d2h_ms") is None


def test_lines_that_are_torn_or_no_objects_are_skipped_and_the_others_found(path):
    torn = line(2)[:20]
    path.write_text(line(1) + torn + "\n" + line(3) + "[]\n\n7\nnull\n" + line(4) + torn)
    assert list(read(path)) == [1, 3, 4]


def test_lines_parsed_together_never_make_an_object_of_two(path):
    # As one array, [{"a": 1, "kind": ...}, {...}] would be two objects of two lines.
    path.write_text('{"a": 1\n"kind": "train", "iteration": 1},{"a": 2}\n' + line(5))
    assert list(read(path)) == [5]
    path.write_text('{"kind": "train", "a": "1\n{", "iteration": 1}\n' + line(5))
    assert list(read(path)) == [5]


@pytest.mark.parametrize("more", [", 5", ', "x"', ", []", ", null"])
def test_a_line_with_more_than_an_object_is_skipped(path, more):
    path.write_text(line(1) + line(2).strip() + more + "\n" + line(3))
    assert list(read(path)) == [1, 3]


@pytest.mark.parametrize(
    "value", [None, "1.5", [1], {"a": 1}, True, 10**400, math.nan, math.inf, -math.inf, "<b>"]
)
def test_a_value_that_is_no_finite_number_is_none(path, value):
    path.write_text(line(1, 1.5) + line(2, value))
    found = read(path)
    assert found[1] == 1.5
    assert math.isnan(found[2])


@pytest.mark.parametrize("iteration", [None, -1, 1.5, "2", True, 10**400, 2.0**53, [2], math.nan])
def test_a_record_without_a_plausible_iteration_is_skipped(path, iteration):
    path.write_text(line(1) + line(iteration))
    assert list(read(path)) == [1]


def test_what_is_appended_is_read_later_and_a_half_line_once_it_is_whole(path):
    whole = line(2, 7.0)
    path.write_text(line(1) + whole[:9])
    reader = MetricsReader(path, TABLES)
    reader.read()
    assert losses(reader) == {1: 1.0}
    with path.open("a") as stream:
        stream.write(whole[9:])
    reader.read()
    assert losses(reader) == {1: 1.0, 2: 7.0}
    reader.read()
    assert losses(reader) == {1: 1.0, 2: 7.0}


def test_another_file_in_its_place_is_read_from_its_beginning(path):
    path.write_text(line(1) + line(2))
    reader = MetricsReader(path, TABLES)
    reader.read()
    path.write_text(line(3))
    reader.read()
    assert list(losses(reader)) == [3], "a shorter one"

    other = path.with_name("other")
    other.write_text(line(4) + line(5) + line(6))
    other.replace(path)
    reader.read()
    assert list(losses(reader)) == [4, 5, 6], "a longer one"


def test_of_a_file_beyond_the_limits_the_end_is_read_and_that_is_said(path, monkeypatch):
    path.write_text("".join(line(n) for n in range(100)))
    assert not MetricsReader(path, TABLES).is_cut
    monkeypatch.setattr(metrics_file, "_MOST_BYTES", 500)
    reader = MetricsReader(path, TABLES)
    reader.read()
    found = list(losses(reader))
    assert found == list(range(100 - len(found), 100))
    assert 0 < len(found) * len(line(99)) <= 500
    assert reader.is_cut


def test_a_line_without_end_is_never_held(path, monkeypatch):
    monkeypatch.setattr(metrics_file, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", 300)
    path.write_text(line(1) + "x" * 5000 + "\n" + line(2))
    reader = MetricsReader(path, TABLES)
    reader.read()
    assert list(losses(reader)) == [1, 2]
    with path.open("a") as stream:
        stream.write("y" * 5000)
    reader.read()
    assert len(reader._rest) <= 1000


def test_only_a_regular_file_is_opened(path):
    reader = MetricsReader(path, TABLES)
    with pytest.raises(FileNotFoundError):
        reader.read()
    os.mkfifo(path)
    with pytest.raises(OSError, match="Expected a regular file of JSON lines, got a FIFO"):
        reader.read()


PIECES = st.sampled_from(
    [
        line(1),
        line(2, 8.0),
        "{}, 5\n",
        line(3, "x"),
        line(2)[:11],
        "\n",
        "{",
        "[1",
        "\0",
        '{"kind": {}}\n',
    ]
).map(str.encode) | st.binary(max_size=6)


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=12), st.integers(1, 40))
def test_any_bytes_in_blocks_of_any_size_are_read_as_at_once(tmp_path_factory, pieces, block_bytes):
    content = b"".join(pieces)
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_file, "_BLOCK_BYTES", block_bytes)
        in_blocks = read(path)
    np.testing.assert_equal(in_blocks, read(path))
