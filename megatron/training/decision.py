"""What follows an iteration: an evaluation, a save, the end of the run.

`decide` is a pure function of values that are equal on all ranks, so every rank decides the same
without another collective:

    after an iteration                       evaluates    save
    in the middle of the run                 if due       BEGIN if due, SKIP if the previous save
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
    SKIP = auto()  # leave out a save that is due, on all ranks
    LAST = auto()  # save the final state and wait for it
    FINISH = auto()  # wait for the pending save, which may still fit, but start none


class Decision(NamedTuple):
    """What follows an iteration, in this order; the same on every rank."""

    evaluates: bool
    save: Save
    stop: Stop | None  # ends the run early; None: it continues, or has finished


def decide(
    config: RunConfig,
    frequency: Frequency,
    step_info: StepInfo,
    *,
    num_samples: int,
    votes: Votes,
    stop: Stop | None,
) -> Decision:
    """Decides what follows the iteration that `step_info` counts last.

    Args:
        num_samples: in its global batch.
        votes: summed over all ranks.
        stop: why the run is to end, if it is, by `StopConditions.stop`.
    """
    is_end = step_info.iteration == config.training.train_iters
    stop = _with_saves(config, votes, stop)
    if is_end or stop is not None:
        # A run at its last iteration has finished, even if another reason to stop applies. A signal
        # leaves no time for the final evaluations.
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
    """The reason to stop, in view of whether checkpoints are saved, and whether that failed."""
    if stop is not None and stop.code is ExitCode.PREEMPTED and config.checkpoint.save is None:
        return replace(
            stop, code=ExitCode.PREEMPTED_UNSAVED, reason=f"{stop.reason}, and there is no --save"
        )
    # Without time to save, the exit code already reports that the state was not saved.
    is_saved = stop is None or stop.saves
    if votes.save_failed and config.checkpoint.exit_on_save_failure and is_saved:
        return Stop("a checkpoint could not be saved", ExitCode.NOT_SAVED, saves=True)
    return stop
