"""Loading a run's checkpoint: which one, what must fit, and what happens to one that is damaged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from megatron.core.dist_checkpointing.reader import check_contents, is_skipped, load_entries
from megatron.core.dist_checkpointing.small_files import read_train_state
from megatron.core.dist_checkpointing.state import DCPState
from megatron.core.dist_checkpointing.store import Store, open_store
from megatron.core.dist_checkpointing.torch_dcp import load_tensors, read_metadata
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.options import ConfigError, expect
from megatron.training.checkpointing import FORMAT_VERSION, Progress, RunState, private_rng, rng_entry
from megatron.training.config import RunConfig
from megatron.training.rng import rng_state, set_rng_state

logger = logging.getLogger(__name__)

# Settings that may differ between a checkpoint and the run that loads it without a word.
_UNREMARKABLE = {
    "save",
    "load",
    "ckpt_format",
    "async_save",
    "metrics_jsonl",
    "tensorboard_dir",
    "progress_bar",
    "log_interval",
    "exit_interval",
}


def load_run(config: RunConfig, state: RunState, device: Device) -> list[int] | None:
    """Loads the checkpoint that `--load` asks for into `state`, in place. Called by all ranks together.

    One that turns out to be damaged is passed over, loudly, for the one before it, unless `--ckpt-step` names it.

    Returns:
        The iterations of damaged checkpoints that were passed over; None if there is no checkpoint at all, which
        `--exit-on-missing-checkpoint` makes an error.

    Raises:
        CheckpointError: for a checkpoint that is there but cannot be loaded; `state` has not been changed unless a
            data file turned out to be unreadable or damaged, and no earlier checkpoint was whole.
        ConfigError: if there is none and there must be, or its schedule differs from this run's.
    """
    checkpoint, root = config.checkpoint, config.checkpoint.load
    if root is None:
        return None
    store = open_store(root)
    wanted = on_first_rank(lambda: _wanted_iterations(checkpoint, store), f"looking for checkpoints in {root}")
    if not wanted:
        logger.info("no checkpoint found in %s, starting from the beginning", root)
        return None
    damaged: dict[int, CheckpointDamagedError] = {}
    for iteration in wanted:
        name = checkpoint_name(iteration)
        try:
            train_state = _load_any(config, state, device, store, name)
        except CheckpointDamagedError as failure:
            logger.error("DAMAGED: checkpoint %s/%s is passed over. %s", root, name, failure)
            damaged[iteration] = failure
            continue
        if not checkpoint.finetune:
            _report_differences(config, train_state)
        logger.info(
            "loaded checkpoint %s/%s; this run begins after iteration %d and %d samples",
            root,
            name,
            state.progress.iteration,
            state.progress.consumed_samples,
        )
        return list(damaged)
    newest = damaged[wanted[0]]
    raise CheckpointError(f"Expected a checkpoint in {root} that is whole, got: {newest}") from newest


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


def _load_any(config: RunConfig, state: RunState, device: Device, store: Store, name: str) -> dict[str, Any]:
    """Loads one checkpoint of either format. Returns its `train_state.json`."""
    if on_first_rank(lambda: format_of(store, name), f"looking at {name}") == FSDP_DTENSOR:
        return _load_fsdp_dtensor(config, state, device, store, name)
    return _load_torch_dcp(config, state, device, store, name)


class _Plain(NamedTuple):
    """What of a checkpoint is plain data, read and checked; installed once the tensors are there."""

    progress: Progress
    schedule: LRSchedule
    loss_scaler: LossScaler | None
    loads_optimizer: bool

    @classmethod
    def read(cls, config: RunConfig, state: RunState, train_state: dict[str, Any], folder: str) -> _Plain:
        """CheckpointError, ConfigError for what cannot be taken over; `state` stays as it is."""
        checkpoint = config.checkpoint
        progress, schedule = _progress(train_state, folder), state.schedule
        if not checkpoint.finetune:
            schedule = _schedule(config.schedule, state.schedule, train_state, folder)
        loads_optimizer = checkpoint.load_optim and not checkpoint.finetune
        scaler = state.optimizer.loss_scaler
        if loads_optimizer:
            scaler = _loss_scaler(scaler, train_state, folder)
        return cls(progress, schedule, scaler, loads_optimizer)

    def install(self, config: RunConfig, state: RunState) -> None:
        state.optimizer.loss_scaler = self.loss_scaler
        if not config.checkpoint.finetune:
            state.schedule = self.schedule
            vars(state.progress).update(vars(self.progress))


def _load_fsdp_dtensor(config: RunConfig, state: RunState, device: Device, store: Store, name: str) -> dict[str, Any]:
    flags, optimizer = config.checkpoint, state.optimizer.optimizer
    checkpoint = on_all_ranks(lambda: PublishedCheckpoint.open(store, name, verify=flags.verify_checkpoint))
    plain = _Plain.read(config, state, checkpoint.train_state, checkpoint.path)
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
        if PARAM_GROUPS not in contents.plain or is_skipped(PARAM_GROUPS, skip):
            return entries, None
        loaded = {entry.key for entry in entries}
        names = {p: own for p, own in contents.names.items() if all(f"model.{name}" in loaded for name in own)}
        saved: Any = checkpoint.read_plain(PARAM_GROUPS)
        return entries, match_param_groups(optimizer, names, saved)

    entries, options = on_all_ranks(check)
    on_all_ranks(lambda: load_entries(checkpoint, contents, entries))
    if options is not None:
        with _own_constants(optimizer):
            install_options(optimizer, options)
    plain.install(config, state)
    if own_rng is not None:
        set_rng_state(device, own_rng)
    return checkpoint.train_state


def _load_torch_dcp(config: RunConfig, state: RunState, device: Device, store: Store, name: str) -> dict[str, Any]:
    if not store.is_rename_atomic:
        raise CheckpointError(f"Expected {TORCH_DCP} checkpoints in a folder of a file system, got {store.root}.")
    checkpoint, folder = config.checkpoint, Path(store.root) / name
    for flag, is_given in (
        ("--load-skip-keys", bool(checkpoint.load_skip_keys)),
        ("--dist-ckpt-strictness", checkpoint.dist_ckpt_strictness != "raise_all"),
    ):
        expect(not is_given, flag, f"a checkpoint of the format {FSDP_DTENSOR}", f"{folder}, which is {TORCH_DCP}")
    train_state = read_train_state(store, name)
    # Read and checked first, installed last: a refusal must leave the run as it was.
    plain = _Plain.read(config, state, train_state, str(folder))
    app = DCPState(state.model, state.optimizer.optimizer if plain.loads_optimizer else None)
    tensors = app.state_dict()
    metadata = read_metadata(folder)
    own_rng = None if checkpoint.finetune or not checkpoint.load_rng else _saved_rng(metadata, device)
    if own_rng is not None:
        tensors |= rng_entry(own_rng)
    load_tensors(folder, metadata, tensors, ("rng.",) if plain.loads_optimizer else ("rng.", "optim."))
    with _own_constants(state.optimizer.optimizer):
        app.load_state_dict(tensors)
    plain.install(config, state)
    if own_rng is not None:
        set_rng_state(device, own_rng)
    return train_state


@contextmanager
def _own_constants(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What the flags say of weight decay, betas and the like holds; a checkpoint's groups would silently undo it."""
    constants = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    yield
    for group, own_constants in zip(optimizer.param_groups, constants, strict=True):
        group.update(own_constants)


def _progress(train_state: dict[str, Any], folder: str) -> Progress:
    if train_state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected format version {FORMAT_VERSION} in {folder}, got {train_state.get('format_version')!r}."
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


def _report_differences(config: RunConfig, train_state: dict[str, Any]) -> None:
    saved, own = train_state.get("config", {}), config.values()
    for name in own:
        if name not in _UNREMARKABLE and name in saved and saved[name] != own[name]:
            logger.info("resuming with another %s: %s in the checkpoint, %s now", name, saved[name], own[name])
