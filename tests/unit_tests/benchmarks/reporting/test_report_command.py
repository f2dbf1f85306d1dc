"""`python -m benchmarks report`, whole: what it writes, and what --check finds stale."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, Ratio
from benchmarks.reporting.blocks import MarkerError, with_contents
from benchmarks.reporting.command import Report, check, main, write
from benchmarks.reporting.stored import stored_results
from tests.helpers.result_files import write_result_file

ROOT = Path(__file__).resolve().parents[4]


def markers(*names: str) -> str:
    return "\n".join(
        f"<!-- benchmarks:{name} begin -->\n<!-- benchmarks:{name} end -->" for name in names
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with results and pages that have been written."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"# Title\n\n{markers('peers', 'picture-ratios')}\n")
    blocks = markers("results", "one", "other", "picture-scaling")
    (tmp_path / "docs" / "benchmarks.md").write_text(blocks)
    (tmp_path / "docs" / "without_blocks.md").write_text("no newline at the end")
    write_result(tmp_path, 2.0)
    assert write(report_of(tmp_path)) == 0
    return tmp_path


def write_result(root: Path, value: float) -> None:
    ours = Measurement("", "ours", "ms", (10.0, 11.0))
    write_result_file(root / "results", "one", [ours], [Ratio("a / b", value, at_least=1.5)])


def report_of(root: Path) -> Report:
    benchmarks = {name: Benchmark(name, "", 1, (), ()) for name in ("one", "other")}
    return Report(root, benchmarks, stored_results(root / "results"))


def test_what_was_written_is_not_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    page = (root / "docs" / "benchmarks.md").read_text()
    assert "| a / b | 2.00 | ≥ 1.5 | met |" in page
    assert "| 1 of 1 |" in page
    assert "docs/img/ratios_dark.svg" in (root / "README.md").read_text()
    assert {path.name for path in (root / "docs" / "img").iterdir()} == {
        "ratios_light.svg",
        "ratios_dark.svg",
    }

    capsys.readouterr()
    assert check(report_of(root)) == 0
    assert write(report_of(root)) == 0
    assert "Nothing has changed." in capsys.readouterr().out
    assert {path: path.read_bytes() for path in written} == written


def test_another_figure_makes_its_blocks_and_pictures_stale(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(root, 1.25)
    capsys.readouterr()
    assert check(report_of(root)) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    results, one, light, dark = lines
    assert results.startswith("docs/benchmarks.md:1: the block results")
    assert "the block one is stale" in one
    assert light.startswith("docs/img/ratios_light.svg: ")
    assert dark.startswith("docs/img/ratios_dark.svg: ")
    assert last.startswith("4 would change.")

    assert write(report_of(root)) == 0
    assert check(report_of(root)) == 0
    assert "**missed**" in (root / "docs" / "benchmarks.md").read_text()


def test_a_block_edited_by_hand_is_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = root / "docs" / "benchmarks.md"
    page.write_text(page.read_text().replace("1 of 1", "2 of 2"))
    capsys.readouterr()
    assert check(report_of(root)) == 1
    assert "the block results is stale" in capsys.readouterr().out


def test_a_picture_edited_by_hand_is_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = root / "docs" / "img" / "ratios_light.svg"
    drawn = picture.read_text()
    picture.write_text(drawn.replace("2.00", "3.00"))
    capsys.readouterr()
    assert check(report_of(root)) == 1
    assert "docs/img/ratios_light.svg: " in capsys.readouterr().out
    assert write(report_of(root)) == 0
    assert picture.read_text() == drawn


def test_a_page_without_the_markers_it_must_have_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "README.md").write_text("# Title\n")
    capsys.readouterr()
    assert check(report_of(root)) == 1
    message = "README.md: the markers of the block peers are missing"
    assert message in capsys.readouterr().out


def test_a_picture_without_results_goes_and_others_stay(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "docs" / "img" / "timeline_light.svg").write_text("<svg/>")
    (root / "results" / "one.json").unlink()
    capsys.readouterr()
    assert check(report_of(root)) == 1
    assert "docs/img/ratios_dark.svg: " in capsys.readouterr().out
    assert write(report_of(root)) == 0
    assert [path.name for path in (root / "docs" / "img").iterdir()] == ["timeline_light.svg"]
    assert check(report_of(root)) == 0


def test_a_marker_of_an_unknown_name_is_rejected_before_anything_is_written(root: Path) -> None:
    write_result(root, 1.25)
    before = (root / "README.md").read_text()
    page = root / "docs" / "z.md"
    page.write_text(markers("three"))
    with pytest.raises(MarkerError, match=r"docs/z.md: Expected .* in a marker, got three."):
        write(report_of(root))
    assert (root / "README.md").read_text() == before
    assert check_text(root) == "**missed** is not there"


def check_text(root: Path) -> str:
    is_there = "**missed**" in (root / "docs" / "benchmarks.md").read_text()
    return "**missed** is there" if is_there else "**missed** is not there"


def test_results_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", "--results", str(tmp_path / "none")]) == 2
    assert "Expected a directory of results, got" in capsys.readouterr().err
    (tmp_path / "a.json").write_text('{"schema": 9}')
    assert main(["--check", "--results", str(tmp_path)]) == 2
    assert "Expected schema 2" in capsys.readouterr().err


def test_the_committed_pages_and_pictures_are_those_of_the_committed_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_results_are_linked_in_generated_blocks_only() -> None:
    link = re.compile(r"benchmarks/results/\w+\.json\)")
    pages = {page: page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    assert any(link.search(text) for text in pages.values())
    written = {page: with_contents(page.name, text, lambda _: "") for page, text in pages.items()}
    assert [page.name for page, text in written.items() if link.search(text)] == []


def test_a_check_does_not_import_torch() -> None:
    program = (
        "import sys; from benchmarks.reporting.command import main; main(['--check']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
