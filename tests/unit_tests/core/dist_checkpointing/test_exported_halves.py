"""`hf/` is in a checkpoint whole, with every byte as it was written, or there is no checkpoint:
whatever happens to ranks, disks and machines while it is saved.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    KILLED,
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
    DRAFT,
    LATER,
    NEW,
    OLD,
    Size,
    check_published,
    end_by_themselves,
    go_on,
    make_old,
    memory_folder,
    outcome_of_save,
    run_scene,
)

PAGE = 4096
SIZES = {
    "bf16": Size(256, 3, torch.bfloat16),
    "fp32": Size(256, 3, torch.float32),  # the weights are stored there alone
}
SMALL_SIZES = {name: Size(24, 2, size.hf_dtype) for name, size in SIZES.items()}
PHASES = {
    "beginning": rf"(mkdir|fsync|open) {DRAFT}.*",
    "rows": rf"(write|fsync) {DRAFT}/hf/model.*",
    "tokenizer": rf".* {DRAFT}/hf/tokenizer.*",
    "data": rf"(write|fsync) {DRAFT}/__.*",
    "end": rf"(.* {DRAFT}/(manifest_|published).*|rename .*|fsync \.)",
}
DECISIVE = (f"rename {checkpoint_name(NEW)}", f"replace {DRAFT}/manifest_1.json")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    with forks("tests.unit_tests.core.dist_checkpointing.helpers.scenes") as found:
        yield found


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp32", marks=pytest.mark.wide)])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def old(nursery: Forks, home: Path, name: str) -> Path:
    """A folder with the old checkpoint, and a draft."""
    nursery.run(make_old, home / f"old_{name}", SIZES[name])
    return home / f"old_{name}"


@pytest.fixture(scope="module")
def operations(nursery: Forks, old: Path, home: Path, name: str) -> list[list[str]]:
    """What each rank does when nothing goes wrong."""
    root = shutil.copytree(old, home / f"good_{name}")
    scene = nursery.run(run_scene, root, {}, None, False, SIZES[name])
    assert (scene.endings, scene.published) == ([None, None], [NEW])
    for rank, phase in itertools.product(range(2), PHASES):
        is_there = any(re.fullmatch(PHASES[phase], each) for each in scene.operations[rank])
        assert is_there or (rank == 1 and phase == "tokenizer"), (rank, phase)
    return scene.operations


@pytest.fixture
def root(old: Path, home: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=home))
    yield shutil.copytree(old, folder / "run")
    shutil.rmtree(folder)


def moment(seed: int, operations: list[list[str]]) -> tuple[int, int]:
    """A rank, and one of its operations, in the phase of this seed."""
    lot, phase = random.Random(seed), PHASES[list(PHASES)[seed % len(PHASES)]]
    found = [
        (rank, number)
        for rank, own in enumerate(operations)
        for number, operation in enumerate(own)
        if re.fullmatch(phase, operation) and number > own.index(f"mkdir {DRAFT}")
    ]
    return lot.choice(found)


def check_struck(
    nursery: Forks,
    root: Path,
    size: Size,
    operations: list[list[str]],
    seed: int,
    *,
    is_killed: bool,
) -> None:
    """Kills a rank, or has an operation of it fail, and asserts what is published then; and that
    another run goes on and leaves nothing else.
    """
    rank, number = moment(seed, operations)
    own = operations[rank]
    is_new = number > own.index(DECISIVE[rank])
    # A folder that is there already need not be made.
    is_harmless = own[number] == f"mkdir {DRAFT}/hf" and (rank == 1 or own[number] in own[:number])
    is_new = is_new or (is_harmless and not is_killed)
    what = Kill(number, 999 * seed) if is_killed else Fault(number, errno.ENOSPC)
    struck = rank if is_killed else None
    scene = nursery.run(run_scene, root, {rank: what}, struck, is_killed and not is_new, size)
    if is_killed:
        assert scene.endings[rank] == KILLED
    elif not is_new:
        assert all(os.strerror(errno.ENOSPC) in ending for ending in scene.endings)
    assert scene.published in ([OLD, NEW], [NEW]) if is_new else scene.published == [OLD]
    assert scene.folders == [checkpoint_name(iteration) for iteration in (*scene.published, LATER)]


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(5, 60))]
)
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_rank_that_dies_or_whose_disk_fails_leaves_hf_whole_or_no_checkpoint(
    nursery: Forks,
    root: Path,
    name: str,
    operations: list[list[str]],
    seed: int,
    is_killed: bool,
) -> None:
    check_struck(nursery, root, SIZES[name], operations, seed, is_killed=is_killed)


def _cut_power(root: Path, images: Path, size: Size) -> tuple[int, list[list[int]]]:
    """How many images a power cut may leave until the checkpoint is renamed; and what is published,
    and whole, in each of all images.
    """
    images.mkdir()
    cut, numbers = PowerCut(root), itertools.count()
    taken: list[Path] = []
    decisive = [0]

    def before(operation: Operation) -> None:
        number = next(numbers)
        for seed in range(3):
            taken.append(images / f"{number}_{seed}")
            cut.leave(taken[-1], random.Random(f"{seed} {number}"))
        if str(operation) == DECISIVE[0]:
            decisive[0] = len(taken)
        cut(operation)

    assert outcome_of_save(root, before, size=size) is None
    return decisive[0], [list(check_published(image, size)) for image in taken]


def test_a_power_cut_at_any_moment_leaves_hf_whole_or_no_checkpoint(
    nursery: Forks, home: Path, name: str
) -> None:
    size, old, images = SMALL_SIZES[name], home / f"cut_{name}", home / f"images_{name}"
    nursery.run(make_old, old, size)
    decisive, published = nursery.run(_cut_power, old, images, size, timeout=120)
    assert decisive > 50
    assert all(found == [OLD] for found in published[:decisive])
    assert all(found in ([OLD], [OLD, NEW], [NEW]) for found in published[decisive:])
    assert NEW in published[-1], "what has been announced stays"


def _fill_disk(
    old: Path, folder: Path, num_pages: int, size: Size
) -> tuple[list[str | None], list[int], list[str]] | None:
    """Two ranks save to a disk that has room for so many pages more than the old checkpoint."""
    kept = old / checkpoint_name(OLD)
    sizes = [path.stat().st_size for path in kept.rglob("*")]
    there = sum(-(-nbytes // PAGE) for nbytes in sizes) + 8
    folder.mkdir()
    if not mount_small_disk(folder, (there + num_pages) * PAGE):
        return None
    shutil.copytree(kept, folder / checkpoint_name(OLD))
    endings = end_by_themselves(folder, size=size)
    published = list(check_published(folder, size))
    resize_disk(folder, 10 * there * PAGE)
    return endings, published, go_on(folder, size)


def test_a_full_disk_fails_the_save_on_all_ranks_and_leaves_nothing(
    nursery: Forks, old: Path, home: Path, name: str
) -> None:
    outcomes = []
    whole = sum(
        -(-path.stat().st_size // PAGE) for path in old.glob(f"{checkpoint_name(OLD)}/**/*")
    )
    for num_pages in (2, whole // 6, whole // 3, whole // 2, whole * 4 // 5, whole + 60):
        folder = home / f"disk_{name}_{num_pages}"
        result = nursery.run(_fill_disk, old, folder, num_pages, SIZES[name])
        if result is None:
            pytest.skip("no file system may be mounted here")
        endings, published, folders = result
        for ending in endings:
            assert ending is None or re.search("No space left on device|the disk is full", ending)
        assert published in ([[OLD]] if all(endings) else [[NEW], [OLD, NEW]])
        assert folders == [checkpoint_name(iteration) for iteration in (*published, LATER)]
        outcomes.append(published)
    assert outcomes[:5] == [[OLD]] * 5
    assert NEW in outcomes[-1]
