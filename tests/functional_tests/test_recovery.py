"""Jobs that lose ranks and restart without help: the results are bit-equal.

`pytest -s tests/functional_tests/test_recovery.py` prints the time of each part of a recovery.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import pytest
from torch.distributed import TCPStore

import pretrain_gpt
from megatron.core.options import ConfigError
from tests.functional_tests.helpers.recovery_scenes import (
    MODEL,
    NO_DROPOUT,
    OFFLOADED,
    TIMEOUT,
    Job,
    children,
    is_running,
    kill_process,
    recoveries,
    run,
    run_undisturbed,
    started,
    table,
    torchrun,
    until,
)
from tests.functional_tests.helpers.runner import assert_same_tensors, read_checkpoint
from tests.functional_tests.helpers.runs import (
    DAMAGE,
    LAUNCHER,
    SETTINGS,
    TORCHRUN,
    flip_last_weight,
    pretrain,
)
from tests.unit_tests.core.helpers.keepers import keepers_of

NUM_ITERS = 12
FLAGS = [
    *MODEL,
    *OFFLOADED,
    "--train-iters",
    str(NUM_ITERS),
    "--save-interval",
    "2",
    "--async-save",
]


class Kill(NamedTuple):
    """A SIGKILL that is planned."""

    spec: str
    phases: tuple[str, ...]  # one of which the process is in when it dies


def planned_kills(seed: int) -> list[Kill]:
    """Five kills, one for each start of the job, in random ranks and iterations."""
    draw = random.Random(seed)

    def spec(
        restart: int,
        at: str,
        step: int | None = None,
        delay: tuple[float, float] | None = None,
    ) -> str:
        when = "" if step is None else f",step={step}"
        late = "" if delay is None else f",delay={draw.uniform(*delay):.4f}"
        return f"kill:restart={restart},rank={draw.choice((0, 1))},at={at}{when}{late}"

    return [
        Kill(spec(0, "forward", draw.randint(4, 5)), ("forward",)),
        # A save in the background has written all data, and is not published. Rank 0 writes the
        # event of its start.
        Kill("kill-in-save:restart=1,rank=0,step=6", ("save",)),
        # The weights are loaded, and the position in the data is not yet.
        Kill(spec(2, "data"), ("data",)),
        # The first update of a process takes the longest. The run resumes from iteration 4. A late
        # timer may strike in the next iteration.
        Kill(spec(3, "step", 5, (0.001, 0.003)), ("step", "batch", "forward")),
        Kill(spec(4, "backward", draw.randint(9, 11)), ("backward",)),
    ]


@pytest.fixture(scope="module", params=[2, pytest.param(5, marks=pytest.mark.wide)])
def kills(request: pytest.FixtureRequest) -> list[Kill]:
    """The first of them: every start of a job takes seconds."""
    return planned_kills(seed=6)[: request.param]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run without faults."""
    job = Job(tmp_path_factory.mktemp("whole"))
    run_undisturbed(job, *FLAGS)
    assert [iteration for iteration, _ in job.losses()] == list(range(1, NUM_ITERS + 1))
    return job


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, kills: list[Kill]) -> Job:
    """The same run, killed again and again, and each time started again by torchrun."""
    job = Job(tmp_path_factory.mktemp("killed"))
    specs = [kill.spec for kill in kills]
    assert run(job, torchrun("--max-restarts", "6"), *FLAGS, "--inject", *specs) == 0, job.log
    return job


def assert_goes_the_way_of(job: Job, whole: Job, first: int = 1) -> None:
    """Every loss that was ever written is the undisturbed run's, to the bit, and so is the last
    state.

    Args:
        first: the first iteration of the job.
    """
    expected = {iteration: loss for iteration, loss in whole.losses() if iteration >= first}
    losses = job.losses()
    assert {iteration for iteration, _ in losses} == set(expected)
    assert [(iteration, loss) for iteration, loss in losses if loss != expected[iteration]] == []
    assert_same_tensors(read_checkpoint(job.saved), read_checkpoint(whole.saved))


def test_a_rank_is_killed_in_forward_save_and_resume_and_each_time_the_job_comes_back(
    killed, kills
):
    deaths = killed.events("inject")
    assert [(death["restart"], death["spec"]) for death in deaths] == [
        (n, kill.spec) for n, kill in enumerate(kills)
    ]
    for death, kill in zip(deaths, kills, strict=True):
        assert death["phase"] in kill.phases, kill.spec
    assert [start["restart"] for start in killed.events("start")] == list(range(len(kills) + 1))
    for death, loss in zip(deaths, killed.events("lost"), strict=True):
        assert (loss["restart"], loss["ranks"]) == (death["restart"], [death["rank"]])
        assert "was killed or has crashed" in loss["cause"]
    *_, end = killed.events("exit")
    assert (end["name"], end["code"], end["iteration"], end["restart"]) == (
        "FINISHED",
        0,
        NUM_ITERS,
        len(kills),
    )


def test_a_kill_in_a_save_strikes_in_the_middle_of_it_and_what_was_begun_is_swept(killed):
    death = killed.events("inject")[1]
    (begun,) = (e for e in killed.events("save_begun") if (e["restart"], e["iteration"]) == (1, 6))
    assert begun["time"] < death["time"]
    published = [
        e for e in killed.events("save_published") if (e["restart"], e["iteration"]) == (1, 6)
    ]
    assert published == []
    assert "swept what earlier runs left unfinished" in killed.log
    (resume,) = (e for e in killed.events("resume") if e["restart"] == 2)
    assert resume["checkpoint"] == str(killed.saved / "iter_0000004")


def test_every_loss_of_the_killed_job_and_its_last_state_are_bit_equal_to_the_undisturbed_runs(
    killed, whole
):
    assert len(killed.losses()) > NUM_ITERS, "some iterations were made twice"
    assert_goes_the_way_of(killed, whole)


def test_the_time_from_a_death_to_the_next_step_is_that_of_a_start(killed):
    found = recoveries(killed)
    print(f"\nseconds from a rank's death to the first step after the restart\n{table(found)}")
    # Where the next start was killed before it came to a step, there is no such time.
    assert [recovery.phase for recovery in found] == [
        death["phase"]
        for death, following in pairwise([*killed.events("inject"), None])
        if following is None or following["phase"] != "data"
    ]
    for recovery in found:
        assert min(recovery.seconds) >= 0


@pytest.mark.wide
def test_with_a_kept_host_state_the_killed_job_loses_no_step(whole, tmp_path):
    job = Job(tmp_path / "kept")
    kills = [
        # In the updates that the optimizer's lanes carry out, or soon after.
        "kill:restart=0,rank=1,step=4,at=step,delay=0.002",
        "kill:restart=1,rank=0,step=7,at=backward",
        "kill-in-save:restart=2,rank=0,step=10",
    ]
    flags = [*FLAGS, "--keep-host-state", "--inject", *kills]
    assert run(job, torchrun("--max-restarts", "3"), *flags) == 0, job.log
    _, *resumed = job.events("resume")
    assert [event["checkpoint"] for event in resumed] == 3 * [None]
    first, second, third = (event["iteration"] for event in resumed)
    assert 3 <= first < 7
    assert (second, third >= 10) == (6, True)
    deaths = [event["time"] for event in job.events("inject")]
    for event, death in zip(resumed, deaths, strict=True):
        assert death <= event["failed_at"] + 1 <= event["time"] + 1, "up to the clock's steps"
    assert_goes_the_way_of(job, whole)


# The project's launcher on a machine that loses the first of two devices.
ONE_DEVICE_LEFT = """
import sys
from argparse import Namespace
from megatron_hybrid import launcher
launcher.kernels_of = lambda device: Namespace(visible_devices="DEVICES_OF_A_TEST")
is_lost = "import os, sys; sys.exit(os.environ['DEVICES_OF_A_TEST'] == '0')"
launcher.TRY_DEVICE = [sys.executable, "-c", is_lost]
sys.exit(launcher.main(sys.argv[1:]))
"""


@pytest.mark.wide
@pytest.mark.parametrize(("fewer", "sizes"), [("3,1", [2, 1]), ("3,2", [2, 2])])
def test_a_job_that_loses_a_device_goes_on_with_fewer_ranks_if_it_may(tmp_path, fewer, sizes):
    job = Job(tmp_path / "fewer")
    launcher = [sys.executable, "-c", ONE_DEVICE_LEFT, "--standalone", "--nproc-per-node", "2"]
    launcher += ["--fallback-nproc-per-node", fewer, "--max-restarts", "1"]
    flags = [*FLAGS, "--keep-host-state", "--inject", "kill:rank=1,step=4,at=step,delay=0.002"]
    assert run(job, launcher, *flags) == 0, job.log
    assert [event["world_size"] for event in job.events("start")] == sizes
    _, resumed = job.events("resume")
    assert (resumed["checkpoint"], resumed["world_size"]) == (None, sizes[-1])
    assert resumed["failed_at"] is not None
    assert job.losses()[-1][0] == NUM_ITERS


@pytest.mark.wide
def test_ranks_that_are_killed_at_random_moments_lose_no_step(whole, tmp_path):
    job, draw = Job(tmp_path / "kept"), random.Random(8)
    slow = "slow:rank=any,restart=any,step=1,seconds=1"
    flags = [*FLAGS, "--keep-host-state", "--recover-retries", "100", "--inject", slow]
    with started(job, torchrun("--max-restarts", "100"), *flags) as process:
        for restart in range(8):
            # Before the state is restored, or after the first step of a start.
            kind = draw.choice(("start", "step"))
            until(
                lambda number=restart, kind=kind: (
                    process.poll() is not None
                    or any(event["restart"] == number for event in job.events(kind))
                ),
                "a start",
            )
            time.sleep(draw.uniform(0, 3))
            ranks = children(process.pid)
            for pid in draw.choice((ranks, ranks[:1], ranks[-1:])):
                kill_process(pid)
        assert process.wait(TIMEOUT) == 0, job.log
    resumed = job.events("resume")
    print(f"continued from iterations {[event['iteration'] for event in resumed]}")
    assert {event["checkpoint"] for event in resumed} == {None}
    assert resumed[-1]["iteration"] > 0
    assert_goes_the_way_of(job, whole)


def kept_memory(keeper: int) -> set[int]:
    """The inodes of a keeper's memory."""
    paths = [
        path for path in Path(f"/proc/{keeper}/fd").iterdir() if "memfd" in str(path.readlink())
    ]
    return {path.stat().st_ino for path in paths}


def users_of(memory: set[int]) -> list[str]:
    """The processes that have some of the memory mapped or open."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # another kind of entry, or a process that has just ended
            lines = (folder / "maps").read_text().splitlines()
            inodes = {int(line.split()[4]) for line in lines if "/memfd:" in line}
            inodes |= {path.stat().st_ino for path in (folder / "fd").iterdir() if path.exists()}
            if inodes & memory:
                found.append(folder.name)
    return found


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        (LAUNCHER, signal.SIGKILL),
        *(
            pytest.param(launcher, number, marks=pytest.mark.wide)
            for launcher in (TORCHRUN, LAUNCHER)
            for number in (signal.SIGINT, signal.SIGTERM)
        ),
        pytest.param(TORCHRUN, signal.SIGKILL, marks=pytest.mark.wide),
    ],
)
def test_a_launcher_that_ends_by_a_signal_leaves_neither_a_keeper_nor_its_memory(
    tmp_path, launcher, number
):
    job = Job(tmp_path)
    flags = [*MODEL, *OFFLOADED, "--train-iters", "1000000", "--keep-host-state"]
    with started(job, launcher, *flags) as process:
        until(lambda: job.events("step"), "a step")
        (keeper,) = keepers_of(process.pid)
        memory = kept_memory(keeper)
        assert len(users_of(memory)) == 3, "the keeper and two ranks"
        process.send_signal(number)
        assert process.wait(TIMEOUT) != 0
        until(lambda: not is_running(keeper), "the end of the keeper")
        until(lambda: not users_of(memory), "the end of its memory")


# Hangs.

HANG = "hang:rank=1,step=5"
HANG_TIMEOUT = 5.0  # seconds


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same run again, in which a rank goes to sleep and never wakes."""
    job = Job(tmp_path_factory.mktemp("hung"))
    flags = ["--hang-timeout-seconds", str(HANG_TIMEOUT), "--inject", HANG]
    assert run(job, torchrun("--max-restarts", "1"), *FLAGS, *flags) == 0, job.log
    return job


def test_a_rank_that_hangs_is_found_in_time_and_named_with_where_it_hangs(hung):
    (sleep,) = hung.events("inject")
    (found,) = hung.events("hang")
    assert found["ranks"] == [1]
    assert "megatron/training/health/inject.py" in found["cause"]
    assert "hang_for_ever" in found["cause"]
    assert found["time"] - sleep["time"] >= HANG_TIMEOUT
    (line,) = [line for line in hung.log.splitlines() if found["cause"] in line and "ERROR" in line]
    assert "watchdog" not in line
    assert [event["name"] for event in hung.events("exit")] == ["HANG", "FINISHED"]
    print(f"\n{line}")


def test_a_job_with_a_rank_that_hangs_is_restarted_and_ends_like_the_undisturbed_run(hung, whole):
    assert [start["restart"] for start in hung.events("start")] == [0, 1]
    assert_goes_the_way_of(hung, whole)


# Damaged checkpoints.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A small run of four iterations on two ranks, all of them saved."""
    job = Job(tmp_path_factory.mktemp("small"))
    run_undisturbed(job, *SETTINGS, "--save-interval", "1")
    assert folders(job) == [f"iter_{iteration:07d}" for iteration in (1, 2, 3, 4)]
    return job


def folders(job: Job) -> list[str]:
    return sorted(path.name for path in job.saved.iterdir() if path.is_dir())


def copy_of_checkpoints(job: Job, folder: Path) -> Job:
    """A job with only the checkpoints of another one."""
    copy = Job(folder)
    for name in folders(job):
        shutil.copytree(job.saved / name, copy.saved / name)
    return copy


@pytest.mark.parametrize("corruption", ["a bit of one rank's data", "no marker", "no metadata"])
def test_a_corrupt_newest_checkpoint_leads_to_the_one_before_it_with_one_loud_line(
    small, tmp_path, corruption
):
    job = copy_of_checkpoints(small, tmp_path / "job")
    newest = job.saved / "iter_0000004"
    DAMAGE[corruption](newest)
    runs = pretrain(*job.flags, "--save-interval", 1, world_size=2)
    assert [run.error for run in runs] == ["", ""]
    (line,) = [line for run in runs for line in run.log.splitlines() if "DAMAGED" in line]
    assert f"ERROR: DAMAGED: checkpoint {newest} is passed over. " in line
    (damage,) = job.events("damaged")
    assert damage["checkpoint"] == str(newest)
    assert damage["reason"] in line
    (resume,) = job.events("resume")
    assert resume["checkpoint"] == str(job.saved / "iter_0000003")
    assert_goes_the_way_of(job, small, first=4)
    assert [name.partition(".")[0] for name in folders(job)] == [*folders(small), newest.name], (
        "it is set aside"
    )


@pytest.mark.wide
def test_where_no_checkpoint_is_intact_the_job_ends_with_the_reason_and_no_relaunch_begins_anew(
    small, tmp_path
):
    job = copy_of_checkpoints(small, tmp_path / "job")
    for name in folders(job):
        flip_last_weight(job.saved / name, 1)
    assert run(job, torchrun("--max-restarts", "1"), *SETTINGS) != 0
    assert "exitcode  : 3 " in job.log
    assert f"Expected a checkpoint in {job.saved} that is whole, got: " in job.log
    damaged = [str(job.saved / name) for name in reversed(folders(small))]
    # Each is read once, and not again by the relaunch.
    assert [(event["restart"], event["checkpoint"]) for event in job.events("damaged")] == [
        (0, it) for it in damaged
    ]
    ends = [(event["restart"], event["code"], event["name"]) for event in job.events("exit")]
    assert ends == [(0, 3, "BAD_FILES"), (1, 3, "BAD_FILES")]
    assert all(f"{damaged[0]}/__1_0.distcp" in event["reason"] for event in job.events("exit"))
    assert job.losses() == []
    assert folders(job) == folders(small)


# Fewer ranks.

RESIZED = [
    *SETTINGS,
    *NO_DROPOUT,
    *OFFLOADED,
    *"--train-iters 24 --save-interval 2 --log-interval 1".split(),
]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Without dropout, whose masks depend on the number of ranks."""
    job = Job(tmp_path_factory.mktemp("on_two_ranks"))
    run_undisturbed(job, *RESIZED)
    return job


def assert_goes_about_the_way_of(job: Job, whole: Job) -> None:
    """Every loss that was ever written is within 1e-6 of the undisturbed run's, relatively."""
    expected = dict(whole.losses())
    losses = job.losses()
    assert {iteration for iteration, _ in losses} == set(expected)
    for iteration, loss in losses:
        assert loss == pytest.approx(expected[iteration], rel=1e-6, abs=0), iteration


def test_a_checkpoint_of_two_ranks_is_continued_by_one(on_two_ranks, tmp_path):
    job = Job(tmp_path)
    run_undisturbed(job, *RESIZED, "--exit-interval", "10")
    run_undisturbed(job, *RESIZED, num_ranks=1)
    assert [(e["iteration"], e["world_size"]) for e in job.events("resume")] == [(0, 2), (10, 1)]
    assert_goes_about_the_way_of(job, on_two_ranks)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def node(port: int, *, is_host: bool) -> list[str]:
    """The launcher on one of up to two machines of a job, with one rank each.

    Args:
        port: of the launchers' common store, on the machine that hosts it.
        is_host: whether that is this one.
    """
    times = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        f"job{port}",
    ]
    conf = ["--rdzv-conf", f"{times},is_host={str(is_host).lower()}"]
    return torchrun("--nnodes", "1:2", *rendezvous, *conf, "--max-restarts", "3", num_ranks=1)


def trains(job: Job, world_size: int, least: int) -> bool:
    """Whether a job is on so many ranks, and has made so many iterations in all."""
    resumes = job.events("resume")
    return (
        bool(resumes)
        and resumes[-1]["world_size"] == world_size
        and max(dict(job.losses()), default=0) >= least
    )


def lose(job: Job, goes: Popen[bytes], stays: Popen[bytes]) -> None:
    """Kills one launcher: its rank ends by itself, and the other machine finishes the run."""
    (orphan,) = children(goes.pid)
    lost_at = time.time()
    goes.kill()
    try:
        until(lambda: not is_running(orphan), "the rank of the killed launcher to end")
        assert stays.wait(TIMEOUT) == 0, job.log
    finally:
        kill_process(orphan)
    assert job.events("resume")[-1]["world_size"] == 1
    assert job.events("resume")[-1]["iteration"] >= 4, "it resumed from a checkpoint"
    assert job.events("exit")[-1]["name"] == "FINISHED"
    (step,) = [e for e in job.events("step") if e["time"] > lost_at]
    print(
        f"\nfrom the loss of a machine to the first step without it: {step['time'] - lost_at:.1f} s"
    )


# A node that comes late can join: see docs/training.md.
LATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.wide
@pytest.mark.parametrize("phase", ["forward", "save"])
def test_two_machines_train_lose_one_and_finish_on_the_other(on_two_ranks, tmp_path, phase):
    """In a step, whose collectives fail then; or in a save, where ranks wait for each other's files
    alone.
    """
    job, port = Job(tmp_path), free_port()
    # Slow enough to lose a machine in the middle.
    slow = ["slow:rank=any,step=1,seconds=0.2", "slow:rank=any,step=6,at=save,seconds=5,times=1"]
    flags = [*RESIZED, "--inject", *(slow if phase == "save" else slow[:1])]
    with (
        started(job, node(port, is_host=True), *flags, log="log_0.txt", **LATE) as stays,
        started(job, node(port, is_host=False), *flags, log="log_1.txt", **LATE) as goes,
    ):
        until(lambda: trains(job, 2, 5), "two ranks that train")
        if phase == "save":
            until(
                lambda: len([e for e in job.events("inject") if e["phase"] == "save"]) == 2,
                "a save",
            )
        lose(job, goes, stays)
    assert_goes_about_the_way_of(job, on_two_ranks)


@pytest.mark.wide
def test_the_machine_of_rank_0_is_lost_where_the_launchers_store_is_on_neither(
    on_two_ranks, tmp_path
):
    job = Job(tmp_path)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    flags = [*RESIZED, "--inject", "slow:rank=any,step=1,seconds=0.2"]
    with (
        started(job, node(store.port, is_host=False), *flags, log="log_0.txt", **LATE) as one,
        started(job, node(store.port, is_host=False), *flags, log="log_1.txt", **LATE) as other,
    ):
        until(lambda: trains(job, 2, 5), "two ranks that train")
        is_first = job.events("start")[-1]["pid"] in children(one.pid)
        lose(job, *((one, other) if is_first else (other, one)))
    assert_goes_about_the_way_of(job, on_two_ranks)


@pytest.mark.wide
def test_a_machine_that_comes_back_joins_the_others_and_the_losses_stay_what_they_were(tmp_path):
    longer = [*RESIZED, "--train-iters", "60"]
    whole, job, port = Job(tmp_path / "whole"), Job(tmp_path / "job"), free_port()
    run_undisturbed(whole, *longer)
    flags = [*longer, "--inject", "slow:rank=any,restart=any,step=1,seconds=0.3"]
    with started(job, node(port, is_host=True), *flags, log="log_0.txt", **LATE) as stays:
        with started(job, node(port, is_host=False), *flags, log="log_1.txt", **LATE) as goes:
            until(lambda: trains(job, 2, 5), "two ranks that train")
            goes.kill()
            until(lambda: trains(job, 1, 12), "one rank that trains")
        with started(job, node(port, is_host=False), *flags, log="log_2.txt", **LATE) as comes:
            assert [process.wait(TIMEOUT) for process in (stays, comes)] == [0, 0], job.log
    assert [event["world_size"] for event in job.events("resume")] == [2, 1, 2]
    assert_goes_about_the_way_of(job, whole)


# Faults that a run lives with.


def test_a_full_disk_a_nan_and_a_slow_rank_by_flag_are_in_the_event_log_and_the_run_goes_on(
    small, tmp_path
):
    job = Job(tmp_path)
    faults = [
        "disk-full:rank=1,step=2",
        "nan:rank=1,step=3",
        "slow:rank=1,step=1,seconds=0.3,times=1,at=backward",
    ]
    runs = pretrain(*SETTINGS, *job.flags, "--save-interval", 1, "--inject", *faults, world_size=2)
    assert [run.error for run in runs] == ["", ""]
    told = {
        event["spec"]: (event["rank"], event["phase"], event["iteration"])
        for event in job.events("inject")
    }
    assert told == {
        faults[0]: (1, "save", 2),
        faults[1]: (1, "forward", 3),
        faults[2]: (1, "backward", 1),
    }
    (failure,) = job.events("save_failed")
    assert "rank 1" in failure["reason"]
    assert "No space left on device" in failure["reason"]
    assert [event["iteration"] for event in job.events("save_published")] == [1, 3, 4]
    (nan,) = job.events("nan")
    assert (nan["iteration"], nan["ranks"]) == (3, [1])
    (first, *_) = job.events("step")
    assert first["seconds"] >= 0.3, "the others wait for the slow one"
    losses, expected = dict(job.losses()), dict(small.losses())
    assert [losses[n] == expected[n] for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert losses[3] is None, "JSON has no NaN"


@pytest.mark.parametrize("place", ["memory://bucket/try", "runs/production-2/gpt"])
def test_faults_are_refused_where_a_path_looks_like_production(tmp_path, place):
    for flags in (["--save", place], ["--save", tmp_path, "--load", place]):
        with pytest.raises(
            ConfigError, match=r"--inject: expected local paths without .* production, .*, got '"
        ):
            pretrain_gpt.run([*SETTINGS, *map(str, flags), "--inject", "kill:step=1"])
    assert list(tmp_path.iterdir()) == []
