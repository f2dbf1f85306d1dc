"""Which result files count, and what is said about those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reporting.stored import ResultFileError, provenance, stored_results
from tests.helpers.result_files import write_result_file


def test_full_results_are_found_by_benchmark_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_result_file(tmp_path, name, facts={"of": name})
    write_result_file(tmp_path, "c", mode="quick")

    found = stored_results(tmp_path)
    assert [(name, one.file) for name, one in found.items()] == [("a", "a.json"), ("b", "b.json")]
    assert [one.result.facts for one in found.values()] == [{"of": "a"}, {"of": "b"}]


def test_a_result_under_the_name_of_another_benchmark_is_an_error(tmp_path: Path) -> None:
    write_result_file(tmp_path, "a").rename(tmp_path / "a_2026-05-03.json")
    with pytest.raises(ResultFileError, match=r"a_2026-05-03\.json"):
        stored_results(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expected JSON in .*a.json, got"),
        ("[]", "Expected schema 2 in .*a.json, got None"),
        ('{"schema": 3}', "Expected schema 2 in .*a.json, got 3"),
        ('{"schema": 2, "facts": {"x": [1, Infinity]}}', r"got inf at facts.x\[1\]"),
        ('{"schema": 2}', "Expected the field 'mode' in .*a.json; it is missing"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ResultFileError, match=message):
        stored_results(tmp_path)


@pytest.mark.parametrize("field", ["benchmark", "machine", "versions", "measurements", "ratios"])
def test_a_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    path = write_result_file(tmp_path, "a")
    content = json.loads(path.read_text())
    del content[field]
    path.write_text(json.dumps(content))
    with pytest.raises(ResultFileError, match=f"the field '{field}' in"):
        stored_results(tmp_path)


@pytest.mark.parametrize(
    "change", [{"measurements": [7]}, {"measurements": None}, {"machine": None}, {"date": 5}]
)
def test_a_field_of_another_type_is_an_error_of_the_file(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = write_result_file(tmp_path, "a")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ResultFileError, match=r"a\.json"):
        stored_results(tmp_path)


def test_the_provenance_says_machine_days_and_commits_once(tmp_path: Path) -> None:
    write_result_file(tmp_path, "a")
    write_result_file(
        tmp_path, "b", date="2026-05-09T10:00:00+00:00", commit="fedcba9876543210", is_dirty=True
    )
    other = {"cpu": "Another CPU", "cores": 8, "accelerator": "a GPU"}
    write_result_file(tmp_path, "c", machine=other, commit=None, is_dirty=None)

    assert provenance([*stored_results(tmp_path).values()]) == [
        "A CPU, 2 cores, 24 GiB, torch 2.13.0 · 2026-05-03 to 2026-05-09 · "
        "commits 0123456 to fedcba9 with changes",
        "Another CPU, 8 cores, a GPU, torch 2.13.0 · 2026-05-03 · commit unknown",
    ]
