"""Which checkpoints stay, and what is swept when a run begins."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import published_iterations
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.async_saves import CPU


@given(
    st.lists(st.integers(0, 60), unique=True, min_size=1),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.data(),
)
def test_what_is_superseded_is_older_than_the_last_few_and_no_multiple(
    published, keep_last, interval, data
):
    newest = data.draw(st.sampled_from(published))
    superseded = Retention(keep_last, interval).superseded(published, newest)
    kept = [iteration for iteration in published if iteration not in superseded]
    assert newest in kept
    assert all(iteration in kept for iteration in published if iteration > newest), (
        "they are not this run's"
    )
    if keep_last is None and interval is None:
        assert superseded == []
        return
    older = sorted(iteration for iteration in published if iteration <= newest)
    assert set(older[-(keep_last or 1) :]) <= set(kept)
    if interval is not None:
        assert all(iteration in kept for iteration in older if iteration % interval == 0)
    for iteration in older[: -(keep_last or 1)]:
        assert (iteration in kept) == (interval is not None and iteration % interval == 0)


class Notes(LocalStore):
    """A store that writes down what becomes of folders, and fails where it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.events: list[str] = []
        self.fails = False

    def publish(self, draft: str, final: str) -> bool:
        if self.fails:
            raise OSError("not now")
        is_durable = super().publish(draft, final)
        self.events.append(f"+{final[-1]}")
        return is_durable

    def remove(self, name: str) -> None:
        super().remove(name)
        if name.startswith("iter_") and not name.endswith(".saving"):
            self.events.append(f"-{name[-1]}")


def test_checkpoints_are_deleted_once_the_next_is_published_and_what_failed_does_not_count(
    tmp_path,
):
    store, contents = Notes(tmp_path), collect(nn.Linear(8, 8))
    with CheckpointManager(store, CPU, 0, 1, "abcd", retention=Retention(2, 4)) as manager:
        for iteration in range(1, 10):
            store.fails = iteration in (3, 5, 6)
            manager.save(iteration, contents, {})
            if store.fails:
                with pytest.raises(CheckpointError, match="not now"):
                    manager.finish()
            manager.finish()
    assert store.events == ["+1", "+2", "+4", "-1", "+7", "-2", "+8", "+9", "-7"]
    assert published_iterations(store) == [4, 8, 9]


def test_a_checkpoint_that_cannot_be_deleted_fails_nothing_and_goes_with_the_next(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    store, contents = LocalStore(tmp_path), collect(nn.Linear(8, 8))
    with CheckpointManager(store, CPU, 0, 1, "abcd", retention=Retention(1)) as manager:
        for iteration in (1, 2, 3):
            with pytest.MonkeyPatch.context() as patch:
                if iteration == 2:
                    patch.setattr(store, "remove", lambda _: (_ for _ in ()).throw(OSError("busy")))
                manager.save(iteration, contents, {})
                manager.finish()
            assert published_iterations(store) == {1: [1], 2: [1, 2], 3: [3]}[iteration]
    assert f"could not delete {tmp_path}/iter_0000001: busy" in caplog.text


def _starts(root: Path) -> str:
    """All ranks begin, and save."""
    with CheckpointManager.start(str(root), CPU, dist.get_rank(), dist.get_world_size()) as manager:
        manager.save(
            3,
            collect(nn.Linear(64, 64), rank=dist.get_rank(), world_size=dist.get_world_size()),
            {},
        )
        manager.finish()
    marker = json.loads((root / "iter_0000003" / "published.json").read_text())
    return str(marker["save_id"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_sweeps_what_was_never_published_when_it_begins_and_nothing_else(
    tmp_path, world_size
):
    for iteration in (1, 2):
        with CheckpointManager(LocalStore(tmp_path), CPU, 0, 1, "abcd") as manager:
            manager.save(iteration, collect(nn.Linear(8, 8)), {})
            manager.finish()
    for name in ("iter_0000002.dead1.saving", "iter_0000009.saving", "iter_0000001.0123.deleting"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "published.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.saving").mkdir()
    save_ids = run_ranks(world_size, _starts, tmp_path)
    assert len(set(save_ids)) == 1, "of all ranks"
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["iter_0000001", "iter_0000002", "iter_0000003", "notes", "notes.saving"]


def _cannot_start(root: Path) -> str:
    with pytest.raises(CheckpointError) as failure:
        CheckpointManager.start(str(root), CPU, dist.get_rank(), dist.get_world_size())
    return str(failure.value)


def test_a_run_that_cannot_begin_says_why_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    for message in run_ranks(2, _cannot_start, tmp_path / "file"):
        assert message.startswith(
            f"Expected a folder of checkpoints at {tmp_path}/file, got NotADirectoryError"
        )
