"""A rank that fails, or never comes, keeps nobody waiting: all hear of it by name, and the next
save is as good as any.

The ranks of a save are managers side by side here: nothing that they do needs a process group.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.names import (
    TRACKER_FILE,
    checkpoint_name,
    latest_iteration,
    published_iterations,
)
from megatron.core.dist_checkpointing.save import manager as manager_module
from megatron.core.dist_checkpointing.save.data_sink import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.store import LocalStore
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


class FaultySink:
    """A data file whose disk fails when it is written to."""

    def __init__(self, sink: DataSink, path: str) -> None:
        self._sink = sink
        self._path = path

    def write(self, spans: Sequence[memoryview]) -> None:
        self._sink.write([spans[0][:4096]])
        raise _error_of(self._path)

    def close(self, nbytes: int) -> None:
        self._sink.close(nbytes)

    def abort(self) -> None:
        self._sink.abort()


class FaultyStore(LocalStore):
    """A store as one rank has it, which cannot make or write some things, once each.

    Attributes:
        faulty: patterns of their paths; with "in" before it, of data files that can be made, and
            not written.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faulty: list[str] = []

    def open_data(self, path: str) -> DataSink:
        self._check(path)
        sink = super().open_data(path)
        return FaultySink(sink, path) if self._takes(f"in {path}") else sink

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        self._check(path)
        super().write(path, content, sync)

    def make_folder(self, name: str) -> None:
        self._check(name)
        super().make_folder(name)

    def _check(self, path: str) -> None:
        if self._takes(path):
            raise _error_of(path)

    def _takes(self, path: str) -> bool:
        for pattern in self.faulty:
            if re.search(pattern, path):
                self.faulty.remove(pattern)
                return True
        return False


def _error_of(path: str) -> OSError:
    return OSError(errno.EIO, "Input/output error", path)


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
        """Some ranks begin to save; default: all."""
        for rank in ranks or self.all:
            state = State(iteration, size=size)
            self.managers[rank].save(
                iteration, state.contents(rank, len(self.managers)), state.train_state
            )

    def endings(self, *ranks: int) -> list[str | None]:
        """The error of each rank, or of some, if there is one. All of them have it at once."""
        return [ending_of(self.managers[rank]) for rank in ranks or self.all]

    def save(self, iteration: int) -> list[str | None]:
        self.begin(iteration)
        return self.endings()


@contextmanager
def ranks_of(root: Path, world_size: int, timeout_seconds: float = FOR_EVER) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(root, stack, world_size, timeout_seconds)


NUM_RANKS = 3


@pytest.mark.parametrize("faulty", [r"\.saving$", r"^[^ ]*\.distcp", r"^in .*\.distcp", "manifest"])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_that_cannot_write_is_named_on_all_ranks_at_once_and_the_next_save_succeeds(
    tmp_path, rank, faulty
):
    with ranks_of(tmp_path, NUM_RANKS) as ranks:
        others = [other for other in ranks.all if other != rank]
        # It is the last to begin, and the first.
        for iteration, order in ((10, [*others, rank]), (20, [rank, *others])):
            ranks.stores[rank].faulty = [faulty]
            ranks.begin(iteration, *order)
            for other, ending in enumerate(ranks.endings()):
                assert ending.startswith(
                    f"Expected checkpoint {checkpoint_name(iteration)} to be published in "
                )
                assert other == rank or f"rank {rank}: " in ending
                assert "[Errno 5] Input/output error" in ending
                assert ending.endswith(
                    f"({iteration // 10} failed so far; this run has published none yet)"
                )
            assert published_iterations(ranks.stores[0]) == []
        assert ranks.save(30) == [None] * NUM_RANKS
        assert [manager.num_failed for manager in ranks.managers] == [2] * NUM_RANKS
    check_loads(LocalStore(tmp_path), 30, SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        checkpoint_name(30),
        TRACKER_FILE,
    ], "nothing is left"


@pytest.mark.parametrize("name", [METADATA_FILE, TRAIN_STATE_FILE, MARKER_FILE])
def test_what_rank_zero_cannot_write_for_all_is_named_on_all(tmp_path, name):
    with ranks_of(tmp_path, NUM_RANKS) as ranks:
        ranks.stores[0].faulty = [name]
        for rank, ending in enumerate(ranks.save(10)):
            assert ("rank 0: " in ending) == (rank > 0)
            assert re.search(rf"Input/output error: 'iter_0000010.*/{re.escape(name)}'", ending)
        assert ranks.save(20) == [None] * NUM_RANKS
        assert published_iterations(ranks.stores[0]) == [20]


def test_a_checkpoint_whose_announcement_fails_is_published_all_the_same_and_found(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    with ranks_of(tmp_path, NUM_RANKS) as ranks:
        assert ranks.save(10) == [None] * NUM_RANKS
        ranks.stores[0].faulty = [TRACKER_FILE]
        assert ranks.save(20) == [None] * NUM_RANKS
        assert (
            f"{tmp_path}/iter_0000020 is published, but {TRACKER_FILE} may still name another: "
            in caplog.text
        )
        assert latest_iteration(ranks.stores[0]) == 20
        check_loads(ranks.stores[0], 20, SMALL)


def test_ranks_that_never_come_are_named_within_the_timeout_and_may_come_later(tmp_path):
    # The others wait twice as long, within which rank 0 leaves its reason.
    with ranks_of(tmp_path, 4, timeout_seconds=8.0) as ranks:
        ranks.begin(10, 0, 3)
        own, other = ranks.endings(0, 3)
        draft = f"{tmp_path}/iter_0000010.abcd1.saving"
        named = f"Expected a manifest of every rank in {draft}, got none of rank 1, 2 "
        assert f"{named}within 8 s." in own
        assert f"rank 0: {named}within 8 s." in other
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


def test_a_rank_with_another_model_is_named_and_nothing_of_it_is_published(tmp_path):
    with ranks_of(tmp_path, NUM_RANKS) as ranks:
        ranks.begin(10, 2, size=SMALL._replace(dim=SMALL.dim + 1))
        ranks.begin(10, 0, 1)
        for ending in ranks.endings():
            assert "Expected rank 2 to have written " in ending
            assert manifest_file(2) in ending
        assert published_iterations(ranks.stores[0]) == []


def test_failures_are_counted_and_the_last_success_is_dated(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(
        manager_module,
        "time",
        SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter),
    )
    with ranks_of(tmp_path, 2) as ranks:
        assert ranks.save(10) == [None, None]
        for number in range(1, 3):
            clock.now += 60.0
            ranks.stores[1].faulty = ["manifest"]
            for ending in ranks.save(10 + number):
                assert ending.endswith(
                    f"({number} failed so far; the last was published {60 * number} s ago)"
                )
        assert ranks.save(20) == [None, None]
        clock.now += 5.0
        ranks.stores[0].faulty = [METADATA_FILE]
        assert all(
            ending.endswith("(3 failed so far; the last was published 5 s ago)")
            for ending in ranks.save(30)
        )
        assert published_iterations(ranks.stores[0]) == [10, 20]


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
    assert "iter_0000030" in caplog.text, "what nobody has asked for, the end tells"
    assert not re.search("iter_00000[12]0", caplog.text)
