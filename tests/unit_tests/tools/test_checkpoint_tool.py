from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import read_marker
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.step import StepInfo
from megatron_hybrid.checkpoint import command as checkpoint
from tests.helpers.checkpoints import row_cuts, whole, write_checkpoint

ROOT = Path(__file__).resolve().parents[3]

TENSORS = {
    "model.embedding.weight": (torch.randn(9, 4), row_cuts((9, 4), 3, 4, 2)),
    "model.layers.0.weight": (torch.randn(6, 5).bfloat16(), row_cuts((6, 5), 0, 6)),
    "optimizer.state.layers.0.weight.step": (torch.tensor(4.0), whole(torch.tensor(4.0), rank=2)),
}
PLAIN = {"optimizer.param_groups": [{"lr": 0.1}]}
TRAIN_STATE = {"progress": {"iteration": 10}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_checkpoint(folder / "iter_0000010", TENSORS, PLAIN, world_size=3, train_state=TRAIN_STATE)
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    return folder


@pytest.fixture
def torch_dcp(tmp_path: Path) -> Path:
    """A checkpoint that PyTorch wrote."""
    folder = tmp_path / "dcp" / "iter_0000010"
    state = {
        "model": {"embedding.weight": TENSORS["model.embedding.weight"][0]},
        "optim": {"lr": [0.5]},
    }
    dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


class Run:
    """One call of the tool."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str]:
        """The exit code and what was printed."""
        code = checkpoint.main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        if code == 2:
            (line,) = printed.err.splitlines()
            assert line.startswith("checkpoint: Expected")
            return code, line
        assert printed.err == ""
        return code, printed.out

    def json(self, *arguments: str | Path) -> Any:
        return json.loads(self(*arguments, "--json")[1])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_list_shows_the_state_of_each_checkpoint(root, torch_dcp, run):
    shutil.copytree(torch_dcp, root / "iter_0000020")
    others = ("iter_0000030.abc.saving", "iter_0000005.abc.deleting", "iter_0000031", "tensorboard")
    for name in others:
        (root / name).mkdir()
    marker = read_marker(open_store(root), "iter_0000010")
    for iteration in (40, 50, 60, 70):
        copy = shutil.copytree(root / "iter_0000010", root / checkpoint_name(iteration))
        if iteration != 70:
            (copy / "published.json").write_bytes(replace(marker, iteration=iteration).to_bytes())
    flip(root / "iter_0000040" / "published.json", 30)
    (root / "iter_0000050" / "__1_0.distcp").unlink()
    (root / "iter_0000060" / "published.json").unlink()
    rows = {row["name"]: row for row in run.json("list", root)}
    assert {name: (row["format"], row["state"]) for name, row in rows.items()} == {
        "iter_0000005.abc.deleting": (None, "being deleted"),
        "iter_0000010": ("fsdp_dtensor", "published"),
        "iter_0000020": ("torch_dcp", "published"),
        "iter_0000030.abc.saving": (None, "draft"),
        "iter_0000031": (None, "draft"),
        "iter_0000040": ("fsdp_dtensor", "damaged"),
        "iter_0000050": ("fsdp_dtensor", "damaged"),
        "iter_0000060": ("fsdp_dtensor", "damaged"),
        "iter_0000070": ("fsdp_dtensor", "published"),
    }
    files = [path for path in (root / "iter_0000010").iterdir() if path.name != "published.json"]
    assert rows["iter_0000010"]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert rows["iter_0000010"]["world_size"] == 3
    assert "__1_0.distcp" in rows["iter_0000050"]["problem"]
    assert "iteration 10" in rows["iter_0000070"]["problem"], "it is a copy"
    assert [name for name, row in rows.items() if row["is_latest"]] == ["iter_0000010"]
    assert len(run("list", root)[1].splitlines()) == len(rows)


def test_show_describes_tensors_and_their_writers(root, run):
    code, printed = run("show", root / "iter_0000010", "--chunks")
    assert code == 0
    for words in ("3 chunks, ranks 0-2", "1 chunks, rank 1", "[3:7, 0:4]  rank 1: __1_0.distcp, "):
        assert words in printed
    report = run.json("show", root / "iter_0000010", "--key", "model.l*")
    (row,) = report["tensors"]
    assert (row["key"], row["dtype"], row["shape"]) == ("model.layers.0.weight", "bfloat16", [6, 5])
    (chunk,) = row["chunks"]
    found = (chunk["offsets"], chunk["sizes"], chunk["rank"], chunk["file"])
    assert found == ([0, 0], [6, 5], 1, "__1_0.distcp")
    assert (report["plain"], report["train_state"]) == ([], TRAIN_STATE)


def test_show_reads_what_pytorch_wrote(torch_dcp, run):
    report = run.json("show", torch_dcp)
    assert (report["format"], report["is_run"]) == ("torch_dcp", False)
    assert [tensor["key"] for tensor in report["tensors"]] == ["model.embedding.weight"]
    assert "rank 0" in run("show", torch_dcp)[1]


def test_verify_finds_an_intact_checkpoint(root, run):
    assert run("verify", root / "iter_0000010")[0] == 0
    report = run.json("verify", root / "iter_0000010")
    assert (report["is_intact"], report["problems"]) == (True, [])
    data = (root / "iter_0000010").glob("*.distcp")
    assert report["num_bytes"] == sum(path.stat().st_size for path in data)


def test_verify_finds_any_damaged_file(root, run):
    for path in (root / "iter_0000010").iterdir():
        content = path.read_bytes()
        for damaged in (content[:-1], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            code, printed = run("verify", root / "iter_0000010")
            assert (code, path.name in printed) == (1, True), path
        path.write_bytes(content)


def test_diff_shows_each_difference_and_exits_as_diff(root, tmp_path, run):
    changed = {key: (tensor.clone(), cuts) for key, (tensor, cuts) in TENSORS.items()}
    changed["model.embedding.weight"][0][8, 3] += 2.0
    del changed["model.layers.0.weight"]
    changed["model.more"] = (torch.ones(2), row_cuts((2,), 1, 1))
    plain = {"optimizer.param_groups": [{"lr": 0.2}]}
    write_checkpoint(tmp_path / "b", changed, plain, world_size=3)
    code, printed = run("diff", root / "iter_0000010", tmp_path / "b")
    assert code == 1
    assert printed.splitlines()[-1] == "1 of 5 keys are equal"
    rows = run.json("diff", root / "iter_0000010", tmp_path / "b")["keys"]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["values", "only in A", "equal", "values", "only in B"]
    assert rows[0]["max_difference"] == pytest.approx(2.0)
    assert run("diff", root / "iter_0000010", tmp_path / "b", "--key", "*.step")[0] == 0
    assert run("diff", root / "iter_0000010", root / "iter_0000010")[0] == 0


def test_a_difference_that_is_no_number_is_json(tmp_path, run):
    for name, value in (("a", 1.0), ("b", float("nan"))):
        tensor = torch.tensor([value])
        write_checkpoint(tmp_path / name, {"model.w": (tensor, whole(tensor))}, {}, world_size=1)
    assert run.json("diff", tmp_path / "a", tmp_path / "b")["keys"][0]["max_difference"] == "inf"


def test_a_checkpoint_with_a_runs_state_is_known(tmp_path, torch_dcp, run):
    step_info, schedule = StepInfo(iteration=10), LRSchedule.build(LRScheduleConfig(lr=1.0), 10)
    state = RecoverInfo(step_info, schedule.state()).to_plain()
    runs = tmp_path / "runs"
    write_checkpoint(runs / "iter_0000010", TENSORS, PLAIN, world_size=3, train_state=state)
    write_checkpoint(runs / "iter_0000020", TENSORS, PLAIN, world_size=3, train_state=TRAIN_STATE)
    shutil.copytree(torch_dcp, runs / "iter_0000030")
    assert [row["is_run"] for row in run.json("list", runs)] == [True, False, False]
    for name, is_run in (("iter_0000010", True), ("iter_0000020", False)):
        assert run.json("show", runs / name)["is_run"] is is_run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("list {0}/none", "Expected a directory of checkpoints at {0}/none, got none"),
        ("show {0}/none", "Expected a checkpoint in {0}/none"),
        ("show {0}", "Expected a checkpoint in {0}"),
        ("verify {0}/none", "Expected a checkpoint in {0}/none"),
        ("diff {0}/iter_0000010 {0}/none", "Expected a checkpoint in {0}/none"),
    ],
)
def test_errors_are_one_line(root, run, arguments, message):
    before = sorted(path.name for path in root.iterdir())
    code, line = run(*(word.format(root) for word in arguments.split()))
    assert code == 2
    assert message.format(root) in line
    assert sorted(path.name for path in root.iterdir()) == before


def test_a_store_behind_a_url_is_used_as_well(root, run):
    files, url = fsspec.filesystem("memory"), "memory://checkpoint_tool"
    try:
        files.put(str(root / "iter_0000010"), "/checkpoint_tool/iter_0000020", recursive=True)
        assert run("verify", f"{url}/iter_0000020")[0] == 0
        assert run("diff", f"{url}/iter_0000020", root / "iter_0000010")[0] == 0
        assert [row["state"] for row in run.json("list", url)] == ["published"]
        files.rm("/checkpoint_tool/iter_0000020/published.json")
        files.touch("/checkpoint_tool/iter_0000020/begun.txt")
        assert [row["state"] for row in run.json("list", url)] == ["draft"]
    finally:
        files.rm("/checkpoint_tool", recursive=True)


def test_verify_says_of_the_other_format_that_it_has_no_digests(torch_dcp, run):
    code, line = run("verify", torch_dcp)
    assert code == 2
    assert "got one of the format torch_dcp, which has none" in line


def test_an_unfinished_remote_checkpoint_is_none(root, run):
    folder = root / "iter_0000010"
    for file in ("published.json", "manifest_0.json"):
        (folder / file).unlink()
    assert run.json("show", folder)["format"] == "torch_dcp"
    (folder / "begun.txt").touch()
    code, line = run("show", folder)
    assert (code, f"Expected a checkpoint in {folder}" in line) == (2, True)
