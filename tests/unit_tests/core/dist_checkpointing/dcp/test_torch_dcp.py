"""`torch_dcp` checkpoints, and the directories of both formats."""

from __future__ import annotations

import errno
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.dist_checkpointing import store as stores
from megatron.core.dist_checkpointing.dcp.torch_dcp import (
    TorchDcpCheckpoint,
    load_tensors,
    save_checkpoint,
)
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format import names as folders
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import read_train_state
from megatron.core.dist_checkpointing.store import TRACKER_FILE, LocalStore, open_store
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    Fault,
    Operation,
    PowerCut,
    watched,
)


def latest_iteration(root: Path) -> int | None:
    return stores.latest_iteration(open_store(root))


def published_iterations(root: Path) -> list[int]:
    return stores.published_iterations(open_store(root))


def checkpoint_folder(root: Path, iteration: int) -> Path:
    return root / checkpoint_name(iteration)


def save(root: Path, iteration: int, value: float = 0.0) -> Path:
    return save_checkpoint(
        root, iteration, {"model": {"w": torch.full((3,), value)}}, {"iteration": iteration}
    )


def opened(folder: Path) -> TorchDcpCheckpoint:
    return TorchDcpCheckpoint.open(LocalStore(folder.parent), folder.name)


def load(folder: Path, ignored: tuple[str, ...] = (), **wanted: torch.Tensor) -> dict:
    state = {"model": wanted}
    load_tensors(opened(folder), state, ignored)
    return state["model"]


def test_a_checkpoint_is_found_and_read_back(tmp_path):
    assert latest_iteration(tmp_path / "missing") is None
    save(tmp_path, 5, 1.5)
    save(tmp_path, 10, 2.5)
    assert latest_iteration(tmp_path) == 10
    assert published_iterations(tmp_path) == [5, 10]
    folder = checkpoint_folder(tmp_path, 10)
    assert folder.name == "iter_0000010"
    assert read_train_state(open_store(folder.parent), folder.name) == {"iteration": 10}
    assert torch.equal(load(folder, w=torch.zeros(3))["w"], torch.full((3,), 2.5))


def test_an_abandoned_save_is_not_found_and_is_replaced_by_the_next(tmp_path):
    draft = tmp_path / "iter_0000005.saving"
    draft.mkdir(parents=True)
    (draft / "half").write_text("written")
    assert latest_iteration(tmp_path) is None
    folder = save(tmp_path, 5)
    assert latest_iteration(tmp_path) == 5
    assert not draft.exists()
    assert not (folder / "half").exists()


def test_a_crash_before_the_tracker_is_written_loses_no_checkpoint(tmp_path):
    save(tmp_path, 5)
    (tmp_path / TRACKER_FILE).unlink()
    assert latest_iteration(tmp_path) == 5
    save(tmp_path, 10)
    (tmp_path / TRACKER_FILE).write_text("5\n")
    assert latest_iteration(tmp_path) == 10


def test_a_tracker_without_its_checkpoint_is_an_error_and_no_fresh_start(tmp_path):
    save(tmp_path, 5)
    (tmp_path / TRACKER_FILE).write_text("99\n")
    with pytest.raises(CheckpointError, match="iter_0000099"):
        latest_iteration(tmp_path)


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_any_operation_that_fails_leaves_the_new_checkpoint_or_the_old_one_and_an_error(
    tmp_path, monkeypatch, caplog, is_carried_out
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    operations: list[str] = []
    save(tmp_path / "old", 5)
    good = shutil.copytree(tmp_path / "old", tmp_path / "good")
    with watched(good, lambda operation: operations.append(str(operation))):
        save(good, 10)
    outcomes = []
    for number, operation in enumerate(operations):
        if is_carried_out and operation.startswith(("open", "write")):
            continue
        fault = Fault(number, errno.EIO, is_carried_out=is_carried_out)
        root = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        caplog.clear()
        error = None
        with watched(root, fault):
            try:
                save(root, 10, 2.5)
            except CheckpointError as failure:
                error = str(failure)
        if error is None:
            loaded = load(checkpoint_folder(root, 10), w=torch.zeros(3))["w"]
            assert torch.equal(loaded, torch.full((3,), 2.5))
        else:
            assert "Input/output error" in error
            assert published_iterations(root) == [5], operation
        tracked = (root / TRACKER_FILE).read_text()
        assert (
            tracked == f"{latest_iteration(root)}\n"
            or "iter_0000010 is published, but" in caplog.text
        )
        left = {path.name for path in root.iterdir()} - {
            "iter_0000005",
            "iter_0000010",
            TRACKER_FILE,
        }
        assert not left, operation
        outcomes.append((operation, latest_iteration(root)))

    decisive = outcomes.index(("rename iter_0000010", 10 if is_carried_out else 5))
    assert outcomes[decisive - 1] == ("fsync iter_0000010.saving", 5)
    assert {latest for _, latest in outcomes[decisive + 1 :]} == {10}
    assert [latest for _, latest in outcomes].count(5) >= 8


@pytest.mark.parametrize(
    "text", ["", "release", "-5", "9" * 5000, "\u0665", "5 5", "\x1b[2J" * 100]
)
def test_a_tracker_without_an_iteration_is_one_short_error(tmp_path, text):
    save(tmp_path, 5)
    (tmp_path / TRACKER_FILE).write_text(f"{text}\n")
    with pytest.raises(CheckpointError, match="Expected an iteration in ") as error:
        latest_iteration(tmp_path)
    assert len(str(error.value)) < 400
    assert "\x1b" not in str(error.value)


def test_a_tracker_that_cannot_be_read_is_an_error_and_no_fresh_start(tmp_path):
    save(tmp_path, 5)
    (tmp_path / TRACKER_FILE).unlink()
    (tmp_path / TRACKER_FILE).mkdir()
    with pytest.raises(CheckpointError, match=rf"Expected to read .*/{TRACKER_FILE}, got "):
        latest_iteration(tmp_path)


@given(
    st.integers(0, 10**18 - 1),
    st.sampled_from(["", ".0a1b.saving", ".saving", ".0a1b.deleting", ".0a.damaged"]),
)
def test_a_name_is_parsed_to_its_iteration_and_suffix(iteration, suffix):
    name = checkpoint_name(iteration) + suffix
    assert folders.parse_folder(name) == (iteration, suffix)
    assert folders.iteration_of(name) == (None if suffix else iteration)
    for other in (f"{name}\n", "iter_00000010", "iter_10", "iter_" + "\u0660" * 7, "iter_-000010"):
        assert folders.parse_folder(other) is None


def test_a_power_cut_at_any_moment_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path):
    root, images, published = tmp_path / "run", tmp_path / "images", []
    save(root, 5)
    images.mkdir()
    cut, lot = PowerCut(root), random.Random(0)

    def before(operation: Operation) -> None:
        for _ in range(4):
            image = images / str(len(published))
            cut.leave(image, lot)
            published.append(published_iterations(image))
        cut(operation)

    with watched(root, before):
        save(root, 10, 2.5)
    for number, iterations in enumerate(published):
        assert iterations in ([5], [5, 10])
        folder = checkpoint_folder(images / str(number), iterations[-1])
        expected = torch.full((3,), 2.5 if 10 in iterations else 0.0)
        assert torch.equal(load(folder, w=torch.zeros(3))["w"], expected)
        assert read_train_state(open_store(folder.parent), folder.name) == {
            "iteration": iterations[-1]
        }
    assert published[0] == [5]
    assert published[-1] == [5, 10]


def test_every_difference_is_named_before_a_tensor_is_changed(tmp_path):
    tensors = {
        "a": torch.ones(3),
        "b": torch.ones(2),
        "c": torch.ones(2),
        "only_saved": torch.ones(1),
    }
    folder = save_checkpoint(tmp_path, 1, {"model": tensors}, {})
    wanted = {
        "a": torch.zeros(3),
        "b": torch.zeros(4),
        "c": torch.zeros(2, dtype=torch.float16),
        "only_wanted": torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as error:
        load(folder, **wanted)
    message = str(error.value)
    assert "it lacks model.only_wanted" in message
    assert "it has unexpected keys model.only_saved" in message
    assert "model.b has shape (2,) where the model has (4,)" in message
    assert "model.c is torch.float32 where the model has torch.float16" in message
    assert torch.equal(wanted["a"], torch.zeros(3))


def test_keys_may_be_left_unread_only_by_naming_their_prefix(tmp_path):
    folder = save_checkpoint(
        tmp_path, 1, {"model": {"w": torch.ones(1)}, "optim": {"m": torch.ones(1)}}, {}
    )
    with pytest.raises(CheckpointError, match=r"optim\.m"):
        load(folder, w=torch.zeros(1))
    assert torch.equal(load(folder, ("optim.",), w=torch.zeros(1))["w"], torch.ones(1))


def test_files_that_cannot_be_read_are_named(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "train_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"train_state\.json"):
        read_train_state(open_store(folder.parent), folder.name)
    (folder / "train_state.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"train_state\.json"):
        read_train_state(open_store(folder.parent), folder.name)
    (data,) = folder.glob("*.distcp")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"distcp"):
        load(folder, w=torch.zeros(3))
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        opened(folder)


def _one_rank_cannot_write(root: str) -> str:
    def state() -> dict:
        class Unwritable:
            def __reduce__(self):
                raise OSError("cannot be written")

        mine = {"w": torch.ones(1)} if dist.get_rank() == 0 else {"v": Unwritable()}
        return {str(dist.get_rank()): mine}

    with pytest.raises(CheckpointError) as error:
        save_checkpoint(root, 5, state(), {})
    return str(error.value)


def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_published(tmp_path):
    for message in run_ranks(2, _one_rank_cannot_write, str(tmp_path)):
        assert "rank 1: OSError: cannot be written" in message
    assert latest_iteration(tmp_path) is None
    assert list(tmp_path.iterdir()) == [], "rank 0's files are deleted"


def test_ranks_share_the_checking_and_sizes_are_checked_first(tmp_path):
    state = {"model": {f"w{number}": torch.full((3,), float(number)) for number in range(5)}}
    folder = save_checkpoint(tmp_path, 1, state, {})
    for place in FileSystemReader(folder).read_metadata().storage_data.values():
        file = folder / place.relative_path
        whole = file.read_bytes()
        with file.open("r+b") as stream:
            stream.seek(place.offset + 3)
            stream.write(b"?")
        found = []
        for rank in range(3):
            try:
                opened(folder).check(rank=rank, world_size=3)
            except CheckpointDamagedError:
                found.append(rank)
        assert len(found) == 1
        opened(folder)
        file.write_bytes(whole)
    file.write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected \d+ bytes or more in .*, got \d+\."
    ):
        opened(folder)
    file.unlink()
    with pytest.raises(CheckpointDamagedError, match="No such file"):
        opened(folder)
