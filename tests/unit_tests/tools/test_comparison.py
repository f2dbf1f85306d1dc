"""`comparison`, and `formats`, through which it reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.core.dist_checkpointing import formats
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.formats import (
    ReadableCheckpoint,
    open_checkpoint,
    pieces_of,
)
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.store import open_store
from megatron_hybrid.checkpoint.comparison import KeyComparison, _differences, compare
from tests.helpers.checkpoints import row_cuts, whole, write_checkpoint

NAN, INF = math.nan, math.inf


def saved(
    root: Path, name: str, tensors: dict[str, torch.Tensor], plain: dict[str, Any]
) -> ReadableCheckpoint:
    write_checkpoint(
        root / name,
        {key: (tensor, whole(tensor)) for key, tensor in tensors.items()},
        plain,
        world_size=1,
    )
    return open_checkpoint(open_store(root), name)


def ignore(num_bytes: int) -> None:
    """No bar."""


def compared(a: ReadableCheckpoint, b: ReadableCheckpoint) -> dict[str, KeyComparison]:
    keys = list(dict.fromkeys([*a.tensors, *a.plain, *b.tensors, *b.plain]))
    found = list(compare(a, b, keys, ignore))
    assert [each.key for each in found] == keys
    return {each.key: each for each in found}


def test_each_difference_has_its_outcome(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    changed = base.clone()
    changed[0, 0], changed[1, 2] = 0.25, -5.0
    ours = dict.fromkeys(("same", "values", "shape", "dtype", "kind", "ours"), base)
    theirs = {"same": base.clone(), "values": changed, "shape": base.t(), "dtype": base.half()}
    theirs["theirs"] = base
    same = [1, {"a": (2.0, "x")}]
    a = saved(tmp_path, "a", ours, {"plain.same": same, "plain.other": [1], "plain.ours": 1})
    b = saved(tmp_path, "b", theirs, {"plain.same": same, "plain.other": [2], "kind": 5})
    found = compared(a, b)
    assert {key: each.outcome for key, each in found.items()} == {
        "same": "equal",
        "values": "values",
        "shape": "shape",
        "dtype": "dtype",
        "kind": "kind",
        "ours": "only in A",
        "theirs": "only in B",
        "plain.same": "equal",
        "plain.other": "values",
        "plain.ours": "only in A",
    }
    assert (found["values"].num_different, found["values"].max_difference) == (2, 10.0)
    assert found["same"].max_difference == 0.0
    assert found["shape"].detail == "(2, 3) and (3, 2)"
    assert compared(b, a)["kind"].outcome == "kind"


@pytest.mark.parametrize(
    ("one", "other", "number", "largest"),
    [
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        ([NAN, 1.0], [NAN, 1.0], 0, 0.0),
        ([NAN, 1.0], [0.0, 1.5], 2, INF),
        ([INF, INF], [INF, -INF], 1, INF),
        ([INF], [1.0], 1, INF),
        ([3e38], [-3e38], 1, 6e38),
    ],
)
def test_values_that_are_no_numbers_are_compared_by_their_bits(one, other, number, largest):
    found = _differences(torch.tensor(one), torch.tensor(other))
    assert found == (number, pytest.approx(largest, rel=1e-6))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_any_dtype_is_compared(dtype):
    one, other = torch.tensor([0, 1, 0, 1]).to(dtype), torch.tensor([0, 1, 1, 1]).to(dtype)
    assert _differences(one, other) == (1, 1.0)
    assert _differences(one, one.clone()) == (0, 0.0)


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(4, 100))
def test_pieces_hold_each_element_once_and_none_is_large(shape, piece_bytes):
    memory = torch.arange(torch.Size(shape).numel()).float().reshape(shape)
    saved = SavedTensor("w", torch.float32, tuple(memory.shape), [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_PIECE_BYTES", piece_bytes)
        pieces = [memory[box.slices()].flatten() for box in pieces_of(saved)]
    assert all(0 < piece.nbytes <= piece_bytes for piece in pieces)
    assert torch.equal(torch.cat([torch.empty(0), *pieces]), memory.flatten())


def test_tensors_are_compared_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_PIECE_BYTES", 64)
    tensor = torch.arange(100.0).reshape(10, 10)
    write_checkpoint(tmp_path / "a", {"w": (tensor, row_cuts((10, 10), 3, 7))}, {}, world_size=2)
    changed = tensor.clone()
    changed[0, 0] += 1
    changed[9, 9] += 3
    b = saved(tmp_path, "b", {"w": changed}, {})
    steps: list[int] = []
    (found,) = compare(open_checkpoint(open_store(tmp_path), "a"), b, ["w"], steps.append)
    assert (found.num_different, found.max_difference) == (2, 3.0)
    assert sum(steps) == tensor.nbytes
    assert max(steps) <= 64


STATE = {
    "model": {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(3).half()},
    "optim": {"groups": [{"lr": 1.0}]},
}


def save_torch_dcp(folder: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def test_a_checkpoint_that_pytorch_wrote_is_read(tmp_path):
    save_torch_dcp(tmp_path / "a", STATE)
    checkpoint = open_checkpoint(open_store(tmp_path), "a")
    assert checkpoint.train_state == {}
    assert list(checkpoint.tensors) == ["model.w", "model.b"]
    assert list(checkpoint.plain) == ["optim.groups.0.lr"]
    out = torch.empty(2, 2)
    assert checkpoint.read("model.w", (1, 1), out) == 48
    assert torch.equal(out, STATE["model"]["w"][1:3, 1:])
    assert checkpoint.read("model.w", (0, 0), torch.empty(1, 1)) == 0, "the chunk has been kept"
    changed = {**STATE, "model": {**STATE["model"], "w": STATE["model"]["w"] + 1}}
    save_torch_dcp(tmp_path / "b", changed)
    found = compared(checkpoint, open_checkpoint(open_store(tmp_path), "b"))
    assert found["model.w"].max_difference == 1.0
    assert {key for key, each in found.items() if each.outcome != "equal"} == {"model.w"}


def test_a_damaged_checkpoint_of_pytorch_is_named_where_that_can_be_seen(tmp_path):
    save_torch_dcp(tmp_path / "a", STATE)
    checkpoint = open_checkpoint(open_store(tmp_path), "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:100])
    with pytest.raises(CheckpointDamagedError, match=data.name):
        checkpoint.read("model.w", (0, 0), torch.empty(4, 3))
    data.write_bytes(b"x" * len(content))
    with pytest.raises(CheckpointDamagedError, match=r"Expected .* in 'model.w' in"):
        checkpoint.read("model.w", (0, 0), torch.empty(4, 3))
    data.unlink()
    with pytest.raises(CheckpointDamagedError, match=data.name):
        checkpoint.read("model.w", (0, 0), torch.empty(4, 3))
    (tmp_path / "a" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointDamagedError, match=r"\.metadata"):
        open_checkpoint(open_store(tmp_path), "a")
