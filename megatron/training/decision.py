"""Decides after each iteration on an evaluation, a save, and the end of the run.

`decide` is a pure function of values that are equal on all ranks, so every rank decides the same
without another collective:

    after an iteration                       evaluates    save
    during the run                           if due       BEGIN if due; SKIP if the previous save
                                                          is in flight and skipping was requested
    the last one, or a reason to stop        no           LAST
    a signal, and too little time to save    no           FINISH

Without `--save`, the last column is NOTHING.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from megatron.training.checkpoint.saver import Frequency
from megatron.training.config import RunConfig
from megatron.training.health.exits import ExitCode
from megatron.training.step import StepInfo
from megatron.training.stop import Stop, Votes

_PREEMPTED = (ExitCode.PREEMPTED, ExitCode.PREEMPTED_UNSAVED)


class Save(Enum):
    """The action on checkpoints after an iteration."""

    NOTHING = auto()
    BEGIN = auto()  # save; in the background with --async-save
    SKIP = auto()  # skip a save that is due, on all ranks
    LAST = auto()  # save the final state and wait for it
    FINISH = auto()  # wait for the save in flight, but start none


class Decision(NamedTuple):
    """The actions after an iteration, in this order; the same on every rank."""

    evaluates: bool
    save: Save
    stop: Stop | None  # the reason to end early; None: the run continues or has finished


def decide(
    config: RunConfig,
    frequency: Frequency,
    step_info: StepInfo,
    *,
    num_samples: int,
    votes: Votes,
    stop: Stop | None,
) -> Decision:
    """Decides on the actions after the last iteration of `step_info`.

    Args:
        num_samples: number of samples in its global batch.
        votes: the votes, summed over all ranks.
        stop: the reason to end the run from `StopConditions.stop`, if any.
    """
    is_end = step_info.iteration == config.training.train_iters
    stop = _with_saves(config, votes, stop)
    if is_end or stop is not None:
        # A run at its last iteration has finished, even with another reason to stop. After a signal
        # there is no time for the final evaluations.
        is_early = stop is not None and (not is_end or stop.code in _PREEMPTED)
        save = Save.LAST if stop is None or stop.saves else Save.FINISH
        return Decision(
            evaluates=False,
            save=save if config.checkpoint.save is not None else Save.NOTHING,
            stop=stop if is_early else None,
        )

    save = Save.NOTHING
    if config.checkpoint.save is not None and frequency.is_due(
        step_info, num_samples, votes.save_late
    ):
        skips = votes.saving > 0 and config.checkpoint.async_save_busy == "skip"
        save = Save.SKIP if skips else Save.BEGIN
    return Decision(is_due(step_info, config.training.eval_interval), save, None)


def is_due(step_info: StepInfo, interval: int | None) -> bool:
    """Whether an iteration is a multiple of the interval. None: no interval."""
    return interval is not None and step_info.iteration % interval == 0


def _with_saves(config: RunConfig, votes: Votes, stop: Stop | None) -> Stop | None:
    """Returns the reason to stop, which depends on `--save` and on failed saves."""
    if stop is not None and stop.code is ExitCode.PREEMPTED and config.checkpoint.save is None:
        return replace(
            stop, code=ExitCode.PREEMPTED_UNSAVED, reason=f"{stop.reason}, and there is no --save"
        )
    # Without time to save, the exit code already reports that the state was not saved.
    is_saved = stop is None or stop.saves
    if votes.save_failed and config.checkpoint.exit_on_save_failure and is_saved:
        return Stop("a checkpoint could not be saved", ExitCode.NOT_SAVED, saves=True)
    return stop
