"""All ranks of a save come to the same end, whichever is held up or whose disk fails, at whatever
operation.

The moments are walked through one by one; nothing is left to chance. See
`helpers/interleaving.py`.
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
from megatron.core.dist_checkpointing.format.names import TRACKER_FILE, checkpoint_name
from megatron.core.dist_checkpointing.load.small_files import read_marker
from megatron.core.dist_checkpointing.save.publisher import _PATIENCE
from megatron.core.dist_checkpointing.store import LocalStore
from tests.unit_tests.core.dist_checkpointing.helpers.interleaving import (
    Fault,
    Interleaved,
    Outcome,
    Pause,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import DRAFT, NEW, memory_folder

FINAL = checkpoint_name(NEW)
FOR_EVER = 10**9  # operations: as far as a rank can go
SECONDS = 3 * _PATIENCE
# What another rank may come to see. Files that are being written have names that nobody looks at.
VISIBLE = ("mkdir", "replace", "rename", f"open {DRAFT}/__")


class Scenes:
    """Saves of one folder, each of which is checked and taken away."""

    def __init__(self, root: Path, world_size: int, caplog: pytest.LogCaptureFixture) -> None:
        self.num_saved, self.num_failed = 0, 0
        self._root = root
        self._ranks = Interleaved(root, world_size)
        self._world_size = world_size
        self._caplog = caplog
        self._data: list[bytes] = []  # of each rank's file
        self.undisturbed = self.save()

    def save(self, pause: Pause | None = None, fault: Fault | None = None) -> Outcome:
        outcome = self._ranks.save(pause, fault)
        final = self._root / FINAL
        left = {path.name for path in self._root.iterdir()} - {TRACKER_FILE, FINAL}
        about = f"{pause}, {fault}: {outcome.endings}; beside the checkpoint: {left}"
        assert outcome.seconds < SECONDS, about
        if final.exists():
            self.num_saved += 1
            assert outcome.endings == [None] * self._world_size, about
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
        """Each pause of a rank for another. Of the other's operations every one, or those that can
        be seen.
        """
        for at in itertools.count():
            longest = Pause(rank, at, other, FOR_EVER)
            outcome = self.save(longest)
            if outcome.num_in_pause < 0:
                return  # the rank has ended before
            yield longest
            for until, operation in enumerate(
                outcome.operations[other][: outcome.num_in_pause - 1]
            ):
                if is_every or operation.startswith(VISIBLE):
                    yield Pause(rank, at, other, until)

    def _check_whole(self, final: Path) -> None:
        """That all that belongs to the checkpoint is there, and nothing else, and is what was to be
        saved.
        """
        assert sorted(path.name for path in final.iterdir()) == sorted(
            [*files_of(self._world_size), MARKER_FILE]
        )
        for name, record in read_marker(LocalStore(self._root), FINAL).files.items():
            content = (final / name).read_bytes()
            assert len(content) == record.nbytes
            assert record.digest in (None, digest(content))
        data = [(final / data_file(rank)).read_bytes() for rank in range(self._world_size)]
        self._data = self._data or data
        assert data == self._data

    def _check_tracker(self, pause: Pause | None, fault: Fault | None) -> None:
        tracker = self._root / TRACKER_FILE
        if not tracker.exists() or tracker.read_text() != f"{NEW}\n":
            assert fault is not None, pause
            assert fault.rank == 0
            assert f"{self._root}/{FINAL} is published, but" in self._caplog.text


@pytest.fixture
def scenes(caplog, monkeypatch, request) -> Iterator[Scenes]:
    """In memory, where thousands of saves take no time. Two ranks, unless another number is asked
    for.
    """
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    caplog.set_level(logging.WARNING)
    with memory_folder() as home:
        yield Scenes(home / "run", getattr(request, "param", 2), caplog)


def of_ranks(world_size: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "scenes", [world_size], indirect=True, ids=[f"{world_size} ranks"]
    )


# Ranks that are held up.


def test_the_operations_of_an_undisturbed_save_end_with_what_the_others_act_upon(scenes):
    first, second = scenes.undisturbed.operations
    manifest = second.index(f"replace {DRAFT}/manifest_1.json")
    assert not [one for one in second[manifest + 1 :] if not one.startswith(("stat", "read"))], (
        "it only looks"
    )
    assert second[manifest - 1] == f"fsync {DRAFT}/manifest_1.json"
    assert second.index(f"fsync {DRAFT}/__1_0.distcp") < manifest
    assert f"fsync {DRAFT}" not in second, "names come to disk once, when all are there"
    published = first.index(f"rename {FINAL}")
    assert first[published - 1] == f"fsync {DRAFT}", (
        "so are the names of all files, whoever gave them"
    )


@pytest.mark.parametrize(("rank", "other"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.wide)])
def test_a_rank_held_up_before_any_operation_until_any_of_the_others_fails_no_save(
    scenes, rank, other
):
    for pause in scenes.pauses(rank, other, is_every=False):
        scenes.save(pause)
    assert scenes.num_saved > 2 * len(scenes.undisturbed.operations[rank])
    assert scenes.num_failed == 0


@pytest.mark.wide
@of_ranks(3)
@pytest.mark.parametrize(("rank", "other"), list(itertools.permutations(range(3), 2)))
def test_of_three_ranks_one_held_up_before_any_operation_until_any_of_anothers_fails_no_save(
    scenes, rank, other
):
    for pause in scenes.pauses(rank, other, is_every=True):
        scenes.save(pause)
    assert scenes.num_failed == 0


@pytest.mark.wide
@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_rank_held_up_before_any_operation_until_any_at_all_of_the_others_fails_no_save(
    scenes, rank, other
):
    for pause in scenes.pauses(rank, other, is_every=True):
        scenes.save(pause)
    assert scenes.num_failed == 0


# Ranks whose disk fails.


def walk_through_faults(scenes: Scenes, rank: int, other: int, **how: bool) -> None:
    """An operation of a rank fails at once, and after as long a pause as possible; each operation
    in turn.
    """
    for number in itertools.count():
        pause = Pause(rank, number, other, FOR_EVER)
        fault = Fault(rank, number, **how)
        if scenes.save(pause, fault).num_in_pause < 0:
            return
        scenes.save(None, fault)


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_any_operation_that_fails_fails_the_save_on_all_ranks_within_seconds_or_on_none(
    scenes, rank, other
):
    walk_through_faults(scenes, rank, other)
    assert scenes.num_failed > 20
    assert scenes.num_saved > 10, "with the checkpoint published there is nothing to fail"


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_an_operation_that_is_carried_out_and_answered_with_an_error_has_all_ranks_agree(
    scenes, rank, other
):
    walk_through_faults(scenes, rank, other, is_carried_out=True)
    assert scenes.num_failed > 20
    assert scenes.num_saved > 10


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_disk_that_no_longer_syncs_costs_all_ranks_seconds(scenes, rank, other):
    walk_through_faults(scenes, rank, other, is_of_syncs=True)
    assert scenes.num_failed > 10


@pytest.mark.wide
@of_ranks(3)
@pytest.mark.parametrize(
    "how", [{}, {"is_carried_out": True}], ids=["not carried out", "carried out"]
)
@pytest.mark.parametrize(("rank", "other"), list(itertools.permutations(range(3), 2)))
def test_of_three_ranks_any_operation_that_fails_fails_the_save_on_all_or_on_none(
    scenes, rank, other, how
):
    walk_through_faults(scenes, rank, other, **how)
    assert scenes.num_failed > 10


@pytest.mark.wide
@pytest.mark.parametrize(
    "how", [{}, {"is_carried_out": True}], ids=["not carried out", "carried out"]
)
@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_any_operation_that_fails_after_any_pause_fails_the_save_on_all_ranks_or_on_none(
    scenes, rank, other, how
):
    for pause in scenes.pauses(rank, other, is_every=True):
        scenes.save(pause, Fault(rank, pause.at, **how))
    assert scenes.num_failed > 100
