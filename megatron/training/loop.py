"""The training loop: steps, reports, evaluations, checkpoints, and a clean end.

After each step the ranks hold the same result, and `Loop.decide` derives the same actions from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.datasets.sample_dataset import SampleDataset
from megatron.core.datasets.sampler import GlobalBatchSampler, build_data_loader
from megatron.training.checkpoint.kept_state import KeptState
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.checkpoint.saver import Frequency, Saver
from megatron.training.config import RunConfig
from megatron.training.decision import Decision, Save, decide, is_due
from megatron.training.engines import ModuleEngine
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.inject import Injections
from megatron.training.health.progress import Phase
from megatron.training.lane_profile import NO_LANE_PROFILE, REPORT, AnyLaneProfile
from megatron.training.metrics import Metrics
from megatron.training.step import (
    AllMaskedError,
    Batch,
    ForwardStep,
    NonFiniteLossError,
    StepInfo,
    StepResult,
)
from megatron.training.stop import Stop, StopConditions, Votes

logger = logging.getLogger(__name__)


class Watch(Protocol):
    """Monitors the run's progress, as the watchdog does."""

    def mark(self, phase: Phase, iteration: int) -> None:
        """Marks the start of a phase of an iteration."""

    def status(self, **fields: object) -> None:
        """Adds fields to the heartbeat."""

    def takes_long_while(self, condition: Callable[[], bool]) -> None:
        """While the condition holds, a step may take as long as a save."""


class NoWatch:
    """No monitoring, for programs that embed this one and supervise their processes."""

    def mark(self, phase: Phase, iteration: int) -> None:
        pass

    def status(self, **fields: object) -> None:
        pass

    def takes_long_while(self, condition: Callable[[], bool]) -> None:
        pass


@dataclass(frozen=True)
class Loop:
    """Trains an engine to the last iteration, or until there is a reason to stop earlier.

    Attributes:
        mark: called at the start of each phase: notifies the watchdog and injects faults that are
            due.
        data: identifies the training data in checkpoints.
        evaluated: the last evaluation: its iteration, and the loss by split.
        profile: records a timeline of some iterations.
        kept: records steps in memory that survives this process.
        unreported: the result of the last iteration, if it is to be reported before the next one.
    """

    engine: ModuleEngine
    config: RunConfig
    forward_step: ForwardStep
    metrics: Metrics
    stop: StopConditions
    saver: Saver
    frequency: Frequency
    events: EventLog
    watch: Watch
    injections: Injections
    mark: Callable[[Phase, int], None]
    data: dict[str, Any]
    evaluated: dict[str, Any]
    profile: AnyLaneProfile = NO_LANE_PROFILE
    kept: KeptState | None = None
    unreported: StepResult | None = None

    def train(self, train_data: SampleDataset, valid_data: SampleDataset | None) -> Stop | None:
        """Trains; saves at intervals and at the end.

        Returns:
            Why training stopped before the last iteration, or None if it did not.

        Raises:
            NonFiniteLossError: with `--check-for-nan-in-loss`, on all ranks in the same iteration,
                before any step.
            ExitError: if the last state could not be saved. Earlier failures are logged, and
                training continues, except with `--ckpt-format torch_dcp`, where they end it.
        """
        step_info, train_iters = self.engine.state.step_info, self.config.training.train_iters
        num_samples = num_train_samples(self.config, step_info)
        batches = self._microbatches(train_data, step_info.consumed_samples, num_samples)
        self.saver.prepare(self.engine)
        self.watch.takes_long_while(lambda: self.saver.is_saving)
        self.profile.prepare(step_info.iteration, train_iters)
        stop: Stop | None = None
        if self.unreported is not None:
            self._report(self.unreported)
            stop = self._follow(self.unreported, valid_data, is_repeated=True)
        if valid_data is not None and stop is None and self._is_evaluation_missing():
            self.evaluate(valid_data, "validation")

        if self.kept is not None:
            self.kept.ended(self._info())
        first, start = step_info.iteration + 1, time.perf_counter()
        while step_info.iteration < train_iters and stop is None:
            self.profile.begin(step_info.iteration + 1)
            self.metrics.resume_clock()
            result = self._step(batches)
            if step_info.iteration == first:
                self._write(EventKind.STEP, seconds=time.perf_counter() - start)

            stop = self._follow(result, valid_data)
            if self.kept is not None:
                self.kept.ended(self._info())

        # With --overlap-optimizer-with-forward the last step may still be running on the host.
        self.engine.state.optimizer.synchronize()
        iteration = step_info.iteration
        self.profile.finish(iteration)
        if stop is None:
            logger.info("training ended at iteration %d", iteration)
        else:
            logger.info("exiting at iteration %d of %d: %s", iteration, train_iters, stop.reason)
        return stop

    def _follow(
        self, result: StepResult, valid_data: SampleDataset | None, *, is_repeated: bool = False
    ) -> Stop | None:
        """What follows an iteration: an evaluation, a save, or the end.

        Args:
            is_repeated: whether earlier processes may have done some of it.
        """
        evaluates, save, stop = self.decide(result)
        if evaluates and valid_data is not None:
            self.evaluate(valid_data, "validation")
        if not (is_repeated and self.saver.is_published(self._iteration)):
            self._save(save)
        return stop

    def decide(self, result: StepResult) -> Decision:
        """What follows an iteration with this result; the same on every rank."""
        step_info, votes = self.engine.state.step_info, Votes(*result.votes)
        return decide(
            self.config,
            self.frequency,
            step_info,
            num_samples=result.num_samples,
            votes=votes,
            stop=self.stop.stop(step_info.iteration, votes),
        )

    def evaluate(self, dataset: SampleDataset, split: str) -> float | None:
        """Evaluates on the first `--eval-iters` global batches of `dataset`, always the same ones,
        and reports the loss. If all of their tokens are masked, warns and returns None, or raises
        AllMaskedError if the run only evaluates.
        """
        iteration, num_iters = self._iteration, self.config.training.eval_iters
        num_microbatches = num_iters * self._num_microbatches
        self.mark(Phase.EVALUATE, iteration)

        def batches() -> Iterator[Batch]:
            num_samples = num_iters * self.config.global_batch_size
            for number, batch in enumerate(self._microbatches(dataset, 0, num_samples)):
                self.watch.mark(Phase.EVALUATE, iteration)
                self.metrics.shows(f"{split} {100 * number // num_microbatches}%")
                yield batch

        try:
            loss = self.engine.eval_batch(
                batches(), self.forward_step, num_microbatches=num_microbatches
            )
        except AllMaskedError as error:
            if self.config.training.skip_train:
                raise
            # Training continues, and its weights are saved.
            if self.engine.mesh.get_rank() == 0:
                logger.warning(
                    "the %s loss at iteration %d is undefined. %s", split, iteration, error
                )
            self.evaluated["iteration"] = iteration
            self.evaluated.pop(split, None)
            return None
        self.metrics.evaluation(split, loss, iteration)
        self.evaluated.update({"iteration": iteration, split: loss})
        self._write(EventKind.EVALUATION, split=split, loss=loss)
        return loss

    @property
    def _iteration(self) -> int:
        return self.engine.state.step_info.iteration

    @property
    def _num_microbatches(self) -> int:
        size = self.config.parallel.data_parallel_size(self.engine.mesh.size())
        return self.config.num_microbatches(size)

    def _step(self, batches: Iterator[Batch]) -> StepResult:
        """One iteration's step, and its report."""
        config, number = self.config, self._iteration + 1
        result = self.engine.train_batch(
            batches,
            self.injections.forward_step(self.forward_step, number),
            num_microbatches=self._num_microbatches,
            votes=self._votes,
            mark=lambda phase: self.mark(phase, number),
            journal=self.kept,
        )

        self.profile.phase(REPORT)
        self._report(result)
        if config.training.check_for_nan_in_loss and not result.is_finite:
            if self.kept is not None:
                self.kept.forget()  # it would end the next start as well
            raise NonFiniteLossError(number, result.bad_ranks, result.total_loss)
        return result

    def _votes(self) -> Votes:
        """This rank's votes on stopping and saving."""
        saver = self.saver
        return self.stop.votes(saver.save_seconds)._replace(
            save_failed=float(saver.take_failure()),
            saving=float(saver.is_saving),
            save_late=float(saver.is_late),
        )

    def _report(self, result: StepResult) -> None:
        step_info = self.engine.state.step_info
        self.metrics.step(
            result,
            iteration=step_info.iteration,
            consumed_samples=step_info.consumed_samples,
            learning_rate=result.learning_rate,
            skipped=step_info.skipped_iterations,
            nan=step_info.nan_iterations,
        )
        self.watch.status(
            iteration=step_info.iteration,
            train_iters=self.config.training.train_iters,
            loss=result.loss,
            ms_per_iteration=self.metrics.ms_per_iteration,
        )

        if not result.is_finite:
            self._write(EventKind.NAN, ranks=list(result.bad_ranks))
        if result.is_skipped:
            self._write(EventKind.SKIP, grad_norm=result.grad_norm)
        if is_due(step_info, self.config.logging.log_interval):
            self._report_timings(step_info.iteration)

    def _report_timings(self, iteration: int) -> None:
        # A timeline needs the same spans, but no log lines.
        if not self.config.logging.timing_log_level:
            return
        timings = self.engine.state.optimizer.timings()
        if timings is not None:
            self.metrics.timings(timings, iteration)
        activations = self.engine.activations
        timings = None if activations is None else activations.timings()
        if timings is not None:
            self.metrics.activation_timings(timings, iteration)

    def _save(self, save: Save) -> None:
        if save is Save.NOTHING:
            return
        self.mark(Phase.SAVE, self._iteration)
        self.metrics.shows("saving")
        match save:
            case Save.BEGIN:
                self.saver.save(self.engine, self._info())
            case Save.SKIP:
                self.saver.skip(self._iteration)
            case Save.FINISH:
                self.saver.wait()
            case Save.LAST:
                self.saver.save_last(self.engine, self._info())
                self.watch.status(saved_iteration=self._iteration)

    def _info(self) -> RecoverInfo:
        """The part of a checkpoint other than tensors, as of now."""
        return self.engine.state.info(
            data=self.data,
            logger=self.metrics.state(),
            evaluator=self.evaluated,
            config=self.config.values(),
        )

    def _is_evaluation_missing(self) -> bool:
        """Whether the run was stopped at an iteration whose evaluation it then left out."""
        step_info, training = self.engine.state.step_info, self.config.training
        return (
            0 < step_info.iteration < training.train_iters
            and is_due(step_info, training.eval_interval)
            and self.evaluated["iteration"] != step_info.iteration
        )

    def _microbatches(
        self, dataset: SampleDataset, first_sample: int, num_samples: int
    ) -> Iterator[Batch]:
        """This rank's microbatches of the global batches that cover samples `first_sample` to
        `num_samples`, in order.
        """
        config, mesh, parallel = self.config, self.engine.mesh, self.config.parallel
        sampler = GlobalBatchSampler(
            num_samples=num_samples,
            consumed_samples=first_sample,
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=config.global_batch_size,
            data_parallel_rank=parallel.data_parallel_rank(mesh.get_local_rank()),
            data_parallel_size=parallel.data_parallel_size(mesh.size()),
        )
        pin_memory = self.engine.device.pins_batches
        loader = build_data_loader(
            dataset, sampler, num_workers=config.data.num_workers, pin_memory=pin_memory
        )
        return iter(loader)

    def _write(self, kind: EventKind, **fields: object) -> None:
        """An event of the present iteration, from rank 0."""
        if self.engine.mesh.get_rank() == 0:
            self.events.write(kind, iteration=self._iteration, **fields)


def num_train_samples(config: RunConfig, step_info: StepInfo) -> int:
    """Samples that the whole run consumes, from its very first to its last.

    Counted from consumed samples, not from iterations: a run may be resumed with another
    global batch size.
    """
    remaining = max(0, config.training.train_iters - step_info.iteration)
    return step_info.consumed_samples + remaining * config.global_batch_size
