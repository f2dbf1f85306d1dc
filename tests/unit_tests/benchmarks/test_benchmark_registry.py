"""benchmarks/runner/registry.py: which benchmarks there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.runner import command
from benchmarks.runner.registry import (
    BENCHMARKS,
    chosen,
    declaration,
    lines,
    registered,
    seconds_of,
)
from tests.helpers.result_files import write_result_file

DECLARED = """
BENCHMARK = Benchmark(
    name="one", question="a against " "b", ranks=2, full=("--rounds=9",), quick=()
)
"""


def test_every_module_of_the_package_is_a_benchmark_with_a_main():
    modules = {path.stem: path for path in BENCHMARKS.glob("*.py") if path.stem[:2] != "__"}
    found = registered()
    assert list(found) == sorted(modules)
    assert "host_adam" in found
    for path in modules.values():
        functions = [one for one in ast.parse(path.read_text()).body if hasattr(one, "args")]
        (main,) = (one for one in functions if one.name == "main")
        assert [argument.arg for argument in main.args.args] == ["argv"], path
    assert all(found[name].question for name in found)


def test_no_docs_page_and_no_docstring_starts_a_benchmark_as_a_file():
    root = BENCHMARKS.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *BENCHMARKS.rglob("*.py")]
    started = ("python benchmarks/", "2 benchmarks/", "1 benchmarks/")
    assert not [page for page in pages if any(how in page.read_text() for how in started)]


def test_the_pages_example_is_a_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "sums.py"
    path.write_text(program)
    found = declaration(path)
    assert found.quick == ("--rounds=3",)

    monkeypatch.delenv(report.RESULT_FILE, raising=False)
    names: dict[str, Any] = {"__name__": "sums"}
    exec(compile(program, str(path), "exec"), names)
    names["main"](found.quick)
    assert "float64 / float32" in capsys.readouterr().out


def test_a_declaration_is_read_without_importing_the_module(tmp_path: Path):
    path = tmp_path / "one.py"
    path.write_text("import a_module_that_is_not_installed\n" + DECLARED)
    assert declaration(path) == Benchmark("one", "a against b", 2, ("--rounds=9",), ())


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "BENCHMARK = None\n",
        DECLARED.replace("ranks=2", "ranks=RANKS"),
        DECLARED.replace("ranks=2", "ranks=0"),
        DECLARED.replace('"one"', '"another"'),
    ],
)
def test_a_module_that_does_not_declare_itself_is_rejected(tmp_path: Path, text: str):
    (tmp_path / "one.py").write_text(text)
    with pytest.raises(ValueError, match="Expected "):
        registered(tmp_path)


def test_names_choose_benchmarks_once_each_in_their_order():
    known = {name: Benchmark(name, "", 1, (), ()) for name in ("a", "b", "c")}
    assert [one.name for one in chosen(known, [])] == ["a", "b", "c"]
    assert [one.name for one in chosen(known, ["c", "a", "c"])] == ["c", "a"]


def test_unknown_names_are_one_error_with_those_that_are_near(capsys: pytest.CaptureFixture[str]):
    assert command.main(["host_adm", "fsdp_step", "step", "qqq"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'host_adm' (near: host_adam)" in line
    assert "'qqq'; " not in line
    assert "'qqq'." in line
    for near in ("fsdp_step", "moe_step", "offload_step"):
        assert near in line.partition("'step'")[2]


def test_the_list_has_the_seconds_of_the_stored_results(tmp_path: Path):
    one = Benchmark("one", "a against b", 2, (), (), environment="deepspeed")
    write_result_file(tmp_path, "one", seconds=61.6)
    row, question = list(lines([one], seconds_of(tmp_path), {}))[1:]
    assert row.split() == ["one", "2", "62", "s", "-", "deepspeed"]
    assert question.strip() == "a against b"
