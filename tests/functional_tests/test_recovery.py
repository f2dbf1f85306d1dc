"""Jobs that lose ranks and restart without help: the results are bit-equal.

`pytest -s tests/functional_tests/test_recovery.py` prints the time of each part of a recovery.
"""

from __future__ import annotations

import random
import shutil
import socket
import time
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
from tests.functional_tests.helpers.runs import DAMAGE, SETTINGS, flip_last_weight, pretrain

NUM_ITERS = 12
HANG_TIMEOUT = 5.0  # seconds
FLAGS = [
    *MODEL,
    *OFFLOADED,
    "--train-iters",
    str(NUM_ITERS),
    "--save-interval",
    "2",
    "--async-save",
]


class Fault(NamedTuple):
    """A SIGKILL or a hang that is planned."""

    spec: str
    phases: tuple[str, ...]  # one of which the process is in when it strikes

    @property
    def is_hang(self) -> bool:
        return self.spec.startswith("hang")


def planned_faults(seed: int) -> list[Fault]:
    """Six faults, one for each start of the job. Every restart resumes from iteration 4."""
    draw = random.Random(seed)

    def kill(restart: int, at: str, *more: str) -> str:
        where = f"restart={restart},rank={draw.choice((0, 1))},at={at}"
        return f"kill:{','.join((where, *more))}"

    return [
        # A save in the background has written all data, and is not published. Rank 0 writes the
        # event of its start.
        Fault("kill-in-save:restart=0,rank=0,step=6", ("save",)),
        Fault("hang:restart=1,rank=1,step=6", ("forward",)),
        # The weights are loaded, and the position in the data is not yet.
        Fault(kill(2, "data"), ("data",)),
        # The first update of a process takes the longest. A late timer may strike in the next
        # iteration.
        Fault(
            kill(3, "step", "step=5", f"delay={draw.uniform(0.001, 0.003):.4f}"),
            ("step", "batch", "forward"),
        ),
        Fault(kill(4, "forward", f"step={draw.randint(5, 6)}"), ("forward",)),
        Fault(kill(5, "backward", f"step={draw.randint(9, 11)}"), ("backward",)),
    ]


@pytest.fixture(scope="module", params=[2, pytest.param(6, marks=pytest.mark.wide)])
def faults(request: pytest.FixtureRequest) -> list[Fault]:
    """The first of them: every start of a job takes seconds."""
    return planned_faults(seed=6)[: request.param]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run without faults."""
    job = Job(tmp_path_factory.mktemp("whole"))
    run_undisturbed(job, *FLAGS)
    assert [iteration for iteration, _ in job.losses()] == list(range(1, NUM_ITERS + 1))
    return job


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, faults: list[Fault]) -> Job:
    """The same run, killed or hung again and again, and each time started again by torchrun."""
    job = Job(tmp_path_factory.mktemp("disturbed"))
    specs = [fault.spec for fault in faults]
    flags = [*FLAGS, "--hang-timeout-seconds", str(HANG_TIMEOUT), "--inject", *specs]
    assert run(job, torchrun("--max-restarts", "6"), *flags) == 0, job.log
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


def test_every_fault_is_noticed_and_each_time_the_job_comes_back(disturbed, faults):
    struck = disturbed.events("inject")
    assert [(event["restart"], event["spec"]) for event in struck] == [
        (n, fault.spec) for n, fault in enumerate(faults)
    ]
    starts = disturbed.events("start")
    assert [start["restart"] for start in starts] == list(range(len(faults) + 1))
    noticed = disturbed.events("lost", "hang")
    for fault, event, found in zip(faults, struck, noticed, strict=True):
        assert event["phase"] in fault.phases, fault.spec
        assert found["event"] == ("hang" if fault.is_hang else "lost")
        assert (found["restart"], found["ranks"]) == (event["restart"], [event["rank"]])
        assert fault.is_hang or "was killed or has crashed" in found["cause"]
    *_, end = disturbed.events("exit")
    assert (end["name"], end["code"], end["iteration"], end["restart"]) == (
        "FINISHED",
        0,
        NUM_ITERS,
        len(faults),
    )


def test_a_kill_in_a_save_strikes_in_the_middle_of_it_and_what_was_begun_is_swept(disturbed):
    death = disturbed.events("inject")[0]
    begun, published = (
        [e for e in disturbed.events(kind) if (e["restart"], e["iteration"]) == (0, 6)]
        for kind in ("save_begun", "save_published")
    )
    assert [event["time"] < death["time"] for event in begun] == [True]
    assert published == []
    assert "swept what earlier runs left unfinished" in disturbed.log
    (resume,) = (e for e in disturbed.events("resume") if e["restart"] == 1)
    assert resume["checkpoint"] == str(disturbed.saved / "iter_0000004")


def test_a_rank_that_hangs_is_found_in_time_and_named_with_where_it_hangs(disturbed):
    sleep = disturbed.events("inject")[1]
    (found,) = disturbed.events("hang")
    assert "megatron/training/health/inject.py" in found["cause"]
    assert "hang_for_ever" in found["cause"]
    assert found["time"] - sleep["time"] >= HANG_TIMEOUT
    log = disturbed.log.splitlines()
    (line,) = [line for line in log if found["cause"] in line and "ERROR" in line]
    assert "watchdog" not in line
    exits = [event["name"] for event in disturbed.events("exit") if event["restart"] == 1]
    assert exits == ["HANG"]


def test_every_loss_of_the_disturbed_job_and_its_last_state_are_bit_equal_to_the_whole_runs(
    disturbed, whole
):
    assert len(disturbed.losses()) > NUM_ITERS, "some iterations were made twice"
    assert_goes_the_way_of(disturbed, whole)


def test_the_time_from_a_fault_to_the_next_step_is_that_of_a_start(disturbed):
    found = recoveries(disturbed)
    print(f"\nseconds from a fault to the first step after the restart\n{table(found)}")
    # Where the next start was killed before it came to a step, there is no such time.
    assert [recovery.phase for recovery in found] == [
        event["phase"]
        for event, following in pairwise([*disturbed.events("inject"), None])
        if following is None or following["phase"] != "data"
    ]
    for recovery in found:
        assert min(recovery.seconds) >= 0


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
