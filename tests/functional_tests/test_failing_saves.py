"""Runs of `pretrain_gpt.py` whose checkpoints are damaged, or cannot be saved: their messages, and
how they continue.
"""

from __future__ import annotations

import errno
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.save.data_file import DataSink
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.files import Sync
from megatron.training.checkpoint.saver import Saver
from tests.functional_tests.helpers.runner import assert_same_tensors, read_checkpoint
from tests.functional_tests.helpers.runs import (
    DAMAGE,
    flip_last_weight,
    pretrain,
    published,
    train,
    trained,
)

# Damaged checkpoints.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on two ranks, at each of its four iterations."""
    root = tmp_path_factory.mktemp("saved")
    pretrain("--save", root, "--save-interval", 1, world_size=2)
    assert len(published(root)) == 4
    return root


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_checkpoint_that_is_whole_is_loaded_on_all_ranks_and_the_others_are_named_loudly(
    saved, tmp_path, damage
):
    root, metrics = shutil.copytree(saved, tmp_path / "saved"), tmp_path / "metrics.jsonl"
    for iteration in (4, 3):
        DAMAGE[damage](root / f"iter_{iteration:07d}")
    flags = ["--load", root, "--save", tmp_path / "again", "--metrics-jsonl", metrics]
    runs = pretrain(*flags, world_size=2)
    assert [run.error for run in runs] == ["", ""]
    assert trained(metrics) == [3, 4]
    assert_same_tensors(read_checkpoint(tmp_path / "again"), read_checkpoint(saved))
    log = "".join(run.log for run in runs)
    named = re.findall(r"ERROR: DAMAGED: checkpoint (.+) is passed over", log)
    assert named == [f"{root}/iter_0000004", f"{root}/iter_0000003"], "each once"


def test_where_all_checkpoints_are_damaged_there_is_an_error_and_no_fresh_start(saved, tmp_path):
    root, metrics = shutil.copytree(saved, tmp_path / "saved"), tmp_path / "metrics.jsonl"
    for folder in published(root):
        flip_last_weight(root / folder, 1)
    runs = pretrain("--load", root, "--metrics-jsonl", metrics, world_size=2)
    assert [run.log.count("DAMAGED") for run in runs] == [4, 0], "one loud line each"
    for run in runs:
        assert run.error.startswith(f"CheckpointError: Expected a checkpoint in {root}")
        assert f"{root}/iter_0000004/__1_0.distcp" in run.error
    assert not metrics.exists() or trained(metrics) == []


def test_a_step_that_is_asked_for_and_damaged_is_an_error_though_others_are_whole(saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "saved")
    flip_last_weight(root / "iter_0000003", 0)
    for run in pretrain("--load", root, "--ckpt-step", 3, world_size=2):
        assert run.error.startswith(f"CheckpointError: Expected a checkpoint in {root}")
        assert f"{root}/iter_0000003/__0_0.distcp" in run.error
    # With the flag, the damaged checkpoint is loaded.
    train("--load", root, "--ckpt-step", 3, "--no-verify-checkpoint", world_size=2)


# Saves that fail.


def fail_on(rank: int, iteration: int) -> Callable[[pytest.MonkeyPatch], None]:
    """One rank's disk fails in the save of one iteration."""

    def disturb(patch: pytest.MonkeyPatch) -> None:
        real = LocalStore.open_data

        def open_data(store: LocalStore, path: str) -> DataSink:
            if f"iter_{iteration:07d}" in path and f"__{rank}_0" in path:
                raise OSError(errno.EIO, "Input/output error", path)
            return real(store, path)

        patch.setattr(LocalStore, "open_data", open_data)

    return disturb


@pytest.mark.parametrize("flags", [(), ("--async-save",)])
def test_a_failed_save_is_reported_on_all_ranks_and_training_continues(tmp_path, flags):
    flags = [*flags, "--save", tmp_path / "saved", "--save-interval", 1]
    runs = pretrain(*flags, world_size=2, disturb=fail_on(1, 2))
    for run in runs:
        assert run.error == ""
        (line,) = [line for line in run.log.splitlines() if "ERROR" in line]
        assert "Expected checkpoint iter_0000002 to be published" in line
        assert "[Errno 5] Input/output error" in line
    assert "rank 1: " in runs[0].log
    assert published(tmp_path / "saved") == ["iter_0000001", "iter_0000003", "iter_0000004"]


@pytest.mark.parametrize("rank", range(2))
def test_a_save_that_fails_ends_the_run_if_that_is_asked_for_once_the_state_has_been_saved(
    tmp_path, rank
):
    flags = ["--save", tmp_path / "saved", "--exit-on-save-failure"]
    flags += ["--save-interval", 1, "--train-iters", 9]
    runs = pretrain(*flags, world_size=2, disturb=fail_on(rank, 2))
    assert [run.error for run in runs] == ["", ""]
    assert "exiting at iteration 3 of 9: a checkpoint could not be saved" in runs[0].log
    assert published(tmp_path / "saved") == ["iter_0000001", "iter_0000003"]


@pytest.mark.parametrize("flags", [(), ("--async-save",)])
def test_a_last_state_that_cannot_be_saved_is_the_runs_error(tmp_path, flags):
    flags = [*flags, "--save", tmp_path / "saved", "--save-interval", 2]
    for run in pretrain(*flags, world_size=2, disturb=fail_on(0, 4)):
        assert run.error.startswith("ExitError: Expected checkpoint iter_0000004 to be published")
        assert "[Errno 5] Input/output error" in run.error
    assert published(tmp_path / "saved")[0] == "iter_0000002"


def _block_first_save(patch: pytest.MonkeyPatch) -> None:
    """The first save has read all that it writes, so that the training can continue, and ends once
    another is due.
    """
    was_due, real_write, real_skip = threading.Event(), LocalStore.write, Saver.skip

    def write(store: LocalStore, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        assert was_due.wait(600), "the run waits for this save"
        real_write(store, path, content, sync)

    def skip(saver: Saver, iteration: int) -> None:
        real_skip(saver, iteration)
        was_due.set()

    patch.setattr(LocalStore, "write", write)
    patch.setattr(Saver, "skip", skip)


def test_a_save_that_is_due_while_another_runs_is_left_out_on_all_ranks_if_asked_for(tmp_path):
    flags = ["--async-save", "--async-save-busy", "skip", "--save-interval", 1]
    flags += ["--save", tmp_path / "saved"]
    runs = pretrain(*flags, world_size=2, disturb=_block_first_save)
    for run in runs:
        assert run.error == ""
        assert "iteration 2 is not saved: the previous save is still in flight" in run.log
    assert published(tmp_path / "saved")[0] == "iter_0000001"
    assert published(tmp_path / "saved")[-1] == "iter_0000004"
    assert "iter_0000002" not in published(tmp_path / "saved")


def test_a_run_that_ends_in_an_error_gives_up_its_save_and_tells_that_error(tmp_path):
    """With an absurd learning rate, the second loss is not finite."""
    absurd = "--lr 1e30 --optimizer sgd --lr-decay-style constant --clip-grad 0".split()
    flags = [*absurd, "--check-for-nan-in-loss", "--async-save", "--save-interval", 1]
    flags += ["--save", tmp_path / "saved"]

    def never_write(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            "megatron.core.dist_checkpointing.save.publisher._is_published", lambda _: False
        )
        real = LocalStore.write

        def write(store: LocalStore, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
            if "manifest_1" not in path:
                real(store, path, content, sync)

        patch.setattr(LocalStore, "write", write)

    for run in pretrain(*flags, world_size=2, disturb=never_write):
        assert run.error.startswith("NonFiniteLossError: Expected a finite loss in iteration 2")
        assert "Expected time to finish the save, got the end of the run" in run.log
    assert all(name.endswith(".saving") for name in published(tmp_path / "saved"))
