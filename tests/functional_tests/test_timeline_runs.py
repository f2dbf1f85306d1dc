"""Runs that record a timeline: every rank, every row, and the losses as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.trace_file import (
    CHECKPOINT,
    COMPUTE,
    D2H,
    DISK,
    GATHER,
    H2D,
    HOST,
    PHASE,
    REDUCE,
    WORK,
    Trace,
)
from megatron_hybrid import timeline
from tests.functional_tests.helpers.document_runs import OFFLOADED, train, write_text


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


def read(folder: Path) -> list[Trace]:
    files = sorted(folder.glob("trace_rank*.json"))
    return [Trace.from_json(file.read_bytes()) for file in files]


def test_a_run_records_all_rows_of_all_ranks_and_a_resumed_one_adds_its_own(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*OFFLOADED, "--overlap-optimizer-with-forward"]
    expected = train(prefix, tmp_path / "plain", *flags)
    saving = ["--save", tmp_path / "run", "--save-interval", 2, "--async-save"]
    recording = [*saving, "--profile-lanes", "2:5"]
    assert train(prefix, tmp_path / "recorded", *flags, *recording) == expected

    traces = read(tmp_path / "run" / "timelines" / "iterations_2-4")
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
    rows = {COMPUTE, GATHER, REDUCE, D2H, HOST, H2D, CHECKPOINT, DISK}
    for trace in traces:
        assert list(trace.iterations) == [2, 3, 4]
        assert {one.row for one in trace.slices} == rows
        first, last = trace.iterations[2], trace.iterations[4]
        for one in trace.slices:
            assert one.begin >= first.begin
            assert one.end <= last.end or one.row not in (COMPUTE, GATHER, REDUCE)
        phases = [one.name for one in trace.slices if (one.kind, one.iteration) == (PHASE, 2)]
        assert phases == [*["data", "forward", "backward"] * 2, "norm", "step", "report", "save"]
        assert sum(one.nbytes for one in trace.slices if one.row == DISK) > 0

        # The save at the end of the run is waited for.
        save = [one for one in trace.slices if (one.kind, one.name) == (PHASE, "save")][-1]
        waits = [one for one in trace.slices if one.name == f"wait for {CHECKPOINT}"]
        assert save.iteration == 4
        assert any(save.begin <= one.begin and one.end <= save.end for one in waits)

    # Ranks meet in every reduction, so one's lies in the other's but for their clocks and threads.
    reductions = [
        [one for one in trace.slices if (one.row, one.kind) == (REDUCE, WORK)] for trace in traces
    ]
    assert len(reductions[0]) == len(reductions[1]) > 0
    for own, other in zip(*reductions, strict=True):
        assert own.name == other.name
        assert own.begin < other.end
        assert other.begin < own.end

    # A start that makes iteration 3 again, and has no update in progress when it starts.
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    for later in (tmp_path / "run").glob("iter_0000004"):
        later.rename(tmp_path / "aside")
    resumed = train(prefix, tmp_path / "resumed", *flags, *recording)
    assert resumed == {number: expected[number] for number in (3, 4)}
    (of_first, _) = read(tmp_path / "run" / "timelines" / "iterations_2-4.2")
    assert list(of_first.iterations) == [3, 4]

    assert timeline.main([str(tmp_path / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["iteration"] == 4
    assert {lane["lane"] for lane in shown["lanes"]} >= {GATHER, REDUCE, D2H, HOST, H2D}
