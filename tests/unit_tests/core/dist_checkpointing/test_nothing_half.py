"""Saves are atomic: after any failure, a load gets the previous checkpoint or the new one, bit for
bit, including `hf/`.

Ranks are forked processes, since a save needs no process group. Faults are injected at operations
on the file system, see `helpers/crashes.py`.
"""

from __future__ import annotations

import errno
import itertools
import math
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.save import publisher
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.store import (
    latest_iteration,
    open_store,
    published_iterations,
)
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    KILLED,
    At,
    Fault,
    Forks,
    Kill,
    Operation,
    PowerCut,
    forks,
    mount_small_disk,
    resize_disk,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import (
    CPU,
    DRAFT,
    LATER,
    NEW,
    OLD,
    SMALL,
    WHOLE,
    Size,
    State,
    check_loads,
    check_published,
    end_by_themselves,
    go_on,
    make_old,
    memory_folder,
    outcome_of_save,
    run_scene,
)

PAGE = 4096
WITH_HF = WHOLE._replace(hf_dtype=torch.bfloat16)
SMALL_WITH_HF = SMALL._replace(hf_dtype=torch.bfloat16)
# The phases of a save, and the operations of each.
PHASES = {
    "sweep": r".* iter_0000005\.(saving|deleting).*",
    "beginning": rf"(mkdir {DRAFT}|fsync \.|open {DRAFT}/__.*)",
    "header": rf"write {DRAFT}/__.*",
    "data": rf"(write|fsync) {DRAFT}/__.*",
    "manifest": rf".* {DRAFT}/manifest_.*",
    "metadata": rf".* {DRAFT}/\.metadata",
    "index": rf".* {DRAFT}/index\.json",
    "train state": rf".* {DRAFT}/train_state\.json",
    "marker": rf".* {DRAFT}/published\.json",
    "rename": rf"(rename {checkpoint_name(NEW)}|fsync ({DRAFT}|\.))",
    "tracker": r".* latest_checkpointed_iteration\.txt",
    "deletion": rf".* {checkpoint_name(OLD)}.*",
}
HF_PHASES = {
    "rows": rf"(write|fsync) {DRAFT}/hf/model.*",
    "tokenizer": rf".* {DRAFT}/hf/tokenizer.*",
    "end": rf"(.* {DRAFT}/(manifest_|published).*|rename .*)",
}
CASES = [
    *((WHOLE, phase) for phase in PHASES),
    *((WITH_HF, phase) for phase in HF_PHASES),
]
# The operation of rank 0 that publishes the new checkpoint, and the last operation of rank 1 that
# it waits for.
DECISIVE = (f"rename {checkpoint_name(NEW)}", f"replace {DRAFT}/manifest_1.json")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    with forks("tests.unit_tests.core.dist_checkpointing.helpers.scenes") as found:
        yield found


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


class Old:
    """Directories with the old checkpoint and an abandoned draft, copied for each test."""

    def __init__(self, nursery: Forks, home: Path) -> None:
        self._nursery = nursery
        self._home = home
        self._roots: dict[Size, Path] = {}
        self._operations: dict[Size, list[list[str]]] = {}

    def root(self, size: Size) -> Path:
        if size not in self._roots:
            self._roots[size] = Path(tempfile.mkdtemp(dir=self._home)) / "run"
            self._nursery.run(make_old, self._roots[size], size)
        return self._roots[size]

    def copy(self, size: Size) -> Path:
        return shutil.copytree(self.root(size), Path(tempfile.mkdtemp(dir=self._home)) / "run")

    def operations(self, size: Size) -> list[list[str]]:
        """The operations of each of two ranks in a save without faults."""
        if size not in self._operations:
            scene = self._nursery.run(run_scene, self.copy(size), {}, None, False, size)
            assert (scene.endings, scene.published) == ([None, None], [NEW])
            self._operations[size] = scene.operations
        return self._operations[size]

    def operations_of_one(self, size: Size) -> list[str]:
        """The operations of a single rank in a save without faults."""
        return self._nursery.run(_save_alone, self.copy(size), size)


@pytest.fixture(scope="module")
def old(nursery: Forks, home: Path) -> Old:
    return Old(nursery, home)


def _save_alone(root: Path, size: Size) -> list[str]:
    found: list[str] = []
    assert outcome_of_save(root, lambda operation: found.append(str(operation)), size=size) is None
    return found


@pytest.fixture(scope="module")
def own(old: Old) -> list[str]:
    return old.operations_of_one(SMALL)


def expected_folders(published: list[int]) -> list[str]:
    """Returns all directories after another run has cleaned up and saved."""
    return [checkpoint_name(iteration) for iteration in (*published, LATER)]


# Ranks that are killed. `test_interleavings.py` has ranks whose file system fails.


def test_the_operations_of_two_ranks_are_deterministic_and_cover_all_phases(nursery, old):
    operations = old.operations(WHOLE)
    assert nursery.run(run_scene, old.copy(WHOLE), {}).operations == operations
    for phase, pattern in PHASES.items():
        has_phase = [any(re.fullmatch(pattern, each) for each in own) for own in operations]
        is_of_all = phase in ("header", "data", "manifest", "beginning")
        assert has_phase == [True, is_of_all], phase
    for rank in range(2):
        for operation in operations[rank]:
            assert any(re.fullmatch(phase, operation) for phase in PHASES.values())
        assert operations[rank].count(DECISIVE[rank]) == 1


class Moment(NamedTuple):
    """One of a rank's operations."""

    rank: int
    number: int


def random_moment(lot: random.Random, phase: str, operations: list[list[str]]) -> Moment:
    """A moment in a phase of a save, of any rank that passes through it."""
    pattern = (PHASES | HF_PHASES)[phase]
    found = [
        [number for number, operation in enumerate(own) if re.fullmatch(pattern, operation)]
        for own in operations
    ]
    rank = lot.choice([rank for rank in range(2) if found[rank]])
    return Moment(rank, found[rank][0] if phase == "header" else lot.choice(found[rank]))


def check_killed(nursery: Forks, old: Old, size: Size, moment: Moment, num_written: int) -> None:
    """Kills a rank, and asserts which checkpoints are published, and that another run can continue.

    Args:
        num_written: bytes, if the operation writes.
    """
    (rank, number), operations = moment, old.operations(size)
    is_new = number > operations[rank].index(DECISIVE[rank])
    kill, root = {rank: Kill(number, num_written)}, old.copy(size)
    scene = nursery.run(run_scene, root, kill, rank, not is_new, size)
    assert scene.endings[rank] == KILLED
    if size == WHOLE:
        assert scene.operations[rank] == operations[rank][: number + 1], "the same in every run"
    assert is_new or scene.endings[1 - rank] is not None
    assert scene.published in ([OLD, NEW], [NEW]) if is_new else scene.published == [OLD]
    assert scene.folders == expected_folders(scene.published)
    shutil.rmtree(root)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(1, 4))]
)
@pytest.mark.parametrize(("size", "phase"), CASES, ids=str)
def test_killing_a_rank_in_each_phase_leaves_the_old_or_the_new_checkpoint(
    nursery, old, size, phase, seed
):
    lot = random.Random(f"{phase} {seed}")
    moment = random_moment(lot, phase, old.operations(size))
    check_killed(nursery, old, size, moment, lot.randrange(4096 if phase == "header" else 1 << 16))


@pytest.mark.wide
@pytest.mark.parametrize("rank", range(2))
def test_killing_a_rank_at_every_operation_leaves_the_old_or_the_new_checkpoint(nursery, old, rank):
    for number in range(len(old.operations(WHOLE)[rank])):
        check_killed(nursery, old, WHOLE, Moment(rank, number), number)


# Disks without room.


def _pages(folder: Path) -> int:
    return sum(-(-path.stat().st_size // PAGE) for path in folder.rglob("*"))


def _fill_disk(
    old: Path, folder: Path, num_pages: int, size: Size
) -> tuple[list[str | None], list[int], list[str]] | None:
    """Two ranks save to a disk that has room for so many pages more than the old checkpoint."""
    kept = old / checkpoint_name(OLD)
    folder.mkdir()
    if not mount_small_disk(folder, (_pages(kept) + num_pages) * PAGE):
        return None
    shutil.copytree(kept, folder / checkpoint_name(OLD))
    endings = end_by_themselves(folder, size=size)
    published = list(check_published(folder, size))
    resize_disk(folder, 10 * _pages(kept) * PAGE)
    return endings, published, go_on(folder, size)


def test_a_full_disk_fails_the_save_on_all_ranks_and_leaves_no_files(nursery, old, home):
    outcomes, size = [], WITH_HF
    whole = _pages(old.root(size) / checkpoint_name(OLD))
    # From a disk without room to one with room for everything. Between them, data files fit first.
    for num_pages in (4, whole // 6, whole // 2, whole - 6, whole + 6, whole + 60):
        folder = home / f"disk_{whole}_{num_pages}"
        result = nursery.run(_fill_disk, old.root(size), folder, num_pages, size)
        if result is None:
            pytest.skip("no file system may be mounted here")
        endings, published, folders = result
        assert published in ([[OLD]] if all(endings) else [[NEW], [OLD, NEW]])
        assert all(endings) or not any(endings)
        for ending in endings:
            assert ending is None or re.search("No space left on device|the disk is full", ending)
        assert folders == expected_folders(published), "with more room again"
        outcomes.append(published)
    assert outcomes[:3] == [[OLD]] * 3
    assert outcomes[-1] == [NEW]


def test_a_file_instead_of_the_directory_is_an_error_and_not_a_fresh_start(tmp_path):
    (tmp_path / "run").write_text("")
    assert "Not a directory" in outcome_of_save(tmp_path / "run", size=SMALL)
    with pytest.raises(CheckpointError, match=r"/run, got NotADirectoryError"):
        CheckpointManager.start(str(tmp_path / "run"), CPU)
    with pytest.raises(CheckpointError, match=r"/run, got a file"):
        latest_iteration(open_store(tmp_path / "run"))


# A machine that loses its power.


def _cut_power(
    root: Path, images: Path, size: Size, num_images: int, failing: int | None = None
) -> list[list[int]]:
    """The published checkpoints in each image that a power cut may leave.

    Args:
        num_images: for each operation.
        failing: an operation that fails; only the images from it on are checked.
    """
    images.mkdir()
    cut, fault = PowerCut(root), Fault(-1 if failing is None else failing, errno.EIO)
    numbers, taken = itertools.count(), []

    def before(operation: Operation) -> None:
        number = next(numbers)
        for seed in range(num_images) if failing is None or number >= failing else ():
            taken.append(images / f"{number}_{seed}")
            cut.leave(taken[-1], random.Random(f"{seed} {number}"))
        fault(operation)
        cut(operation)

    assert outcome_of_save(root, before, size=size) is None
    return [list(check_published(image, size)) for image in taken]


@pytest.mark.parametrize("num_images", [1, pytest.param(3, marks=pytest.mark.wide)])
def test_a_power_failure_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    nursery, old, home, num_images
):
    size, images = SMALL_WITH_HF, home / f"images_{num_images}"
    own = old.operations_of_one(size)
    published = nursery.run(_cut_power, old.copy(size), images, size, num_images, timeout=600)
    assert len(published) == num_images * len(own)
    decisive = num_images * (own.index(f"rename {checkpoint_name(NEW)}") + 1)
    assert all(found == [OLD] for found in published[:decisive])
    if num_images > 1:
        assert [OLD] in published[decisive:], "the rename may not have reached the disk"
    assert all(found in ([OLD], [OLD, NEW], [NEW]) for found in published[decisive:])
    settled = num_images * (own.index("open latest_checkpointed_iteration.txt") + 1)
    assert all(NEW in found for found in published[settled:]), "announced checkpoints stay"


def test_a_power_failure_after_a_failed_sync_leaves_the_old_or_the_new_checkpoint(
    nursery, old, home, own
):
    failing = own.index(f"rename {checkpoint_name(NEW)}") + 1
    assert own[failing] == "fsync ."
    images = home / "unsynced"
    published = nursery.run(_cut_power, old.copy(SMALL), images, SMALL, 3, failing, timeout=600)
    assert [OLD] in published, "the sync had no effect"
    assert all(found in ([OLD], [OLD, NEW], [NEW]) for found in published)


# Two runs that save into one directory.


def _meet(
    root: Path, number: int, other: Callable[[Path], str | None]
) -> tuple[str | None, str | None, dict[int, int]]:
    """Returns the outcomes of a run and of another that runs at one operation of the first, and the
    published checkpoints.
    """
    others: list[str | None] = []
    error = outcome_of_save(root, At(number, lambda: others.append(other(root))), run=1, size=SMALL)
    (other_error,) = others
    return error, other_error, check_published(root, SMALL)


def _start(root: Path) -> None:
    CheckpointManager.start(str(root), CPU).close()


def _save_too(root: Path) -> str | None:
    return outcome_of_save(root, run=2, size=SMALL)


def _meet_at_many(
    old: Path, home: Path, numbers: list[int], other: Callable[[Path], str | None]
) -> list[Any]:
    found = []
    for number in numbers:
        root = shutil.copytree(old, home / f"{other.__name__}_{number}")
        found.append((number, *_meet(root, number, other), str(root)))
    return found


def _every_third_and_around(own: list[str], *decisive: int) -> list[int]:
    """Numbers of operations: each third, and the ones before, at and after the decisive ones."""
    near = {number + by for number in decisive for by in (-1, 0, 1)}
    return sorted({*range(0, len(own), 3), len(own) - 1} | (near & {*range(len(own))}))


def test_of_two_runs_that_save_the_same_iteration_one_publishes_and_the_other_fails(
    nursery, old, home, own
):
    decisive = own.index(f"rename {checkpoint_name(NEW)}")
    refused = re.compile(
        f"Expected no checkpoint yet at (.*/)?{checkpoint_name(NEW)}, got (a published )?one"
    )
    numbers = _every_third_and_around(own, decisive)
    found = nursery.run(_meet_at_many, old.root(SMALL), home, numbers, _save_too)
    for number, error, other_error, published, _ in found:
        assert published[NEW] == (2 if number <= decisive else 1)
        if number <= decisive:
            assert other_error is None
            assert refused.search(error)
        else:
            assert error is None
            assert refused.search(other_error)


def test_a_run_that_starts_during_the_save_of_another_fails_it_or_is_too_late(
    nursery, old, home, own
):
    first = own.index(f"mkdir {DRAFT}")
    decisive = own.index(f"rename {checkpoint_name(NEW)}")
    numbers = _every_third_and_around(own, first, decisive)
    found = nursery.run(_meet_at_many, old.root(SMALL), home, numbers, _start)
    for number, error, _, published, root in found:
        if first < number <= decisive:
            assert published == {OLD: 0}
            assert f"{root}/{checkpoint_name(NEW)}.abc11.saving" in error
        else:
            assert error is None
            assert published in ({NEW: 1}, {OLD: 0, NEW: 1})


def _sweep(root: Path) -> None:
    open_store(root).sweep()


@pytest.mark.parametrize("rank", range(2))
def test_a_run_that_starts_during_a_save_of_two_ranks_fails_it_on_both_or_on_none(
    nursery, old, rank
):
    lot = random.Random(rank)
    for number in lot.sample(range(20), 5):
        root = old.copy(SMALL)
        before = {rank: At(number, partial(_sweep, root))}
        scene = nursery.run(run_scene, root, before, None, False, SMALL)
        if scene.published == [OLD]:
            assert all("iter_0000020" in ending for ending in scene.endings)
        else:
            assert scene.endings == [None, None]
            assert scene.published == [NEW]


# A remote store that goes away.


class LostConnection:
    """The files of a remote store, of which none can be reached from the n-th request on."""

    def __init__(self, files: Any, num_good: float) -> None:
        self.num_requests = 0
        self._files = files
        self._num_good = num_good

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._files, name)
        return partial(self._request, value) if callable(value) else value

    def _request(self, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.num_requests += 1
        if self.num_requests > self._num_good:
            raise ConnectionError("connection lost")
        return request(*args, **options)


@pytest.fixture
def remote() -> Iterator[str]:
    yield "memory://nothing_half"
    # The memory of fsspec is the process's.
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def _save_remotely(root: str, iteration: int, num_good: float) -> tuple[str | None, int]:
    """Returns the error, or None, and the number of requests."""
    store, state = open_store(root), State(iteration, size=SMALL)
    connection = store._files = LostConnection(store._files, num_good)
    with CheckpointManager(
        store, CPU, 0, 1, f"{num_good}", retention=Retention(keep_last=1)
    ) as manager:
        manager.save(iteration, state.contents(), state.train_state)
        try:
            manager.finish()
        except CheckpointError as failure:
            return str(failure), connection.num_requests
    return None, connection.num_requests


def test_losing_a_remote_store_at_any_request_leaves_the_old_or_the_new_checkpoint(
    remote, monkeypatch
):
    monkeypatch.setattr(publisher, "_PATIENCE", 0.1)  # it does not come back
    assert _save_remotely(f"{remote}/good", OLD, math.inf)[0] is None
    error, num_requests = _save_remotely(f"{remote}/good", NEW, math.inf)
    assert error is None
    outcomes = []
    for num_good in range(num_requests):
        root = f"{remote}/{num_good}"
        assert _save_remotely(root, OLD, math.inf)[0] is None
        error, _ = _save_remotely(root, NEW, num_good)
        store = open_store(root)
        published = published_iterations(store)
        assert latest_iteration(store) == published[-1]
        for iteration in published:
            assert check_loads(store, iteration, SMALL) == 0
        assert error is None or "connection lost" in error
        outcomes.append((published, error is None))
        store.sweep()
        assert _save_remotely(root, LATER, math.inf)[0] is None
        assert published_iterations(store) == [LATER]
    assert outcomes[0] == ([OLD], False)
    assert outcomes[-1][1]
    assert all((NEW in published) == is_good for published, is_good in outcomes), (
        "reported checkpoints are published"
    )
