"""What a run's checkpoint covers, and saving it: model, optimizer, schedule, random generators and counters as one."""

from __future__ import annotations

import logging
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.collect import collect
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, CheckpointConfig
from megatron.core.dist_checkpointing.entries import Contents
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER_FILE, checkpoint_name, published_iterations
from megatron.core.dist_checkpointing.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.state import DCPState
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.dist_checkpointing.torch_dcp import save_checkpoint
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.lr_schedule import LRSchedule
from megatron.core.options import ConfigError
from megatron.training.config import RunConfig
from megatron.training.rng import rng_state

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass
class Progress:
    """How far a run has come. Everything that resuming needs besides tensors and the schedule."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0


@dataclass
class RunState:
    """What a checkpoint covers."""

    model: nn.Module
    optimizer: DistributedOptimizer
    schedule: LRSchedule
    progress: Progress


class Checkpointer:
    """Saves a run's state, and remembers how that went; a context manager, made by all ranks together."""

    def __init__(self, config: RunConfig, device: Device) -> None:
        """
        Raises:
            CheckpointError: on all ranks, if what earlier runs left unfinished cannot be looked through.
        """
        checkpoint = config.checkpoint
        self._config = config
        self._device = device
        self._has_failed = False
        self._manager: CheckpointManager | None = None
        if checkpoint.save is not None and checkpoint.ckpt_format == FSDP_DTENSOR:
            self._manager = CheckpointManager.start(
                checkpoint.save,
                device,
                dist.get_rank(),
                dist.get_world_size(),
                retention=Retention(checkpoint.save_keep_last, checkpoint.save_retain_interval),
                timeout_seconds=60.0 * checkpoint.save_timeout_minutes,
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is not None:
            self._manager.close()

    def votes(self) -> tuple[float, float]:
        """(a save is under way on this rank, one has failed since this was last asked), 0 or 1."""
        if self._manager is not None:
            self._note(self._manager.failure())
        has_failed, self._has_failed = self._has_failed, False
        return float(self._manager is not None and self._manager.is_busy), float(has_failed)

    def save(self, state: RunState, num_busy: float) -> None:
        """Saves at an interval: all ranks call it together. A failure is logged, and shows in the next votes.

        Args:
            num_busy: ranks that have said in `votes` that they are still saving, summed in this very iteration: so
                that all of them skip this save, or none.
        """
        checkpoint = self._config.checkpoint
        if num_busy and checkpoint.async_save_busy == "skip":
            logger.warning("iteration %d is not saved: the save before is still under way", state.progress.iteration)
            return
        if self._manager is None:
            save_torch_dcp(self._config, state, self._device)
            return
        # Whatever cannot be saved at all is an error here, not a failure to be logged.
        contents = self._collect(state)
        try:
            self._manager.save(state.progress.iteration, contents, _train_state(self._config, state))
            if not checkpoint.async_save:
                self._manager.finish()
        except CheckpointError as failure:
            self._note(failure)

    def save_last(self, state: RunState) -> None:
        """Saves at the end of a run, and waits for it. CheckpointError if it came to nothing."""
        if self._manager is None:
            save_torch_dcp(self._config, state, self._device)
            return
        contents = self._collect(state)
        try:
            self._manager.save(state.progress.iteration, contents, _train_state(self._config, state))
        except CheckpointError as failure:
            self._note(failure)  # of the save before; this one has begun
        self._manager.finish()

    def check(self, state: RunState) -> None:
        """CheckpointError now, rather than at the first save, if there is something that the format cannot hold."""
        if self._manager is not None:
            self._collect(state)

    def _collect(self, state: RunState) -> Contents:
        return collect(
            state.model,
            state.optimizer.optimizer,
            with_states=self._config.checkpoint.save_optim,
            private=private_rng(rng_state(self._device)),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def _note(self, failure: CheckpointError | None) -> None:
        if failure is not None:
            logger.error("%s", failure)
            self._has_failed = True


def save_torch_dcp(config: RunConfig, state: RunState, device: Device) -> None:
    """Publishes a `torch_dcp` checkpoint of the present state under `--save`. Called by all ranks together."""
    if config.checkpoint.save is None:
        raise RuntimeError("Expected --save to be set where a checkpoint is saved, got none.")
    start = time.perf_counter()
    optimizer = state.optimizer.optimizer if config.checkpoint.save_optim else None
    tensors = {**DCPState(state.model, optimizer).state_dict(), **rng_entry(rng_state(device))}
    root = open_store(config.checkpoint.save).root
    folder = save_checkpoint(root, state.progress.iteration, tensors, _train_state(config, state))
    logger.info("saved checkpoint %s in %.2f s", folder, time.perf_counter() - start)


def _train_state(config: RunConfig, state: RunState) -> dict[str, Any]:
    train_state = {
        "format_version": FORMAT_VERSION,
        "progress": vars(state.progress),
        "schedule": state.schedule.state(),
        "world_size": dist.get_world_size(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "config": config.values(),
    }
    if state.optimizer.loss_scaler is not None:
        train_state["loss_scaler"] = state.optimizer.loss_scaler.state()
    return train_state


def check_save_folder(config: CheckpointConfig, start_iteration: int, damaged: Sequence[int] = ()) -> None:
    """Makes the folder of `--save`. Called by all ranks together, before there is anything to lose.

    Args:
        damaged: iterations of checkpoints in `--load` that were passed over for being damaged. In the folder of
            `--save`, too, they are set aside: they would stand in the way of what is saved again.

    Raises:
        ConfigError: if it cannot be written, or holds checkpoints that this run would come to overwrite.
    """
    root = config.save
    if root is None:
        return
    is_same = config.load is not None and _place(config.load) == _place(root)
    aside = damaged if is_same else ()
    on_first_rank(lambda: _check_save_folder(root, start_iteration, aside), f"preparing {root}")


def _place(root: str) -> str:
    """A folder of checkpoints, however it is named."""
    store = open_store(root)
    return str(Path(store.root).resolve()) if store.is_rename_atomic else store.root


def _check_save_folder(root: str, start_iteration: int, damaged: Sequence[int]) -> None:
    store = open_store(root)
    if store.is_rename_atomic:
        try:
            Path(store.root).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=store.root):
                pass
        except OSError as failure:
            raise ConfigError(
                f"--save: expected a folder that can be written, got {root} ({failure.strerror})."
            ) from None
    newer = [iteration for iteration in published_iterations(store) if iteration > start_iteration]
    in_the_way = [iteration for iteration in newer if iteration not in damaged]
    if in_the_way:
        raise ConfigError(
            f"--save: expected a folder without checkpoints beyond iteration {start_iteration}, where this run begins, "
            f"got {in_the_way} in {root}. Load the newest with --load, or save elsewhere."
        )
    if newer:
        # First: it must not name what is not there.
        store.write(TRACKER_FILE, f"{start_iteration}\n".encode())
    for iteration in newer:
        aside = store.set_aside(checkpoint_name(iteration))
        where = "is deleted" if aside is None else f"is set aside as {store.root}/{aside}"
        logger.warning("the damaged checkpoint of iteration %d %s", iteration, where)


def private_rng(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random generators are each rank's own."""
    return {f"rng.{kind}": tensor for kind, tensor in states.items()}


def rng_entry(states: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Random generators are each rank's own, so their keys carry the rank."""
    return {"rng": {str(dist.get_rank()): states}}
