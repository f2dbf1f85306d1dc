from __future__ import annotations

from typing import Any

import pytest

from megatron.training.checkpoint.saver import Frequency
from megatron.training.decision import Decision, Save, decide
from megatron.training.health.exits import ExitCode
from megatron.training.step import StepInfo
from megatron.training.stop import Stop, Votes
from tests.unit_tests.training.helpers.fake_runs import config_of

GRACE_OVER = Stop("SIGTERM was received", ExitCode.PREEMPTED_UNSAVED, saves=False)
SIGNALLED = Stop("SIGTERM was received", ExitCode.PREEMPTED, saves=True)
OUT_OF_TIME = Stop("the time is over", ExitCode.FINISHED, saves=True)
NOT_SAVED = Stop("a checkpoint could not be saved", ExitCode.NOT_SAVED, saves=True)
NO_FOLDER = Stop(
    "SIGTERM was received, and there is no --save", ExitCode.PREEMPTED_UNSAVED, saves=True
)
GOES_ON = Decision(evaluates=False, save=Save.NOTHING, stop=None)

SAVES = ("--save", "checkpoints")
ASYNC = (*SAVES, "--async-save")
SKIP = (*ASYNC, "--async-save-busy", "skip")
STRICT = (*SAVES, "--exit-on-save-failure")


def decided(
    iteration: int,
    flags: tuple[str, ...] = (),
    *,
    every: int | None = 2,
    stop: Stop | None = None,
    **votes: float,
) -> Decision:
    """The decision after an iteration of ten, each of 4 samples; evaluations are due every 4."""
    return decide(
        config_of(*flags),
        Frequency(every),
        StepInfo(iteration, 4 * iteration),
        num_samples=4,
        votes=Votes(**votes),
        stop=stop,
    )


@pytest.mark.parametrize(
    ("iteration", "flags", "votes", "expected"),
    [
        (3, SAVES, {}, GOES_ON),
        (2, SAVES, {}, Decision(False, Save.BEGIN, None)),
        (4, SAVES, {}, Decision(True, Save.BEGIN, None)),
        (4, (), {}, Decision(True, Save.NOTHING, None)),
        (3, SAVES, {"save_late": 1.0}, Decision(False, Save.BEGIN, None)),
        (3, (), {"save_late": 1.0}, GOES_ON),
        # A save under way delays the next one, unless that is to be skipped.
        (2, ASYNC, {"saving": 1.0}, Decision(False, Save.BEGIN, None)),
        (2, SKIP, {"saving": 1.0}, Decision(False, Save.SKIP, None)),
        (2, SKIP, {}, Decision(False, Save.BEGIN, None)),
        (3, SKIP, {"saving": 1.0}, GOES_ON),
        # A failed save ends the run only if that was asked for.
        (3, SAVES, {"save_failed": 1.0}, GOES_ON),
        (4, STRICT, {"save_failed": 2.0}, Decision(False, Save.LAST, NOT_SAVED)),
    ],
)  # fmt: skip
def test_due_actions_are_taken_in_the_middle_of_a_run(iteration, flags, votes, expected):
    assert decided(iteration, flags, **votes) == expected


@pytest.mark.parametrize(
    ("flags", "votes", "stop", "expected"),
    [
        (SAVES, {}, SIGNALLED, Decision(False, Save.LAST, SIGNALLED)),
        (SAVES, {}, OUT_OF_TIME, Decision(False, Save.LAST, OUT_OF_TIME)),
        (SAVES, {}, GRACE_OVER, Decision(False, Save.FINISH, GRACE_OVER)),
        ((), {}, SIGNALLED, Decision(False, Save.NOTHING, NO_FOLDER)),
        ((), {}, OUT_OF_TIME, Decision(False, Save.NOTHING, OUT_OF_TIME)),
        ((), {}, GRACE_OVER, Decision(False, Save.NOTHING, GRACE_OVER)),
        # A failed save outranks other reasons, but for one that leaves no time to save again.
        (STRICT, {"save_failed": 1.0}, SIGNALLED, Decision(False, Save.LAST, NOT_SAVED)),
        (STRICT, {"save_failed": 1.0}, GRACE_OVER, Decision(False, Save.FINISH, GRACE_OVER)),
        # The last save is never skipped.
        (SKIP, {"saving": 1.0}, OUT_OF_TIME, Decision(False, Save.LAST, OUT_OF_TIME)),
    ],
)  # fmt: skip
def test_a_reason_to_stop_saves_the_state_without_an_evaluation(flags, votes, stop, expected):
    assert decided(4, flags, stop=stop, **votes) == expected


@pytest.mark.parametrize(
    ("flags", "votes", "stop", "expected"),
    [
        (SAVES, {}, None, Decision(False, Save.LAST, None)),
        ((), {}, None, GOES_ON),
        # The run has done what was planned, so it ended by itself.
        (SAVES, {}, OUT_OF_TIME, Decision(False, Save.LAST, None)),
        (STRICT, {"save_failed": 1.0}, None, Decision(False, Save.LAST, None)),
        # But a signal leaves no time for the final evaluations.
        (SAVES, {}, SIGNALLED, Decision(False, Save.LAST, SIGNALLED)),
        (SAVES, {}, GRACE_OVER, Decision(False, Save.FINISH, GRACE_OVER)),
        ((), {}, SIGNALLED, Decision(False, Save.NOTHING, NO_FOLDER)),
    ],
)
def test_the_last_iteration_saves_and_is_no_early_stop_unless_signalled(
    flags, votes, stop, expected
):
    assert decided(10, flags, stop=stop, **votes) == expected


def test_without_an_interval_only_the_end_saves():
    found = {iteration: decided(iteration, SAVES, every=None).save for iteration in range(1, 11)}
    assert [iteration for iteration, save in found.items() if save is not Save.NOTHING] == [10]


def test_a_decision_does_not_depend_on_which_rank_it_is_made():
    """The reason may name another signal on each rank; everything else is the same."""
    other: dict[str, Any] = vars(SIGNALLED) | {"reason": "another rank was signalled"}
    here, there = (decided(4, SAVES, stop=stop) for stop in (SIGNALLED, Stop(**other)))
    assert here[:2] == there[:2]
    assert (here.stop.code, here.stop.saves) == (there.stop.code, there.stop.saves)
