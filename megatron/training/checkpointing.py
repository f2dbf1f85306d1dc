"""A run's checkpoint: model, optimizer, schedule, random generators and counters, saved and loaded as one."""

from __future__ import annotations

import logging
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.device import Device
from megatron.core.dist_checkpointing.config import CheckpointConfig
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manager import (
    checkpoint_folder,
    latest_iteration,
    load_tensors,
    on_first_rank,
    published_iterations,
    read_metadata,
    read_train_state,
    save_checkpoint,
)
from megatron.core.dist_checkpointing.state import DCPState
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.options import ConfigError
from megatron.training.config import RunConfig
from megatron.training.rng import rng_state, set_rng_state

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1
# Settings that may differ between a checkpoint and the run that loads it without a word.
_UNREMARKABLE = {"save", "load", "metrics_jsonl", "tensorboard_dir", "progress_bar", "log_interval", "exit_interval"}


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


def save_run(config: RunConfig, state: RunState, device: Device) -> None:
    """Publishes a checkpoint of the present state under `--save`. Called by all ranks together."""
    if config.checkpoint.save is None:
        raise RuntimeError("Expected --save to be set where a checkpoint is saved, got none.")
    start = time.perf_counter()
    optimizer = state.optimizer.optimizer if config.checkpoint.save_optim else None
    tensors = {**DCPState(state.model, optimizer).state_dict(), **_rng_entry(rng_state(device))}
    train_state = {
        "format_version": _FORMAT_VERSION,
        "progress": vars(state.progress),
        "schedule": state.schedule.state(),
        "world_size": dist.get_world_size(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "config": config.values(),
    }
    if state.optimizer.loss_scaler is not None:
        train_state["loss_scaler"] = state.optimizer.loss_scaler.state()
    folder = save_checkpoint(config.checkpoint.save, state.progress.iteration, tensors, train_state)
    logger.info("saved checkpoint %s in %.2f s", folder, time.perf_counter() - start)


def load_run(config: RunConfig, state: RunState, device: Device) -> bool:
    """Loads the checkpoint that `--load` asks for into `state`, in place. Called by all ranks together.

    Returns:
        Whether there was one. `--load` may name a folder without any, unless `--exit-on-missing-checkpoint` is set.

    Raises:
        CheckpointError: for a checkpoint that is there but cannot be loaded; `state` has not been changed unless a
            data file turned out to be unreadable.
        ConfigError: if there is none and there must be, or its schedule differs from this run's.
    """
    checkpoint, root = config.checkpoint, config.checkpoint.load
    if root is None:
        return False
    iteration = on_first_rank(lambda: _wanted_iteration(checkpoint, root), f"looking for checkpoints in {root}")
    if iteration is None:
        logger.info("no checkpoint found in %s, starting from the beginning", root)
        return False
    folder = checkpoint_folder(root, iteration)
    train_state = read_train_state(folder)
    # Read and checked first, installed last: a refusal must leave the run as it was.
    progress = _progress(train_state, str(folder))
    schedule = (
        state.schedule if checkpoint.finetune else _schedule(config.schedule, state.schedule, train_state, str(folder))
    )
    loads_optimizer = checkpoint.load_optim and not checkpoint.finetune
    scaler = state.optimizer.loss_scaler
    if loads_optimizer:
        scaler = _loss_scaler(scaler, train_state, str(folder))
    app = DCPState(state.model, state.optimizer.optimizer if loads_optimizer else None)
    tensors = app.state_dict()
    metadata = read_metadata(folder)
    own_rng = None if checkpoint.finetune or not checkpoint.load_rng else _saved_rng(metadata, device)
    if own_rng is not None:
        tensors |= _rng_entry(own_rng)
    load_tensors(folder, metadata, tensors, ("rng.",) if loads_optimizer else ("rng.", "optim."))
    # What the flags say of weight decay, betas and the like holds; the checkpoint's groups would silently undo it.
    constants = [{key: group[key] for key in group if key != "params"} for group in state.optimizer.param_groups]
    app.load_state_dict(tensors)
    for group, own_constants in zip(state.optimizer.param_groups, constants, strict=True):
        group.update(own_constants)
    state.optimizer.loss_scaler = scaler
    if own_rng is not None:
        set_rng_state(device, own_rng)
    if not checkpoint.finetune:
        state.schedule = schedule
        vars(state.progress).update(vars(progress))
        _report_differences(config, train_state)
    logger.info(
        "loaded checkpoint %s; this run begins after iteration %d and %d samples",
        folder,
        state.progress.iteration,
        state.progress.consumed_samples,
    )
    return True


def load_weights(folder: Path, model: nn.Module) -> None:
    """Loads a checkpoint's model, and nothing else, into `model` in place. Needs no process group."""
    app = DCPState(model)
    tensors = app.state_dict()
    load_tensors(folder, read_metadata(folder), tensors, ("rng.", "optim."))
    app.load_state_dict(tensors)


def check_save_folder(config: CheckpointConfig, start_iteration: int) -> None:
    """Makes the folder of `--save`. Called by all ranks together, before there is anything to lose.

    Raises:
        ConfigError: if it cannot be written, or holds checkpoints that this run would come to overwrite.
    """
    root = config.save
    if root is not None:
        on_first_rank(lambda: _check_save_folder(root, start_iteration), f"preparing {root}")


def _check_save_folder(root: str, start_iteration: int) -> None:
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as failure:
        raise ConfigError(f"--save: expected a folder that can be written, got {root} ({failure.strerror}).") from None
    newer = [iteration for iteration in published_iterations(root) if iteration > start_iteration]
    if newer:
        raise ConfigError(
            f"--save: expected a folder without checkpoints beyond iteration {start_iteration}, where this run begins, "
            f"got {newer} in {root}. Load the newest with --load, or save elsewhere."
        )


def _wanted_iteration(config: CheckpointConfig, root: str) -> int | None:
    if config.ckpt_step is not None:
        published = published_iterations(root)
        if config.ckpt_step not in published:
            raise ConfigError(f"--ckpt-step: expected one of {published}, which are in {root}, got {config.ckpt_step}.")
        return config.ckpt_step
    iteration = latest_iteration(root)
    if iteration is None and config.exit_on_missing_checkpoint:
        raise ConfigError(
            f"--load: expected a checkpoint in {root}, got none, and --exit-on-missing-checkpoint is set."
        )
    return iteration


def _progress(train_state: dict[str, Any], folder: str) -> Progress:
    if train_state.get("format_version") != _FORMAT_VERSION:
        raise CheckpointError(
            f"Expected format version {_FORMAT_VERSION} in {folder}, got {train_state.get('format_version')!r}."
        )
    try:
        return Progress(**train_state["progress"])
    except (KeyError, TypeError) as failure:
        raise CheckpointError(f"Expected the run's counters in {folder}, got {failure}.") from None


def _schedule(config: LRScheduleConfig, own: LRSchedule, train_state: dict[str, Any], folder: str) -> LRSchedule:
    """This run's schedule or the checkpoint's, as the flags say; ConfigError if they differ and no flag says."""
    try:
        saved = LRSchedule.from_state(train_state["schedule"])
    except (KeyError, TypeError) as failure:
        raise CheckpointError(f"Expected a learning-rate schedule in {folder}, got {failure}.") from None
    if saved == own or config.override_opt_param_scheduler:
        return own
    if config.use_checkpoint_opt_param_scheduler:
        return saved
    differences = ", ".join(
        f"{name} {saved_value} (checkpoint) and {own.state()[name]} (this run)"
        for name, saved_value in saved.state().items()
        if saved_value != own.state()[name]
    )
    raise ConfigError(
        f"--load: expected the learning-rate schedule of the checkpoint, got {differences}. "
        "Choose with --override-opt-param-scheduler (this run's) or --use-checkpoint-opt-param-scheduler."
    )


def _loss_scaler(own: LossScaler | None, train_state: dict[str, Any], folder: str) -> LossScaler | None:
    """This run's scaler as the checkpoint's was; as it is, if the checkpoint's run or this one had none."""
    if own is None or "loss_scaler" not in train_state:
        return own
    try:
        return own.from_state(train_state["loss_scaler"])
    except (AttributeError, ValueError) as failure:
        raise CheckpointError(f"Expected the state of a loss scaler in {folder}, got {failure}.") from None


def _rng_entry(states: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Random generators are each rank's own, so their keys carry the rank."""
    return {"rng": {str(dist.get_rank()): states}}


def _saved_rng(metadata: Metadata, device: Device) -> dict[str, torch.Tensor] | None:
    """Tensors to load this rank's generators into, if the checkpoint has states of as many ranks as run now."""
    keys = metadata.state_dict_metadata
    saved_ranks = {key.split(".")[1] for key in keys if key.startswith("rng.")}
    own = rng_state(device)
    if len(saved_ranks) == dist.get_world_size() and all(f"rng.{dist.get_rank()}.{name}" in keys for name in own):
        return own
    logger.info(
        "the checkpoint has random states of %d ranks (%s), this run wants %d (%s): dropout goes on with fresh ones",
        len(saved_ranks),
        ", ".join(sorted({key.split(".", 2)[2] for key in keys if key.startswith("rng.")})) or "none",
        dist.get_world_size(),
        ", ".join(sorted(own)),
    )
    return None


def _report_differences(config: RunConfig, train_state: dict[str, Any]) -> None:
    saved, own = train_state.get("config", {}), config.values()
    for name in own:
        if name not in _UNREMARKABLE and name in saved and saved[name] != own[name]:
            logger.info("resuming with another %s: %s in the checkpoint, %s now", name, saved[name], own[name])
