"""The state that a run's checkpoint covers: model, optimizer, schedule, random generators and
counters; and how it is saved.
"""

from __future__ import annotations

import logging
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, CheckpointConfig
from megatron.core.dist_checkpointing.dcp.torch_dcp import save_checkpoint
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import MARKER_FILE, METADATA_FILE
from megatron.core.dist_checkpointing.format.names import checkpoint_name, iteration_of
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import (
    TRACKER_FILE,
    open_store,
    published_iterations,
)
from megatron.core.files import reason_of, remove_empty_folder
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.lr_schedule import LRSchedule
from megatron.core.options import ConfigError
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.rng import rng_state
from megatron.training.step import StepInfo

logger = logging.getLogger(__name__)


@dataclass
class RunState:
    """The state that a checkpoint covers.

    Attributes:
        torn: the parts, weights and states, into which a load has read something, but not all.
    """

    model: nn.Module
    optimizer: DistributedOptimizer
    schedule: LRSchedule
    step_info: StepInfo
    torn: set[str] = field(default_factory=set)

    def info(
        self,
        *,
        data: Mapping[str, Any] | None = None,
        logger: Mapping[str, Any] | None = None,
        evaluator: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> RecoverInfo:
        """The plain data of a checkpoint that is saved now. The arguments are the parts that other
        components of the run provide, empty by default.
        """
        scaler = self.optimizer.loss_scaler
        return RecoverInfo(
            self.step_info,
            self.schedule.state(),
            None if scaler is None else scaler.state(),
            data=dict(data or {}),
            logger=dict(logger or {}),
            evaluator=dict(evaluator or {}),
            world_size=dist.get_world_size(),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            config=dict(config or {}),
        )

    def contents(self, device: Device, *, with_optim: bool, with_rng: bool = True) -> Contents:
        """The contents of an `fsdp_dtensor` checkpoint of it."""
        # Each rank writes a file with its states.
        states = rng_state(device) if with_rng else {}
        return collect(
            self.model,
            self.optimizer.optimizer,
            with_states=with_optim,
            private={f"rng.{kind}": tensor for kind, tensor in states.items()},
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def tensors(self, device: Device, *, with_optim: bool, with_rng: bool = True) -> dict[str, Any]:
        """The contents of a `torch_dcp` checkpoint of it."""
        state = DCPState(self.model, self.optimizer.optimizer if with_optim else None).state_dict()
        if not with_rng:
            return state
        return {**state, "rng": {str(dist.get_rank()): rng_state(device)}}


def save_torch_dcp(
    root: str,
    state: RunState,
    device: Device,
    info: RecoverInfo,
    *,
    with_optim: bool,
    name: str | None = None,
) -> float:
    """Publishes a `torch_dcp` checkpoint of the present state. Called by all ranks together.

    Args:
        root: a directory of the file system.
        name: the name of the checkpoint directory; default: the iteration's name, for the
            checkpoints of a run.

    Returns:
        The seconds it took.
    """
    start = time.perf_counter()
    tensors = state.tensors(device, with_optim=with_optim, with_rng=name is None or with_optim)
    folder = save_checkpoint(
        open_store(root).root, state.step_info.iteration, tensors, info.to_plain(), name=name
    )
    seconds = time.perf_counter() - start
    logger.info("saved checkpoint %s in %.2f s", folder, seconds)
    return seconds


def save_once(
    path: str, state: RunState, device: Device, *, with_optim: bool, ckpt_format: str
) -> None:
    """Saves a checkpoint that is not one of a run's to this path, and waits for it. Called by all
    ranks together.

    Raises:
        CheckpointError: on all ranks, if it could not be saved, or the path exists.
        ValueError: for the name of a run's checkpoint, or a path that the format cannot use.
    """
    root, name = split_path(path)
    if iteration_of(name) is not None:
        raise ValueError(f"Expected a name other than iter_N, which runs write, got {path!r}.")

    store = open_store(root)
    if ckpt_format != FSDP_DTENSOR and not store.is_rename_atomic:
        raise ValueError(
            f"Expected a directory of a file system for {ckpt_format} checkpoints, got {path!r}."
        )

    def prepare() -> str:
        if store.is_rename_atomic:
            remove_empty_folder(Path(store.root) / name)
        if store.exists(name):
            raise CheckpointError(
                f"Expected {path} to be missing or empty, got files. Checkpoints are never "
                "overwritten."
            )
        for abandoned in store.folders():
            if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]+\.saving", abandoned):
                store.remove(abandoned)  # an earlier save to this path was killed
        return secrets.token_hex(8)

    token = on_first_rank(prepare, f"preparing {path}")
    state.optimizer.synchronize()
    if ckpt_format != FSDP_DTENSOR:
        save_torch_dcp(root, state, device, state.info(), with_optim=with_optim, name=name)
        return

    def save() -> None:
        contents = state.contents(device, with_optim=with_optim, with_rng=with_optim)
        with CheckpointManager(
            store, device, dist.get_rank(), dist.get_world_size(), token
        ) as manager:
            manager.save(state.step_info.iteration, contents, state.info().to_plain(), name=name)
            manager.finish()

    on_all_ranks(save)


def split_path(path: str) -> tuple[str, str]:
    """(the directory that contains a checkpoint, its name). ValueError for a path without both."""
    root, _, name = str(path).rstrip("/").rpartition("/")
    if not name or name in (".", "..") or root.endswith(":/"):
        raise ValueError(f"Expected the path of a checkpoint's directory, got {path!r}.")
    return root or ("/" if str(path).startswith("/") else "."), name


def make_save_folder(root: str) -> None:
    """Creates the directory of `--save`, on one rank. ConfigError if it is not writable."""
    store = open_store(root)
    if store.is_rename_atomic:
        try:
            Path(store.root).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=store.root):
                pass
        except OSError as failure:
            raise ConfigError(
                f"--save: expected a writable directory, got {root} ({reason_of(failure)})."
            ) from None


def check_save_folder(
    config: CheckpointConfig, start_iteration: int, damaged: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Prepares the directory of `--save` for a run. Called by all ranks together, before training.

    Args:
        damaged: paths of checkpoints that were skipped as damaged. Checkpoints among them that are
            in the directory of `--save` are set aside, since the run will save the same iterations
            again.

    Returns:
        The paths that were set aside, each with a sentence with the checkpoint's new place.

    Raises:
        ConfigError: if it contains checkpoints that this run would overwrite.
    """
    root = config.save
    if root is None:
        return []

    def set_aside() -> list[list[str]]:
        store = open_store(root)
        newer = [it for it in published_iterations(store) if it > start_iteration]
        intact = [it for it in newer if checkpoint_path(root, it) not in damaged]
        if intact:
            raise ConfigError(
                "--save: expected a directory without checkpoints beyond iteration "
                f"{start_iteration}, where this run starts, got {intact} in {root}. Load the "
                "newest with --load, or save elsewhere."
            )

        if newer:
            # First: the tracker must not name a missing checkpoint.
            store.write(TRACKER_FILE, f"{start_iteration}\n".encode())
        done = []
        for iteration in newer:
            aside = store.set_aside(checkpoint_name(iteration))
            where = "is deleted" if aside is None else f"is set aside as {store.root}/{aside}"
            sentence = f"the damaged checkpoint of iteration {iteration} {where}"
            logger.warning("%s", sentence)
            done.append([checkpoint_path(root, iteration), sentence])
        return done

    return [(path, what) for path, what in on_first_rank(set_aside, f"preparing {root}")]


def place_of(root: str) -> str:
    """The canonical name of a directory of checkpoints."""
    store = open_store(root)
    return str(Path(store.root).resolve()) if store.is_rename_atomic else store.root


def checkpoint_path(root: str, iteration: int) -> str:
    """The canonical path of an iteration's checkpoint, which events and relaunches use."""
    return f"{place_of(root)}/{checkpoint_name(iteration)}"


def named_checkpoint(root: str) -> tuple[str, str] | None:
    """(directory, name) if `root` is a checkpoint; None if it is a directory of checkpoints."""
    store = open_store(root)
    if not any(store.exists(file) for file in (MARKER_FILE, METADATA_FILE)):
        return None
    return split_path(place_of(root))
