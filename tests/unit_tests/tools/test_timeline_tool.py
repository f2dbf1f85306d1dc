"""`timeline`: what it prints and draws of a trace made by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.trace_file import (
    COMPUTE,
    DISK,
    GATHER,
    HOST,
    ITERATION,
    PHASE,
    WAIT,
    WORK,
    Slice,
    Trace,
)
from megatron_hybrid import timeline
from megatron_hybrid.charts import blended
from megatron_hybrid.timeline import draw

ROOT = Path(__file__).resolve().parents[3]


def trace_of(rank: int, iterations: tuple[int, ...] = (20, 21)) -> Trace:
    """Iterations of 100 ms, of which 60 compute and 20 wait."""
    slices: list[Slice] = []
    for number, iteration in enumerate(iterations):

        def add(row: str, kind: str, name: str, begin: int, end: int, nbytes: int = 0) -> None:
            first = 0.1 * number  # noqa: B023  called at once
            slices.append(
                Slice(row, kind, name, first + begin / 1e3, first + end / 1e3, iteration, nbytes)  # noqa: B023
            )

        add(COMPUTE, ITERATION, f"iteration {iteration}", 0, 100)
        add(COMPUTE, PHASE, "data", 0, 10)
        add(COMPUTE, PHASE, "forward", 10, 50)
        add(COMPUTE, WAIT, "wait for gather", 10, 20)
        add(COMPUTE, PHASE, "backward", 50, 80)
        add(COMPUTE, PHASE, "norm", 80, 90)
        add(COMPUTE, WAIT, "wait for ranks", 80, 90)
        add(GATHER, WORK, "decoder.layers.0", 15, 25, 1 << 20)
        add(GATHER, WORK, "decoder.layers.1", 25, 45, 1 << 20)
        add(HOST, WORK, "decoder.layers.0", 90, 95)
    return Trace(rank, 2, 1.7e9, "a machine, 2 cores", tuple(sorted(slices, key=lambda s: s.begin)))


def write(folder: Path, *ranks: int) -> Path:
    folder.mkdir(parents=True)
    for rank in ranks:
        (folder / f"trace_rank{rank}.json").write_bytes(trace_of(rank).to_json())
    return folder


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write(tmp_path / "run" / "timelines" / "iterations_20-21", 0, 1)


def shown(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert timeline.main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert timeline.main([str(word) for word in argv], "timeline") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, "one line"
    return captured.err


def test_shares_are_printed(recording, capsys):
    lines = shown(capsys, recording).splitlines()
    assert lines[0].startswith("iteration 21, rank 0 of 2, a machine, 2 cores, 2023-11-14 22:13:20")
    assert lines[1] == "100.0 ms: computing 60.0%, waiting 20.0%"
    table = {line[:17].strip(): line[17:].split() for line in lines[4:]}
    assert table["gather"] == ["30.0", "83.3%", "5.0", "10.0", "2.0"]
    assert table["host"] == ["5.0", "0.0%", "5.0", "0.0", "-"]
    assert table["other ranks"] == ["10.0"]


def test_json_has_the_same_values(recording, capsys):
    found = json.loads(shown(capsys, recording, "--json", "--rank", 1, "--iteration", 20))
    assert (found["rank"], found["iteration"], found["recorded_iterations"]) == (1, 20, [20, 21])
    assert found["computing_seconds"] == pytest.approx(0.06)
    lanes = {lane["lane"]: lane for lane in found["lanes"]}
    assert lanes["gather"]["hidden_share"] == pytest.approx(25 / 30)
    assert lanes["gather"]["bytes"] == 2 << 20
    assert found["phases_seconds"]["forward"] == pytest.approx(0.04)


def test_a_run_its_timelines_a_recording_and_files_are_paths(recording, capsys):
    expected = shown(capsys, recording, "--rank", 1)
    files = sorted(recording.iterdir())
    for paths in ([recording.parents[1]], [recording.parent], files, files[1:]):
        assert shown(capsys, *paths, "--rank", 1) == expected


def test_errors_are_one_line(recording, tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for argv, message in (
        ([recording, "--rank", 7], "0, 1, got 7"),
        ([recording, "--iteration", 3], "20, 21, got 3"),
        ([tmp_path / "empty"], "trace_rank0.json"),
        ([tmp_path / "nowhere"], "No such file"),
        ([tmp_path / "other.json"], "other.json"),
        ([recording, "--output", tmp_path / "a.png"], "a.png"),
        ([recording, "--merge", tmp_path / "all.json", "--json"], "--merge"),
        ([recording, write(tmp_path / "x", 1), "--merge", tmp_path / "all.json"], "0, 1, 1"),
    ):
        assert message in refused(capsys, *argv)
    assert not (tmp_path / "all.json").exists()


def test_merged_ranks_are_one_trace(recording, tmp_path, capsys):
    merged = tmp_path / "all.json"
    assert "2 ranks in" in shown(capsys, recording, "--merge", merged)
    events = json.loads(merged.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert "1 rank in" in shown(capsys, recording / "trace_rank1.json", "--merge", merged)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_shows_rows_shares_and_what_it_is_of(recording, tmp_path, theme, capsys):
    path = tmp_path / "step.svg"
    shown(capsys, recording, "--output", path, "--theme", theme)
    texts = texts_of(path)
    assert {"compute", "gather", "host", "forward", "backward", "waiting", "layers.1"} <= texts
    assert {"60% computing", "83% hidden", "of 30.0 ms, 5.0 ms exposed"} <= texts
    assert any("a machine, 2 cores" in text for text in texts)
    assert "checkpoint disk" not in texts, "a row without work is left out"
    assert ("#0d1117" if theme == "dark" else "#ffffff") in path.read_text()

    shown(capsys, recording, "--output", tmp_path / "again.svg", "--theme", theme)
    assert (tmp_path / "again.svg").read_bytes() == path.read_bytes()


def test_names_in_a_file_are_text_of_the_picture_and_never_markup(tmp_path, capsys):
    trace = trace_of(0, (20,))
    hostile = "<a>&\x00\ud800"
    slices = [one._replace(name=hostile) if one.row == GATHER else one for one in trace.slices]
    file = tmp_path / "trace_rank0.json"
    file.write_bytes(replace(trace, machine=hostile, slices=tuple(slices)).to_json())
    shown(capsys, file, "--output", tmp_path / "step.svg")
    assert r"<a>&\x00\ud800" in texts_of(tmp_path / "step.svg")


def texts_of(path: Path) -> set[str]:
    elements = ET.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}text")
    return {element.text or "" for element in elements}


def test_exposed_work_is_hatched_and_paler_than_hidden_work(tmp_path):
    path = tmp_path / "step.svg"
    draw(trace_of(0, (20,)), 20, path)
    rects = list(ET.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}rect"))
    hidden = [one for one in rects if one.get("fill") == "#2a9d74"]
    pale = [one for one in rects if one.get("fill") == blended("#2a9d74", "#ffffff", 0.55)]
    # Of 15 to 45 ms, the first 5 are beside a wait.
    widths = [sum(float(one.get("width") or 0) for one in some) for some in (hidden, pale)]
    assert widths[1] / sum(widths) == pytest.approx(5 / 30, abs=0.01)


def test_an_iteration_with_nothing_but_a_disk_is_drawn(tmp_path, capsys):
    slices = (
        Slice(COMPUTE, ITERATION, "iteration 1", 0.0, 1e-6, 1),
        Slice(DISK, WORK, "write", 0.0, 0.0, 1),
    )
    file = tmp_path / "trace_rank0.json"
    file.write_bytes(Trace(0, 1, 0.0, "a machine", slices).to_json())
    path = tmp_path / "step.svg"
    shown(capsys, file, "--output", path)
    assert "0% computing" in texts_of(path)


def test_of_several_recordings_the_newest_is_shown(recording, capsys):
    later = write(recording.with_name("iterations_20-21.2"), 5)
    assert "rank 5 of 2" in shown(capsys, later.parents[1])
