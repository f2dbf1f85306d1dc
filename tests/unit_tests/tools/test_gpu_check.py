from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import on_ranks
from tests.simulated_accelerator import build
from tools.gpu_check import __main__ as command_line
from tools.gpu_check import verdict
from tools.gpu_check.__main__ import main
from tools.gpu_check.accelerator import Peak
from tools.gpu_check.findings import Findings, SkippedError
from tools.gpu_check.folder import MOST_BYTES, MOST_FILES, ResultFolder
from tools.gpu_check.page import page_of
from tools.gpu_check.prediction import (
    THREE_BILLION,
    Machine,
    least_fraction,
    needed_host_bytes,
    predict,
)
from tools.gpu_check.runner import Outcome, Runner
from tools.gpu_check.table import STAGES, Stage, selected

ROOT = Path(__file__).resolve().parents[3]
FAKES = "tests.unit_tests.tools.helpers.gpu_check_stages"


def fake(
    name: str, *, limit: float = 30.0, least: float = 0.0, alone: bool = True, function: str = ""
) -> Stage:
    return Stage(name, f"{FAKES}:{function or name}", "", limit, least, alone)


def run(
    tmp_path: Path, *stages: Stage, budget: float = 60.0, **options: Any
) -> tuple[list[Outcome], ResultFolder]:
    folder = ResultFolder(tmp_path / "out")
    outcomes = Runner(folder, tmp_path / "scratch", budget_seconds=budget, **options).run(
        list(stages)
    )
    return outcomes, folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def new_findings(tmp_path: Path) -> Findings:
    (tmp_path / "shared").mkdir()
    return Findings(
        "x",
        tmp_path / "records.jsonl",
        tmp_path,
        tmp_path / "shared",
        simulate=False,
        deadline=time.monotonic() + 60,
    )


def test_a_stage_that_passes_leaves_its_checks_figures_and_outcome_as_json_lines(tmp_path):
    [outcome], folder = run(tmp_path, fake("passes"))
    assert (outcome.outcome, outcome.reason) == ("ok", "")
    check, figure, end = records(folder.path)
    assert check == {
        "stage": "passes",
        "kind": "check",
        "what": "two and two",
        "ok": True,
        "got": 4,
        "expected": 4,
    }
    assert (figure["name"], figure["value"], figure["unit"], figure["telling"]) == (
        "speed",
        12.345678,
        "GB/s",
        True,
    )
    assert (end["kind"], end["outcome"]) == ("outcome", "ok")
    assert "passes             ok" in page_of([outcome], simulate=False, seconds=1)
    assert "1 of 1 checks; speed 12.35 GB/s" in page_of([outcome], simulate=False, seconds=1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails_a_check", "two and two: expected 5, got 4"),
        ("raises", "ValueError: Expected a fish, got a bird."),
        ("checks_nothing", "The stage ended without having checked anything."),
        ("dies", "ended by SIGSEGV"),
        ("floods_its_records", "expected at most"),
        ("lacks_a_part_of_this_project", "No module named 'tools.gpu_check.no_such_module'"),
    ],
)
def test_a_stage_that_goes_wrong_is_a_failure_with_its_reason_and_the_next_one_runs(
    tmp_path, name, reason
):
    (outcome, following), folder = run(tmp_path, fake(name), fake("passes"))
    assert outcome.outcome == "failed"
    assert reason in outcome.reason
    assert following.outcome == "ok"
    assert reason in page_of([outcome, following], simulate=False, seconds=1)
    assert [
        record["outcome"] for record in records(folder.path) if record["kind"] == "outcome"
    ] == ["failed", "ok"]


def test_a_stage_that_hangs_is_killed_with_its_children_and_its_log_says_where_it_was(tmp_path):
    (outcome, following), folder = run(tmp_path, fake("hangs", limit=5), fake("passes"))
    assert (outcome.outcome, following.outcome) == ("failed", "ok")
    assert re.match(r"killed after \d+ s", outcome.reason)
    assert "in hangs" in (folder.path / "logs.txt").read_text()
    assert [record["what"] for record in outcome.records] == ["before it hung"]
    child = int((tmp_path / "scratch" / "shared" / "child").read_text())
    assert not is_running(child)


def test_a_stage_that_floods_its_log_is_killed_and_the_folder_stays_small(tmp_path):
    (outcome, following), folder = run(tmp_path, fake("floods_its_log"), fake("passes"))
    assert "it wrote more than 32 MiB" in outcome.reason
    assert following.outcome == "ok"
    assert (folder.path / "logs.txt").stat().st_size < 1 << 20


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lacks_a_package", "no_such_package is not installed; carry its wheel with --wheels"),
        ("cannot_say", "no usable GPU"),
    ],
)
def test_a_stage_that_cannot_run_here_is_skipped_with_the_reason(tmp_path, name, reason):
    (outcome, following), _ = run(tmp_path, fake(name), fake("passes"))
    assert (outcome.outcome, outcome.reason, following.outcome) == ("skipped", reason, "ok")


@pytest.mark.wide
def test_what_no_longer_fits_into_the_budget_is_skipped_and_what_does_is_cut_short(tmp_path):
    stages = [
        fake("passes"),
        fake("passes_later", function="passes", least=100),
        fake("hangs", limit=1000),
    ]
    (first, second, third), _ = run(tmp_path, *stages, budget=10)
    assert first.outcome == "ok"
    assert second.outcome == "skipped"
    assert re.fullmatch(r"the budget: \d s are left, and it needs 100", second.reason)
    assert third.outcome == "failed"
    assert third.seconds > 3


def test_a_stage_that_keeps_time_runs_however_much_those_before_it_take(tmp_path):
    last = Stage("last", f"{FAKES}:passes", "", 90.0, 60.0, runs_alone=True, keeps_time=True)
    (hanging, skipped, kept), _ = run(
        tmp_path, fake("hangs"), fake("passes", least=1.0), last, budget=67
    )
    assert (hanging.outcome, skipped.outcome, kept.outcome) == ("failed", "skipped", "ok")


def test_stages_that_measure_nothing_run_side_by_side_and_those_that_do_alone(tmp_path):
    names = ["one", "two"]
    for alone in (False, True):
        folder = tmp_path / str(alone)
        stages = [fake(name, function="takes_its_time", alone=alone) for name in names]
        run(folder, *stages, num_jobs=2)
        shared = folder / "scratch" / "shared"
        (begin, _, end), (other_begin, _, other_end) = (
            json.loads((shared / f"{name}.json").read_text()) for name in names
        )
        assert (begin < other_end and other_begin < end) is not alone


def test_the_folder_holds_at_most_eight_files_and_16_mib(tmp_path):
    _, folder = run(tmp_path, fake("keeps_a_large_file"), fake("keeps_files"), fake("raises"))
    folder.write_page("page")
    files = sorted(path.name for path in folder.path.iterdir())
    assert files == [
        "logs.txt",
        "page.txt",
        "results.jsonl",
        *(f"trace{number}.gz" for number in range(5)),
    ]
    assert len(files) == MOST_FILES
    assert sum(path.stat().st_size for path in folder.path.iterdir()) < MOST_BYTES
    left_out = [record["text"] for record in records(folder.path) if record["kind"] == "note"]
    assert [text.split()[0] for text in left_out] == ["large.gz", "trace5.gz", "trace6.gz"]


def test_stages_are_selected_by_name_in_the_order_of_the_table_and_unknown_names_are_refused(
    capsys,
):
    assert [stage.name for stage in selected(STAGES, "adam, lanes")] == ["lanes", "adam"]
    assert selected(STAGES, None) == list(STAGES)
    for names in ("adam,nonsense", ""):
        with pytest.raises(ValueError, match="--stages: expected names among facts, build"):
            selected(STAGES, names)
    assert main(["--stages", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_list_names_every_stage_and_needs_no_torch(tmp_path):
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
         "from tools.gpu_check.__main__ import main; main(['--list']); "
         "assert 'torch' not in sys.modules"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        stage.name for stage in STAGES
    ]


@pytest.fixture
def wheels(tmp_path) -> Path:
    """A folder with a file that is called a wheel and is none."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "fish-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    return folder


def run_with(wheels: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(command_line, "STAGES", [fake("passes")])
    assert main(["--wheels", str(wheels), "--out", str(out)]) == 0
    return records(out)


def test_wheels_that_pip_refuses_are_noted_with_its_status_and_the_stages_run(
    tmp_path, wheels, capsys, monkeypatch
):
    note, *rest = run_with(wheels, tmp_path / "out", monkeypatch)
    assert note["kind"] == "note"
    assert note["text"].startswith("--wheels: nothing was installed, pip ended with 1: ERROR: ")
    assert rest[-1]["outcome"] == "ok"
    assert capsys.readouterr().err.splitlines() == [note["text"]]


def test_a_pip_that_does_not_end_is_noted_and_the_stages_run(tmp_path, wheels, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "_INSTALL_SECONDS", 0.01)
    note, *rest = run_with(wheels, tmp_path / "out", monkeypatch)
    assert note["text"] == "--wheels: nothing was installed, pip was still running after 0 s"
    assert rest[-1]["outcome"] == "ok"
    assert capsys.readouterr().err.splitlines() == [note["text"]]


def test_the_functions_of_all_stages_are_there():
    import importlib

    for stage in STAGES:
        module, _, name = stage.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), stage.name


def test_the_tables_of_the_documentation_are_what_the_prediction_prints(capsys):
    from tools.gpu_check import prediction

    prediction.main()
    page = (ROOT / "docs" / "gpu.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert line in page, line


def test_the_prediction_grows_by_what_is_not_hidden_and_shrinks_by_what_leaves_the_device():
    shape, machine = THREE_BILLION, Machine()
    device, offloaded = predict(shape, machine, 0.0), predict(shape, machine, 1.0)
    assert (device.exposed, device.time.host_pass) == (0.0, 0.0)
    assert offloaded.time.host_pass == pytest.approx(28 * shape.numel / 150e9)
    assert device.peak_bytes - offloaded.peak_bytes == pytest.approx(12 * shape.numel)
    # A host that is fast enough is hidden wholly, and the least bandwidth and fraction meet their
    # bars exactly.
    assert predict(shape, Machine(host_bytes=1e15, link_bytes=1e15), 1.0).exposed == 0.0
    fast = Machine(host_bytes=needed_host_bytes(shape, machine, 1.0))
    assert predict(shape, fast, 1.0).seconds / device.seconds == pytest.approx(1.15)
    at_least = predict(shape, machine, least_fraction(shape))
    assert at_least.peak_bytes / device.peak_bytes == pytest.approx(0.55)


def test_runs_of_other_bits_are_a_failure_and_a_single_run_says_nothing(tmp_path):
    findings = new_findings(tmp_path)
    findings.share(
        "one_rank", {"zero3": ["0x1p+2 0x1p+0", "digest"], "zero2": ["0x1p+2 0x1p+0", "digest"]}
    )
    with pytest.raises(
        SkippedError,
        match="needs two of one_rank, one_rank_delayed, one_rank_blocking, and one_rank",
    ):
        verdict.bits(findings)
    findings.share("one_rank_blocking", {"zero3": ["0x1p+2 0x1p+0", "digest"]})
    verdict.bits(findings)
    assert (findings.num_checks, findings.num_failed) == (2, 0)
    findings.share("one_rank_delayed", {"zero3": ["0x1p+2 0x1p+0", "another"]})
    verdict.bits(findings)
    assert findings.num_failed == 1


@pytest.mark.parametrize(
    ("seconds", "allocated", "num_failed"), [(2.8, 30e9, 0), (2.9, 30e9, 1), (2.8, 36e9, 1)]
)
def test_the_verdict_asks_for_one_side_that_meets_both_bars(
    tmp_path, seconds, allocated, num_failed
):
    findings = new_findings(tmp_path)
    side = {
        "numel": THREE_BILLION.numel,
        "tokens": THREE_BILLION.tokens,
        "losses": [10.4, 9.0],
        "shape": asdict(THREE_BILLION),
        "moments": "fp32",
    }
    lanes = {
        "host": 0.5,
        "d2h": 0.1,
        "h2d": 0.1,
        "waited_host": 0.4,
        "waited_d2h": 0.0,
        "waited_h2d": 0.0,
    }
    findings.share(
        "speed_device", {**side, "seconds": 2.5, "allocated": 63e9, "fraction": 0.0, "timings": {}}
    )
    findings.share(
        "speed_offload",
        {**side, "seconds": seconds, "allocated": allocated, "fraction": 1.0, "timings": lanes},
    )
    verdict.speed(findings)
    assert findings.num_failed == num_failed
    texts = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    [step] = [
        text["value"]
        for text in texts
        if text.get("name") == "speed_offload, step: measured, predicted"
    ]
    assert step == [seconds, pytest.approx(2.98, abs=0.01)]


def test_what_is_exposed_of_half_an_offload_leaves_out_the_pass_on_the_device(tmp_path):
    findings = new_findings(tmp_path)
    shape, machine = THREE_BILLION, Machine()
    # A machine on which the steps take just as long as predicted.
    expected = predict(shape, machine, 0.5)
    side = {
        "numel": shape.numel,
        "tokens": shape.tokens,
        "losses": [10.4, 9.0],
        "shape": asdict(shape),
        "moments": "fp32",
        "allocated": 30e9,
        "timings": {},
    }
    findings.share(
        "speed_device", {**side, "seconds": predict(shape, machine, 0.0).seconds, "fraction": 0.0}
    )
    findings.share("speed_half", {**side, "seconds": expected.seconds, "fraction": 0.5})
    verdict.speed(findings)
    texts = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    figures = {text["name"]: text["value"] for text in texts if text["kind"] == "figure"}
    measured, predicted = figures["speed_half, exposed: measured, predicted"]
    assert expected.time.device_pass > 0.005
    assert measured == pytest.approx(predicted)


class StoppedAccelerator:
    """One whose memory does not change."""

    def synchronize(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def peak(self) -> Peak:
        return Peak(100, 100)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_figures_of_a_prediction_are_there_for_our_engine_alone(tmp_path, is_ours, monkeypatch):
    from tools.gpu_check import speed

    findings = new_findings(tmp_path)
    monkeypatch.setattr(speed, "_batches", lambda shape, number: [])  # noqa: ARG005  # there is nothing to pin for
    losses = iter(range(100, 0, -1))
    expected = {"expected": predict(THREE_BILLION, Machine(), 1.0)} if is_ours else {}
    speed._measure(
        findings, StoppedAccelerator(), THREE_BILLION, lambda _: float(next(losses)), **expected
    )
    texts = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    predicted = [text["name"] for text in texts if text.get("name", "").startswith("predicted")]
    assert predicted == (["predicted step, computation alone", "predicted peak"] if is_ours else [])
    assert findings.num_failed == 0


def test_a_family_of_other_bits_and_a_step_that_waits_twice_are_failures(tmp_path):
    from tools.gpu_check.one_rank import check_families, check_steps
    from tools.gpu_check.training import CONFIGURATIONS, Step, Trained

    findings = new_findings(tmp_path)
    bits = ["0x1.0p+2 0x1.0p+0", "digest"]
    check_families(findings, {"zero3": bits, "zero2": bits})
    assert (findings.num_checks, findings.num_failed) == (2, 0)
    check_families(findings, {"zero3": bits, "zero2": ["0x1.0000000000001p+2 0x1.0p+0", "digest"]})
    assert findings.num_failed == 1
    # On two ranks the last bits may differ between strategies, and nothing more.
    check_families(
        findings, {"zero3": bits, "zero2": ["0x1.0000000000001p+2 0x1.0p+0", "digest"]}, num_ranks=2
    )
    assert findings.num_failed == 1
    check_families(findings, {"zero3": bits, "zero2": ["0x1.1p+2 0x1.0p+0", "digest"]}, num_ranks=2)
    assert findings.num_failed == 2

    steps = [
        Step(float(number).hex(), "0x1.0p+0", ("step.py:1",), int(number == 0))
        for number in range(5)
    ]
    check_steps(findings, "zero3", CONFIGURATIONS["zero3"], Trained(steps, ""))
    assert findings.num_failed == 2
    steps[4] = steps[4]._replace(syncs=("step.py:1", "fused_adam.py:2"), new_segments=1)
    check_steps(findings, "zero3", CONFIGURATIONS["zero3"], Trained(steps, ""))
    assert findings.num_failed == 4


@on_ranks(2)
def test_gloo_takes_the_place_of_nccl_with_the_same_sums() -> None:
    from megatron.core.distributed.fsdp import collectives
    from tools.gpu_check.ranks import use_gloo_on_device

    rank, group = dist.get_rank(), dist.group.WORLD
    before = collectives._all_gather_on_device, collectives._reduce_scatter_on_device
    try:
        use_gloo_on_device()
        gathered = torch.empty(4)
        collectives._all_gather_on_device(gathered, torch.full((2,), rank + 1.0), group=group)
        assert gathered.tolist() == [1, 1, 2, 2]
        for op, expected in ((dist.ReduceOp.AVG, [1.5, 3.0]), (dist.ReduceOp.SUM, [3.0, 6.0])):
            own = torch.empty(2, dtype=torch.bfloat16)
            whole = (gathered * (rank + 1)).bfloat16()
            collectives._reduce_scatter_on_device(own, whole, op=op, group=group)
            assert own.tolist() == [expected[rank]] * 2
            assert whole.tolist() == [rank + 1.0] * 2 + [2 * rank + 2.0] * 2
    finally:
        collectives._all_gather_on_device, collectives._reduce_scatter_on_device = before


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.sim
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param("facts,lanes,adam", id="quick"),
        pytest.param(None, id="all", marks=pytest.mark.wide),
    ],
)
def test_the_stages_pass_on_the_simulated_accelerator(tmp_path, stages):
    missing = build.missing_for_build()
    if missing:
        pytest.skip(missing)
    command = [sys.executable, "-m", "tools.gpu_check", "--simulate", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *(["--stages", stages] if stages else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    found = records(tmp_path)
    outcomes = {
        record["stage"]: record["outcome"] for record in found if record["kind"] == "outcome"
    }
    names = stages.split(",") if stages else [stage.name for stage in STAGES]
    assert outcomes == dict.fromkeys(names, "ok"), done.stdout
    assert done.returncode == 0
