"""A run with `--keep-host-state` that is killed at any moment loses no step and no bit.

The process that starts the ranks is the launcher. Ranks are killed at a lane's operation or
at the start of a phase, and started again until they reach the end. `--save` gets its only
checkpoint at the end, by default.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pretrain_gpt
from megatron.core import host_keeper
from megatron.core.host_keeper import Keeper
from megatron.core.host_memory import HostLimits
from megatron.core.lanes import ThreadLane
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.kept_updates import KeptUpdates
from megatron.core.options import ConfigError
from megatron.training.checkpoint import kept_ranks
from megatron.training.checkpoint.kept_ranks import EarlierRanks
from megatron.training.checkpoint.kept_state import KeptState
from megatron.training.engines import MegatronEngine
from megatron.training.health.events import EventKind, read_events
from megatron.training.loop import Loop
from tests.functional_tests.helpers.runs import SETTINGS, losses
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    KILLED,
    Child,
    DiedError,
    Forks,
    forks,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import memory_folder
from tests.unit_tests.core.helpers.keepers import keepers_of

ITERATIONS = 4  # of SETTINGS
FLAGS = [
    *"--bf16 --main-grads-dtype bf16 --hidden-dropout 0.1 --log-interval 2".split(),
    *"--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d".split(),
    *"--overlap-optimizer-with-forward --eval-interval 2".split(),
]
KEPT = ["--keep-host-state"]
NUM_BUCKETS = 2  # of the one layer and the rest
PARTS = 8  # of all moments, each a test
RANDOM_KILLS = 16  # of a test, at least


class Moment(NamedTuple):
    """Before or after the n-th piece of a lane's work, or the start of a phase of an iteration."""

    lane: str
    number: int
    is_over: bool


NEVER = Moment("no lane", 0, False)  # for ranks that are killed otherwise


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    package = "tests.unit_tests.core"
    with forks(
        "megatron.training.pretrain",
        "pretrain_gpt",
        "tests.functional_tests.helpers.runs",
        f"{package}.helpers.keepers",
        f"{package}.dist_checkpointing.helpers.scenes",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def _rank(
    root: Path, flags: Sequence[str], launch: dict[str, str], moment: Moment | None
) -> list[str]:
    """Trains to the end, or is killed. Returns the lanes of all work."""
    os.environ.update(launch)
    seen: list[str] = []
    carry_out = ThreadLane.carry_out

    def kill_at(lane: str, number: int, is_over: bool) -> None:
        if moment == (lane, number, is_over):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self: ThreadLane, item: Any) -> None:
        lane = self._name
        number = seen.count(lane)  # one thread carries out all of a lane's work
        seen.append(lane)

        def work() -> None:
            kill_at(lane, number, False)
            item.work()
            kill_at(lane, number, True)

        carry_out(self, item._replace(work=work))

    ThreadLane.carry_out = watch  # type: ignore[method-assign]
    folder = ["--save", str(root), "--metrics-jsonl", str(root / "metrics.jsonl")]
    pretrain_gpt.run([*SETTINGS, *FLAGS, *flags, *folder])
    return seen


def _start(
    root: Path,
    world_size: int,
    flags: Sequence[str],
    restart: int = 0,
    moment: Moment | None = None,
    kill: Callable[[list[int]], None] = lambda _: None,
) -> list[list[str]] | None:
    """Starts the ranks, of which the last is to be killed; None if one was. `kill` gets the process
    ids of all.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    children = []
    for rank in range(world_size):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        at = moment if rank == world_size - 1 else None
        children.append(Child(_rank, root, flags, own, at))
    kill([child.pid for child in children])
    answers: list[Any] = []
    for child in reversed(children):
        if KILLED in answers:
            os.kill(child.pid, signal.SIGKILL)
            with suppress(DiedError):  # it may have missed its peer
                child.end()
        else:
            answers.append(child.end())
    return None if KILLED in answers else answers[::-1]


# The iteration, and whether the state was kept, of each start after the first; losses and states.
Outcome = tuple[list[tuple[int, bool]], dict[str, object]]


def _outcome(root: Path, world_size: int) -> Outcome:
    last = root / f"iter_{ITERATIONS:07d}"
    values: dict[str, object] = {
        f"states of rank {rank}": (last / f"__{rank}_0.distcp").read_bytes()
        for rank in range(world_size)
    }
    values["losses"] = losses(root / "metrics.jsonl")
    state = json.loads((last / "train_state.json").read_text())
    values["progress"], values["logger"] = state["progress"], state["logger"]
    values["evaluator"] = state["evaluator"]
    resumed = [event for event in read_events(root) if event["event"] == EventKind.RESUME]
    starts = [(event["iteration"], event["failed_at"] is not None) for event in resumed[1:]]
    return starts, values


def _undisturbed(
    root: Path, world_size: int, flags: Sequence[str]
) -> tuple[list[str], dict[str, object]]:
    """The lanes of the last rank's work, and the end of a run without `KEPT`."""
    lanes = _start(root / "lanes", world_size, [*KEPT, *flags])
    assert lanes is not None
    assert _start(root / "plain", world_size, flags) is not None
    _, expected = _outcome(root / "plain", world_size)
    assert _outcome(root / "lanes", world_size)[1] == expected
    return lanes[-1], expected


def _killed(
    root: Path,
    world_sizes: Sequence[int],
    moments: Sequence[Moment],
    flags: Sequence[str],
    between: Callable[[], None],
    disturb: Callable[[], None] = lambda: None,
) -> Outcome:
    """Starts a run, kills it at each of the moments of a start, and lets it end.

    Args:
        world_sizes: of each start.
        disturb: called in this process, before the ranks start.
    """
    disturb()
    *others, last = world_sizes
    for restart, (world_size, moment) in enumerate(zip(others, moments, strict=True)):
        killed = _start(root, world_size, [*KEPT, *flags], restart, moment)
        assert killed is None, f"not killed at {moment}"
        between()
    assert _start(root, last, [*KEPT, *flags], len(moments)) is not None
    return _outcome(root, last)


class RandomKills:
    """Kills of the last rank or of all, after random times that are shorter than a whole start."""

    def __init__(self, root: Path, world_size: int, flags: Sequence[str], seed: int) -> None:
        begin = time.monotonic()
        assert _start(root, world_size, [*KEPT, *flags]) is not None
        self._seconds = time.monotonic() - begin
        self._draw = random.Random(seed)

    def __call__(self, pids: list[int]) -> None:
        time.sleep(self._draw.uniform(0, self._seconds))
        for pid in self._draw.choice((pids, pids[-1:])):
            os.kill(pid, signal.SIGKILL)


def _killed_at_random(
    root: Path, world_size: int, flags: Sequence[str], seed: int
) -> list[tuple[int, Outcome]]:
    """Starts runs, and kills them until they have ended, which takes `RANDOM_KILLS` in all. Returns
    the kills of each.
    """
    kill, found, left = RandomKills(root, world_size, flags, seed), [], RANDOM_KILLS
    while left > 0:
        own, restart = root.with_name(f"run {left}"), 0
        while _start(own, world_size, [*KEPT, *flags], restart, kill=kill) is None:
            restart += 1
        found.append((restart, _outcome(own, world_size)))
        left -= restart
    return found


class Scene:
    """An undisturbed run, and runs that are killed."""

    def __init__(self, nursery: Forks, home: Path, world_size: int, *flags: str) -> None:
        self._nursery, self._home, self._world_size = nursery, home, world_size
        self._flags = flags
        self.lanes, self._expected = nursery.run(_undisturbed, self._folder(), world_size, flags)

    def moments(self) -> list[Moment]:
        counted = Counter(self.lanes)
        return [
            Moment(lane, number, is_over)
            for lane in sorted(counted)
            for number, is_over in itertools.product(range(counted[lane]), (False, True))
        ]

    def starts(
        self,
        moments: Sequence[Moment],
        flags: Sequence[str] = (),
        between: Callable[[], None] = lambda: None,
        disturb: Callable[[], None] = lambda: None,
        world_sizes: Sequence[int] = (),
    ) -> list[tuple[int, bool]]:
        """The starts of a run that ends with the bits of the undisturbed one."""
        sizes = world_sizes or [self._world_size] * (len(moments) + 1)
        own = [*self._flags, *flags]
        starts, values = self._nursery.run(
            _killed, self._folder(), sizes, moments, own, between, disturb
        )
        for name, value in self._expected.items():
            assert values[name] == value, name
        return starts

    def starts_at_random(self, flags: Sequence[str], seed: int) -> list[list[tuple[int, bool]]]:
        """The starts of runs that are killed at random moments, with the same end."""
        own = [*self._flags, *flags, "--recover-retries", "1000"]
        runs = self._nursery.run(_killed_at_random, self._folder(), self._world_size, own, seed)
        for _, (_, values) in runs:
            for name, value in self._expected.items():
                assert values[name] == value, name
        print(f"kills of each run: {[num_kills for num_kills, _ in runs]}")
        return [starts for _, (starts, _) in runs]

    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._home)) / "run"


@pytest.fixture(scope="module")
def scene_of(nursery: Forks, home: Path) -> Callable[..., Scene]:
    return functools.cache(functools.partial(Scene, nursery, home))


def _is_within(starts: Sequence[tuple[int, bool]]) -> bool:
    """Whether every start after the first step continued from the kept state."""
    return all(is_kept for iteration, is_kept in starts if iteration)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_killed_in_updates_one_after_the_other_end_with_equal_bits(scene_of, world_size):
    scene = scene_of(world_size)
    updates = [moment for moment in scene.moments() if moment.lane == "optimizer host"]
    # The restarted ranks are killed in their first step.
    starts = scene.starts([updates[len(updates) // 3], updates[1]])
    assert [is_kept for _, is_kept in starts] == [True, True]
    assert starts[0][0] < starts[1][0] < ITERATIONS


def test_a_step_that_is_finished_ends_the_step_of_delayed_scalings_histories(scene_of):
    scene = scene_of(1, "--fp8-format", "hybrid", "--fp8-recipe", "delayed")
    updates = [moment for moment in scene.moments() if moment.lane == "optimizer host"]
    ((_, is_kept),) = scene.starts([updates[len(updates) // 2]])
    assert is_kept


def test_ranks_killed_while_they_finish_a_step_finish_it_in_the_next_start(scene_of):
    def die_in_second_bucket() -> None:
        start = KeptUpdates._carry_on
        numbers: list[int] = []

        def dying(self: KeptUpdates, kernel: Any, number: int, *rest: Any) -> Callable[[], None]:
            numbers.append(number)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and len(numbers) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return start(self, kernel, number, *rest)

        KeptUpdates._carry_on = dying  # type: ignore[method-assign]

    scene = scene_of(1)
    # The last step has been decided, and no bucket has been updated.
    starts_of_updates = [each for each in scene.moments() if each.lane == "optimizer host start"]
    last = starts_of_updates[-2 * NUM_BUCKETS]
    assert scene.starts([last, NEVER], disturb=die_in_second_bucket) == [(ITERATIONS, True)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("world_size", "part"),
    [*((1, part) for part in range(PARTS)), (2, 0), (2, PARTS // 2)],
)
def test_a_run_killed_in_every_operation_of_its_lanes_ends_with_equal_bits(
    scene_of, world_size, part
):
    scene = scene_of(world_size)
    for moment in scene.moments()[part::PARTS]:
        assert _is_within(scene.starts([moment])), moment


@pytest.mark.wide
@pytest.mark.parametrize("saves", [[], ["--save-interval", "1"]], ids=["end", "every"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_runs_killed_at_random_moments_of_every_start_end_with_equal_bits(
    scene_of, world_size, saves, seed
):
    for starts in scene_of(world_size).starts_at_random(saves, seed):
        assert _is_within(starts)


@pytest.mark.wide
@pytest.mark.parametrize("phase", ["forward", "agree", "step", "evaluate"])
def test_a_run_killed_at_the_start_of_a_phase_repeats_at_most_one_step(scene_of, phase):
    # The injected fault kills the rank: no lane is watched.
    inject = [
        "--inject",
        f"kill:step=3,at={phase}" if phase != "evaluate" else "kill:step=2,at=evaluate",
    ]
    assert scene_of(1).starts([NEVER], inject) == [(2, True)]


# Other numbers of ranks. A batch can be divided over 1, 2 or 3 of them.
RESIZED = "--micro-batch-size 1 --global-batch-size 6".split()
IN_STEP_2 = Moment("optimizer host", NUM_BUCKETS, True)
IN_FIRST_STEP = Moment("optimizer host", 0, True)


def _resized_through_checkpoints(
    root: Path, world_sizes: Sequence[int], ends: Sequence[int], flags: Sequence[str]
) -> Outcome:
    """A run that saves and ends at some iterations, and continues with other numbers of ranks."""
    for restart, (world_size, end) in enumerate(zip(world_sizes, ends, strict=True)):
        assert _start(root, world_size, [*flags, "--exit-interval", str(end)], restart) is not None
    return _outcome(root, world_sizes[-1])


def _assert_like(values: dict[str, object], expected: dict[str, object]) -> None:
    """Equal bits of states, and losses to 1e-6."""
    assert values.keys() == expected.keys()
    for name in ("losses", "evaluator"):
        assert values[name] == pytest.approx(expected[name], rel=1e-6), name
    for name in values.keys() - {"losses", "evaluator", "logger"}:
        assert values[name] == expected[name], name


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--data-parallel-sharding-strategy", "optim"], marks=pytest.mark.wide),
        pytest.param(["--data-parallel-sharding-strategy", "optim_grads"], marks=pytest.mark.wide),
        pytest.param(["--fp8-format", "hybrid", "--fp8-recipe", "delayed"], marks=pytest.mark.wide),
    ],
)
def test_a_job_goes_on_with_1_and_3_of_2_ranks_as_from_checkpoints(nursery, home, flags):
    own, folder, sizes = [*RESIZED, *flags], Path(tempfile.mkdtemp(dir=home)), (2, 1, 3)
    _, expected = nursery.run(
        _resized_through_checkpoints, folder / "saved", sizes, (2, 3, ITERATIONS), own
    )
    moments = [IN_STEP_2, IN_FIRST_STEP]
    starts, values = nursery.run(
        _killed, folder / "kept", sizes, moments, own, lambda: None, lambda: None
    )
    assert starts == [(2, True), (3, True)]
    _assert_like(values, expected)


def _kill_after(owner: type, name: str, restart: int) -> None:
    """Has a method kill its process at its end, in one of the starts."""
    method = getattr(owner, name)

    def dying(self: Any, *args: Any, **options: Any) -> Any:
        found = method(self, *args, **options)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == str(restart):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dying)


def test_ranks_killed_before_their_first_step_after_a_resize_begin_it_again(nursery, home):
    def disturb() -> None:
        _kill_after(HybridDeviceOptimizer, "finish_kept", 1)  # one of two ranks' step
        _kill_after(KeptState, "landed", 2)

    folder = Path(tempfile.mkdtemp(dir=home))
    _, expected = nursery.run(
        _resized_through_checkpoints, folder / "saved", (2, 3), (2, ITERATIONS), RESIZED
    )
    moments = [IN_STEP_2, NEVER, NEVER]
    starts, values = nursery.run(
        _killed, folder / "kept", (2, 1, 3, 3), moments, RESIZED, lambda: None, disturb
    )
    assert starts == [(2, True), (2, True)]
    _assert_like(values, expected)


def test_a_resize_that_was_killed_leaves_the_state_of_the_earlier_ranks(scene_of):
    def disturb() -> None:
        _kill_after(EarlierRanks, "finish", 1)

    scene = scene_of(2, *RESIZED)
    starts = scene.starts([IN_STEP_2, NEVER], disturb=disturb, world_sizes=(2, 1, 2))
    assert starts == [(2, True)]


def test_a_step_that_was_decided_but_not_reported_is_reported_once(scene_of):
    """Killed between the decision and the report: its loss is not computed again."""

    def die_in_report() -> None:
        report = Loop._report

        def dying(self: Loop, result: Any) -> None:
            if self._iteration == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            report(self, result)

        Loop._report = dying  # type: ignore[method-assign]

    assert scene_of(1).starts([NEVER], disturb=die_in_report) == [(2, True)]


def _kill_keepers() -> None:
    for keeper in keepers_of(os.getpid()):
        os.kill(keeper, signal.SIGKILL)


def _damage_records() -> None:
    def overwrite() -> None:
        descriptor = _opened("records 0", 0, 1)
        for place in range(0, os.fstat(descriptor).st_size, 1 << 26):
            os.pwrite(descriptor, b"\1" * 200, place)

    Child(overwrite).result()


def _truncate_states(rank: int, world_size: int) -> None:
    def truncate() -> None:
        os.ftruncate(_opened("states 0", rank, world_size), 4096)

    Child(truncate).result()


def _opened(name: str, rank: int, world_size: int) -> int:
    keeper = Keeper(os.getppid(), rank, world_size)
    keeper.connect(starts=False)
    return keeper.open(name, keeper.files[name])


def _flip_bit(name: str, rank: int, world_size: int, place: int) -> None:
    """`place`: number of the element, of 4 bytes; negative: from the end, where padding is."""

    def flip() -> None:
        descriptor = _opened(name, rank, world_size)
        at = 4 * place % os.fstat(descriptor).st_size
        (byte,) = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ 1]), at)

    Child(flip).result()


@pytest.mark.parametrize(
    ("damage", "world_size"),
    [
        (_kill_keepers, 1),
        (_damage_records, 1),
        (functools.partial(_truncate_states, 0, 1), 1),
        (functools.partial(_flip_bit, "main weights 0", 0, 1, 0), 1),
        (functools.partial(_flip_bit, "states 0", 0, 1, 0), 1),
        (functools.partial(_flip_bit, "states 0", 1, 2, -100), 2),
    ],
)
def test_without_an_intact_kept_state_a_run_resumes_from_its_checkpoint(
    scene_of, damage, world_size
):
    scene = scene_of(world_size)
    last = [moment for moment in scene.moments() if moment.lane == "optimizer host"][-1]
    starts = scene.starts([last], ["--save-interval", "2"], between=damage)
    assert starts == [(2, False)]


def _damaged_undo(root: Path, flags: Sequence[str]) -> Outcome:
    """A run that is killed in the updates of its last step, and whose undo slot is damaged."""

    def overwrite() -> None:
        slot = struct.pack("@5q", ITERATIONS, 1000, 0, 0, 64)  # of a bucket that is not there
        os.pwrite(_opened("undo 0", 0, 1), slot, 0)

    # In the updates of the last step.
    moment = Moment("optimizer host start", NUM_BUCKETS * ITERATIONS - 1, False)
    assert _start(root, 1, flags, 0, moment) is None
    Child(overwrite).result()
    with pytest.raises(DiedError):
        _start(root, 1, flags, 1)
    assert _start(root, 1, flags, 2) is not None
    return _outcome(root, 1)


def test_a_state_that_cannot_be_finished_is_dropped_for_the_checkpoint(nursery, home):
    folder = Path(tempfile.mkdtemp(dir=home)) / "run"
    starts, _ = nursery.run(_damaged_undo, folder, [*KEPT, "--save-interval", "2"])
    assert starts == [(2, False)]


def test_memory_is_dropped_on_all_ranks_before_any_of_them_needs_it_again(scene_of, home):
    folder = Path(tempfile.mkdtemp(dir=home))

    def disturb() -> None:
        forget, check = Keeper.forget, MegatronEngine._check_host_memory

        def is_second() -> bool:
            return os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"

        def late(self: Keeper) -> None:
            if is_second() and self._rank == 1:
                time.sleep(2)
            forget(self)
            if is_second():
                (folder / str(self._rank)).touch()

        def checked(self: MegatronEngine, *rest: Any) -> None:
            if is_second():
                assert {path.name for path in folder.iterdir()} == {"0", "1"}
            check(self, *rest)

        Keeper.forget = late  # type: ignore[method-assign]
        MegatronEngine._check_host_memory = checked  # type: ignore[method-assign]

    scene = scene_of(2)
    last = [moment for moment in scene.moments() if moment.lane == "optimizer host"][-1]
    damage = functools.partial(_flip_bit, "states 0", 1, 2, 0)
    flags = ["--save-interval", "2"]
    assert scene.starts([last], flags, between=damage, disturb=disturb) == [(2, False)]


def _fill_memory() -> None:
    class Full:
        @staticmethod
        def read() -> HostLimits:
            return HostLimits(1000, None)

    kept_ranks.HostLimits = Full  # type: ignore[assignment, misc]


@pytest.mark.parametrize(
    "damage",
    [
        functools.partial(_truncate_states, 1, 2),
        functools.partial(_flip_bit, "main weights 0", 1, 2, 0),
        _fill_memory,
    ],
)
def test_a_resize_without_intact_ranks_or_memory_resumes_from_the_checkpoint(nursery, home, damage):
    folder = Path(tempfile.mkdtemp(dir=home)) / "run"
    flags = [*RESIZED, "--save-interval", "1"]
    starts, _ = nursery.run(_killed, folder, (2, 1), [IN_STEP_2], flags, damage)
    assert starts == [(1, False)]


def test_without_a_keeper_a_run_goes_its_way(scene_of):
    def start_none() -> None:
        host_keeper._start = lambda _launcher: None
        host_keeper._PATIENCE_SECONDS = 0.1

    assert scene_of(1).starts([], disturb=start_none) == []


def test_a_run_that_no_launcher_restarts_is_refused():
    with pytest.raises(ConfigError, match="--keep-host-state"):
        pretrain_gpt.run([*SETTINGS, *FLAGS, *KEPT])


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer-offload-fraction", "0.5"],
        ["--optimizer-update-on-device", "0.5"],
        ["--optimizer-early-update-gib", "1"],
        ["--freeze", "embedding"],
        ["--optimizer", "muon"],
        ["--fp8-format", "hybrid", "--fp8-param-gather"],
    ],
)
def test_states_that_are_not_in_host_memory_between_steps_are_refused(flags):
    with pytest.raises(ConfigError, match="--keep-host-state"):
        pretrain_gpt.run([*SETTINGS, *FLAGS, *KEPT, *flags])
