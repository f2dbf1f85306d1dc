"""`torch_dcp` checkpoints, and the folders of both formats."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import folders, torch_dcp
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER_FILE, checkpoint_name
from megatron.core.dist_checkpointing.small_files import read_train_state
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.dist_checkpointing.torch_dcp import check_files, load_tensors, read_metadata, save_checkpoint
from tests.ranks import run_ranks


def latest_iteration(root: Path) -> int | None:
    return folders.latest_iteration(open_store(root))


def published_iterations(root: Path) -> list[int]:
    return folders.published_iterations(open_store(root))


def checkpoint_folder(root: Path, iteration: int) -> Path:
    return root / checkpoint_name(iteration)


def save(root: Path, iteration: int, value: float = 0.0) -> Path:
    return save_checkpoint(root, iteration, {"model": {"w": torch.full((3,), value)}}, {"iteration": iteration})


def load(folder: Path, ignored: tuple[str, ...] = (), **wanted: torch.Tensor) -> dict:
    state = {"model": wanted}
    load_tensors(folder, read_metadata(folder), state, ignored)
    return state["model"]


def test_what_is_saved_is_found_and_read_back(tmp_path):
    save(tmp_path, 5, 1.5)
    save(tmp_path, 10, 2.5)
    assert latest_iteration(tmp_path) == 10
    assert published_iterations(tmp_path) == [5, 10]
    folder = checkpoint_folder(tmp_path, 10)
    assert folder.name == "iter_0000010"
    assert read_train_state(open_store(folder.parent), folder.name) == {"iteration": 10}
    assert torch.equal(load(folder, w=torch.zeros(3))["w"], torch.full((3,), 2.5))


def test_a_folder_that_holds_nothing_has_no_latest_iteration(tmp_path):
    assert latest_iteration(tmp_path) is None
    assert latest_iteration(tmp_path / "missing") is None


def test_an_abandoned_save_is_not_found_and_is_replaced_by_the_next(tmp_path):
    draft = tmp_path / "iter_0000005.saving"
    draft.mkdir(parents=True)
    (draft / "half").write_text("written")
    assert latest_iteration(tmp_path) is None
    folder = save(tmp_path, 5)
    assert latest_iteration(tmp_path) == 5
    assert not draft.exists()
    assert not (folder / "half").exists()


def test_a_published_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 5, 1.0)
    with pytest.raises(CheckpointError, match=r"Expected no checkpoint yet at .*iter_0000005, got a published one"):
        save(tmp_path, 5, 2.0)
    assert torch.equal(load(checkpoint_folder(tmp_path, 5), w=torch.zeros(3))["w"], torch.ones(3))


def test_a_crash_before_the_tracker_is_written_loses_nothing(tmp_path):
    save(tmp_path, 5)
    (tmp_path / TRACKER_FILE).unlink()
    assert latest_iteration(tmp_path) == 5
    save(tmp_path, 10)
    (tmp_path / TRACKER_FILE).write_text("5\n")
    assert latest_iteration(tmp_path) == 10


def test_a_tracker_that_was_set_back_is_not_followed_without_a_word(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    save(tmp_path, 5)
    save(tmp_path, 10)
    (tmp_path / TRACKER_FILE).write_text("5\n")
    assert latest_iteration(tmp_path) == 10
    assert "names 5, and 10 has been published since; taking that. To go back, use --ckpt-step." in caplog.text


def test_a_file_in_place_of_the_folder_is_no_fresh_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Expected a folder of checkpoints at .*, got a file"):
        latest_iteration(tmp_path / "file")


@pytest.mark.parametrize(("text", "message"), [("99\n", "iter_0000099"), ("release", "got 'release'"), ("", "got ''")])
def test_a_tracker_that_names_what_is_not_there_is_an_error_and_no_fresh_start(tmp_path, text, message):
    save(tmp_path, 5)
    (tmp_path / TRACKER_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        latest_iteration(tmp_path)


@pytest.mark.parametrize("step", ["draft", "rename", "tracker"])
def test_a_failure_while_publishing_leaves_the_old_checkpoint_the_newest(tmp_path, monkeypatch, step):
    save(tmp_path, 5)

    def fail(*_args):
        raise OSError("disk full")

    real_write = torch_dcp._write_durably
    if step == "rename":
        real_rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda p, to: fail() if p.suffix == ".saving" else real_rename(p, to))
    else:
        failing = {"draft": "train_state.json", "tracker": TRACKER_FILE}[step]
        monkeypatch.setattr(torch_dcp, "_write_durably", lambda p, t: fail() if p.name == failing else real_write(p, t))
    with pytest.raises(CheckpointError, match=r"publishing .*iter_0000010.*disk full"):
        save(tmp_path, 10)
    assert (tmp_path / TRACKER_FILE).read_text() == "5\n"
    assert latest_iteration(tmp_path) == (10 if step == "tracker" else 5)


def test_every_difference_is_named_before_anything_is_touched(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(2), "only_saved": torch.ones(1)}
    folder = save_checkpoint(tmp_path, 1, {"model": tensors}, {})
    wanted = {
        "a": torch.zeros(3),
        "b": torch.zeros(4),
        "c": torch.zeros(2, dtype=torch.float64),
        "only_wanted": torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as error:
        load(folder, **wanted)
    message = str(error.value)
    assert "it lacks model.only_wanted" in message
    assert "the model has no model.only_saved" in message
    assert "model.b has shape (2,) where the model has (4,)" in message
    assert "model.c is torch.float32 where the model has torch.float64" in message
    assert torch.equal(wanted["a"], torch.zeros(3))


def test_keys_may_be_left_unread_only_by_naming_their_beginning(tmp_path):
    folder = save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(1)}, "optim": {"m": torch.ones(1)}}, {})
    with pytest.raises(CheckpointError, match=r"optim\.m"):
        load(folder, w=torch.zeros(1))
    assert torch.equal(load(folder, ("optim.",), w=torch.zeros(1))["w"], torch.ones(1))


def test_files_that_cannot_be_read_are_named(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "train_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"train_state\.json, got JSONDecodeError"):
        read_train_state(open_store(folder.parent), folder.name)
    (folder / "train_state.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"train_state\.json, got list"):
        read_train_state(open_store(folder.parent), folder.name)
    (data,) = folder.glob("*.distcp")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"distcp"):
        load(folder, w=torch.zeros(3))
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_metadata(folder)


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


def _rank_zero_cannot_prepare(root: str) -> str:
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(root, 5, {"w": torch.ones(1)}, {})
    return str(error.value)


def test_all_ranks_hear_of_what_rank_zero_could_not_do(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for message in run_ranks(2, _rank_zero_cannot_prepare, str(tmp_path / "file")):
        assert "preparing" in message
        assert "NotADirectoryError" in message or "FileExistsError" in message


def test_the_plain_data_is_readable_json(tmp_path):
    folder = save(tmp_path, 5)
    assert json.loads((folder / "train_state.json").read_text()) == {"iteration": 5}


def test_no_bit_of_a_blob_can_change_what_is_loaded_without_being_found(tmp_path):
    folder = save(tmp_path, 1, 0.75)
    metadata = read_metadata(folder)
    check_files(folder, metadata)
    (place,) = metadata.storage_data.values()
    file = folder / place.relative_path
    content = file.read_bytes()
    num_found = 0
    for byte in range(place.offset, place.offset + place.length, 7):
        changed = bytearray(content)
        changed[byte] ^= 1 << byte % 8
        file.write_bytes(changed)
        try:
            check_files(folder, metadata)
        except CheckpointDamagedError as error:
            assert str(file) in str(error)  # noqa: PT017  it may as well not be raised
            num_found += 1
        else:
            wanted = torch.zeros(3)
            load(folder, w=wanted)
            assert torch.equal(wanted, torch.full((3,), 0.75)), f"bit {byte % 8} of byte {byte} matters"
    assert num_found > place.length // 14


def test_ranks_share_the_checking_and_sizes_alone_may_be_checked(tmp_path):
    state = {"model": {f"w{number}": torch.full((3,), float(number)) for number in range(5)}}
    folder = save_checkpoint(tmp_path, 1, state, {})
    metadata = read_metadata(folder)
    for place in metadata.storage_data.values():
        file = folder / place.relative_path
        whole = file.read_bytes()
        with file.open("r+b") as stream:
            stream.seek(place.offset + 3)
            stream.write(b"?")
        found = []
        for rank in range(3):
            try:
                check_files(folder, metadata, rank=rank, world_size=3)
            except CheckpointDamagedError:
                found.append(rank)
        assert len(found) == 1
        check_files(folder, metadata, checks_data=False)
        file.write_bytes(whole)
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointDamagedError, match=r"Expected \d+ bytes or more in .*, got \d+\."):
        check_files(folder, metadata, checks_data=False)
    file.unlink()
    with pytest.raises(CheckpointDamagedError, match="No such file"):
        check_files(folder, metadata)
