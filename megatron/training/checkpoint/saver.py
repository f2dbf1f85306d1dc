"""`Saver`: saves a run's own checkpoints, at intervals and at the end.

    with Saver(config, device, num_local_ranks=launch.local_world_size, events=events) as saver:
        ...
        saver.save(engine, info)           # if `Frequency.is_due`
        saver.save_last(engine, info)

The outcome of each save is written to the event log, and affects the ranks' next votes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.store import Store, open_store, published_iterations
from megatron.core.dtypes import DTYPES
from megatron.core.timeline import NO_TIMELINE, AnyTimeline
from megatron.core.trace_file import CHECKPOINT
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_weights import HfExport
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.checkpoint.run_state import checkpoint_path, save_torch_dcp
from megatron.training.config import RunConfig
from megatron.training.engines import ModuleEngine
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.exits import ExitCode, ExitError
from megatron.training.step import StepInfo
from megatron.training.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frequency:
    """The intervals between saves, in steps and in samples; None without an interval.

    `--save-interval-seconds` is not here: clocks differ, so ranks vote on it (`Votes.save_late`).
    """

    steps: int | None = None
    samples: int | None = None

    def is_due(self, step_info: StepInfo, num_samples: int, num_late: float) -> bool:
        """Returns whether a save is due after a step; the same on every rank.

        Args:
            num_samples: the size of the step's global batch.
            num_late: the number of ranks that voted for a save by their clock.
        """
        consumed = step_info.consumed_samples
        return (
            (self.steps is not None and step_info.iteration % self.steps == 0)
            or num_late > 0
            or (
                self.samples is not None
                and consumed // self.samples > (consumed - num_samples) // self.samples
            )
        )


class Saver:
    """Saves a run's checkpoints. A context manager, which all ranks enter together."""

    def __init__(
        self,
        config: RunConfig,
        device: Device,
        *,
        num_local_ranks: int,
        events: EventLog,
        wrap_store: Callable[[Store], Store] = lambda store: store,
        timeline: AnyTimeline = NO_TIMELINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            num_local_ranks: the number of ranks that share this machine's staging memory.
            wrap_store: wraps the store that is written to, for fault injection.
            timeline: records the operations of saves.
            clock: a monotonic clock in seconds.
        """
        self._config = config
        self._device = device
        self._num_local_ranks = num_local_ranks
        self._events = events
        self._wrap_store = wrap_store
        self._timeline = timeline
        self._clock = clock
        self._manager: CheckpointManager | None = None
        self._export: HfExport | None = None
        self._num_begun = 0
        self._has_failed = False
        self._last_save = 0.0  # on the clock; set as the context is entered
        self._save_seconds: list[float] = []

    def __enter__(self) -> Saver:
        """Deletes unfinished checkpoints of earlier runs.

        Raises:
            CheckpointError: on all ranks, if the directory could not be read.
        """
        checkpoint = self._config.checkpoint
        # An evaluation must not delete the drafts of a run that trains in the same directory.
        if checkpoint.save is None or self._config.training.skip_train:
            return self

        store = open_store(checkpoint.save)
        if checkpoint.ckpt_format == FSDP_DTENSOR:
            self._manager = CheckpointManager.start(
                self._wrap_store(store),
                self._device,
                dist.get_rank(),
                dist.get_world_size(),
                retention=Retention(checkpoint.save_keep_last, checkpoint.save_retain_interval),
                timeout_seconds=60.0 * checkpoint.save_timeout_minutes,
                staging_share=checkpoint.save_staging_share if checkpoint.async_save else 0.0,
                num_local_ranks=self._num_local_ranks,
                on_published=self._on_published,
                on_failed=self._on_failed,
                timeline=self._timeline,
            )
        elif swept := on_first_rank(store.sweep, f"sweeping {store.root}"):
            logger.warning(
                "swept what earlier runs left unfinished in %s: %s", store.root, ", ".join(swept)
            )

        self._last_save = self._clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._manager is not None:
            self._manager.close(is_told=error is not None)

    @property
    def is_saving(self) -> bool:
        """Returns whether a save is in flight on this rank."""
        return self._manager is not None and self._manager.is_busy

    @property
    def is_late(self) -> bool:
        """Returns whether --save-interval-seconds have passed on this rank's clock."""
        limit = self._config.checkpoint.save_interval_seconds
        return limit is not None and self._clock() - self._last_save >= limit

    @property
    def save_seconds(self) -> float | None:
        """Returns an estimate of the seconds of a save: the maximum of the last ones, or twice that
        if a save is in flight. None before the first one.
        """
        seconds = max(self._save_seconds[-3:], default=None)
        return 2 * seconds if seconds is not None and self.is_saving else seconds

    def is_published(self, iteration: int) -> bool:
        """Returns whether the iteration has a checkpoint in `--save`. All ranks call it together.

        Raises:
            CheckpointError: on all ranks, if the directory could not be read.
        """
        save = self._config.checkpoint.save
        return save is not None and on_first_rank(
            lambda: iteration in published_iterations(open_store(save)),
            f"looking for checkpoints in {save}",
        )

    def take_failure(self) -> bool:
        """Returns whether a save has failed since the last call."""
        if self._manager is not None:
            self._note(self._manager.failure())
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def prepare(self, engine: ModuleEngine) -> None:
        """Prepares saves. All ranks call it together, before the first step.

        Raises:
            CheckpointError: if the format cannot store the engine's state, or a file of `hf/`
                cannot be written.
            ConfigError: for `hf/` of a GPT that no architecture of the transformers library
                computes.
        """
        checkpoint = self._config.checkpoint
        if self._manager is None:
            return
        engine.state.contents(self._device, with_optim=checkpoint.save_optim)
        if checkpoint.save_hf_weights is not None:
            dtype = DTYPES[checkpoint.save_hf_weights]
            extras = on_all_ranks(lambda: _extras(self._config))
            max_length = self._config.data.seq_length
            self._export = HfExport.of(engine.state.model, dtype, extras, max_length=max_length)

    def save(self, engine: ModuleEngine, info: RecoverInfo) -> None:
        """Saves, in the background with `--async-save`. All ranks call it together.

        A failed write is logged and affects the next votes. A state that the format cannot store is
        an error here.
        """
        self._last_save = self._clock()
        self._num_begun += 1
        has_hf = self._num_begun % self._config.checkpoint.save_hf_interval == 0
        self._note(self._begin(engine, info, self._export if has_hf else None))
        if not self._config.checkpoint.async_save:
            self.wait()

    def skip(self, iteration: int) -> None:
        """Skips a due save, because the previous one is in flight."""
        self._last_save = self._clock()
        reason = "the previous save is still in flight"
        logger.warning("iteration %d is not saved: %s", iteration, reason)
        self._on_rank_0(EventKind.SAVE_SKIPPED, iteration=iteration, reason=reason)

    def save_last(self, engine: ModuleEngine, info: RecoverInfo) -> None:
        """Saves at the end of a run, and waits for it. ExitError (NOT_SAVED) if it failed."""
        self._note(self._begin(engine, info, self._export))

        failure = self.wait()
        if failure is not None:
            raise ExitError(ExitCode.NOT_SAVED, str(failure), is_reported=True) from failure

    def wait(self) -> CheckpointError | None:
        """Waits for the save in flight. A failure is logged and returned."""
        failure = self._finish()
        self._note(failure)
        return failure

    def _begin(
        self, engine: ModuleEngine, info: RecoverInfo, export: HfExport | None
    ) -> CheckpointError | None:
        """Starts a save. Returns the failure of the previous save, if any.

        Raises:
            ExitError: NOT_SAVED, if PyTorch could not write a `torch_dcp` checkpoint.
        """
        checkpoint, iteration = self._config.checkpoint, engine.step_info().iteration
        if checkpoint.save is None:
            raise RuntimeError("Expected --save to be set where a checkpoint is saved, got none.")
        if self._manager is None:
            self._save_torch_dcp(checkpoint.save, engine, info)
            return None

        contents = engine.state.contents(self._device, with_optim=checkpoint.save_optim)
        contents = replace(contents, export=export)
        # `manager.save` would wait for the previous save as well, but raise its failure after this
        # one has started.
        failure = self._finish()
        self._on_rank_0(EventKind.SAVE_BEGUN, iteration=iteration)
        self._manager.save(iteration, contents, info.to_plain())
        return failure

    def _save_torch_dcp(self, root: str, engine: ModuleEngine, info: RecoverInfo) -> None:
        iteration, with_optim = engine.step_info().iteration, self._config.checkpoint.save_optim
        self._on_rank_0(EventKind.SAVE_BEGUN, iteration=iteration)
        try:
            seconds = save_torch_dcp(root, engine.state, self._device, info, with_optim=with_optim)
        except CheckpointError as error:
            self._note(error)
            self._on_failed(iteration, str(error))
            raise ExitError(ExitCode.NOT_SAVED, str(error), is_reported=True) from error
        self._on_published(iteration, seconds)

    def _finish(self) -> CheckpointError | None:
        try:
            if self._manager is not None:
                with self._timeline.waiting(CHECKPOINT):
                    self._manager.finish()
        except CheckpointError as failure:
            return failure
        return None

    def _on_published(self, iteration: int, seconds: float) -> None:
        self._save_seconds.append(seconds)
        path = checkpoint_path(str(self._config.checkpoint.save), iteration)
        self._on_rank_0(
            EventKind.SAVE_PUBLISHED, iteration=iteration, checkpoint=path, seconds=seconds
        )

    def _on_failed(self, iteration: int, reason: str) -> None:
        self._on_rank_0(EventKind.SAVE_FAILED, iteration=iteration, reason=reason)

    def _note(self, failure: CheckpointError | None) -> None:
        if failure is not None:
            logger.error("%s", failure)
            self._has_failed = True

    def _on_rank_0(self, kind: EventKind, **fields: Any) -> None:
        if dist.get_rank() == 0:
            self._events.write(kind, **fields)


def _extras(config: RunConfig) -> FolderExtras:
    """Returns the contents of `hf/` besides the weights and their config."""
    tokenizer, base_model = build_tokenizer(config.tokenizer), config.checkpoint.hf_model
    return FolderExtras.of_model(tokenizer, config.tokenizer.tokenizer_model, base_model)
