"""All ranks of a save end the same way if a rank is delayed, or its disk fails, at any operation.

The tests enumerate the operations. See `helpers/interleaving.py`.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    data_file,
    digest,
    files_of,
)
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import read_marker
from megatron.core.dist_checkpointing.save.publisher import _PATIENCE
from megatron.core.dist_checkpointing.store import TRACKER_FILE, LocalStore
from tests.unit_tests.core.dist_checkpointing.helpers.interleaving import (
    Fault,
    Interleaved,
    Outcome,
    Pause,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import DRAFT, NEW, memory_folder

FINAL, NUM_RANKS = checkpoint_name(NEW), 2
FOR_EVER = 10**9  # operations: until the other rank ends or blocks
SECONDS = 3 * _PATIENCE
# Operations that another rank may observe. Files have temporary names while they are written.
VISIBLE = ("mkdir", "replace", "rename", f"open {DRAFT}/__")
HIDDEN = ("write", "fsync")


class Scenes:
    """Saves to one directory, which is checked and deleted after each save."""

    def __init__(self, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.num_saved, self.num_failed = 0, 0
        self._root = root
        self._ranks = Interleaved(root, NUM_RANKS)
        self._caplog = caplog
        self._data: list[bytes] = []  # of each rank's file
        self.undisturbed = self.save()

    def save(self, pause: Pause | None = None, fault: Fault | None = None) -> Outcome:
        outcome = self._ranks.save(pause, fault)
        final = self._root / FINAL
        left = {path.name for path in self._root.iterdir()} - {TRACKER_FILE, FINAL}
        about = f"{pause}, {fault}: {outcome.endings}; other files: {left}"
        assert outcome.seconds < SECONDS, about
        if final.exists():
            self.num_saved += 1
            assert outcome.endings == [None] * NUM_RANKS, about
            assert not left, about
            self._check_whole(final)
            self._check_tracker(pause, fault)
        else:
            self.num_failed += 1
            assert fault is not None, about
            assert not (self._root / TRACKER_FILE).exists(), about
            for rank, ending in enumerate(outcome.endings):
                assert ending is not None, about
                assert "[Errno 5] Input/output error" in ending, about
                assert rank == fault.rank or f"rank {fault.rank}: " in ending, about
        shutil.rmtree(self._root)
        self._caplog.clear()
        return outcome

    def pauses(self, rank: int, other: int, *, is_every: bool) -> Iterator[Pause]:
        """Yields the pauses of a rank, before each of its operations and until each operation of
        another rank. Unless `is_every`, only operations that other ranks can observe count.
        """
        for at in itertools.count():
            longest = Pause(rank, at, other, FOR_EVER)
            outcome = self.save(longest)
            if outcome.num_in_pause < 0:
                return  # the rank ended before the pause
            yield longest
            if not is_every and outcome.operations[rank][at].startswith(HIDDEN):
                continue
            for until, operation in enumerate(
                outcome.operations[other][: outcome.num_in_pause - 1]
            ):
                if is_every or operation.startswith(VISIBLE):
                    yield Pause(rank, at, other, until)

    def _check_whole(self, final: Path) -> None:
        """Asserts that the checkpoint has exactly its files, with the expected contents."""
        assert sorted(path.name for path in final.iterdir()) == sorted(
            [*files_of(NUM_RANKS), MARKER_FILE]
        )
        for name, record in read_marker(LocalStore(self._root), FINAL).files.items():
            content = (final / name).read_bytes()
            assert len(content) == record.nbytes
            assert record.digest in (None, digest(content))
        data = [(final / data_file(rank)).read_bytes() for rank in range(NUM_RANKS)]
        self._data = self._data or data
        assert data == self._data

    def _check_tracker(self, pause: Pause | None, fault: Fault | None) -> None:
        tracker = self._root / TRACKER_FILE
        if not tracker.exists() or tracker.read_text() != f"{NEW}\n":
            assert fault is not None, pause
            assert fault.rank == 0
            assert f"{self._root}/{FINAL} is published, but" in self._caplog.text


@pytest.fixture
def scenes(caplog, monkeypatch) -> Iterator[Scenes]:
    """Saves of two ranks to a directory in memory, so that thousands of saves are fast."""
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    caplog.set_level(logging.WARNING)
    with memory_folder() as home:
        yield Scenes(home / "run", caplog)


# Delayed ranks.


def test_a_save_without_faults_syncs_files_and_names_before_it_publishes(scenes):
    first, second = scenes.undisturbed.operations
    manifest = second.index(f"replace {DRAFT}/manifest_1.json")
    assert not [one for one in second[manifest + 1 :] if not one.startswith(("stat", "read"))], (
        "only reads follow"
    )
    assert second[manifest - 1] == f"fsync {DRAFT}/manifest_1.json"
    assert second.index(f"fsync {DRAFT}/__1_0.distcp") < manifest
    assert f"fsync {DRAFT}" not in second, "names are synced once, when all files exist"
    published = first.index(f"rename {FINAL}")
    assert first[published - 1] == f"fsync {DRAFT}", "with the names of all ranks' files"


@pytest.mark.parametrize(("rank", "other"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.wide)])
def test_a_delay_of_one_rank_until_any_observable_operation_fails_no_save(scenes, rank, other):
    for pause in scenes.pauses(rank, other, is_every=False):
        scenes.save(pause)
    assert scenes.num_saved > 2 * len(scenes.undisturbed.operations[rank])
    assert scenes.num_failed == 0


@pytest.mark.wide
@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_delay_of_one_rank_until_any_operation_fails_no_save(scenes, rank, other):
    for pause in scenes.pauses(rank, other, is_every=True):
        scenes.save(pause)
    assert scenes.num_failed == 0


# Ranks whose disk fails.


def walk_through_faults(scenes: Scenes, rank: int, other: int, **how: bool) -> None:
    """Fails each operation of a rank, at once and after the longest possible pause."""
    for number in itertools.count():
        pause = Pause(rank, number, other, FOR_EVER)
        fault = Fault(rank, number, **how)
        own = scenes.undisturbed.operations[rank]
        if fault.is_of_syncs and 0 < number < len(own) and not own[number - 1].startswith("fsync"):
            continue  # the same as a fault in the previous operation
        if scenes.save(pause, fault).num_in_pause < 0:
            return
        scenes.save(None, fault)


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_failed_operation_fails_the_save_on_all_ranks_within_seconds_or_on_none(
    scenes, rank, other
):
    walk_through_faults(scenes, rank, other)
    assert scenes.num_failed > 20
    assert scenes.num_saved > 10, "after the publication a save cannot fail"


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_all_ranks_agree_after_an_operation_that_succeeded_and_raised_an_error(scenes, rank, other):
    walk_through_faults(scenes, rank, other, is_carried_out=True)
    assert scenes.num_failed > 20
    assert scenes.num_saved > 10


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_all_ranks_fail_within_seconds_if_a_disk_does_not_sync(scenes, rank, other):
    walk_through_faults(scenes, rank, other, is_of_syncs=True)
    assert scenes.num_failed > 2
