"""Saves that end early: closed, interrupted, or failed by an update."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.save.data_file import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore, published_iterations
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.async_saves import (
    CPU,
    SOON,
    Training,
    in_thread,
    saving,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import GatedStore


class SlowStore(LocalStore):
    """A store whose disk writes only after a gate is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.is_writing = threading.Event(), threading.Event()
        self.num_bytes = 0

    def open_data(self, path: str) -> DataSink:
        sink = super().open_data(path)
        write = sink.write

        def slow_write(spans: Sequence[memoryview]) -> None:
            self.is_writing.set()
            assert self.gate.wait(600)
            self.num_bytes += sum(span.nbytes for span in spans)
            write(spans)

        sink.write = slow_write
        return sink


def test_closing_aborts_a_save_on_a_slow_disk_before_all_of_it_is_written(tmp_path):
    store, model = SlowStore(tmp_path), nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    manager = CheckpointManager(store, CPU, 0, 1, "abcd")
    manager.save(1, collect(model), {})
    assert store.is_writing.wait(600)
    closing = in_thread(manager.close)
    closing.join(SOON)
    store.gate.set()
    closing.join(600)
    assert store.num_bytes <= 4 * 4 * 1024**2 < 48 * 1024**2, "the buffers, and one tensor"
    assert manager.num_failed == 1
    assert published_iterations(store) == []


def test_a_manager_that_is_closed_leaves_no_thread_behind(tmp_path):
    others = set(threading.enumerate())
    manager = CheckpointManager(LocalStore(tmp_path), CPU, 0, 1, "abcd")
    manager.save(1, collect(nn.Linear(64, 64)), {})
    manager.finish()
    manager.save(1, collect(nn.Linear(64, 64)), {})
    with contextlib.suppress(CheckpointError):
        manager.finish()
    threads = set(threading.enumerate()) - others
    assert len(threads) >= 2
    manager.close()
    manager.close()
    del manager
    gc.collect()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()


def test_closing_aborts_a_save_that_waits_for_another_rank_at_once(tmp_path):
    for rank in range(2):
        manager = CheckpointManager(LocalStore(tmp_path), CPU, rank, 2, f"abcd{rank}")
        manager.save(1, collect(nn.Linear(64, 64), rank=rank, world_size=2), {})
        own = tmp_path / f"iter_0000001.abcd{rank}1.saving"
        while not (own / f"manifest_{rank}.json").exists():
            time.sleep(0.001)
        manager.close()
        assert manager.num_failed == 1
    assert published_iterations(LocalStore(tmp_path)) == []


def test_an_exception_aborts_the_save_and_is_raised(tmp_path):
    store = GatedStore(tmp_path)
    opening = threading.Timer(SOON, store.gate.set)

    def run() -> None:
        with CheckpointManager(store, CPU, 0, 1, "abcd") as manager:
            manager.save(1, collect(nn.Linear(64, 64)), {})
            opening.start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert published_iterations(store) == []
    with CheckpointManager.start(str(tmp_path), CPU) as manager:
        manager.save(1, collect(nn.Linear(64, 64)), {})
        manager.finish()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000001"]


def _an_update_fails(root: Path) -> None:
    training = Training(1.0)
    with pytest.MonkeyPatch.context() as patch, saving(root) as manager:
        training.backward(1)
        patch.setattr(HostAdam, "run", lambda *_: 1 / 0)
        training.update(1)
        manager.save(1, training.contents(), {})
        with pytest.raises(
            CheckpointError, match=r"got: ZeroDivisionError: division by zero \(1 failed"
        ) as failure:
            manager.finish()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    assert published_iterations(LocalStore(root)) == []
    with saving(root, None) as manager:
        manager.save(2, collect(nn.Linear(64, 64)), {})
        manager.finish()


def test_a_failed_update_fails_the_save(home):
    run_ranks(1, _an_update_fails, home / "update")
