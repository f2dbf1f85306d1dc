"""`checkpoint import`: another program's DCP folder as a checkpoint, by one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.store import LocalStore
from megatron_hybrid.checkpoint import command as checkpoint

TABLE = "keys: {w13: [gate, up], emb: first, out: last}\ntied: {out: emb}"


def imported(tmp_path: Path, state: dict[str, Any], *flags: str) -> int:
    """The exit code of importing this state to the folder `runs`."""
    (tmp_path / "table.yaml").write_text(TABLE)
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    table = ["--dcp-key-map", str(tmp_path / "table.yaml")]
    return checkpoint.main(
        ["import", str(tmp_path / "saved"), str(tmp_path / "runs"), *table, *flags]
    )


def found(tmp_path: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(LocalStore(tmp_path / "runs"), "iter_0000000")
    values = {}
    for key, tensor in opened.tensors.items():
        values[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        opened.read(key, (0,) * len(tensor.shape), values[key])
    return values


def test_weights_alone_become_fp32_and_are_no_run(tmp_path, capsys):
    weights = torch.randn(6, 3).bfloat16()
    same = torch.randn(4, 3)
    state = {"model": {"w13": weights, "emb": same, "out": same.clone()}, "epoch": 3}
    assert imported(tmp_path, state, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_tensors"], summary["has_moments"]) == (3, False)

    values = found(tmp_path)
    assert values.keys() == {"model.gate", "model.up", "model.first"}  # the tied one once
    assert torch.equal(torch.cat([values["model.gate"], values["model.up"]]), weights.float())
    root = str(tmp_path / "runs")
    assert checkpoint.main(["list", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["is_run"] is False


def test_a_second_weight_that_differs_is_no_tied_one(tmp_path):
    state = {"w13": torch.zeros(2, 3), "emb": torch.zeros(4, 3), "out": torch.ones(4, 3)}
    assert imported(tmp_path, state) == 0
    assert found(tmp_path).keys() == {"model.gate", "model.up", "model.first", "model.last"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w13": torch.zeros(2, 3), "ema.w13": torch.zeros(2, 3)}, "got ema.w13."),
        ({"other": torch.zeros(2, 3)}, "tensors that the table names or ignores"),
        ({"epoch": 3}, "Expected tensors that the table names in"),
        ({"w13": torch.zeros(3, 3)}, "w13 of shape (3, 3) does not divide into 1 + 1 parts"),
        (
            {"w13": torch.zeros(2, 3), "optim.state.w13.step": torch.tensor(0.5)},
            "optimizer.state.gate.step",
        ),
    ],
    ids=["unknown", "none known", "no tensors", "division", "counter"],
)
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(tmp_path, capsys, state, message):
    assert imported(tmp_path, state) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_a_damaged_chunk_leaves_nothing_and_checkpoints_are_not_overwritten(tmp_path, capsys):
    state = {"w13": torch.arange(6.0).view(2, 3) + 100}
    assert imported(tmp_path, state) == 0
    # The directory to import is not even opened.
    table = ["--dcp-key-map", str(tmp_path / "table.yaml")]
    assert checkpoint.main(["import", "missing", str(tmp_path / "runs"), *table]) == 2
    assert "iter_0000000" in capsys.readouterr().err

    (path,) = (tmp_path / "saved").glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[content.index(state["w13"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    argv = ["import", str(tmp_path / "saved"), str(tmp_path / "other"), *table]
    assert checkpoint.main(argv) == 2
    assert path.name in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
