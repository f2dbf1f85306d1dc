"""Whatever happens to a save, what is loaded next is the checkpoint before it or the new one, to
the bit.

Ranks are forked processes: saving needs no process group. Moments are operations on the file
system, see `helpers/crashes.py`.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import (
    checkpoint_name,
    latest_iteration,
    published_iterations,
)
from megatron.core.dist_checkpointing.save import publisher
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.lanes import delays
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    KILLED,
    At,
    Child,
    Fault,
    Forks,
    Kill,
    Operation,
    PowerCut,
    forks,
    give_up_privileges,
    mount_small_disk,
    resize_disk,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import (
    CPU,
    DRAFT,
    LATER,
    NEW,
    NOT_BEGUN,
    OLD,
    SMALL,
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
# What a save does, and which operations that is.
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
# Before this operation of rank 0 the old checkpoint counts, after it the new one. With this one,
# rank 1 has done its part.
DECISIVE = (f"rename {checkpoint_name(NEW)}", f"replace {DRAFT}/manifest_1.json")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    with forks("tests.unit_tests.core.dist_checkpointing.helpers.scenes") as found:
        yield found


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def old(nursery, home) -> Path:
    nursery.run(make_old, home / "old")
    return home / "old"


@pytest.fixture(scope="module")
def small_old(nursery, home) -> Path:
    nursery.run(make_old, home / "small_old", SMALL)
    return home / "small_old"


@pytest.fixture
def root(old, home) -> Iterator[Path]:
    """A folder with the old checkpoint, for one test."""
    folder = Path(tempfile.mkdtemp(dir=home))
    yield shutil.copytree(old, folder / "run")
    shutil.rmtree(folder)


@pytest.fixture
def small_root(small_old, home) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=home))
    yield shutil.copytree(small_old, folder / "run")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def own(nursery, small_old, home) -> list[str]:
    """What a rank does that saves alone, when nothing goes wrong."""
    return nursery.run(_save_alone, shutil.copytree(small_old, home / "good_small"))


def _save_alone(root: Path) -> list[str]:
    found: list[str] = []
    assert outcome_of_save(root, lambda operation: found.append(str(operation)), size=SMALL) is None
    return found


# Ranks that are killed.


@pytest.fixture(scope="module")
def operations(nursery, old, home) -> list[list[str]]:
    """What each rank does when nothing goes wrong."""
    root = shutil.copytree(old, home / "good")
    scene = nursery.run(run_scene, root, {})
    assert scene.endings == [None, None]
    assert scene.published == [NEW]
    return scene.operations


def test_two_ranks_do_the_same_in_every_save_and_pass_through_all_phases(nursery, root, operations):
    assert nursery.run(run_scene, root, {}).operations == operations
    for phase, pattern in PHASES.items():
        ranks = [
            rank
            for rank in range(2)
            if any(re.fullmatch(pattern, operation) for operation in operations[rank])
        ]
        assert ranks == ([0, 1] if phase in ("header", "data", "manifest", "beginning") else [0]), (
            phase
        )
    for rank in range(2):
        assert all(
            any(re.fullmatch(phase, one) for phase in PHASES.values()) for one in operations[rank]
        )
        assert operations[rank].count(DECISIVE[rank]) == 1


class Moment(NamedTuple):
    """One of a rank's operations."""

    rank: int
    number: int


def random_moment(lot: random.Random, phase: str, operations: list[list[str]]) -> Moment:
    """A moment in a phase of a save, of any rank that passes through it."""
    found = [
        [number for number, operation in enumerate(own) if re.fullmatch(PHASES[phase], operation)]
        for own in operations
    ]
    rank = lot.choice([rank for rank in range(2) if found[rank]])
    return Moment(rank, found[rank][0] if phase == "header" else lot.choice(found[rank]))


def check_killed(
    nursery: Forks, root: Path, operations: list[list[str]], moment: Moment, num_written: int
) -> None:
    """Kills a rank, and asserts that what is published then is whole, and is what it must be; and
    that a run goes on.

    Args:
        num_written: bytes, if the operation writes.
    """
    rank, number = moment
    is_new = number > operations[rank].index(DECISIVE[rank])
    scene = nursery.run(run_scene, root, {rank: Kill(number, num_written)}, rank, not is_new)
    assert scene.endings[rank] == KILLED
    assert scene.operations[rank] == operations[rank][: number + 1], "the same moment in every run"
    assert is_new or scene.endings[1 - rank] is not None
    assert scene.published in ([OLD, NEW], [NEW]) if is_new else scene.published == [OLD]
    assert scene.folders == [checkpoint_name(iteration) for iteration in (*scene.published, LATER)]


@pytest.mark.parametrize(
    "seed", [*range(22), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(22, 44))]
)
def test_a_rank_that_is_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    nursery, root, operations, seed
):
    phase, lot = list(PHASES)[seed % len(PHASES)], random.Random(seed)
    moment = random_moment(lot, phase, operations)
    check_killed(
        nursery, root, operations, moment, lot.randrange(4096 if phase == "header" else 1 << 16)
    )


@pytest.mark.wide
@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_is_killed_at_every_moment_leaves_the_old_checkpoint_or_the_new_one(
    nursery, old, home, operations, rank
):
    for number in range(len(operations[rank])):
        root = shutil.copytree(old, home / f"every_{rank}_{number}")
        check_killed(nursery, root, operations, Moment(rank, number), number)
        shutil.rmtree(root)


# Ranks whose file system fails.

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


def begin(operations: list[str]) -> int:
    """Where the sweep has ended."""
    return operations.index(f"mkdir {DRAFT}")


def check_faulty(
    nursery: Forks,
    root: Path,
    operations: list[list[str]],
    moment: Moment,
    code: int,
    *,
    lasts: bool,
) -> None:
    """Has an operation fail, and asserts who hears of it, and what is published then."""
    rank, number = moment
    is_harmless = rank == 0 and number > operations[0].index(DECISIVE[0])
    if not lasts:
        # A sweep goes on without it; the folder is there already.
        is_harmless |= number < begin(operations[0]) if rank == 0 else number == 0
    is_new = is_harmless or number > operations[rank].index(DECISIVE[rank])
    fault = {rank: Fault(number, code, lasts=lasts)}
    scene = nursery.run(run_scene, root, fault, rank if lasts else None, lasts and not is_new)
    own, other = scene.endings[rank], scene.endings[1 - rank]
    if is_harmless:
        assert own is other is None
    else:
        assert own is not None
        assert os.strerror(code) in own
        assert "(1 failed so far; this run has published none yet)" in own
    if is_new:
        assert other is None
        assert scene.published in ([OLD, NEW], [NEW])
    else:
        assert scene.published == [OLD]
        if not lasts and other != NOT_BEGUN:
            assert f"rank {rank}: " in other
            assert os.strerror(code) in other
    assert scene.folders == [checkpoint_name(iteration) for iteration in (*scene.published, LATER)]


@pytest.mark.parametrize("seed", range(22))
def test_a_disk_that_fails_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    nursery, root, operations, seed
):
    phase, lot = list(PHASES)[seed % len(PHASES)], random.Random(seed)
    moment = random_moment(lot, phase, operations)
    check_faulty(nursery, root, operations, moment, lot.choice(CODES), lasts=seed >= len(PHASES))


@pytest.mark.wide
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("lasts", [False, True])
def test_a_disk_that_fails_at_every_moment_leaves_the_old_checkpoint_or_the_new_one(
    nursery, old, home, operations, rank, lasts
):
    for number in range(len(operations[rank])):
        root = shutil.copytree(old, home / f"faulty_{rank}_{lasts}_{number}")
        check_faulty(
            nursery, root, operations, Moment(rank, number), CODES[number % len(CODES)], lasts=lasts
        )
        shutil.rmtree(root)


def _fill_disk(
    old: Path, folder: Path, share: float, num_pages: int
) -> tuple[list[str | None], list[int], list[str]] | None:
    """Two ranks save to a disk that has room for a share of their data files, and so many pages
    more.
    """
    files = [
        (file, -(-file.stat().st_size // PAGE)) for file in (old / checkpoint_name(OLD)).iterdir()
    ]
    there = sum(pages for _, pages in files)
    data = sum(pages for file, pages in files if file.suffix == ".distcp")
    folder.mkdir()
    if not mount_small_disk(folder, (there + int(share * data) + num_pages) * PAGE):
        return None
    shutil.copytree(old / checkpoint_name(OLD), folder / checkpoint_name(OLD))
    endings = end_by_themselves(folder)
    published = list(check_published(folder))
    resize_disk(folder, 10 * (there + data) * PAGE)
    return endings, published, go_on(folder)


def test_a_disk_that_is_full_fails_the_save_on_all_ranks_at_once(nursery, old, home):
    outcomes = []
    # From a disk that was full before to one with room for all. In between, first the data files
    # find room.
    for case in (
        (0, 4),
        (0.02, 8),
        (0.55, 8),
        (1, -2),
        *((1, num_pages) for num_pages in range(3, 15)),
    ):
        result = nursery.run(_fill_disk, old, home / f"disk_{len(outcomes)}", *case)
        if result is None:
            pytest.skip("no file system may be mounted here")
        endings, published, folders = result
        # What is announced on a full disk is published, and nothing is deleted for it.
        assert published in ([[OLD]] if all(endings) else [[NEW], [OLD, NEW]])
        assert all(endings) or not any(endings)
        for ending in endings:
            assert ending is None or re.search("No space left on device|the disk is full", ending)
        assert folders == [checkpoint_name(iteration) for iteration in (*published, LATER)], (
            "with more room again"
        )
        outcomes.append(published)
    assert outcomes[:4] == [[OLD]] * 4
    assert outcomes[-1] == [NEW]


def _limit_files(root: Path, nbytes: int) -> str | None:
    """A rank saves that may not write files beyond a size."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    return outcome_of_save(root)


@pytest.mark.parametrize("nbytes", [PAGE, 12345, 1 << 20, 2_000_000])
def test_a_data_file_that_the_system_cuts_short_is_no_checkpoint(nursery, root, nbytes):
    assert "File too large" in nursery.run(_limit_files, root, nbytes)
    assert nursery.run(check_published, root).keys() == {OLD}
    assert nursery.run(go_on, root) == [checkpoint_name(OLD), checkpoint_name(LATER)]


def _write_protect(root: Path, number: int | None) -> str | None:
    """A rank saves to a folder that is protected from the beginning, or from an operation on."""

    def protect() -> None:
        for folder in (root, *root.glob(f"{checkpoint_name(NEW)}*")):
            folder.chmod(0o555)

    give_up_privileges()
    try:
        if number is None:
            protect()
            return outcome_of_save(root, size=SMALL)
        return outcome_of_save(root, At(number, protect), size=SMALL)
    finally:
        for folder in (root, *root.glob(f"{checkpoint_name(NEW)}*")):
            folder.chmod(0o755)


def test_a_folder_that_is_write_protected_fails_the_save_and_the_old_checkpoint_stays(
    nursery, small_root
):
    error = nursery.run(_write_protect, small_root, None)
    assert (
        f"PermissionError: [Errno 13] Permission denied: '{small_root}/{checkpoint_name(NEW)}"
        in error
    )
    assert nursery.run(check_published, small_root, SMALL).keys() == {OLD}
    assert nursery.run(_save_alone, small_root)
    assert nursery.run(check_published, small_root, SMALL).keys() == {NEW}


@pytest.mark.parametrize(
    ("operation", "is_new"),
    [
        (f"open {DRAFT}/__0_0.distcp", False),
        (f"open {DRAFT}/manifest_0.json", False),
        (f"replace {DRAFT}/.metadata", False),
        (f"replace {DRAFT}/index.json", False),
        (f"rename {checkpoint_name(NEW)}", False),
        ("open latest_checkpointed_iteration.txt", True),
        (f"rename {checkpoint_name(OLD)}.deleting", True),
    ],
)
def test_a_folder_that_becomes_write_protected_leaves_the_old_checkpoint_or_the_new_one(
    nursery, small_root, own, operation, is_new
):
    error = nursery.run(_write_protect, small_root, own.index(operation))
    assert error is None if is_new else "Permission denied" in error
    assert nursery.run(check_published, small_root, SMALL).keys() == (
        {OLD, NEW} if is_new else {OLD}
    )


def test_a_file_in_the_place_of_the_folder_is_an_error_and_no_fresh_start(tmp_path):
    (tmp_path / "run").write_text("")
    assert "Not a directory" in outcome_of_save(tmp_path / "run", size=SMALL)
    with pytest.raises(
        CheckpointError, match=r"Expected a folder of checkpoints at .*/run, got NotADirectoryError"
    ):
        CheckpointManager.start(str(tmp_path / "run"), CPU)
    with pytest.raises(
        CheckpointError, match=r"Expected a folder of checkpoints at .*/run, got a file"
    ):
        latest_iteration(open_store(tmp_path / "run"))


# A machine that loses its power.


def _cut_power(
    root: Path, images: Path, seeds: range, failing: int | None = None
) -> list[list[int]]:
    """What is published, and whole, in every image that a power cut may leave: at each operation,
    for each seed.

    Args:
        failing: an operation that fails, and so is none; only the images from it on are looked at.
    """
    images.mkdir()
    cut, fault = PowerCut(root), Fault(-1 if failing is None else failing, errno.EIO)
    numbers, taken = itertools.count(), []

    def before(operation: Operation) -> None:
        number = next(numbers)
        if failing is None or number >= failing:
            for seed in seeds:
                taken.append(images / f"{number}_{seed}")
                cut.leave(taken[-1], random.Random(f"{seed} {number}"))
        fault(operation)
        cut(operation)

    assert outcome_of_save(root, before, size=SMALL) is None
    return [list(check_published(image, SMALL)) for image in taken]


def test_a_power_cut_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    nursery, small_root, home, own
):
    published = nursery.run(_cut_power, small_root, home / "images", range(5), timeout=120)
    assert len(published) == 5 * len(own)
    decisive = 5 * (own.index(f"rename {checkpoint_name(NEW)}") + 1)
    assert all(found == [OLD] for found in published[:decisive])
    # Renamed, and not yet for good: it may be either.
    assert [OLD] in published[decisive:]
    assert all(found in ([OLD], [OLD, NEW], [NEW]) for found in published[decisive:])
    settled = 5 * (own.index("open latest_checkpointed_iteration.txt") + 1)
    assert all(NEW in found for found in published[settled:]), "what has been announced stays"


def test_a_power_cut_after_a_sync_that_failed_leaves_the_old_checkpoint_or_the_new_one(
    nursery, small_root, home, own
):
    failing = own.index(f"rename {checkpoint_name(NEW)}") + 1
    assert own[failing] == "fsync ."
    published = nursery.run(
        _cut_power, small_root, home / "unsynced", range(10), failing, timeout=120
    )
    assert [OLD] in published, "the sync was none"
    assert all(found in ([OLD], [OLD, NEW], [NEW]) for found in published)


# Two runs that save into one folder.


def _meet(
    root: Path, number: int, other: Callable[[Path], str | None]
) -> tuple[str | None, str | None, dict[int, int]]:
    """What becomes of a run, and of another that comes and goes at an operation of the first; and
    what is published.
    """
    others: list[str | None] = []
    error = outcome_of_save(root, At(number, lambda: others.append(other(root))), run=1, size=SMALL)
    (other_error,) = others
    return error, other_error, check_published(root, SMALL)


def _start(root: Path) -> None:
    CheckpointManager.start(str(root), CPU).close()


def _save_too(root: Path) -> str | None:
    return outcome_of_save(root, run=2, size=SMALL)


def _meet_at_all(
    old: Path, home: Path, num_operations: int, other: Callable[[Path], str | None]
) -> list[Any]:
    found = []
    for number in range(num_operations):
        root = shutil.copytree(old, home / f"{other.__name__}_{number}")
        found.append((*_meet(root, number, other), str(root)))
    return found


def test_of_two_runs_that_save_one_iteration_at_any_moments_one_publishes_and_the_other_says_so(
    nursery, small_old, home, own
):
    decisive = own.index(f"rename {checkpoint_name(NEW)}")
    refused = re.compile(
        f"Expected no checkpoint yet at (.*/)?{checkpoint_name(NEW)}, got (a published )?one"
    )
    found = nursery.run(_meet_at_all, small_old, home, len(own), _save_too)
    for number, (error, other_error, published, _) in enumerate(found):
        assert published[NEW] == (2 if number <= decisive else 1)
        if number <= decisive:
            assert other_error is None
            assert refused.search(error)
        else:
            assert error is None
            assert refused.search(other_error)


def test_a_run_that_begins_at_any_moment_of_anothers_save_fails_it_by_name_or_comes_too_late(
    nursery, small_old, home, own
):
    first = own.index(f"mkdir {DRAFT}")
    decisive = own.index(f"rename {checkpoint_name(NEW)}")
    found = nursery.run(_meet_at_all, small_old, home, len(own), _start)
    for number, (error, _, published, root) in enumerate(found):
        if first < number <= decisive:
            assert published == {OLD: 0}
            assert f"{root}/{checkpoint_name(NEW)}.abc11.saving" in error
        else:
            assert error is None
            assert published in ({NEW: 1}, {OLD: 0, NEW: 1})


def _sweep(root: Path) -> None:
    open_store(root).sweep()


@pytest.mark.parametrize("rank", range(2))
def test_a_run_that_begins_at_any_moment_of_two_ranks_save_fails_it_on_both_or_on_none(
    nursery, small_old, home, rank
):
    lot = random.Random(rank)
    for number in lot.sample(range(20), 5):
        root = shutil.copytree(small_old, home / f"swept_{rank}_{number}")
        before = {rank: At(number, partial(_sweep, root))}
        scene = nursery.run(run_scene, root, before, None, False, SMALL)
        if scene.published == [OLD]:
            assert all("iter_0000020" in ending for ending in scene.endings)
        else:
            assert scene.endings == [None, None]
            assert scene.published == [NEW]


def _meet_by_chance(root: Path, seed: int) -> tuple[list[str | None], dict[int, int]]:
    """Two runs begin and save at once, under random delays."""
    runs = [Child(_start_and_save, root, run, seed) for run in (1, 2)]
    return [run.end() for run in runs], check_published(root, SMALL)


def _start_and_save(root: Path, run: int, seed: int) -> str | None:
    with delays(10 * seed + run):
        _start(root)
        return outcome_of_save(root, run=run, size=SMALL)


@pytest.mark.parametrize("seed", range(6))
def test_two_runs_that_begin_and_save_at_once_leave_the_checkpoint_of_one_or_the_old_one(
    nursery, small_root, seed
):
    endings, published = nursery.run(_meet_by_chance, small_root, seed)
    assert sum(ending is None for ending in endings) == (NEW in published)
    if NEW in published:
        assert endings[published[NEW] - 1] is None
    else:
        assert published == {OLD: 0}


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
    """Returns the error, if there is one, and how many requests there have been."""
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


def test_a_remote_store_that_is_lost_at_any_moment_holds_the_old_checkpoint_or_the_new_one(
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
        "what is said to be published is"
    )
