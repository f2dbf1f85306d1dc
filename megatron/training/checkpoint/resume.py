"""`RecoverHandler`: a run that dies goes on where its newest intact checkpoint is, and says so.

    handler = RecoverHandler(config, device, num_local_ranks=launch.local_world_size, events=events)
    loaded = handler.load(engine)          # None: there is none, and training begins
    with handler:
        ...
        handler.dump(engine, info)         # at the set frequency
    handler.dump_last(engine, info)

"There is none" and "there is one that cannot be read" are never taken for each other: the one
begins a run, the other ends it, unless an older checkpoint is intact.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, CheckpointConfig
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import latest_iteration
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.store import Store, open_store
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError, options_of
from megatron.training.checkpoint.loading import Loaded, load_run
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.checkpoint.run_state import (
    check_save_folder,
    checkpoint_path,
    make_save_folder,
    named_checkpoint,
    place_of,
    save_torch_dcp,
)
from megatron.training.config import RunConfig
from megatron.training.engine import StepInfo
from megatron.training.engines import ModuleEngine
from megatron.training.health.earlier_starts import Memory
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.exits import ExitCode, ExitError

logger = logging.getLogger(__name__)


# Settings that may differ between a checkpoint and the run that loads it without a word.
_UNREMARKABLE = {
    "save",
    "load",
    "ckpt_format",
    "async_save",
    "metrics_jsonl",
    "events_dir",
    "tensorboard_dir",
    "progress_bar",
    "log_interval",
    "save_interval",
    "save_interval_seconds",
    "save_interval_epochs",
    "global_batch_size",  # has a line of its own
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_handler",
    "exit_signal_grace_seconds",
    "recover_mode",
    "recover_retries",
    "hang_timeout_seconds",
    "inject",
}

# Settings that --use-checkpoint-opt-param-scheduler takes from the checkpoint. The load logs them.
_OF_SCHEDULE_AND_OPTIONS = {
    *(field.name for field in options_of(LRScheduleConfig)),
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
}


@dataclass(frozen=True)
class Frequency:
    """When the state is saved: every so many steps or samples; None: not by that.

    Seconds (`--save-interval-seconds`) are not here: clocks differ, so ranks vote; see
    `Votes.late`.
    """

    steps: int | None = None
    samples: int | None = None

    def is_due(self, step_info: StepInfo, num_samples: int, num_late: float) -> bool:
        """Whether it is, after a step; the same on every rank.

        Args:
            num_samples: of that step's global batch.
            num_late: ranks for which the seconds are over, as they have voted in that step.
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


class Votes(NamedTuple):
    """What a rank has to say about saving, or what all have said, summed. 0 or 1 from each."""

    busy: float  # a save is under way
    failed: float  # one has failed since this was last asked
    late: float  # the seconds between saves are over


class RecoverHandler:
    """See the module's docstring. A context manager while there is something to save; all ranks
    enter it together.
    """

    def __init__(
        self,
        config: RunConfig,
        device: Device,
        *,
        num_local_ranks: int,
        events: EventLog | None = None,
        restart_count: int = 0,
        wrap_store: Callable[[Store], Store] = lambda store: store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            num_local_ranks: ranks on this machine, which divide the memory that saves may stage in.
            events: where it is written down what becomes of saves and loads.
            restart_count: how often the launcher has relaunched this job.
            wrap_store: what to save through, for fault injection.
            clock: seconds that only grow.
        """
        self._config = config
        self._device = device
        self._events = events or EventLog(None)
        self._restart_count = restart_count
        self._num_local_ranks = num_local_ranks
        self._wrap_store = wrap_store
        self._clock = clock
        self._manager: CheckpointManager | None = None
        self._has_failed = False
        self._last_dump = clock()
        self._save_seconds: list[float] = []

    # Loading

    def load(self, engine: ModuleEngine) -> Loaded | None:
        """Puts the engine where the run is to go on: all of it, or none of it. All ranks call it
        together.

        With `--recover-mode` on or auto that is the newest intact checkpoint in the folder of
        `--save`; where there is none, and with off, what `--load` and its flags say.

        Returns:
            None if there is no checkpoint, and training begins with the initial weights.

        Raises:
            CheckpointError, ConfigError: see `load_run`; the engine is what it was.
            ExitError: NO_PROGRESS, if the run has been relaunched from there too often.
        """
        start, save = self._clock(), self._config.checkpoint.save
        if save is not None and not self._config.training.skip_train:
            if not self._config.checkpoint.save_optim:
                logger.warning(
                    "--no-save-optim: what is saved in %s cannot be resumed, only loaded as "
                    "weights",
                    save,
                )
            on_first_rank(lambda: make_save_folder(save), f"preparing {save}")
        known = Memory.from_plain(
            on_first_rank(lambda: self._memory().to_plain(), "reading the event log")
        )
        flags = self._flags(known)
        loaded = None
        if flags is not None:
            loaded = load_run(
                flags,
                self._config.schedule,
                engine.state,
                self._device,
                known_damage=known.damaged,
                on_damage=self._on_damage,
            )
            if loaded is not None and loaded.info is not None:
                self._report_differences(loaded.info)
        if loaded is None:
            looked_at = flags.load if flags is not None else save
            if looked_at is not None:
                logger.info("no checkpoint found in %s, starting from the beginning", looked_at)
        step_info = engine.step_info()
        self._check_attempts(step_info.iteration, known.attempts.get(step_info.iteration, 0))
        self._on_rank_0(
            EventKind.RESUME,
            iteration=step_info.iteration,
            consumed_samples=step_info.consumed_samples,
            checkpoint=None if loaded is None else loaded.path,
            seconds=self._clock() - start,
            world_size=dist.get_world_size(),
        )
        return loaded

    def prepare_folder(self, engine: ModuleEngine, loaded: Loaded | None) -> None:
        """Makes the folder of `--save` ready for this run; see `check_save_folder`. All ranks call
        it together.
        """
        damaged = [] if loaded is None else loaded.damaged
        for path, what in check_save_folder(
            self._config.checkpoint, engine.step_info().iteration, damaged
        ):
            self._on_rank_0(EventKind.SET_ASIDE, checkpoint=path, what=what)

    def _flags(self, known: Memory) -> CheckpointConfig | None:
        """What to load, and how; None: nothing."""
        checkpoint, mode = self._config.checkpoint, self._config.recover.recover_mode
        begins_as_told = checkpoint if checkpoint.load is not None else None
        save = checkpoint.save
        if mode == "off" or save is None or (self._config.training.skip_train and mode == "auto"):
            return begins_as_told

        def look() -> list[Any]:
            load = checkpoint.load
            is_from_save = load is not None and _folder_of(load) == place_of(save)
            return [latest_iteration(open_store(save)), is_from_save]  # ranks tell each other JSON

        newest, is_from_save = on_first_rank(look, f"looking for checkpoints in {save}")
        if newest is None and mode == "on":
            raise ConfigError(f"--recover-mode on: expected a checkpoint in {save}, got none.")
        # Whoever loads from the run's own folder, a step of it or weights alone, means what they
        # say; but once, and not again when the job is relaunched.
        has_saved = known.has_saved or (
            newest is not None and known.begun is not None and newest > known.begun
        )
        if newest is None or (is_from_save and not has_saved):
            return begins_as_told
        return _everything_from(checkpoint, save)

    def _memory(self) -> Memory:
        folder = self._config.events_dir
        return Memory.read(folder) if folder is not None and self._restart_count else Memory()

    def _check_attempts(self, iteration: int, attempts: int) -> None:
        retries = self._config.recover.recover_retries
        if self._restart_count and attempts > retries:
            raise ExitError(
                ExitCode.NO_PROGRESS,
                f"Expected to get from iteration {iteration} to the next checkpoint in {retries} "
                "relaunches "
                f"(--recover-retries), got {attempts} attempts that ended before. See events.jsonl "
                "for how they did.",
            )

    def _on_damage(self, path: str, reason: str) -> None:
        self._on_rank_0(EventKind.DAMAGED, checkpoint=path, reason=reason)

    def _report_differences(self, info: RecoverInfo) -> None:
        own = self._config.values()
        saved_batch, batch = info.config.get("global_batch_size"), self._config.global_batch_size
        if saved_batch not in (None, batch):
            logger.warning(
                "a global batch has %d samples now, and had %d: with a number of ranks that may "
                "change, give "
                "--global-batch-size",
                batch,
                saved_batch,
            )
        left_out = _UNREMARKABLE
        if self._config.schedule.use_checkpoint_opt_param_scheduler:
            left_out = left_out | _OF_SCHEDULE_AND_OPTIONS
        for name in own:
            if name not in left_out and name in info.config and info.config[name] != own[name]:
                logger.info(
                    "resuming with another %s: %s in the checkpoint, %s now",
                    name,
                    info.config[name],
                    own[name],
                )

    # Saving

    def __enter__(self) -> RecoverHandler:
        """CheckpointError on all ranks, if what earlier runs left unfinished cannot be looked
        through.
        """
        checkpoint = self._config.checkpoint
        if self._config.training.skip_train:
            return (
                self  # nothing is saved, and what is under way in the folder is another process's
            )
        if checkpoint.save is not None and checkpoint.ckpt_format == FSDP_DTENSOR:
            self._manager = CheckpointManager.start(
                self._wrap_store(open_store(checkpoint.save)),
                self._device,
                dist.get_rank(),
                dist.get_world_size(),
                retention=Retention(checkpoint.save_keep_last, checkpoint.save_retain_interval),
                timeout_seconds=60.0 * checkpoint.save_timeout_minutes,
                staging_share=checkpoint.save_staging_share if checkpoint.async_save else 0.0,
                num_local_ranks=self._num_local_ranks,
                on_published=self._on_published,
                on_failed=self._on_failed,
            )
        elif checkpoint.save is not None:
            store = open_store(checkpoint.save)
            swept = on_first_rank(store.sweep, f"sweeping {store.root}")
            if swept:
                logger.warning(
                    "swept what earlier runs left unfinished in %s: %s",
                    store.root,
                    ", ".join(swept),
                )
        self._last_dump = self._clock()
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
        """Whether a save is under way on this rank."""
        return self._manager is not None and self._manager.is_busy

    @property
    def save_seconds(self) -> float | None:
        """What a save takes that begins now: the longest of the last few, twice if one is under
        way. None: unknown.
        """
        seconds = max(self._save_seconds[-3:], default=None)
        return 2 * seconds if seconds is not None and self.is_saving else seconds

    def wait(self) -> None:
        """Waits for the save under way. A failure is logged."""
        self._note(self._finish())

    def votes(self) -> Votes:
        """This rank's."""
        if self._manager is not None:
            self._note(self._manager.failure())
        has_failed, self._has_failed = self._has_failed, False
        limit = self._config.checkpoint.save_interval_seconds
        is_late = limit is not None and self._clock() - self._last_dump >= limit
        return Votes(float(self.is_saving), float(has_failed), float(is_late))

    def check(self, engine: ModuleEngine) -> None:
        """CheckpointError now, rather than at the first save, if there is something that the format
        cannot hold.
        """
        if self._manager is not None:
            engine.state.contents(self._device, with_optim=self._config.checkpoint.save_optim)

    def dump(self, engine: ModuleEngine, info: RecoverInfo, num_busy: float = 0.0) -> None:
        """Saves, in the background with `--async-save`. All ranks call it together.

        A failure is logged, and shows in the next votes; but what cannot be saved at all is an
        error here.

        Args:
            num_busy: ranks that were still saving, summed in this very iteration: so that all of
                them leave this save out (`--async-save-busy skip`), or none.
        """
        checkpoint, iteration = self._config.checkpoint, engine.step_info().iteration
        self._last_dump = self._clock()
        if num_busy and checkpoint.async_save_busy == "skip":
            logger.warning(
                "iteration %d is not saved: the save before is still under way", iteration
            )
            self._on_rank_0(
                EventKind.SAVE_SKIPPED,
                iteration=iteration,
                reason="the save before is still under way",
            )
            return
        self._note(self._begin(engine, info))
        if not checkpoint.async_save:
            self._note(self._finish())

    def dump_last(self, engine: ModuleEngine, info: RecoverInfo) -> None:
        """Saves at the end of a run, and waits for it. ExitError (NOT_SAVED) if it came to
        nothing.
        """
        self._note(self._begin(engine, info))
        failure = self._finish()
        self._note(failure)
        if failure is not None:
            raise ExitError(ExitCode.NOT_SAVED, str(failure), is_reported=True) from failure

    def _begin(self, engine: ModuleEngine, info: RecoverInfo) -> CheckpointError | None:
        """Begins to save. Answers the failure of the save before, if that has failed.

        ExitError (NOT_SAVED) if PyTorch could not write a checkpoint of its own format.
        """
        checkpoint, iteration = self._config.checkpoint, engine.step_info().iteration
        if checkpoint.save is None:
            raise RuntimeError("Expected --save to be set where a checkpoint is saved, got none.")
        if self._manager is None:
            self._on_rank_0(EventKind.SAVE_BEGUN, iteration=iteration)
            try:
                seconds = save_torch_dcp(
                    checkpoint.save,
                    engine.state,
                    self._device,
                    info,
                    with_optim=checkpoint.save_optim,
                )
            except CheckpointError as error:
                self._note(error)
                self._on_failed(iteration, str(error))
                raise ExitError(ExitCode.NOT_SAVED, str(error), is_reported=True) from error
            self._on_published(iteration, seconds)
            return None
        contents = engine.state.contents(self._device, with_optim=checkpoint.save_optim)
        failure = self._finish()
        self._on_rank_0(EventKind.SAVE_BEGUN, iteration=iteration)
        self._manager.save(iteration, contents, info.to_plain())
        return failure

    def _finish(self) -> CheckpointError | None:
        """Waits for the save under way. Answers its failure."""
        try:
            if self._manager is not None:
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


def _folder_of(load: str) -> str:
    """The folder of checkpoints that `--load` means: it may name one checkpoint in it."""
    named = named_checkpoint(load)
    return place_of(load if named is None else named[0])


def _everything_from(checkpoint: CheckpointConfig, root: str) -> CheckpointConfig:
    """Flags to load the newest checkpoint of the run itself: those of `--load` speak of how it once
    began.
    """
    return replace(
        checkpoint,
        load=root,
        load_optim=True,
        load_rng=True,
        finetune=False,
        exit_on_missing_checkpoint=False,
        ckpt_step=None,
        dist_ckpt_strictness="raise_all",
        load_skip_keys=(),
    )
