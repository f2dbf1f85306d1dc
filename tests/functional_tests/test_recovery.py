"""Jobs that lose a rank, again and again, and come back by themselves: to the bit, and within seconds.

`pytest -s tests/functional_tests/test_recovery.py` prints what each recovery took, part by part.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.functional_tests.recovery_scenes import (
    MODEL,
    OFFLOADED,
    Job,
    recoveries,
    run,
    run_undisturbed,
    table,
    torchrun,
)
from tests.functional_tests.runner import assert_same_tensors, read_checkpoint

NUM_ITERS = 12
FLAGS = [*MODEL, *OFFLOADED, "--train-iters", str(NUM_ITERS), "--save-interval", "2", "--async-save"]


class Kill(NamedTuple):
    """A SIGKILL that is planned."""

    spec: str
    phases: tuple[str, ...]  # one of which the process is in when it dies


def planned_kills(seed: int) -> list[Kill]:
    """Five, one for each start of the job: in which rank, in which iteration and how far into it is drawn."""
    draw = random.Random(seed)

    def spec(restart: int, at: str, step: int | None = None, delay: tuple[float, float] | None = None) -> str:
        when = "" if step is None else f",step={step}"
        late = "" if delay is None else f",delay={draw.uniform(*delay):.4f}"
        return f"kill:restart={restart},rank={draw.randrange(2)},at={at}{when}{late}"

    return [
        Kill(spec(0, "forward", draw.randint(4, 5)), ("forward",)),
        # The save goes on in the background while the next iteration begins.
        Kill(spec(1, "save", 6, (0.002, 0.04)), ("save", "batch", "forward", "backward")),
        # The weights are there, and where the data goes on is about to be found.
        Kill(spec(2, "data"), ("data",)),
        # The first update of a process takes the longest. It goes on from iteration 4, the last that was saved.
        Kill(spec(3, "step", 5, (0.002, 0.02)), ("step",)),
        Kill(spec(4, "backward", draw.randint(9, 11)), ("backward",)),
    ]


KILLS = planned_kills(seed=6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run that nothing happens to."""
    job = Job(tmp_path_factory.mktemp("whole"))
    run_undisturbed(job, *FLAGS)
    assert [iteration for iteration, _ in job.losses()] == list(range(1, NUM_ITERS + 1))
    return job


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same run, killed five times, and started again by torchrun each time."""
    job = Job(tmp_path_factory.mktemp("killed"))
    assert run(job, torchrun("--max-restarts", "6"), *FLAGS, "--inject", *(kill.spec for kill in KILLS)) == 0, job.log
    return job


def assert_goes_the_way_of(job: Job, whole: Job) -> None:
    """Every loss that was ever written is the undisturbed run's, to the bit, and so is the last state."""
    expected = dict(whole.losses())
    losses = job.losses()
    assert {iteration for iteration, _ in losses} == set(expected)
    assert [(iteration, loss) for iteration, loss in losses if loss != expected[iteration]] == []
    assert_same_tensors(read_checkpoint(job.saved), read_checkpoint(whole.saved))


def test_a_rank_is_killed_in_forward_step_save_resume_and_backward_and_each_time_the_job_comes_back(killed):
    deaths = killed.events("inject")
    assert [(death["restart"], death["spec"]) for death in deaths] == [(n, kill.spec) for n, kill in enumerate(KILLS)]
    for death, kill in zip(deaths, KILLS, strict=True):
        assert death["phase"] in kill.phases, kill.spec
    assert [start["restart"] for start in killed.events("start")] == list(range(6))
    *_, end = killed.events("exit")
    assert (end["name"], end["code"], end["iteration"], end["restart"]) == ("FINISHED", 0, NUM_ITERS, 5)


def test_a_kill_in_a_save_strikes_in_the_middle_of_it_and_what_was_begun_is_swept(killed):
    death = killed.events("inject")[1]
    (begun,) = (e for e in killed.events("save_begun") if (e["restart"], e["iteration"]) == (1, 6))
    assert begun["time"] < death["time"]
    published = [e for e in killed.events("save_published") if (e["restart"], e["iteration"]) == (1, 6)]
    assert published == []
    assert "swept what earlier runs left unfinished" in killed.log
    (resume,) = (e for e in killed.events("resume") if e["restart"] == 2)
    assert resume["checkpoint"] == str(killed.saved / "iter_0000004")


def test_every_loss_of_the_killed_job_and_its_last_state_are_bit_equal_to_the_undisturbed_runs(killed, whole):
    assert len(killed.losses()) > NUM_ITERS, "some iterations were made twice"
    assert_goes_the_way_of(killed, whole)


def test_the_time_from_a_death_to_the_next_step_is_that_of_a_start(killed):
    """A killed rank is noticed at once, and its peers do not wait for anything."""
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
