"""A rank that fails, or never comes, does not hang the others: every rank reports which one failed,
and the next save succeeds.

The ranks of a save are managers in this process: saving needs no process group.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    manifest_file,
)
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.save.data_file import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.store import TRACKER_FILE, LocalStore, published_iterations
from megatron.core.files import Sync
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import (
    CPU,
    SMALL,
    Size,
    State,
    check_loads,
    ending_of,
)

FOR_EVER = 86400.0  # seconds: a rank that waited for another would hang


class FaultyStore(LocalStore):
    """The store of one rank, in which some files cannot be made or written, once each.

    Attributes:
        faulty: patterns of their paths.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faulty: list[str] = []

    def open_data(self, path: str) -> DataSink:
        self._check(path)
        return super().open_data(path)

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        self._check(path)
        super().write(path, content, sync)

    def make_folder(self, name: str) -> None:
        self._check(name)
        super().make_folder(name)

    def _check(self, path: str) -> None:
        for pattern in self.faulty:
            if re.search(pattern, path):
                self.faulty.remove(pattern)
                raise OSError(errno.EIO, "Input/output error", path)


class Ranks:
    """Managers of ranks that save together."""

    def __init__(
        self, root: Path, stack: ExitStack, world_size: int, timeout_seconds: float
    ) -> None:
        self.all = range(world_size)
        self.stores = [FaultyStore(root) for _ in self.all]
        self.managers = [
            stack.enter_context(
                CheckpointManager(
                    store, CPU, rank, world_size, "abcd", timeout_seconds=timeout_seconds
                )
            )
            for rank, store in enumerate(self.stores)
        ]

    def begin(self, iteration: int, *ranks: int, size: Size = SMALL) -> None:
        """Starts the save on some ranks; default: all."""
        for rank in ranks or self.all:
            state = State(iteration, size=size)
            self.managers[rank].save(
                iteration, state.contents(rank, len(self.managers)), state.train_state
            )

    def endings(self, *ranks: int) -> list[str | None]:
        """The error of each rank, or None; default: of all."""
        return [ending_of(self.managers[rank]) for rank in ranks or self.all]

    def save(self, iteration: int) -> list[str | None]:
        self.begin(iteration)
        return self.endings()


@contextmanager
def ranks_of(root: Path, world_size: int, timeout_seconds: float = FOR_EVER) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(root, stack, world_size, timeout_seconds)


NUM_RANKS = 3


@pytest.mark.parametrize("faulty", [r"\.saving$", r"\.distcp", "manifest"])
@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_cannot_write_is_named_on_all_ranks_at_once_and_the_next_save_succeeds(
    tmp_path, rank, faulty
):
    with ranks_of(tmp_path, NUM_RANKS) as ranks:
        others = [other for other in ranks.all if other != rank]
        # The failing rank starts last, and then first.
        for iteration, order in ((10, [*others, rank]), (20, [rank, *others])):
            ranks.stores[rank].faulty = [faulty]
            ranks.begin(iteration, *order)
            for other, ending in enumerate(ranks.endings()):
                assert checkpoint_name(iteration) in ending
                assert other == rank or f"rank {rank}: " in ending
                assert "[Errno 5] Input/output error" in ending
            assert published_iterations(ranks.stores[0]) == []
        assert ranks.save(30) == [None] * NUM_RANKS
        assert [manager.num_failed for manager in ranks.managers] == [2] * NUM_RANKS
    check_loads(LocalStore(tmp_path), 30, SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        checkpoint_name(30),
        TRACKER_FILE,
    ], "failed saves leave no files"


def test_ranks_that_never_come_are_named_within_the_timeout_and_may_come_later(tmp_path):
    # The others wait twice as long, within which rank 0 leaves its reason.
    with ranks_of(tmp_path, 4, timeout_seconds=4.0) as ranks:
        ranks.begin(10, 0, 3)
        own, other = ranks.endings(0, 3)
        draft = f"{tmp_path}/iter_0000010.abcd1.saving"
        named = f"Expected a manifest of every rank in {draft}, got no manifest of rank 1, 2 "
        assert f"{named}within 4 s." in own
        assert f"rank 0: {named}within 4 s." in other
        ranks.begin(10, 1, 2)
        assert all(named in ending for ending in ranks.endings(1, 2)), (
            "the reason has been left for them"
        )
        assert ranks.save(20) == [None] * 4
    check_loads(LocalStore(tmp_path), 20, SMALL)


def test_a_rank_zero_that_never_comes_is_given_up_by_the_others(tmp_path):
    with ranks_of(tmp_path, NUM_RANKS, timeout_seconds=0.1) as ranks:
        ranks.begin(10, 1, 2)
        for ending in ranks.endings(1, 2):
            assert (
                f"Expected {tmp_path}/iter_0000010 to be published by rank 0 within 0.2 s."
                in ending
            )
        assert published_iterations(ranks.stores[0]) == []


def test_a_rank_with_another_model_is_named_and_no_checkpoint_is_published(tmp_path):
    with ranks_of(tmp_path, NUM_RANKS) as ranks:
        ranks.begin(10, 2, size=SMALL._replace(dim=SMALL.dim + 1))
        ranks.begin(10, 0, 1)
        for ending in ranks.endings():
            assert "Expected rank 2 to have written " in ending
            assert manifest_file(2) in ending
        assert published_iterations(ranks.stores[0]) == []


def test_a_failure_is_told_once_by_whatever_asks_first(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    with ranks_of(tmp_path, 1) as ranks:
        (manager,), (store,) = ranks.managers, ranks.stores
        assert manager.failure() is None
        for iteration in (10, 20, 30):
            store.faulty.append(f"{checkpoint_name(iteration)}.*manifest")
        ranks.begin(10)
        with pytest.raises(CheckpointError, match="iter_0000010 to be published"):
            ranks.begin(20)
        while manager.is_busy:
            time.sleep(0.001)
        assert "iter_0000020" in str(manager.failure())
        assert manager.failure() is None
        manager.finish()
        ranks.begin(30)
        while manager.is_busy:
            time.sleep(0.001)
    assert "iter_0000030" in caplog.text, "`close` logs a failure that no caller has asked for"
    assert not re.search("iter_00000[12]0", caplog.text)
