"""The tables of results, and the comparison with the peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, NotRun, Ratio
from benchmarks.reporting.peers import CLAIMS, peers_block, read_comparison
from benchmarks.reporting.stored import stored_results
from benchmarks.reporting.tables import benchmark_block, picture_block, results_block
from tests.helpers.result_files import write_result_file

ROOT = Path(__file__).resolve().parents[4]
MEASURED_ON = "A CPU, 2 cores, 24 GiB, torch 2.13.0 · 2026-05-03 · commit 0123456"


def benchmarks(*names: str) -> list[Benchmark]:
    return [Benchmark(name, f"What {name} compares", 1, (), ()) for name in names]


def test_a_benchmark_has_a_row_with_the_bars_that_it_misses_and_the_sides_that_did_not_run(
    tmp_path: Path,
) -> None:
    ratios = [Ratio("a / b", 1.714, at_least=1.5), Ratio("c | d", 2, at_most=1.5), Ratio("e", 3)]
    write_result_file(tmp_path, "two", ratios=ratios, not_run=[NotRun("peer", "needs CUDA")])
    write_result_file(tmp_path, "without_bars", ratios=[Ratio("f", 1)])
    results = stored_results(tmp_path)

    named = benchmarks("one", "two", "without_bars")
    assert results_block(named, results, "../").splitlines() == [
        "| benchmark | what is compared | bars met | missed, or not run |",
        "|---|---|---|---|",
        "| `one` | What one compares | not measured |  |",
        "| [`two`](../benchmarks/results/two.json) | What two compares | 1 of 2 "
        r"| c \| d = 2.00 (≤ 1.5); peer not run: needs CUDA |",
        "| [`without_bars`](../benchmarks/results/without_bars.json) | What without_bars compares "
        "| no bars |  |",
        "",
        f"Measured on {MEASURED_ON}.",
    ]


def test_without_results_a_table_says_so() -> None:
    assert results_block(benchmarks("one"), {}, "").splitlines()[2:] == [
        "| `one` | What one compares | not measured |  |",
        "",
        "No result has been stored yet.",
    ]


def test_a_benchmark_has_its_sides_with_median_and_spread(tmp_path: Path) -> None:
    measurements = [
        Measurement("save", "ours", "s", (0.5, 0.7, 0.6)),
        Measurement("load", "ours", "tokens/s", (1500.0,)),
        Measurement("save", "DCP", "s", (2.0, 2.1, 2.5)),
    ]
    not_run = [NotRun("DeepSpeed", "no compiler")]
    ratios = [Ratio("DCP / ours", 3.5, at_least=3), Ratio("save / load", 2.0)]
    write_result_file(tmp_path, "one", measurements, ratios, not_run)

    assert benchmark_block(stored_results(tmp_path)["one"], "").splitlines() == [
        "|  | side | median | middle half of the rounds | rounds |",
        "|---|---|---|---|---|",
        "| save | ours | 600 ms | 550 to 650 ms | 3 |",
        "|  | DCP | 2.10 s | 2.05 to 2.30 s | 3 |",
        "| load | ours | 1,500 tokens/s |  | 1 |",
        "|  | DeepSpeed | not run: no compiler |  |  |",
        "",
        "| ratio | measured | bar |  |",
        "|---|---|---|---|",
        "| DCP / ours | 3.50 | ≥ 3 | met |",
        "",
        f"Measured on {MEASURED_ON} ([result](benchmarks/results/one.json)).",
    ]


def test_a_benchmark_without_sides_has_its_ratios_even_without_a_bar(tmp_path: Path) -> None:
    write_result_file(tmp_path, "one", ratios=[Ratio("DCP / ours", 3.5)])
    assert "| DCP / ours | 3.50 |" in benchmark_block(stored_results(tmp_path)["one"], "")


def test_a_benchmark_that_found_nothing_still_says_where_it_ran(tmp_path: Path) -> None:
    write_result_file(tmp_path, "one")
    assert benchmark_block(stored_results(tmp_path)["one"], "").startswith("Measured on A CPU")
    assert benchmark_block(None, "").startswith("Not measured")


def test_a_picture_has_a_variant_for_each_brightness_or_says_that_it_is_not_there() -> None:
    assert 'srcset="docs/img/ratios_dark.svg"' in picture_block("ratios", is_drawn=True, root="")
    light, dark = picture_block("ratios", is_drawn=True, root="../").splitlines()
    assert light.endswith("(img/ratios_light.svg#gh-light-mode-only)")
    assert dark.endswith("(img/ratios_dark.svg#gh-dark-mode-only)")
    assert "not measured yet" in picture_block("ratios", is_drawn=False, root="")


COMPARISON = {
    "columns": {
        "here": {"title": "here", "side": "ours"},
        "there": {"title": "there", "side": "them"},
        "else": {"title": "elsewhere", "side": "others"},
    },
    "properties": [
        {
            "name": "does it",
            "here": {"claim": "yes", "source": "docs/a.md"},
            "there": {"claim": "no", "source": "https://there"},
            "else": {"claim": "no", "source": "https://there"},
        }
    ],
    "measured": [
        {"name": "speed", "benchmark": "run", "group": "tokens/s", "relative": True},
        {"name": "memory", "benchmark": "run", "group": "memory"},
        {"name": "resumes", "benchmark": "run", "fact": "resumes"},
        {"name": "loads", "benchmark": "run", "fact": "loads"},
        {"name": "pass", "benchmark": "pass", "group": "", "sides": {"here": "one pass"}},
    ],
    "versions": "Of today.",
}


def comparison_file(folder: Path, **changed: object) -> Path:
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump({**COMPARISON, **changed}, sort_keys=False))
    return path


def test_the_comparison_is_filled_in_from_results(tmp_path: Path) -> None:
    yes, no = {"loads": "yes", "is_exact": True}, {"loads": "no", "why": "it does not"}
    exact = {"is_exact": True, "loads_on": {"1": yes, "3": yes}}
    inexact = {
        "is_exact": False,
        "largest_difference": {"losses": 0.25, "weights": 1e-3},
        "loads_on": {"1": no, "3": no},
        "after_conversion": {"loads_on": {"1": yes, "3": no}},
    }
    write_result_file(
        tmp_path,
        "run",
        [
            Measurement("tokens/s", "ours", "tokens/s", (200.0,)),
            Measurement("tokens/s", "them", "tokens/s", (100.0,)),
            Measurement("memory", "ours", "MiB", (64.0,)),
        ],
        not_run=[NotRun("others", "needs CUDA")],
        facts={"sides": {"ours": {"resume": exact}, "them": {"resume": inexact}}},
    )
    comparison = read_comparison(comparison_file(tmp_path))
    assert peers_block(comparison, stored_results(tmp_path), "").splitlines() == [
        "|  | here | there | elsewhere |",
        "|---|---|---|---|",
        "| does it | [yes](docs/a.md) | no [[1]](https://there) | no [[1]](https://there) |",
        "| speed | 1.00 (200 tokens/s) | 0.500 (100 tokens/s) | not run |",
        "| memory | 64 MiB | not measured | not run |",
        "| resumes | yes | no, they differ by up to 0.250 | not run |",
        "| loads | yes, on 1 and 3 | after conversion, on 1 | not run |",
        "| pass | not measured | not measured | not measured |",
        "",
        f"Measured on {MEASURED_ON}.",
        "",
        "Of today.",
        "",
        "- Not run in `run`: others, needs CUDA",
    ]


def test_a_page_of_docs_links_its_neighbours(tmp_path: Path) -> None:
    comparison = read_comparison(comparison_file(tmp_path))
    assert "[yes](a.md)" in peers_block(comparison, {}, "../")


def test_a_comparison_with_a_cell_missing_is_rejected(tmp_path: Path) -> None:
    row = {key: cell for key, cell in COMPARISON["properties"][0].items() if key != "there"}
    with pytest.raises(ValueError, match="Expected claims about here, there, else in the row"):
        read_comparison(comparison_file(tmp_path, properties=[row]))
    with pytest.raises(ValueError, match="a group or a fact for the row 'x'"):
        read_comparison(comparison_file(tmp_path, measured=[{"name": "x", "benchmark": "run"}]))
    odd = {"name": "x", "benchmark": "run", "fact": "y"}
    with pytest.raises(ValueError, match="Expected resumes or loads as the fact of 'x', got 'y'"):
        read_comparison(comparison_file(tmp_path, measured=[odd]))


def test_the_projects_own_comparison_can_be_read_and_cites_pages_that_exist() -> None:
    comparison = read_comparison(CLAIMS)
    sources = [c.source for row in comparison.properties.values() for c in row.values()]
    pages = [source for source in sources if source.startswith("docs/")]
    assert len(pages) == len(comparison.properties)
    assert [page for page in pages if not (ROOT / page).is_file()] == []
    assert all(source.startswith("https://") for source in sources if source not in pages)


def test_a_result_without_measurements_shows_its_computed_table(tmp_path):
    computed = {"header": ["machine", "step"], "rows": [["one", "1.2x"]]}
    ratios = [Ratio("with a bar", 1.0, at_most=1.1), Ratio("plain", 2.0)]
    write_result_file(tmp_path, "one", ratios=ratios, facts={"computed_table": computed})
    first, _, row, _, *bars, _, last = benchmark_block(
        stored_results(tmp_path)["one"], ""
    ).splitlines()
    assert (first, row) == ("| machine | step |", "| one | 1.2x |")
    assert [bar.split(" | ")[0] for bar in bars] == ["| ratio", "|---|---|---|---|", "| with a bar"]
    assert last.startswith("Computed, not measured")
