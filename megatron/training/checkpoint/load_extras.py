"""The part of a load besides the tensors of model and optimizer: plain data and random states.

All requested data is read and checked first, and installed after the tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.dist_checkpointing.config import CheckpointConfig
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.load.reader import is_skipped
from megatron.core.dist_checkpointing.state.param_groups import install_options, match_param_groups
from megatron.core.dist_checkpointing.store import Store, path_of
from megatron.core.log import counted
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.optimizer.rules import Adam
from megatron.core.optimizer.state_loading import kept_options
from megatron.core.optimizer.step_inputs import IDENTITIES
from megatron.core.options import ConfigError
from megatron.training.checkpoint.run_info import RecoverInfo, is_of_a_run, no_run_error
from megatron.training.checkpoint.run_state import RunState
from megatron.training.rng import check_rng_state, rng_state, set_rng_state

logger = logging.getLogger(__name__)

RNG_KEY = re.compile(r"rng\.(\d{1,9})\.(.+)")
# Optimizer options that a run never takes from a checkpoint: the schedule sets `lr` in every step.
_NEVER_TAKEN = {"lr", *kept_options(Adam().defaults)}


class RunData(NamedTuple):
    """The checked plain data of a run's checkpoint, which is installed after the tensors."""

    info: RecoverInfo
    schedule: LRSchedule
    loss_scaler: LossScaler | None

    @classmethod
    def read(
        cls,
        flags: CheckpointConfig,
        own: LRScheduleConfig,
        state: RunState,
        train_state: dict[str, Any],
        store: Store,
        name: str,
    ) -> RunData:
        """Reads and checks the data without changing `state`.

        Raises:
            CheckpointError, ConfigError: if this run cannot use it.
        """
        source = path_of(store, f"{name}/{TRAIN_STATE_FILE}")
        if not is_of_a_run(train_state):
            raise no_run_error(path_of(store, name), f"its {TRAIN_STATE_FILE} has no schedule")
        info = RecoverInfo.from_plain(train_state, source)
        iteration = info.step_info.iteration
        if iteration_of(name) not in (None, iteration):
            raise CheckpointError(
                f"Expected progress.iteration in {source} to be that of {name}, got {iteration}."
            )

        return cls.of(flags, own, state, info, source)

    @classmethod
    def of(
        cls,
        flags: CheckpointConfig,
        own: LRScheduleConfig,
        state: RunState,
        info: RecoverInfo,
        source: str,
    ) -> RunData:
        """Checks data without changing `state`. Raises as `read`."""
        schedule = _schedule(own, state.schedule, info, source)
        scaler = state.optimizer.loss_scaler
        if flags.load_optim:
            scaler = _loss_scaler(scaler, info, source)
        return cls(info, schedule, scaler)

    def install(self, state: RunState) -> None:
        state.optimizer.loss_scaler = self.loss_scaler
        state.schedule = self.schedule
        vars(state.step_info).update(vars(self.info.step_info))


class Extras(NamedTuple):
    """The checked data of a load besides the tensors of model and optimizer.

    Attributes:
        run: None if only weights are requested.
        options: the options of each of the optimizer's groups; None to keep the present ones.
        rng: this rank's random states; None to keep the present ones.
    """

    run: RunData | None
    options: list[dict[str, Any]] | None
    rng: dict[str, torch.Tensor] | None

    def install(self, state: RunState, device: Device) -> None:
        if self.options is not None:
            install_options(state.optimizer.optimizer, self.options)
        if self.run is not None:
            self.run.install(state)
        if self.rng is not None:
            set_rng_state(device, self.rng)


def options_to_load(
    config: LRScheduleConfig,
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, Sequence[str]],
    read: Callable[[], list[dict[str, Any]]],
) -> list[dict[str, Any]] | None:
    """Returns the checkpoint's options of each of the optimizer's groups; None if the options of
    this run apply.

    Args:
        names: the names of the loaded parameters.
        read: reads the saved parameter groups; only called if they are requested.
    """
    if not config.use_checkpoint_opt_param_scheduler:
        return None

    saved = read()
    known = {option for group in optimizer.param_groups for option in group} - _NEVER_TAKEN
    named = {option for group in saved for option in group}.difference(IDENTITIES)
    unknown = named - known - _NEVER_TAKEN
    if unknown:
        logger.warning(
            "the checkpoint's optimizer options %s are left out: %s does not have them",
            ", ".join(sorted(unknown)),
            type(optimizer).__name__,
        )

    wanted = [{option: group[option] for option in group if option in known} for group in saved]
    found = []
    matched = match_param_groups(optimizer, names, wanted)
    for number, (group, options) in enumerate(zip(optimizer.param_groups, matched, strict=True)):
        # Groups need not have the same options.
        found.append({option: value for option, value in options.items() if option in group})
        for option, value in found[-1].items():
            if str(value) != str(group[option]):
                text = "parameter group %d: %s is %s, as in the checkpoint, not %s"
                logger.info(text, number, option, value, group[option])

    return found


def rng_to_load(
    checkpoint: ReadableCheckpoint, device: Device, flags: CheckpointConfig
) -> dict[str, torch.Tensor] | None:
    """Returns this rank's checked random states; None if they are not requested, or from another
    number of ranks.

    Raises:
        CheckpointDamagedError: if their bytes do not match their digests.
        CheckpointError: if they are not states of these generators.
    """
    if flags.finetune or not flags.load_rng:
        return None

    keys = [key for key in checkpoint.tensors if not is_skipped(key, flags.load_skip_keys)]
    found = [match for key in keys if (match := RNG_KEY.fullmatch(key))]
    saved = {(int(match[1]), match[2]) for match in found}

    own, num_ranks = rng_state(device), dist.get_world_size()
    ranks, kinds = {rank for rank, _ in saved}, {kind for _, kind in saved}
    if saved != {(rank, kind) for rank in range(num_ranks) for kind in own}:
        logger.info(
            "the checkpoint has random states of %s (%s), this run wants %d (%s): "
            "dropout continues with new ones",
            counted(len(ranks), "rank"),
            ", ".join(sorted(kinds)) or "none",
            num_ranks,
            ", ".join(sorted(own)),
        )
        return None

    prefix = f"rng.{dist.get_rank()}."
    states = {kind: _read_like(checkpoint, f"{prefix}{kind}", like) for kind, like in own.items()}
    try:
        check_rng_state(states, own)
    except ValueError as failure:
        message = f"Expected random states {prefix}* in {checkpoint.path}, got: {failure}"
        raise CheckpointError(message) from None

    return states


def _schedule(
    config: LRScheduleConfig,
    own: LRSchedule,
    info: RecoverInfo,
    source: str,
) -> LRSchedule:
    """Returns this run's schedule or the checkpoint's. ConfigError if no flag chooses."""
    if config.override_opt_param_scheduler:
        return own
    try:
        saved = LRSchedule.from_state(info.schedule)
    except ValueError as failure:
        message = f"Expected the schedule of a run in {source}, got: {failure}"
        raise CheckpointError(message) from None

    if saved == own:
        return own
    if config.use_checkpoint_opt_param_scheduler:
        logger.info("the learning rate follows the checkpoint's %s, not this run's %s", saved, own)
        return saved

    differences = ", ".join(
        f"{name} {saved_value} (checkpoint) and {own.state()[name]} (this run)"
        for name, saved_value in saved.state().items()
        if saved_value != own.state()[name]
    )
    raise ConfigError(
        f"Expected the learning-rate schedule of the checkpoint, got {differences}. Choose with "
        "--override-opt-param-scheduler (this run's) or --use-checkpoint-opt-param-scheduler."
    )


def _loss_scaler(own: LossScaler | None, info: RecoverInfo, source: str) -> LossScaler | None:
    """Returns this run's scaler in the checkpoint's state, if both runs have one."""
    if own is None or info.loss_scaler is None:
        return own
    try:
        return own.from_state(info.loss_scaler)
    except ValueError as failure:
        message = f"Expected the state of a loss scaler in {source}, got: {failure}"
        raise CheckpointError(message) from None


def _read_like(checkpoint: ReadableCheckpoint, key: str, own: torch.Tensor) -> torch.Tensor:
    """Reads a tensor. CheckpointError if its dtype or shape differs from `own`."""
    saved = checkpoint.tensors[key]
    if (saved.dtype, saved.shape) == (own.dtype, tuple(own.shape)):
        return read_piece(checkpoint, key, Box.whole(own.shape))
    raise CheckpointError(
        f"Expected {key} in {checkpoint.path} to be {own.dtype} of shape {tuple(own.shape)}, got "
        f"{saved.dtype} of shape {saved.shape}."
    )
