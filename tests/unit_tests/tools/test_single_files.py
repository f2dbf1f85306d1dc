"""Checkpoints to single files (`to_file`) and back (`from_file`)."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron.core.dist_checkpointing import formats
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import data_file
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.store import LocalStore, open_store
from megatron_hybrid.checkpoint.from_file import publish_content, read_file
from megatron_hybrid.checkpoint.to_file import export_safetensors, export_torch_save
from tests.helpers.checkpoints import Cut, raw_bytes, row_cuts, whole, write_checkpoint

NAME = "iter_0000010"
TENSORS = {
    "model.layers.0.weight": (torch.randn(9, 4), row_cuts((9, 4), 3, 4, 2)),
    "model.grid": (torch.randn(2, 6), [Cut((0, 0), (2, 2), 0), Cut((0, 2), (2, 4), 1)]),
    "model.half": (torch.randn(5).bfloat16(), row_cuts((5,), 0, 5)),
    "model.nothing": (torch.empty(0, 2), []),
    "optimizer.state.layers.0.weight.exp_avg": (torch.randn(9, 4), row_cuts((9, 4), 9)),
    "optimizer.state.layers.0.weight.step": (torch.tensor(4.0), whole(torch.tensor(4.0), rank=2)),
    "rng.0.cpu": (torch.arange(100, dtype=torch.uint8), whole(torch.arange(100))),
}
PLAIN = {
    "optimizer.param_groups": [{"lr": 0.1, "names": ["layers.0.weight"]}],
    "rng.0.python": {"state": [1, 2]},
}
TRAIN_STATE = {"progress": {"iteration": 10}, "versions": {"torch": "2"}}


def ignore(num_bytes: int) -> None:
    """No bar."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / NAME, TENSORS, PLAIN, world_size=3, train_state=TRAIN_STATE)
    return tmp_path


def published(root: Path, iteration: int) -> PublishedCheckpoint:
    return PublishedCheckpoint.open(open_store(root), f"iter_{iteration:07d}")


def assert_holds(
    checkpoint: PublishedCheckpoint, tensors: dict[str, torch.Tensor], plain: dict[str, Any]
) -> None:
    assert checkpoint.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        out = torch.empty(tensor.shape, dtype=checkpoint.tensors[key].dtype)
        checkpoint.read(key, (0,) * tensor.dim(), out)
        assert (out.dtype, raw_bytes(out)) == (tensor.dtype, raw_bytes(tensor)), key
    assert {key: checkpoint.read_plain(key) for key in checkpoint.plain} == plain


WHOLE = {key: tensor for key, (tensor, _) in TENSORS.items()}


@pytest.mark.parametrize("piece_bytes", [8, 1 << 20])
def test_torch_load_reads_every_tensor_bit_equal(root, monkeypatch, piece_bytes):
    monkeypatch.setattr(formats, "_PIECE_BYTES", piece_bytes)
    steps: list[int] = []
    export_torch_save(published(root, 10), root / "all.pt", steps.append)
    assert sum(steps) == sum(tensor.nbytes for tensor in WHOLE.values())
    assert max(steps) <= max(piece_bytes, 8)
    state = torch.load(root / "all.pt", weights_only=True)
    assert {key: state[key] for key in PLAIN} == PLAIN
    assert state["train_state"] == TRAIN_STATE
    assert state.keys() == {*WHOLE, *PLAIN, "train_state"}
    for key, tensor in WHOLE.items():
        assert (state[key].dtype, state[key].shape) == (tensor.dtype, tensor.shape)
        assert raw_bytes(state[key]) == raw_bytes(tensor)


def test_tensors_in_plain_data_reach_the_file(tmp_path):
    plain = {"rng.0.all": {"cpu": torch.arange(5), "none": [torch.tensor(2.0).expand(3)]}}
    write_checkpoint(
        tmp_path / NAME, {"model.w": (torch.ones(3), whole(torch.ones(3)))}, plain, world_size=1
    )
    export_torch_save(published(tmp_path, 10), tmp_path / "all.pt", ignore)
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(state["rng.0.all"]["cpu"], torch.arange(5))
    assert torch.equal(state["rng.0.all"]["none"][0], torch.full((3,), 2.0))
    assert torch.equal(state["model.w"], torch.ones(3))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_there_and_back_is_the_same_checkpoint_in_one_data_file(root, suffix):
    path = root / f"all{suffix}"
    (export_torch_save if suffix == ".pt" else export_safetensors)(
        published(root, 10), path, ignore
    )
    content = read_file(path)
    assert content.train_state == TRAIN_STATE
    publish_content(open_store(root), 20, content, content.train_state, ignore)
    checkpoint = published(root, 20)
    assert_holds(checkpoint, WHOLE, PLAIN)
    assert checkpoint.train_state == TRAIN_STATE
    assert (checkpoint.marker.iteration, checkpoint.marker.world_size) == (20, 1)
    assert [path.name for path in (root / "iter_0000020").glob("*.distcp")] == [data_file(0)]
    assert not list(root.glob("*.saving"))


def test_what_dcp_to_torch_save_makes_of_it_comes_back_as_well(root):
    dcp_to_torch_save(root / NAME, root / "nested.pt")
    assert "layers.0.weight" in torch.load(root / "nested.pt")["model"]
    content = read_file(root / "nested.pt")
    assert content.train_state is None
    publish_content(open_store(root), 20, content, {}, ignore)
    assert_holds(published(root, 20), WHOLE, PLAIN)


def test_memory_that_is_shared_or_turned_is_stored_as_it_is_seen(tmp_path):
    memory = torch.arange(12.0).reshape(3, 4)
    state = {
        "model.turned": memory.t(),
        "model.row": memory[1],
        "model.wide": torch.ones(1).expand(4),
    }
    torch.save(OrderedDict(state, plain=OrderedDict(a=(1, [2]))), tmp_path / "x.pt")
    publish_content(open_store(tmp_path), 1, read_file(tmp_path / "x.pt"), {}, ignore)
    assert_holds(published(tmp_path, 1), state, {"plain": {"a": (1, [2])}})


def test_nothing_is_left_of_a_checkpoint_that_could_not_be_written(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    torch.save({"model.w": torch.ones(2)}, tmp_path / "x.pt")
    for place in ("publish", "open_data"):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, place, full)
            content, store = read_file(tmp_path / "x.pt"), open_store(tmp_path / "root")
            with pytest.raises(CheckpointError, match=r"iter_0000010, got .*No space left"):
                publish_content(store, 10, content, {}, ignore)
        assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("export", [export_torch_save, export_safetensors])
def test_nothing_is_left_of_a_file_whose_checkpoint_is_damaged(root, export):
    path = root / NAME / data_file(2)
    content = bytearray(path.read_bytes())
    content[4096] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=data_file(2)):
        export(published(root, 10), root / "all", ignore)
    assert [path.name for path in root.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({1: 2}, "{1: 2}"),
        ([torch.ones(1)], "Tensor"),
        (torch.float32, "dtype"),
        (float("nan"), "nan"),
    ],
)
def test_plain_data_that_json_cannot_hold_is_named(tmp_path, value, got):
    write_checkpoint(tmp_path / NAME, {}, {"rng.0.odd": value}, world_size=1)
    with pytest.raises(CheckpointError, match=f"'rng.0.odd', got .*{got}"):
        export_safetensors(published(tmp_path, 10), tmp_path / "x.safetensors", ignore)


def test_tuples_are_lists_in_safetensors(tmp_path):
    write_checkpoint(tmp_path / NAME, {}, {"optimizer.betas": [(0.9, 0.95)]}, world_size=1)
    export_safetensors(published(tmp_path, 10), tmp_path / "x.safetensors", ignore)
    assert read_file(tmp_path / "x.safetensors").plain == {"optimizer.betas": [[0.9, 0.95]]}


class Malicious:
    """A pickle that would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused_and_has_not(tmp_path):
    torch.save({"model.w": Malicious(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt, got .*getattr"):
        read_file(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.ones(2)], "got list"),
        ({"train_state": 5}, "'train_state' in .*, got int"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "got several of 'a.b'"),
        ({"": torch.ones(1)}, "x.pt, got an empty one"),
        ({"s": torch.ones(2, 2).to_sparse()}, "x.pt, got .*sparse"),
        ({"p": {"c": 1j}}, "x.pt, got .*complex"),
        ({"p": {"c": torch.ones(1).untyped_storage()}}, "x.pt, got a TypedStorage"),
    ],
)
def test_what_no_checkpoint_holds_is_refused(tmp_path, state, message):
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        read_file(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_of_something_else_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"0123456789abcdef")
    with pytest.raises(CheckpointError, match=name):
        read_file(tmp_path / name)


def test_metadata_of_others_that_is_no_json_is_named(tmp_path):
    safetensors.torch.save_file(
        {"w": torch.ones(1)}, tmp_path / "x.safetensors", {"format": "pt", "title": "A model"}
    )
    with pytest.raises(CheckpointError, match="'title' of "):
        read_file(tmp_path / "x.safetensors")


def test_an_unfinished_remote_checkpoint_is_none(tmp_path):
    write_checkpoint(tmp_path / NAME, {}, {}, world_size=1)
    for file in ("published.json", "manifest_0.json"):
        (tmp_path / NAME / file).unlink()
    assert formats.format_of(open_store(tmp_path), NAME) == "torch_dcp"
    (tmp_path / NAME / "begun.txt").touch()
    with pytest.raises(CheckpointError, match=r"Expected a checkpoint in .*iter_0000010"):
        open_checkpoint(open_store(tmp_path), NAME)
