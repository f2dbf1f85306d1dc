"""benchmarks/helpers: results of a benchmark, its timing, its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.helpers import report
from benchmarks.helpers.result import Measurement, NotRun, Ratio, Result, measured

RESULT = Result(
    (
        *measured({"ours": [2.0, 1.0, 3.0], "theirs": [4.0, 4.0, 5.0]}, "ms", "save"),
        Measurement("", "ours", "tokens/s", (100.0,)),
    ),
    (
        Ratio("theirs / ours", 2.0, at_least=1.5),
        Ratio("growth", 3.0, at_most=1.2),
        Ratio("plain", 1.0),
    ),
    (NotRun("another", "it is not installed"),),
    {"rounds": 3},
    {"parameters": 12, "losses": {"ours": 1.5}},
)


def test_a_result_comes_back_from_its_json_as_it_was():
    again = Result.from_json(json.loads(json.dumps(RESULT.to_json())))
    assert again == RESULT


def test_a_side_is_told_by_its_median_its_spread_and_every_round():
    told = RESULT.to_json()["measurements"][0]
    assert told["values"] == (2.0, 1.0, 3.0)
    assert told["median"] == 2.0
    assert told["quartiles"] == (1.5, 2.5)


def test_one_value_is_its_own_quartiles():
    assert Measurement("", "ours", "ms", (7.0,)).quartiles == (7.0, 7.0)
    with pytest.raises(ValueError, match="Expected at least one value"):
        Measurement("save", "ours", "ms", ())


@pytest.mark.parametrize(
    ("ratio", "is_met"),
    [
        (Ratio("", 1.4, at_least=1.4), True),
        (Ratio("", 1.39, at_least=1.4), False),
        (Ratio("", 1.3, at_most=1.3), True),
        (Ratio("", 1.31, at_most=1.3), False),
        (Ratio("", 0.5, at_least=0.9, at_most=1.1), False),
        (Ratio("", 5.0), None),
    ],
)
def test_a_bar_is_met_or_missed_or_not_stated(ratio: Ratio, is_met: bool | None):
    assert ratio.is_met is is_met


def test_each_round_has_every_side_once_in_an_order_of_its_own():
    names = ["a", "b", "c", "d"]
    order = list(report.schedule(names, 6, seed=3))
    rounds = [order[i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(one) == names for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert order == list(report.schedule(names, 6, seed=3)), "ranks would run different sides"


def test_rounds_that_warm_up_are_run_and_not_kept():
    calls = {"a": 0, "b": 0}

    def count(name: str) -> int:
        calls[name] += 1
        return calls[name]

    found = report.interleaved({name: lambda n=name: count(n) for name in calls}, 3, warm_up=2)
    assert found == {"a": [3, 4, 5], "b": [3, 4, 5]}


def test_a_benchmark_alone_prints_its_result_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv(report.RESULT_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    report.hand_over(RESULT)

    printed = capsys.readouterr().out.splitlines()
    (missed,) = (line for line in printed if "growth" in line)
    assert missed.split() == ["growth", "3", "<=", "1.2", "MISSED"]
    assert any("theirs / ours" in line and line.endswith("met") for line in printed)
    assert "not run: another: it is not installed" in printed
    assert not list(tmp_path.iterdir())


def test_the_file_that_the_runner_expects_goes_before_the_one_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    report.hand_over(RESULT, tmp_path / "folder" / "alone.json")
    alone = json.loads((tmp_path / "folder" / "alone.json").read_text())
    assert Result.from_json(alone) == RESULT
    assert "python" in alone["versions"]

    monkeypatch.setenv(report.RESULT_FILE, str(tmp_path / "expected.json"))
    report.hand_over(RESULT, tmp_path / "ignored.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.json", "folder"]


def test_a_result_that_json_has_no_word_for_leaves_no_file(tmp_path: Path):
    infinite = Result((), (Ratio("broken", float("inf")),))
    with pytest.raises(ValueError, match="JSON"):
        report.hand_over(infinite, tmp_path / "result.json")
    assert not list(tmp_path.iterdir())
