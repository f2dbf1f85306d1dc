"""Loading a run's checkpoint: which one, what must fit, and what happens to one that is damaged.

A load is a transaction: everything is read and checked first, on all ranks, then installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.collect import PARAM_GROUPS, collect, install_options, match_param_groups
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP, CheckpointConfig
from megatron.core.dist_checkpointing.entries import Entry
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.folders import checkpoint_name, latest_iteration, published_iterations
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.published import PublishedCheckpoint
from megatron.core.dist_checkpointing.reader import check_contents, check_data, is_skipped, load_entries
from megatron.core.dist_checkpointing.small_files import read_train_state
from megatron.core.dist_checkpointing.state import DCPState
from megatron.core.dist_checkpointing.store import Store, open_store
from megatron.core.dist_checkpointing.torch_dcp import check_files, load_tensors, read_metadata
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.options import ConfigError, expect
from megatron.training.checkpointing import RunState, checkpoint_path, private_rng, rng_entry
from megatron.training.recover_info import RecoverInfo
from megatron.training.rng import rng_state, set_rng_state

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What a load has come to.

    Attributes:
        path: of the checkpoint.
        info: what it says of its run; `state` has taken over what its flags ask for.
        damaged: paths of newer checkpoints that were passed over for being damaged.
    """

    path: str
    info: RecoverInfo
    damaged: list[str]


def load_run(
    config: CheckpointConfig,
    schedule: LRScheduleConfig,
    state: RunState,
    device: Device,
    *,
    known_damage: Mapping[str, str] | None = None,
    on_damage: Callable[[str, str], None] | None = None,
) -> Loaded | None:
    """Loads the checkpoint that `--load` asks for into `state`, in place. Called by all ranks together.

    One that turns out to be damaged is passed over, loudly, for the one before it, unless `--ckpt-step` names it.

    Args:
        schedule: says whose schedule holds where the checkpoint's differs.
        known_damage: why checkpoints at these paths are damaged, as was found before: they are not read again.
        on_damage: is told the path and the reason of each that is found to be.

    Returns:
        None if there is no checkpoint at all, which `--exit-on-missing-checkpoint` makes an error.

    Raises:
        CheckpointError: for a checkpoint that is there but cannot be loaded. `state` has not been changed, unless a
            file that could be read a moment ago could not be read again.
        ConfigError: if there is none and there must be, or its schedule differs from this run's.
    """
    root = config.load
    if root is None:
        return None
    store = open_store(root)
    wanted = on_first_rank(lambda: _wanted_iterations(config, store), f"looking for checkpoints in {root}")
    if not wanted:
        return None
    damaged: dict[str, str] = {}
    for iteration in wanted:
        name = checkpoint_name(iteration)
        path = checkpoint_path(root, iteration)
        reason = (known_damage or {}).get(path)
        if reason is None:
            try:
                info = load_checkpoint(config, schedule, state, device, store, name)
            except CheckpointDamagedError as failure:
                reason = str(failure)
                if on_damage is not None:
                    on_damage(path, reason)
            else:
                logger.info(
                    "loaded checkpoint %s/%s; this run begins after iteration %d and %d samples",
                    root,
                    name,
                    state.step_info.iteration,
                    state.step_info.consumed_samples,
                )
                return Loaded(path, info, list(damaged))
        if dist.get_rank() == 0:
            logger.error("DAMAGED: checkpoint %s/%s is passed over. %s", root, name, reason)
        damaged[path] = reason
    raise CheckpointError(f"Expected a checkpoint in {root} that is whole, got: {next(iter(damaged.values()))}")


def load_weights(store: Store, name: str, model: nn.Module) -> None:
    """Loads a checkpoint's model, and nothing else, into `model` in place. Needs no process group."""
    if format_of(store, name) == FSDP_DTENSOR:
        checkpoint, contents = PublishedCheckpoint.open(store, name), collect(model)
        load_entries(checkpoint, contents, check_contents(checkpoint, contents, ("optimizer.*", "rng.*")))
        return
    folder, app = Path(store.root) / name, DCPState(model)
    tensors = app.state_dict()
    load_tensors(folder, read_metadata(folder), tensors, ("rng.", "optim."))
    app.load_state_dict(tensors)


def load_checkpoint(
    config: CheckpointConfig, schedule: LRScheduleConfig, state: RunState, device: Device, store: Store, name: str
) -> RecoverInfo:
    """Loads one checkpoint of either format into `state`, in place. Called by all ranks together.

    Raises:
        CheckpointDamagedError, CheckpointError, ConfigError: as `load_run`.
    """
    found = on_first_rank(lambda: format_of(store, name), f"looking at {name}")
    load = _load_fsdp_dtensor if found == FSDP_DTENSOR else _load_torch_dcp
    return load(config, schedule, state, device, store, name)


def _wanted_iterations(config: CheckpointConfig, store: Store) -> list[int]:
    """The checkpoints to try, in this order; none if there are none."""
    published = published_iterations(store)
    if config.ckpt_step is not None:
        if config.ckpt_step not in published:
            raise ConfigError(
                f"--ckpt-step: expected one of {published}, which are in {store.root}, got {config.ckpt_step}."
            )
        return [config.ckpt_step]
    newest = latest_iteration(store)
    if newest is None and config.exit_on_missing_checkpoint:
        raise ConfigError(
            f"--load: expected a checkpoint in {store.root}, got none, and --exit-on-missing-checkpoint is set."
        )
    return published[::-1]


class _Plain(NamedTuple):
    """What of a checkpoint is plain data, read and checked; installed once the tensors are there."""

    info: RecoverInfo
    schedule: LRSchedule
    loss_scaler: LossScaler | None
    loads_optimizer: bool
    loads_run: bool  # counters and schedule, too

    @classmethod
    def read(
        cls,
        config: CheckpointConfig,
        own: LRScheduleConfig,
        state: RunState,
        train_state: dict[str, Any],
        folder: str,
    ) -> _Plain:
        """CheckpointError, ConfigError for what cannot be taken over; `state` stays as it is."""
        info, schedule = RecoverInfo.from_plain(train_state, folder), state.schedule
        if not config.finetune:
            schedule = _schedule(own, state.schedule, info.schedule)
        loads_optimizer = config.load_optim and not config.finetune
        scaler = state.optimizer.loss_scaler
        if loads_optimizer:
            scaler = _loss_scaler(scaler, info, folder)
        return cls(info, schedule, scaler, loads_optimizer, not config.finetune)

    def install(self, state: RunState) -> None:
        state.optimizer.loss_scaler = self.loss_scaler
        if self.loads_run:
            state.schedule = self.schedule
            vars(state.step_info).update(vars(self.info.step_info))


def _load_fsdp_dtensor(
    flags: CheckpointConfig, schedule: LRScheduleConfig, state: RunState, device: Device, store: Store, name: str
) -> RecoverInfo:
    optimizer = state.optimizer.optimizer
    checkpoint = on_all_ranks(lambda: PublishedCheckpoint.open(store, name, verify=flags.verify_checkpoint))
    plain = on_all_ranks(lambda: _Plain.read(flags, schedule, state, checkpoint.train_state, checkpoint.path))
    own_rng = None
    if not flags.finetune and flags.load_rng:
        own_rng = _saved_rng(checkpoint.metadata, device)
    contents = collect(
        state.model,
        optimizer,
        with_states=plain.loads_optimizer,
        private={} if own_rng is None else private_rng(own_rng),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    skip = [*flags.load_skip_keys, *(() if own_rng is not None else ("rng.*",))]
    if not plain.loads_optimizer:
        skip.append("optimizer.*")

    def check() -> tuple[list[Entry], list[dict[str, Any]] | None]:
        entries = check_contents(checkpoint, contents, skip, flags.dist_ckpt_strictness)
        options = None
        if PARAM_GROUPS in contents.plain and not is_skipped(PARAM_GROUPS, skip):
            loaded = {entry.key for entry in entries}
            names = {p: own for p, own in contents.names.items() if all(f"model.{name}" in loaded for name in own)}
            saved: Any = checkpoint.read_plain(PARAM_GROUPS)
            options = match_param_groups(optimizer, names, saved)
        if flags.verify_checkpoint:
            check_data(checkpoint, entries)
        return entries, options

    entries, options = on_all_ranks(check)
    on_all_ranks(lambda: load_entries(checkpoint, contents, entries))
    if options is not None:
        with _own_constants(optimizer):
            install_options(optimizer, options)
    plain.install(state)
    if own_rng is not None:
        set_rng_state(device, own_rng)
    return plain.info


def _load_torch_dcp(
    flags: CheckpointConfig, schedule: LRScheduleConfig, state: RunState, device: Device, store: Store, name: str
) -> RecoverInfo:
    if not store.is_rename_atomic:
        raise CheckpointError(f"Expected {TORCH_DCP} checkpoints in a folder of a file system, got {store.root}.")
    folder = Path(store.root) / name
    for flag, is_given in (
        ("--load-skip-keys", bool(flags.load_skip_keys)),
        ("--dist-ckpt-strictness", flags.dist_ckpt_strictness != "raise_all"),
    ):
        expect(not is_given, flag, f"a checkpoint of the format {FSDP_DTENSOR}", f"{folder}, which is {TORCH_DCP}")

    def check() -> tuple[_Plain, Metadata]:
        plain = _Plain.read(flags, schedule, state, read_train_state(store, name), str(folder))
        metadata = read_metadata(folder)
        check_files(
            folder,
            metadata,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            checks_data=flags.verify_checkpoint,
        )
        return plain, metadata

    plain, metadata = on_all_ranks(check)
    app = DCPState(state.model, state.optimizer.optimizer if plain.loads_optimizer else None)
    tensors = app.state_dict()
    own_rng = None if flags.finetune or not flags.load_rng else _saved_rng(metadata, device)
    if own_rng is not None:
        tensors |= rng_entry(own_rng)
    load_tensors(folder, metadata, tensors, ("rng.",) if plain.loads_optimizer else ("rng.", "optim."))
    with _own_constants(state.optimizer.optimizer):
        app.load_state_dict(tensors)
    plain.install(state)
    if own_rng is not None:
        set_rng_state(device, own_rng)
    return plain.info


@contextmanager
def _own_constants(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What the flags say of weight decay, betas and the like holds; a checkpoint's groups would silently undo it."""
    constants = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        _take_back(optimizer, constants)


def _take_back(optimizer: torch.optim.Optimizer, constants: list[dict[str, Any]]) -> None:
    for group, own_constants in zip(optimizer.param_groups, constants, strict=True):
        group.update(own_constants)


def _schedule(config: LRScheduleConfig, own: LRSchedule, saved: LRSchedule) -> LRSchedule:
    """This run's schedule or the checkpoint's, as the flags say; ConfigError if they differ and no flag says."""
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
        f"Expected the learning-rate schedule of the checkpoint, got {differences}. "
        "Choose with --override-opt-param-scheduler (this run's) or --use-checkpoint-opt-param-scheduler."
    )


def _loss_scaler(own: LossScaler | None, info: RecoverInfo, folder: str) -> LossScaler | None:
    """This run's scaler as the checkpoint's was; as it is, if the checkpoint's run or this one had none."""
    if own is None or info.loss_scaler is None:
        return own
    try:
        return own.from_state(info.loss_scaler)
    except (AttributeError, ValueError) as failure:
        raise CheckpointError(f"Expected the state of a loss scaler in {folder}, got {failure}.") from None


def _saved_rng(metadata: Metadata, device: Device) -> dict[str, torch.Tensor] | None:
    """Tensors to load this rank's generators into, if the checkpoint has states of as many ranks as run now."""
    keys = metadata.state_dict_metadata
    saved_ranks = {key.split(".")[1] for key in keys if key.startswith("rng.")}
    saved_kinds = {key.split(".", 2)[2] for key in keys if key.startswith("rng.")}
    own = rng_state(device)
    if len(saved_ranks) == dist.get_world_size() and saved_kinds == own.keys():
        return own
    logger.info(
        "the checkpoint has random states of %d ranks (%s), this run wants %d (%s): dropout goes on with fresh ones",
        len(saved_ranks),
        ", ".join(sorted(saved_kinds)) or "none",
        dist.get_world_size(),
        ", ".join(sorted(own)),
    )
    return None
