"""Loading a checkpoint: the choice of one, the checks, and the fallback from a damaged one.

All ranks first agree that a checkpoint fits, and then read its tensors into place. At the start of
a run, tensors are verified as they arrive: if one is damaged, an older checkpoint overwrites them,
or the run ends. An engine that has made steps must keep its state: all data is read and verified
first, and then read again.

Data that the flags do not request is not read, so it is never a reason to reject a checkpoint. With
`--finetune`, any directory that has the model's weights is accepted, and so is any schedule or
optimizer option that this run replaces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP, CheckpointConfig
from megatron.core.dist_checkpointing.dcp.torch_dcp import (
    MODEL_PREFIX,
    TorchDcpCheckpoint,
    check_steps,
    dcp_param_groups,
    frozen_changes,
    load_model_weights,
    load_tensors,
    weight_keys,
)
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint, read_train_state
from megatron.core.dist_checkpointing.load.reader import (
    Wanted,
    check_contents,
    check_data,
    is_skipped,
    load_entries,
)
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS, check_param_groups
from megatron.core.dist_checkpointing.store import (
    Store,
    latest_iteration,
    open_store,
    path_of,
    published_iterations,
)
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError, expect, given_options, options_of
from megatron.training.checkpoint.load_extras import (
    RNG_KEY,
    Extras,
    RunData,
    options_to_load,
    rng_to_load,
)
from megatron.training.checkpoint.run_info import RecoverInfo, no_run_error
from megatron.training.checkpoint.run_state import RunState, named_checkpoint, place_of
from megatron.training.step import StepResult

logger = logging.getLogger(__name__)


# The flags of parts that are not loaded.
_LEAVE_OUT = ("load_optim", "load_rng", "load_skip_keys")


class Loaded(NamedTuple):
    """A checkpoint that was loaded, or a kept host state that was restored.

    Attributes:
        path: the checkpoint's path; None for a kept host state.
        info: the plain data of its run; None if only weights were requested.
        damaged: paths of newer checkpoints that were skipped as damaged.
        unreported: the result of the last step, if that was not reported, evaluated and saved yet.
        failed_at: of a kept host state: when the first rank had died, in seconds since 1970.
    """

    path: str | None
    info: RecoverInfo | None
    damaged: list[str]
    unreported: StepResult | None = None
    failed_at: float | None = None


def load_run(
    config: CheckpointConfig,
    schedule: LRScheduleConfig,
    state: RunState,
    device: Device,
    *,
    resumes: bool = False,
    known_damage: Mapping[str, str] | None = None,
    on_damage: Callable[[str, str], None] = lambda _path, _reason: None,
) -> Loaded | None:
    """Loads the checkpoint of `--load` into `state`, in place. Called by all ranks together.

    A damaged checkpoint is skipped, with an error in the log, for the one before it, unless
    `--ckpt-step` or `--load` names exactly this checkpoint.

    Args:
        schedule: determines whose schedule and optimizer options apply where the checkpoint's
            differ.
        resumes: whether the checkpoints are from this run itself. Flags that leave out a part then
            apply once: not to a checkpoint of a start with the same flags.
        known_damage: reasons, by path, of checkpoints that were found damaged before; they are not
            read again.
        on_damage: called with the path and the reason of each checkpoint that is found damaged.

    Returns:
        None if no checkpoint exists, which `--exit-on-missing-checkpoint` makes an error.

    Raises:
        CheckpointError: for a checkpoint that exists but cannot be loaded. If it, or a newer one,
            is damaged, tensors of `state` may have been overwritten in part: the run must end.
            Options, schedule, counters and random states are unchanged.
        ConfigError: if a required checkpoint is missing, or its schedule differs from this run's.
    """
    load = config.load
    if load is None:
        return None
    root, wanted = on_first_rank(
        lambda: _wanted(config, load), f"looking for checkpoints in {load}"
    )
    store = open_store(root)
    if not wanted:
        return None

    damaged: dict[str, str] = {}
    for name in wanted:
        path = f"{place_of(root)}/{name}"
        reason = (known_damage or {}).get(path)
        if reason is None:
            try:
                flags = _unless_held_before(config, store, name) if resumes else config
                info = load_checkpoint(
                    flags, schedule, state, device, store, name, checks_first=False
                )
                _log_loaded(f"{root}/{name}", info, state)
                return Loaded(path, info, list(damaged))
            except CheckpointDamagedError as failure:
                reason = str(failure)
                on_damage(path, reason)
        if dist.get_rank() == 0:
            logger.error("DAMAGED: checkpoint %s/%s is passed over. %s", root, name, reason)
        damaged[path] = reason

    raise CheckpointError(
        f"Expected a checkpoint in {root} that is whole, got: {next(iter(damaged.values()))}"
    )


def _unless_held_before(config: CheckpointConfig, store: Store, name: str) -> CheckpointConfig:
    """Returns the flags without the ones that leave out a part and were also set when the
    checkpoint was saved: leaving it out again would lose its training.
    """

    def read() -> list[str]:
        saved = read_train_state(store, name).get("config")
        saved = saved if isinstance(saved, dict) else {}
        own = {name: getattr(config, name) for name in _LEAVE_OUT}
        own["load_skip_keys"] = list(config.load_skip_keys)
        return [name for name, value in own.items() if saved.get(name) == value]

    is_given = {field.name: field for field in given_options(config) if field.name in _LEAVE_OUT}
    if not is_given:
        return config
    held = on_first_rank(read, f"reading the flags of the run that saved {name}")
    for flag, field in is_given.items():
        logger.info(
            "%s does not hold for %s: the start that saved it had it, too. --load %s obeys it again"
            if flag in held
            else "%s holds for %s, which the run resumes from (--load %s would obey it every time)",
            field.flag_for(getattr(config, flag)),
            path_of(store, name),
            store.root,
        )
    defaults = {field.name: field.default for field in options_of(CheckpointConfig)}
    return replace(config, **{name: defaults[name] for name in held})


def _log_loaded(path: str, info: RecoverInfo | None, state: RunState) -> None:
    logger.info(
        "loaded %s %s; this run starts after iteration %d and %d samples",
        "the weights of" if info is None else "checkpoint",
        path,
        state.step_info.iteration,
        state.step_info.consumed_samples,
    )


def load_weights(store: Store, name: str, model: nn.Module) -> None:
    """Loads only a checkpoint's model into `model`, in place. Needs no process group."""
    if format_of(store, name) == FSDP_DTENSOR:
        checkpoint, contents = PublishedCheckpoint.open(store, name), collect(model)
        load_entries(
            checkpoint, contents, check_contents(checkpoint, contents, ("optimizer.*", "rng.*"))
        )
        return
    _local_path(store, name)
    load_model_weights(TorchDcpCheckpoint.open(store, name), model)


def load_checkpoint(
    config: CheckpointConfig,
    schedule: LRScheduleConfig,
    state: RunState,
    device: Device,
    store: Store,
    name: str,
    *,
    checks_first: bool = True,
) -> RecoverInfo | None:
    """Loads one checkpoint of either format into `state`, in place. Called by all ranks together.

    Args:
        checks_first: whether `state` must stay unchanged if the checkpoint is damaged. All data is
            then read twice: to check it, and to put it into place. `torch_dcp` always does so.

    Returns:
        The plain data of its run; None if `config` requests only weights.

    Raises:
        CheckpointDamagedError: without `checks_first`, tensors of `state` may have been overwritten
            in part; `state.torn` names them until another checkpoint overwrites all of them.
        CheckpointError, ConfigError: `state` has not been changed, unless a file that could be read
            a moment ago could not be read again.
    """
    found = on_first_rank(lambda: format_of(store, name), f"looking at {name}")
    load = _Load(config, schedule, state, device, store, name, checks_first)
    return load.fsdp_dtensor() if found == FSDP_DTENSOR else load.torch_dcp()


def _wanted(config: CheckpointConfig, load: str) -> list[Any]:
    """[the directory of checkpoints, the names to try, in order]; the names may be empty.

    A list, since ranks exchange JSON.
    """
    named = named_checkpoint(load)
    if named is not None:
        root, name = named
        several = "a directory of checkpoints as --load"
        expect(config.ckpt_step is None, "--ckpt-step", several, load)
        return [root, [name]]

    store = open_store(load)
    published = published_iterations(store)
    if config.ckpt_step is not None:
        if config.ckpt_step not in published:
            raise ConfigError(
                f"--ckpt-step: expected one of {published}, which are in {store.root}, got "
                f"{config.ckpt_step}."
            )
        return [load, [checkpoint_name(config.ckpt_step)]]

    newest = latest_iteration(store)
    if newest is None and config.exit_on_missing_checkpoint:
        raise ConfigError(
            f"--load: expected a checkpoint in {store.root}, got none, and "
            "--exit-on-missing-checkpoint is set."
        )

    return [load, [checkpoint_name(iteration) for iteration in reversed(published)]]


@dataclass(frozen=True)
class _Load:
    """One checkpoint, and the flags that select parts of it."""

    flags: CheckpointConfig
    schedule: LRScheduleConfig
    state: RunState
    device: Device
    store: Store
    name: str
    checks_first: bool

    @property
    def with_states(self) -> bool:
        """Whether the flags request the optimizer's states."""
        return self.flags.load_optim and not self.flags.finetune

    def fsdp_dtensor(self) -> RecoverInfo | None:
        """Loads a checkpoint in the `fsdp_dtensor` format. Returns the plain data of its run."""
        flags, store, name = self.flags, self.store, self.name

        def open_it() -> tuple[PublishedCheckpoint, RunData | None]:
            checkpoint = PublishedCheckpoint.open(
                store,
                name,
                verify=flags.verify_checkpoint,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
            )
            return checkpoint, self._run_data(lambda: checkpoint.train_state)

        checkpoint, run = on_all_ranks(open_it)
        contents = collect(
            self.state.model,
            self.state.optimizer.optimizer,
            with_states=self.with_states,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

        def check() -> tuple[Wanted, Extras]:
            # Random states and options are read separately, if they are wanted.
            states = PARAM_GROUPS if self.with_states else "optimizer.*"
            skip = [*flags.load_skip_keys, "rng.*", states]
            wanted = check_contents(checkpoint, contents, skip, flags.dist_ckpt_strictness)
            options = self._options_of(checkpoint, contents, wanted)
            extras = Extras(run, options, rng_to_load(checkpoint, self.device, flags))
            if self.checks_first and flags.verify_checkpoint:
                check_data(checkpoint, wanted)
            return wanted, extras

        wanted, extras = on_all_ranks(check)
        # Without that check, only another checkpoint or the end of the run may follow an error.
        parts = {"weights", "states"} if self.with_states else {"weights"}
        self.state.torn |= parts
        on_all_ranks(lambda: load_entries(checkpoint, contents, wanted))
        self.state.torn -= parts
        extras.install(self.state, self.device)
        return None if run is None else run.info

    def _options_of(
        self, checkpoint: PublishedCheckpoint, contents: Contents, wanted: Wanted
    ) -> list[dict[str, Any]] | None:
        if not self.with_states or is_skipped(PARAM_GROUPS, self.flags.load_skip_keys):
            return None

        loaded = {entry.key for entry in wanted.entries}
        fresh = {id(parameter) for parameter in wanted.fresh}
        names = {
            parameter: own
            for parameter, own in contents.names.items()
            if id(parameter) not in fresh and all(f"model.{name}" in loaded for name in own)
        }

        return options_to_load(
            self.schedule,
            self.state.optimizer.optimizer,
            names,
            lambda: check_param_groups(checkpoint.read_plain(PARAM_GROUPS), checkpoint.path),
        )

    def torch_dcp(self) -> RecoverInfo | None:
        """Loads a checkpoint in PyTorch DCP's format. Returns the plain data of its run."""
        path = _local_path(self.store, self.name)
        for field in given_options(self.flags):
            expect(
                field.name not in ("load_skip_keys", "dist_ckpt_strictness"),
                field.flag,
                f"a checkpoint of the format {FSDP_DTENSOR}",
                f"{path}, which is {TORCH_DCP}",
            )

        model = self.state.model
        app = DCPState(model, self.state.optimizer.optimizer if self.with_states else None)
        tensors = app.state_dict()
        checkpoint, extras = on_all_ranks(lambda: self._check_torch_dcp(tensors))
        if self.with_states:
            # PyTorch installs states and options together. These options are this run's: the
            # checkpoint's are not read here.
            own_groups = tensors["optim"].pop("param_groups")
            ignored = ("rng.", "optim.param_groups.")
            frozen = [f"{MODEL_PREFIX}{name}" for name in app.frozen]
            changes = load_tensors(checkpoint, tensors, ignored, frozen)
            tensors["optim"]["param_groups"] = own_groups
            app.load_state_dict(tensors)
            app.reset_states(changes.fresh)
        else:
            load_model_weights(checkpoint, model)

        extras.install(self.state, self.device)
        return None if extras.run is None else extras.run.info

    def _check_torch_dcp(self, tensors: dict[str, Any]) -> tuple[TorchDcpCheckpoint, Extras]:
        flags, model = self.flags, self.state.model
        checkpoint = TorchDcpCheckpoint.open(
            self.store, self.name, checks_crc=flags.verify_checkpoint
        )
        run = self._run_data(lambda: _train_state(self.store, self.name, checkpoint))

        # Data that the flags do not request may be damaged, or in a form of another program.
        keys = None
        if not self.with_states:
            keys = weight_keys(checkpoint, model)
            keys.update(key for key in checkpoint.keys if RNG_KEY.fullmatch(key))
        if flags.verify_checkpoint:
            checkpoint.check(keys, rank=dist.get_rank(), world_size=dist.get_world_size())

        options = None
        if self.with_states:
            check_steps(checkpoint)
            fresh = frozen_changes(checkpoint, tensors).fresh
            names: dict[torch.Tensor, list[str]] = {
                parameter: [name]
                for name, parameter in model.named_parameters()
                if name not in fresh
            }
            options = options_to_load(
                self.schedule,
                self.state.optimizer.optimizer,
                names,
                lambda: dcp_param_groups(checkpoint),
            )

        return checkpoint, Extras(run, options, rng_to_load(checkpoint, self.device, flags))

    def _run_data(self, train_state: Callable[[], dict[str, Any]]) -> RunData | None:
        """The plain data of the checkpoint's run; None if the flags request only weights."""
        if self.flags.finetune:
            return None
        return RunData.read(
            self.flags, self.schedule, self.state, train_state(), self.store, self.name
        )


def _local_path(store: Store, name: str) -> str:
    if not store.is_rename_atomic:
        raise CheckpointError(
            f"Expected {TORCH_DCP} checkpoints in a directory of a file system, got {store.root}."
        )
    return path_of(store, name)


def _train_state(store: Store, name: str, checkpoint: TorchDcpCheckpoint) -> dict[str, Any]:
    """The plain data of a `torch_dcp` checkpoint. CheckpointError if the directory has none."""
    # A run's checkpoint that has lost the file is damaged; its random states identify it.
    is_ours = any(RNG_KEY.fullmatch(key) for key in checkpoint.keys)
    if not is_ours and not store.exists(f"{name}/{TRAIN_STATE_FILE}"):
        reason = f"it has no {TRAIN_STATE_FILE}, like all that torch.distributed.checkpoint saves"
        raise no_run_error(path_of(store, name), reason)
    return read_train_state(store, name)
