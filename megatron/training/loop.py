"""The training loop: steps, reports, evaluations, checkpoints, and a clean end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from megatron.core.datasets.sample_dataset import SampleDataset
from megatron.core.datasets.sampler import GlobalBatchSampler, build_data_loader
from megatron.core.device import Device
from megatron.training.checkpointing import Checkpointer, Progress, RunState
from megatron.training.config import RunConfig
from megatron.training.metrics import Metrics
from megatron.training.step import Batch, ForwardStep, NonFiniteLossError, StepResult, evaluate, train_step
from megatron.training.stop import StopConditions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What the loop works with and does not change."""

    config: RunConfig
    device: Device
    mesh: DeviceMesh
    forward_step: ForwardStep
    metrics: Metrics
    stop: StopConditions
    checkpoints: Checkpointer

    @property
    def num_microbatches(self) -> int:
        return self.config.num_microbatches(self.mesh.size())


def microbatches(
    dataset: SampleDataset, surroundings: Surroundings, first_sample: int, num_samples: int
) -> Iterator[Batch]:
    """This rank's microbatches of the global batches that cover samples `first_sample` to `num_samples`, in order."""
    training = surroundings.config.training
    sampler = GlobalBatchSampler(
        num_samples=num_samples,
        consumed_samples=first_sample,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=surroundings.config.global_batch_size,
        data_parallel_rank=surroundings.mesh.get_local_rank(),
        data_parallel_size=surroundings.mesh.size(),
    )
    loader = build_data_loader(
        dataset, sampler, num_workers=surroundings.config.data.num_workers, pin_memory=surroundings.device.pins_batches
    )
    return iter(loader)


def train(
    state: RunState, surroundings: Surroundings, train_data: SampleDataset, valid_data: SampleDataset | None
) -> str | None:
    """Trains until the last iteration or a reason to stop earlier; saves at intervals and at the end.

    Returns:
        Why training stopped before the last iteration, or None if it did not.

    Raises:
        NonFiniteLossError: with `--check-for-nan-in-loss`, on all ranks in the same iteration, before any step.
        CheckpointError: if the last state could not be saved. Failures before that are logged, and training goes on,
            but for `--ckpt-format torch_dcp`, where they end it.
    """
    config, progress = surroundings.config, state.progress
    checkpoint, training = config.checkpoint, config.training
    batches = microbatches(train_data, surroundings, progress.consumed_samples, num_train_samples(config, progress))
    surroundings.checkpoints.check(state)
    surroundings.metrics.resume_clock()
    while progress.iteration < training.train_iters:
        result = _run_iteration(state, surroundings, batches)
        *stop_votes, num_busy, num_failed = result.votes
        reason = surroundings.stop.reason(progress.iteration, stop_votes)
        if num_failed and checkpoint.exit_on_save_failure:
            reason = reason or "a checkpoint could not be saved"
        is_last = reason is not None or progress.iteration == training.train_iters
        if valid_data is not None and _is_due(progress, training.eval_interval) and not is_last:
            report_evaluation(state, surroundings, valid_data, "validation")
        if checkpoint.save is not None and is_last:
            surroundings.checkpoints.save_last(state)
        elif checkpoint.save is not None and _is_due(progress, checkpoint.save_interval):
            surroundings.checkpoints.save(state, num_busy)
        surroundings.metrics.resume_clock()
        if reason is not None and progress.iteration < training.train_iters:
            state.optimizer.synchronize()
            logger.info("exiting at iteration %d of %d: %s", progress.iteration, training.train_iters, reason)
            return reason
    state.optimizer.synchronize()
    logger.info("training ended at iteration %d", progress.iteration)
    return None


def num_train_samples(config: RunConfig, progress: Progress) -> int:
    """Samples that the whole run consumes, from its very first to its last.

    Counted from what has been consumed, not from iterations: a run may be resumed with another global batch size.
    """
    remaining = max(0, config.training.train_iters - progress.iteration)
    return progress.consumed_samples + remaining * config.global_batch_size


def report_evaluation(state: RunState, surroundings: Surroundings, dataset: SampleDataset, split: str) -> float:
    """Evaluates on the first `--eval-iters` global batches of `dataset`, always the same ones, and reports the loss."""
    config = surroundings.config
    num_iters = config.training.eval_iters
    loss = evaluate(
        state.model,
        microbatches(dataset, surroundings, 0, num_iters * config.global_batch_size),
        forward_step=surroundings.forward_step,
        num_microbatches=num_iters * surroundings.num_microbatches,
        device=surroundings.device.torch_device,
        mesh=surroundings.mesh,
    )
    surroundings.metrics.evaluation(split, loss, state.progress.iteration)
    return loss


def _is_due(progress: Progress, interval: int | None) -> bool:
    """Whether something done at this interval is done now; None: it never is."""
    return interval is not None and progress.iteration % interval == 0


def _run_iteration(state: RunState, surroundings: Surroundings, batches: Iterator[Batch]) -> StepResult:
    """One iteration: step, counters, report."""
    config, progress = surroundings.config, state.progress
    learning_rate = state.schedule.apply(state.optimizer.param_groups, progress.iteration)
    result = train_step(
        state.model,
        state.optimizer,
        batches,
        forward_step=surroundings.forward_step,
        num_microbatches=surroundings.num_microbatches,
        device=surroundings.device.torch_device,
        mesh=surroundings.mesh,
        votes=lambda: (*surroundings.stop.votes(), *surroundings.checkpoints.votes()),
    )
    progress.iteration += 1
    progress.consumed_samples += config.global_batch_size
    progress.skipped_iterations += result.is_skipped
    progress.nan_iterations += not math.isfinite(result.loss)
    surroundings.metrics.step(
        result,
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        learning_rate=learning_rate,
        skipped=progress.skipped_iterations,
        nan=progress.nan_iterations,
    )
    if _is_due(progress, config.logging.log_interval):
        timings = state.optimizer.timings()
        if timings is not None:
            surroundings.metrics.timings(timings, progress.iteration)
    if config.training.check_for_nan_in_loss and not math.isfinite(result.loss):
        raise NonFiniteLossError(progress.iteration, result.bad_ranks, result.loss)
    return result
