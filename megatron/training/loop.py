"""The training loop: steps, reports, evaluations, checkpoints, and a clean end. What trains is an
engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron.core.datasets.sample_dataset import SampleDataset
from megatron.core.datasets.sampler import GlobalBatchSampler, build_data_loader
from megatron.training.checkpoint.resume import Frequency, RecoverHandler, Votes
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.config import RunConfig
from megatron.training.engine import StepInfo
from megatron.training.engines import ModuleEngine
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.exits import ExitCode
from megatron.training.health.inject import Injections
from megatron.training.health.phases import Phase
from megatron.training.metrics import Metrics
from megatron.training.step import Batch, ForwardStep, NonFiniteLossError, StepResult
from megatron.training.stop import Stop, StopConditions

logger = logging.getLogger(__name__)

_PREEMPTED = (ExitCode.PREEMPTED, ExitCode.PREEMPTED_UNSAVED)


class Watch(Protocol):
    """Who is told of the run's progress: the watchdog."""

    def mark(self, phase: Phase, iteration: int) -> None:
        """A phase of an iteration begins."""

    def status(self, **fields: object) -> None:
        """What the heartbeat says besides."""

    def takes_long_while(self, condition: Callable[[], bool]) -> None:
        """A step may take as long as a save while this is so."""


class NoWatch:
    """Nobody watches: a program that embeds this one minds its own processes."""

    def mark(self, phase: Phase, iteration: int) -> None:
        pass

    def status(self, **fields: object) -> None:
        pass

    def takes_long_while(self, condition: Callable[[], bool]) -> None:
        pass


@dataclass(frozen=True)
class Surroundings:
    """What the loop works with."""

    config: RunConfig
    forward_step: ForwardStep
    metrics: Metrics
    stop: StopConditions
    recover: RecoverHandler
    frequency: Frequency
    events: EventLog
    watch: Watch
    injections: Injections
    # Told of each phase as it begins: the watchdog hears of it, and a fault that is to be injected
    # there strikes.
    mark: Callable[[Phase, int], None]
    data: dict[str, Any]  # what tells the training data from others
    evaluated: dict[str, Any]  # the last evaluation: iteration, and loss by split

    def info(self, engine: ModuleEngine) -> RecoverInfo:
        """What a checkpoint of the present moment says besides tensors."""
        return engine.state.info(
            data=self.data,
            logger=self.metrics.state(),
            evaluator=self.evaluated,
            config=self.config.values(),
        )


def microbatches(
    dataset: SampleDataset,
    engine: ModuleEngine,
    config: RunConfig,
    first_sample: int,
    num_samples: int,
) -> Iterator[Batch]:
    """This rank's microbatches of the global batches that cover samples `first_sample` to
    `num_samples`, in order.
    """
    sampler = GlobalBatchSampler(
        num_samples=num_samples,
        consumed_samples=first_sample,
        micro_batch_size=config.training.micro_batch_size,
        global_batch_size=config.global_batch_size,
        data_parallel_rank=engine.mesh.get_local_rank(),
        data_parallel_size=engine.mesh.size(),
    )
    loader = build_data_loader(
        dataset, sampler, num_workers=config.data.num_workers, pin_memory=engine.device.pins_batches
    )
    return iter(loader)


def train(
    engine: ModuleEngine,
    surroundings: Surroundings,
    train_data: SampleDataset,
    valid_data: SampleDataset | None,
) -> Stop | None:
    """Trains until the last iteration or a reason to stop earlier; saves at intervals and at the
    end.

    Returns:
        Why training stopped before the last iteration, or None if it did not.

    Raises:
        NonFiniteLossError: with `--check-for-nan-in-loss`, on all ranks in the same iteration,
            before any step.
        ExitError: if the last state could not be saved. Failures before that are logged, and
            training goes on, but for `--ckpt-format torch_dcp`, where they end it.
    """
    config, step_info = surroundings.config, engine.state.step_info
    train_iters, saves = config.training.train_iters, config.checkpoint.save is not None
    num_samples = num_train_samples(config, step_info)
    batches = microbatches(train_data, engine, config, step_info.consumed_samples, num_samples)
    surroundings.recover.check(engine)
    surroundings.watch.takes_long_while(lambda: surroundings.recover.is_saving)
    if valid_data is not None and _is_evaluation_missing(engine, surroundings):
        report_evaluation(engine, surroundings, valid_data, "validation")
    surroundings.metrics.resume_clock()
    first, start = step_info.iteration + 1, time.perf_counter()
    while step_info.iteration < train_iters:
        result = _run_iteration(engine, surroundings, batches)
        if step_info.iteration == first:
            _write(engine, surroundings, EventKind.STEP, seconds=time.perf_counter() - start)
        *stop_votes, busy, failed, late = result.votes
        stop = surroundings.stop.stop(step_info.iteration, stop_votes)
        if stop is not None and stop.code is ExitCode.PREEMPTED and not saves:
            stop = replace(
                stop,
                code=ExitCode.PREEMPTED_UNSAVED,
                reason=f"{stop.reason}, and there is no --save",
            )
        if failed and config.checkpoint.exit_on_save_failure and (stop is None or stop.saves):
            stop = Stop("a checkpoint could not be saved", ExitCode.NOT_SAVED, saves=True)
        is_last = stop is not None or step_info.iteration == train_iters
        if (
            valid_data is not None
            and _is_due(step_info, config.training.eval_interval)
            and not is_last
        ):
            report_evaluation(engine, surroundings, valid_data, "validation")
        if saves and is_last and (stop is None or stop.saves):
            surroundings.mark(Phase.SAVE, step_info.iteration)
            surroundings.recover.dump_last(engine, surroundings.info(engine))
            surroundings.watch.status(saved_iteration=step_info.iteration)
        elif saves and is_last:
            surroundings.mark(Phase.SAVE, step_info.iteration)
            # what is under way may still fit, and is better than nothing
            surroundings.recover.wait()
        elif saves and surroundings.frequency.is_due(step_info, result.num_samples, late):
            surroundings.mark(Phase.SAVE, step_info.iteration)
            surroundings.recover.dump(engine, surroundings.info(engine), busy)
        surroundings.metrics.resume_clock()
        # What was planned is done with the last iteration, but a signal means now.
        if stop is not None and (stop.code in _PREEMPTED or step_info.iteration < train_iters):
            engine.state.optimizer.synchronize()
            logger.info(
                "exiting at iteration %d of %d: %s", step_info.iteration, train_iters, stop.reason
            )
            return stop
    engine.state.optimizer.synchronize()
    logger.info("training ended at iteration %d", step_info.iteration)
    return None


def num_train_samples(config: RunConfig, step_info: StepInfo) -> int:
    """Samples that the whole run consumes, from its very first to its last.

    Counted from what has been consumed, not from iterations: a run may be resumed with another
    global batch size.
    """
    remaining = max(0, config.training.train_iters - step_info.iteration)
    return step_info.consumed_samples + remaining * config.global_batch_size


def report_evaluation(
    engine: ModuleEngine, surroundings: Surroundings, dataset: SampleDataset, split: str
) -> float:
    """Evaluates on the first `--eval-iters` global batches of `dataset`, always the same ones, and
    reports the loss.
    """
    config, iteration = surroundings.config, engine.state.step_info.iteration
    num_iters = config.training.eval_iters
    surroundings.mark(Phase.EVALUATE, iteration)

    def batches() -> Iterator[Batch]:
        for batch in microbatches(dataset, engine, config, 0, num_iters * config.global_batch_size):
            surroundings.watch.mark(Phase.EVALUATE, iteration)
            yield batch

    loss = engine.eval_batch(
        batches(),
        surroundings.forward_step,
        num_microbatches=num_iters * config.num_microbatches(engine.mesh.size()),
    )
    surroundings.metrics.evaluation(split, loss, iteration)
    surroundings.evaluated.update({"iteration": iteration, split: loss})
    _write(engine, surroundings, EventKind.EVALUATION, split=split, loss=loss)
    return loss


def _is_due(step_info: StepInfo, interval: int | None) -> bool:
    """Whether something done at this interval is done now; None: it never is."""
    return interval is not None and step_info.iteration % interval == 0


def _is_evaluation_missing(engine: ModuleEngine, surroundings: Surroundings) -> bool:
    """Whether the run was stopped at an iteration whose evaluation it then left out."""
    step_info, training = engine.state.step_info, surroundings.config.training
    return (
        0 < step_info.iteration < training.train_iters
        and _is_due(step_info, training.eval_interval)
        and surroundings.evaluated["iteration"] != step_info.iteration
    )


def _run_iteration(
    engine: ModuleEngine, surroundings: Surroundings, batches: Iterator[Batch]
) -> StepResult:
    """One iteration: step, report."""
    config, step_info, watch = surroundings.config, engine.state.step_info, surroundings.watch
    number = step_info.iteration + 1

    def votes() -> tuple[float, ...]:
        saving: Votes = surroundings.recover.votes()
        return (*surroundings.stop.votes(surroundings.recover.save_seconds), *saving)

    result = engine.train_batch(
        batches,
        surroundings.injections.forward_step(surroundings.forward_step, number),
        num_microbatches=config.num_microbatches(engine.mesh.size()),
        votes=votes,
        mark=lambda phase: surroundings.mark(phase, number),
    )
    surroundings.metrics.step(
        result,
        iteration=step_info.iteration,
        consumed_samples=step_info.consumed_samples,
        learning_rate=result.learning_rate,
        skipped=step_info.skipped_iterations,
        nan=step_info.nan_iterations,
    )
    watch.status(
        iteration=step_info.iteration,
        train_iters=config.training.train_iters,
        loss=result.loss,
        ms_per_iteration=surroundings.metrics.ms_per_iteration,
    )
    if not result.is_finite:
        _write(engine, surroundings, EventKind.NAN, ranks=list(result.bad_ranks))
    if result.is_skipped:
        _write(engine, surroundings, EventKind.SKIP, grad_norm=result.grad_norm)
    if _is_due(step_info, config.logging.log_interval):
        timings = engine.state.optimizer.timings()
        if timings is not None:
            surroundings.metrics.timings(timings, step_info.iteration)
    if config.training.check_for_nan_in_loss and not result.is_finite:
        raise NonFiniteLossError(step_info.iteration, result.bad_ranks, result.loss)
    return result


def _write(
    engine: ModuleEngine, surroundings: Surroundings, kind: EventKind, **fields: object
) -> None:
    """An event of the present iteration, from rank 0."""
    if engine.mesh.get_rank() == 0:
        surroundings.events.write(kind, iteration=engine.state.step_info.iteration, **fields)
