"""`CheckpointManager` with local and remote stores. Crashes are in test_nothing_half.py."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
)
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.data_file import BUFFER_BYTES
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import (
    TRACKER_FILE,
    RemoteStore,
    Store,
    latest_iteration,
    open_store,
    published_iterations,
)
from megatron.core.files import Sync
from megatron.core.host_memory import HostLimits
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import run_ranks

DEVICE = Device("cpu")


@pytest.fixture(params=["local", "remote"])
def root(request, tmp_path) -> Iterator[str]:
    """The path or URL of a new store."""
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    yield f"memory://{tmp_path}/run"
    fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


def trained(seed: int, num_steps: int = 2) -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    step(model, optimizer, num_steps)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for number in range(num_steps):
        model(torch.ones(2, 7) * (number + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    entries = collect(model, optimizer).entries
    return {entry.key: entry.part_of(entry.values.read()).clone() for entry in entries}


def load(store: Store, iteration: int) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, loaded into a model that had others."""
    model, optimizer = trained(seed=99)
    checkpoint, contents = (
        PublishedCheckpoint.open(store, checkpoint_name(iteration)),
        collect(model, optimizer),
    )
    load_entries(checkpoint, contents, check_contents(checkpoint, contents))
    return values(model, optimizer)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(got[key], expected[key])] == []


def test_the_ranks_of_a_machine_divide_what_a_manager_stages_in(tmp_path, monkeypatch):
    """Independent of the environment: programs that start their ranks set no LOCAL_WORLD_SIZE."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    monkeypatch.setattr(
        HostLimits, "read", classmethod(lambda _: HostLimits(80 * BUFFER_BYTES, None))
    )
    staged = {}
    for num_ranks in (1, 4, 8):
        with CheckpointManager.start(
            str(tmp_path), DEVICE, staging_share=0.25, num_local_ranks=num_ranks
        ) as manager:
            manager._pool.lend_more()
            staged[num_ranks] = manager._pool.staged_bytes / BUFFER_BYTES
    assert staged == {1: 20, 4: 5, 8: 2}


def test_a_saved_checkpoint_is_found_and_loaded_from_either_store(root):
    model, optimizer = trained(seed=0)
    saved = {}
    with CheckpointManager.start(root, DEVICE) as manager:
        for iteration in (5, 10):
            step(model, optimizer)
            saved[iteration] = values(model, optimizer)
            manager.save(iteration, collect(model, optimizer), {"iteration": iteration})
            step(model, optimizer)  # while it is being saved
        manager.finish()
        manager.finish()
    store = open_store(root)
    assert published_iterations(store) == [5, 10]
    assert latest_iteration(store) == 10
    assert store.read("latest_checkpointed_iteration.txt") == b"10\n"
    for iteration, expected in saved.items():
        assert PublishedCheckpoint.open(store, checkpoint_name(iteration)).train_state == {
            "iteration": iteration
        }
        assert_same(load(store, iteration), expected)
    assert not torch.equal(saved[5]["model.0.weight"], saved[10]["model.0.weight"])


def test_a_published_checkpoint_is_never_overwritten(root):
    model, optimizer = trained(seed=0)
    expected = values(model, optimizer)
    with CheckpointManager.start(root, DEVICE) as manager:
        manager.save(5, collect(model, optimizer), {})
        manager.finish()
        step(model, optimizer)
        for _ in range(2):  # also not by clearing up after the first attempt
            manager.save(5, collect(model, optimizer), {})
            with pytest.raises(
                CheckpointError,
                match=r"Expected no checkpoint yet at iter_0000005, got a published one",
            ):
                manager.finish()
        assert manager.num_failed == 2
        manager.save(6, collect(model, optimizer), {})
        manager.finish()
    store = open_store(root)
    assert store.folders() == ["iter_0000005", "iter_0000006"]
    assert_same(load(store, 5), expected)


def _no_space(_: str) -> None:
    raise OSError("no space")


def test_older_checkpoints_go_once_a_newer_one_is_published(root, monkeypatch):
    model, optimizer = trained(seed=0)
    store = open_store(root)
    with CheckpointManager.start(
        root, DEVICE, retention=Retention(keep_last=2, interval=3)
    ) as manager:
        for iteration in range(1, 8):
            manager.save(iteration, collect(model, optimizer), {})
            manager.finish()
            assert published_iterations(store)[-2:] == [iteration - 1, iteration][-iteration:]
        assert published_iterations(store) == [3, 6, 7]
        with monkeypatch.context() as patch:
            patch.setattr(manager.store, "open_data", _no_space)
            manager.save(8, collect(model, optimizer), {})
            with pytest.raises(CheckpointError):
                manager.finish()
        assert published_iterations(store) == [3, 6, 7]


iterations = st.lists(st.integers(0, 60), min_size=1, unique=True)


@given(iterations, st.none() | st.integers(1, 5), st.none() | st.integers(1, 9))
def test_retention_keeps_the_newest_and_the_multiples(published, keep_last, interval):
    newest = sorted(published)[len(published) // 2]
    gone = Retention(keep_last, interval).superseded(published, newest)
    earlier = sorted(iteration for iteration in published if iteration <= newest)
    kept = [iteration for iteration in earlier if iteration not in gone]
    assert newest in kept
    assert set(gone) <= set(earlier)
    if keep_last is None and interval is None:
        assert gone == []
        return
    last = earlier[-(keep_last or 1) :]
    assert kept == [i for i in earlier if i in last or (interval is not None and i % interval == 0)]


def _starts(root: Path) -> str:
    """All ranks start, and save. Returns the id of the save."""
    ranks = (dist.get_rank(), dist.get_world_size())
    with CheckpointManager.start(str(root), DEVICE, *ranks) as manager:
        manager.save(3, collect(nn.Linear(64, 64), rank=ranks[0], world_size=ranks[1]), {})
        manager.finish()
    return PublishedCheckpoint.open(open_store(root), checkpoint_name(3)).marker.save_id


def test_ranks_that_start_together_sweep_unpublished_drafts_and_no_other_directory(tmp_path):
    names = ("iter_0000009.saving", "iter_0000001.0123.deleting", "notes", "notes.saving")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / MARKER_FILE).write_text("{}")
    assert len(set(run_ranks(2, _starts, tmp_path))) == 1
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["iter_0000003", "notes", "notes.saving"]


def _of_two_ranks(
    root: str, rank: int, model: nn.Module, optimizer: FusedAdam
) -> CheckpointManager:
    """A manager with a save in flight, as one of two ranks in this process."""
    manager = CheckpointManager(open_store(root), DEVICE, rank, 2, "token", timeout_seconds=120.0)
    contents = collect(model, optimizer, rank=rank, world_size=2)
    if rank == 1:
        manager.save(5, contents, {})
    return manager


def test_a_rank_that_leaves_while_rank_zero_publishes_does_not_affect_the_save(
    root, monkeypatch, caplog
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    model, optimizer = trained(seed=0)
    expected = values(model, optimizer)
    second = _of_two_ranks(root, 1, model, optimizer)
    first = _of_two_ranks(root, 0, model, optimizer)
    write, left = first.store.write, []

    def leave_first(path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        if path.endswith(MARKER_FILE):
            second.close()
            left.append(path)
        write(path, content, sync)

    monkeypatch.setattr(first.store, "write", leave_first)
    first.save(5, collect(model, optimizer, rank=0, world_size=2), {})
    first.finish()
    first.close()
    assert left
    assert second.num_failed == 1
    assert "got the end of the run. Rank 0 may publish the checkpoint all the same." in caplog.text
    assert_same(load(open_store(root), 5), expected)


class _DownError(Exception):
    """An error of a remote file system, which is not an OSError."""


EVERYTHING = ("open_data", "write", "exists", "make_folder", "read", "files")


@pytest.mark.parametrize("methods", [EVERYTHING, ("open_data",)], ids=["down", "full"])
def test_a_failure_is_told_once_does_not_stop_the_training_and_the_next_save_succeeds(
    root, monkeypatch, methods
):
    model, optimizer = trained(seed=0)
    error = _DownError("the network is down")
    with CheckpointManager.start(root, DEVICE) as manager:
        with monkeypatch.context() as patch:
            for method in methods:
                patch.setattr(manager.store, method, _raising(error))
            manager.save(1, collect(model, optimizer), {})
            step(model, optimizer)  # it waits for what reads its states
            with pytest.raises(CheckpointError, match="the network is down") as failure:
                manager.finish()
            assert failure.value.__cause__ is error
            assert not manager.is_busy
        manager.finish()
        assert manager.failure() is None
        manager.save(2, collect(model, optimizer), {})
        manager.finish()
        assert manager.num_failed == 1
    assert open_store(root).folders() == ["iter_0000002"], "the first attempt's draft is gone"


def _raising(error: Exception):
    def fail(*_: object) -> None:
        raise error

    return fail


def test_errors_after_the_publication_do_not_fail_the_save(root, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    model, optimizer = trained(seed=0)
    with CheckpointManager.start(root, DEVICE, retention=Retention(keep_last=1)) as manager:
        write, store = manager.store.write, open_store(root)

        def no_tracker(path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
            if path == TRACKER_FILE:
                raise _DownError("the network is down")
            write(path, content, sync)

        def save(iteration: int) -> None:
            manager.save(iteration, collect(model, optimizer), {})
            manager.finish()

        save(1)
        with monkeypatch.context() as patch:
            patch.setattr(manager.store, "write", no_tracker)
            save(2)
            assert (
                f"is published, but {TRACKER_FILE} may still name another: the network is down"
                in caplog.text
            )
            assert published_iterations(store) == [1, 2], "the tracker's checkpoint must stay"
            assert latest_iteration(store) == 2
        with monkeypatch.context() as patch:
            patch.setattr(manager.store, "folders", _raising(_DownError("the network is down")))
            save(3)
            assert "could not tidy up" in caplog.text
        save(4)
        assert published_iterations(store) == [4]
        assert manager.num_failed == 0


def test_a_caller_that_fails_when_told_of_a_publication_fails_no_save(root, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    model, optimizer = trained(seed=0)

    def tell(iteration: int, seconds: float) -> None:
        raise ZeroDivisionError(f"{iteration}, {seconds}")

    with CheckpointManager.start(root, DEVICE, on_published=tell) as manager:
        for iteration in (1, 2):
            manager.save(iteration, collect(model, optimizer), {})
            manager.finish()
        assert manager.num_failed == 0
    assert published_iterations(open_store(root)) == [1, 2]
    assert "iter_0000001 is published, but the caller failed when told so" in caplog.text


def test_a_rank_that_is_told_to_end_looks_once_more_before_it_counts_a_failure(root, monkeypatch):
    model, optimizer = trained(seed=0)
    second = _of_two_ranks(root, 1, model, optimizer)
    first = _of_two_ranks(root, 0, model, optimizer)
    is_closing, is_looking, may_look = second._is_closing, threading.Event(), threading.Event()

    def wait(_: float) -> bool:
        is_looking.set()
        return may_look.wait(600)

    monkeypatch.setattr(is_closing, "wait", wait)
    assert is_looking.wait(600)
    first.save(5, collect(model, optimizer, rank=0, world_size=2), {})
    first.finish()
    is_closing.set()
    may_look.set()
    second.finish()
    assert second.num_failed == 0
    first.close()
    second.close()


def test_a_manager_that_is_let_go_of_finishes_its_save(root):
    model, optimizer = trained(seed=0)
    expected = values(model, optimizer)
    manager = CheckpointManager.start(root, DEVICE)
    manager.save(5, collect(model, optimizer), {})
    assert manager._in_flight is not None
    done = manager._in_flight.done
    assert done is not None
    del manager
    gc.collect()
    done.synchronize()
    assert_same(load(open_store(root), 5), expected)


def test_a_remote_save_that_another_run_sweeps_before_its_marker_is_no_published_one(
    tmp_path, monkeypatch
):
    root = f"memory://{tmp_path}/swept"
    write = RemoteStore.write

    def sweep_first(store: RemoteStore, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        if path.endswith(MARKER_FILE):
            assert open_store(root).sweep()
        write(store, path, content, sync)

    model, optimizer = trained(0)
    monkeypatch.setattr(RemoteStore, "write", sweep_first)
    with CheckpointManager.start(root, DEVICE, 0, 1) as manager:
        manager.save(5, collect(model, optimizer, rank=0, world_size=1), {})
        with pytest.raises(CheckpointError, match="another run may have swept it"):
            manager.finish()
    assert published_iterations(open_store(root)) == []
