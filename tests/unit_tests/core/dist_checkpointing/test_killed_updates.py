"""A run that is killed at any operation of any lane resumes with the bits of an undisturbed run.

The killed process takes two steps, the second with clipping, and saves between them. At
the chosen operation a lane stops, the other lanes continue as far as they can, and the process is
killed. The next process loads the newest checkpoint and trains to the end.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.store import latest_iteration, open_store
from megatron.core.lanes import ThreadEvent, ThreadLane, delays
from megatron.core.optimizer.cpu_offloading import streamed_pass
from megatron.core.optimizer.cpu_offloading.bucket import Pending
from megatron.core.optimizer.cpu_offloading.streamed_pass import StreamedPass
from tests.unit_tests.core.dist_checkpointing.helpers.async_saves import (
    CPU,
    SLOT,
    Parts,
    Training,
    in_place,
    is_same,
)
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    KILLED,
    Child,
    DiedError,
    Forks,
    forks,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import memory_folder
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import EXECUTORS

# Steps: saved before; saved by the process that is killed; taken during that save; the last one. In
# the first step of a process, after OLD, no update can be early.
OLD, NEW, BEFORE_END, END = 2, 4, 5, 6
PARTS = 4  # of all moments, each a test
OTHERS_GO_ON = 0.2  # seconds: longer makes a wait that is missing no less likely to be noticed


class Moment(NamedTuple):
    """Before or after the n-th piece of a lane's work."""

    lane: str
    number: int
    is_over: bool


class Course(NamedTuple):
    """One process's part of a run."""

    loaded: int  # step
    start: Parts
    losses: list[float]  # of the steps from there on
    end: Parts


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    package = "tests.unit_tests.core.dist_checkpointing.helpers"
    with forks(f"{package}.scenes", f"{package}.async_saves") as found:
        yield found


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def _join(name: str, root: Path, rank: int, world_size: int) -> None:
    # Ranks that have died leave their addresses in the file: it is only for these.
    store = dist.FileStore(f"{root}.{name}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _steps(training: Training, steps: Sequence[int]) -> list[float]:
    losses = []
    for number in steps:
        losses.append(training.backward(number))
        training.update(grad_scale=0.5 if number == BEFORE_END else 1.0)
    return losses


def _undisturbed(root: Path, rank: int, world_size: int) -> dict[int, Course]:
    """The rest of a run without offload from each of the steps that are saved; saves the first."""
    _join("undisturbed", root, rank, world_size)
    training = Training(None)
    _steps(training, range(1, OLD + 1))
    starts = {OLD: training.parts()}
    with CheckpointManager(open_store(str(root)), CPU, rank, world_size, "old") as manager:
        manager.save(OLD, training.contents(), {})
        manager.finish()
    losses = _steps(training, range(OLD + 1, NEW + 1))
    starts[NEW] = training.parts()
    losses += _steps(training, range(BEFORE_END, END + 1))
    end = training.parts()
    return {step: Course(step, start, losses[step - OLD :], end) for step, start in starts.items()}


def _loaded(root: Path, options: dict[str, Any]) -> tuple[Training, int]:
    """A run that continues from the newest checkpoint."""
    streamed_pass.SLOT_NUMEL = SLOT
    training, store = Training(1.0, **options), open_store(str(root))
    newest = latest_iteration(store)
    assert newest is not None
    checkpoint = PublishedCheckpoint.open(store, checkpoint_name(newest))
    contents = training.contents()
    load_entries(checkpoint, contents, check_contents(checkpoint, contents))
    return training, newest


def _resumed(root: Path, rank: int, world_size: int, options: dict[str, Any]) -> Course:
    _join("resumed", root, rank, world_size)
    training, newest = _loaded(root, options)
    start = training.parts()
    return Course(newest, start, _steps(training, range(newest + 1, END + 1)), training.parts())


def _dying(
    root: Path, rank: int, world_size: int, options: dict[str, Any], moment: Moment | None
) -> list[str]:
    """Trains and saves. Without a moment at which to be killed, returns the lanes of all work."""
    _join("dying", root, rank, world_size)
    training, _ = _loaded(root, options)
    _steps(training, range(OLD + 1, NEW))
    training.optimizer.synchronize()
    with (
        CheckpointManager(open_store(str(root)), CPU, rank, world_size, "new") as manager,
        _watched(root, moment) as seen,
        delays(0 if moment is None else moment.number),
        in_place(),
    ):
        _steps(training, [NEW])
        manager.save(NEW, training.contents(), {})
        _steps(training, [BEFORE_END])
        training.optimizer.synchronize()
        manager.finish()
    return seen


@contextmanager
def _watched(root: Path, moment: Moment | None) -> Iterator[list[str]]:
    """While open, this process is killed at a moment. Yields the lanes of all work so far."""
    seen: list[str] = []
    carry_out = ThreadLane.carry_out

    def watch(self: ThreadLane, item: Any) -> None:
        lane = self._name
        number = seen.count(lane)  # one thread carries out all of a lane's work
        seen.append(lane)

        def work() -> None:
            if moment == (lane, number, False):
                deadline = time.monotonic() + OTHERS_GO_ON
                while time.monotonic() < deadline and latest_iteration(open_store(str(root))) < NEW:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
            item.work()
            if moment == (lane, number, True):
                os.kill(os.getpid(), signal.SIGKILL)

        carry_out(self, item._replace(work=work))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadLane, "carry_out", watch)
        yield seen


def _on_ranks(world_size: int, function: Any, root: Path, *args: Any) -> list[Any]:
    children = [Child(function, root, rank, world_size, *args) for rank in range(world_size)]
    return [child.result() for child in children]


def _lanes(root: Path, world_size: int, options: dict[str, Any]) -> list[list[str]]:
    """The lanes of each rank's work in a run that is not killed."""
    return _on_ranks(world_size, _dying, root, options, None)


def _survives(
    root: Path,
    world_size: int,
    options: dict[str, Any],
    moment: Moment | None,
    expected: list[dict[int, Course]],
) -> int | None:
    """Kills the last rank, or lets it finish if there is no moment, and resumes.

    Returns:
        The step of the loaded checkpoint; None if the bits of an undisturbed run differ.
    """
    dying, *others = [
        Child(_dying, root, rank, world_size, options, moment if rank == world_size - 1 else None)
        for rank in reversed(range(world_size))
    ]
    has_died = dying.end() == KILLED
    assert has_died == (moment is not None), "all runs have the same work on each lane"
    for other in others:
        if has_died:
            os.kill(other.pid, signal.SIGKILL)
        with suppress(DiedError) if has_died else nullcontext():  # it may have missed its peer
            other.end()
    newest = OLD
    for resumed, own in zip(_on_ranks(world_size, _resumed, root, options), expected, strict=True):
        newest = resumed.loaded
        course = own[newest]
        if resumed.losses != course.losses or not (
            is_same(resumed.start, course.start) and is_same(resumed.end, course.end)
        ):
            return None
    return newest


class Scene:
    """A directory with a checkpoint, and the results of an undisturbed run from there."""

    def __init__(self, nursery: Forks, home: Path, executor: str, world_size: int) -> None:
        self._nursery = nursery
        self._world_size = world_size
        self._options = EXECUTORS[executor]
        self._root = Path(tempfile.mkdtemp(dir=home)) / "run"
        self._expected = nursery.run(_on_ranks, world_size, _undisturbed, self._root)
        self.lanes = nursery.run(_lanes, self._copy(), world_size, self._options)
        assert {"checkpoint", "checkpoint disk"} < set(self.lanes[-1])

    def moments(self) -> list[Moment]:
        """All moments of the last rank."""
        counted = Counter(self.lanes[-1])
        return [
            Moment(lane, number, is_over)
            for lane in sorted(counted)
            for number, is_over in itertools.product(range(counted[lane]), (False, True))
        ]

    def survives(self, moment: Moment | None, spoil: Any = None) -> int | None:
        """See `_survives`. `spoil` is called in the process that runs it."""
        root = self._copy()

        def run(*args: Any) -> int | None:
            if spoil is not None:
                spoil()
            return _survives(*args)

        try:
            return self._nursery.run(
                run, root, self._world_size, self._options, moment, self._expected
            )
        finally:
            shutil.rmtree(root)

    def _copy(self) -> Path:
        return shutil.copytree(self._root, Path(tempfile.mkdtemp(dir=self._root.parent)) / "run")


@pytest.fixture(scope="module")
def scene_of(nursery: Forks, home: Path) -> Callable[[str, int], Scene]:
    return functools.cache(partial(Scene, nursery, home))


@pytest.mark.parametrize("executor", ["streamed", "early and streamed"])
def test_a_run_killed_at_some_operations_of_its_lanes_resumes_with_equal_bits(scene_of, executor):
    scene = scene_of(executor, 1)
    assert scene.survives(None) == NEW
    for moment in scene.moments()[3::11]:
        assert scene.survives(moment) in (OLD, NEW), moment


@pytest.mark.wide
@pytest.mark.parametrize(
    ("executor", "world_size", "part"),
    [
        *(("half streamed", 1, part) for part in range(PARTS)),
        *(("early and streamed", 1, part) for part in range(PARTS)),
        ("early and streamed", 2, 0),
    ],
)
def test_a_run_killed_at_every_operation_of_its_lanes_resumes_with_equal_bits(
    scene_of, executor, world_size, part
):
    scene = scene_of(executor, world_size)
    for moment in scene.moments()[part::PARTS]:
        assert scene.survives(moment) in (OLD, NEW), moment


def _publish_early() -> None:
    """Has readers not wait for states that are not back in host memory."""
    queue = StreamedPass.queue

    def queue_and_say_done(self: StreamedPass, *args: Any) -> Pending:
        return queue(self, *args)._replace(updated=ThreadEvent.done())

    StreamedPass.queue = queue_and_say_done


def test_a_save_that_does_not_wait_for_streamed_states_is_detected(scene_of):
    scene = scene_of("streamed", 1)
    moment = next(each for each in scene.moments() if each.lane == "optimizer states down")
    assert scene.survives(moment) == OLD
    assert scene.survives(moment, _publish_early) is None
