"""`Resumer`: a run that died resumes from its newest intact checkpoint.

    resumer = Resumer(config, device, events=events, restart_count=launch.restart_count)
    loaded = resumer.load(engine)          # None without a checkpoint
    resumer.prepare_folder(engine, loaded)

A missing checkpoint differs from an unreadable one: without any, training starts; an unreadable one
ends the run, unless an older checkpoint is intact.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.config import CheckpointConfig
from megatron.core.dist_checkpointing.errors import shown
from megatron.core.dist_checkpointing.store import latest_iteration, open_store
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError, options_of
from megatron.training.checkpoint.dcp_import import load_dcp
from megatron.training.checkpoint.kept_state import KeptState
from megatron.training.checkpoint.loading import Loaded, load_run
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.checkpoint.run_state import (
    check_save_folder,
    make_save_folder,
    named_checkpoint,
    place_of,
)
from megatron.training.config import RunConfig, all_options
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine
from megatron.training.health.events import EarlierFindings, EventKind, EventLog
from megatron.training.health.exits import ExitCode, ExitError

logger = logging.getLogger(__name__)


class Resumer:
    """Restores the state of a run. All ranks call each method together."""

    def __init__(
        self, config: RunConfig, device: Device, *, events: EventLog, restart_count: int = 0
    ) -> None:
        """
        Args:
            restart_count: the number of restarts of this job by the launcher.
        """
        self._config = config
        self._device = device
        self._events = events
        self._restart_count = restart_count

    def load(self, engine: ModuleEngine, kept: KeptState | None = None) -> Loaded | None:
        """Loads the state from which the run resumes.

        That is the kept host state, if the engine was built with it. Otherwise, with
        `--recover-mode` on or auto, it is the newest intact checkpoint in the directory of
        `--save`. Without any, or with off, `--load` and its flags choose.

        Returns:
            None without a checkpoint. Training then starts with the initial weights, or the weights
            of `--load-dcp` or `--hf-model`.

        Raises:
            CheckpointError, ConfigError: as `load_run`: the run must end.
            ExitError: NO_PROGRESS, if the run has been relaunched from there too often.
        """
        start = time.monotonic()
        self._make_save_folder()
        known = EarlierFindings(
            **on_first_rank(lambda: vars(self._earlier_findings()), "reading the event log")
        )

        loaded = None if kept is None else kept.restore()
        flags, resumes = (None, False) if loaded is not None else self._flags(known)
        if loaded is not None:
            logger.info("continuing from the kept host state: no step is lost")
        elif flags is not None:
            loaded = load_run(
                flags,
                self._config.schedule,
                engine.state,
                self._device,
                resumes=resumes,
                known_damage=known.damaged,
                on_damage=self._on_damage,
            )

        if loaded is not None and loaded.info is not None:
            self._report_differences(loaded.info)
        looked_at = flags.load if flags is not None else self._config.checkpoint.save
        if loaded is None and looked_at is not None:
            logger.info("no checkpoint found in %s, starting from the beginning", looked_at)
        if loaded is None:
            self._load_first_state(engine)

        step_info = engine.step_info()
        self._check_attempts(step_info.iteration, known.resumed.count(step_info.iteration))
        self._on_rank_0(
            EventKind.RESUME,
            iteration=step_info.iteration,
            consumed_samples=step_info.consumed_samples,
            checkpoint=None if loaded is None else loaded.path,
            seconds=time.monotonic() - start,
            world_size=dist.get_world_size(),
            failed_at=None if loaded is None else loaded.failed_at,
        )
        return loaded

    def _load_first_state(self, engine: ModuleEngine) -> None:
        """Loads the initial weights of a run."""
        checkpoint = self._config.checkpoint
        folder, table = checkpoint.load_dcp, checkpoint.dcp_key_map
        if folder is not None and table is not None:
            # With --hf-model, its config.json still describes the model.
            load_dcp(folder, table, self._config.model, engine.state)
        elif checkpoint.hf_model is not None and not checkpoint.hf_init_random:
            # --vocab-size may request more rows.
            engine.load(SaveLoadMeta(checkpoint.hf_model, "hf", adds_rows=True))

    def prepare_folder(self, engine: ModuleEngine, loaded: Loaded | None) -> None:
        """Sets aside skipped damaged checkpoints in the directory of `--save`.

        Raises:
            ConfigError: if it contains checkpoints that this run would overwrite.
        """
        damaged = [] if loaded is None else loaded.damaged
        for path, what in check_save_folder(
            self._config.checkpoint, engine.step_info().iteration, damaged
        ):
            self._on_rank_0(EventKind.SET_ASIDE, checkpoint=path, what=what)

    def _make_save_folder(self) -> None:
        save = self._config.checkpoint.save
        if save is None or self._config.training.skip_train:
            return
        if not self._config.checkpoint.save_optim:
            logger.warning(
                "--no-save-optim: checkpoints in %s cannot be resumed, only loaded as weights",
                save,
            )
        on_first_rank(lambda: make_save_folder(save), f"preparing {save}")

    def _flags(self, known: EarlierFindings) -> tuple[CheckpointConfig | None, bool]:
        """Returns the flags of the load, if any, and whether the run itself is resumed."""
        checkpoint, mode = self._config.checkpoint, self._config.recover.recover_mode
        initial = checkpoint if checkpoint.load is not None else None
        save = checkpoint.save
        if mode == "off" or save is None or (self._config.training.skip_train and mode == "auto"):
            return initial, False

        def look() -> list[Any]:  # a list, since ranks exchange JSON
            load = checkpoint.load
            is_from_save = load is not None and _folder_of(load) == place_of(save)
            return [latest_iteration(open_store(save)), is_from_save]

        newest, is_from_save = on_first_rank(look, f"looking for checkpoints in {save}")
        if newest is None and mode == "on":
            raise ConfigError(f"--recover-mode on: expected a checkpoint in {save}, got none.")

        # A --load from the run's directory, of one step or only of weights, is intended. But a
        # relaunch of the job must not repeat it, and lose the progress since.
        has_saved = known.has_saved or (
            newest is not None and known.resumed and newest > known.resumed[0]
        )
        if newest is None or (is_from_save and not has_saved):
            return initial, False
        return _newest_of(checkpoint, save), True

    def _earlier_findings(self) -> EarlierFindings:
        folder = self._config.events_dir
        if folder is None or not self._restart_count:
            return EarlierFindings()
        return EarlierFindings.read(folder)

    def _check_attempts(self, iteration: int, attempts: int) -> None:
        retries = self._config.recover.recover_retries
        if self._restart_count and attempts > retries:
            raise ExitError(
                ExitCode.NO_PROGRESS,
                f"Expected to get from iteration {iteration} to the next checkpoint in {retries} "
                f"relaunches (--recover-retries), got {attempts} attempts that ended before. "
                "See events.jsonl.",
            )

    def _on_damage(self, path: str, reason: str) -> None:
        self._on_rank_0(EventKind.DAMAGED, checkpoint=path, reason=reason)

    def _report_differences(self, info: RecoverInfo) -> None:
        own = self._config.values()
        saved_batch, batch = info.config.get("global_batch_size"), self._config.global_batch_size
        if saved_batch not in (None, batch):
            logger.warning(
                "a global batch has %d samples now, and had %d: set --global-batch-size if the "
                "number of ranks may change",
                batch,
                saved_batch,
            )

        takes_saved = self._config.schedule.use_checkpoint_opt_param_scheduler
        of_schedule = {field.name for field in options_of(LRScheduleConfig)}
        changes = []
        for name, value in own.items():
            option = all_options()[name].option
            # The load has logged the values that it took from the checkpoint.
            is_taken = takes_saved and (
                name in of_schedule or option.overridden_by == "use_checkpoint_opt_param_scheduler"
            )
            if option.may_change or is_taken or name == "global_batch_size":
                continue
            if name in info.config and info.config[name] != value:
                changes.append(f"{name} {shown(info.config[name])} -> {shown(value)}")
        if changes:
            logger.info("settings changed since the checkpoint: %s", ", ".join(changes))

    def _on_rank_0(self, kind: EventKind, **fields: Any) -> None:
        if dist.get_rank() == 0:
            self._events.write(kind, **fields)


def _folder_of(load: str) -> str:
    """Returns the directory of checkpoints of `--load`, which may name one checkpoint in it."""
    named = named_checkpoint(load)
    return place_of(load if named is None else named[0])


def _newest_of(checkpoint: CheckpointConfig, root: str) -> CheckpointConfig:
    """Returns the flags that resume the run from its newest checkpoint. Flags of its first start
    do not apply.
    """
    of_start = ("finetune", "ckpt_step", "exit_on_missing_checkpoint")
    fields = options_of(CheckpointConfig)
    defaults = {field.name: field.default for field in fields if field.name in of_start}
    return replace(checkpoint, load=root, **defaults)
