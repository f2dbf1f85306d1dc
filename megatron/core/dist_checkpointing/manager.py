"""Checkpoint folders: how one is written, published, found and read.

    SAVE/latest_checkpointed_iteration.txt      moves last, atomically
    SAVE/iter_0000010/                          published by rename
    SAVE/iter_0000020.saving/                   in flight or abandoned: never loaded

A checkpoint is PyTorch DCP's files and `train_state.json`, which holds everything that is not a tensor as plain data.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.state import check_tensors
from megatron.core.files import published, sync_folder
from megatron.core.options import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRACKER_FILE = "latest_checkpointed_iteration.txt"
TRAIN_STATE_FILE = "train_state.json"
_FOLDER = re.compile(r"iter_(\d{7,})")


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """The folder of the checkpoint of this iteration."""
    return Path(root) / f"iter_{iteration:07d}"


def published_iterations(root: str | Path) -> list[int]:
    """The iterations of the published checkpoints in `root`, ascending; none if there is no such folder."""
    if not Path(root).is_dir():
        return []
    matches = (_FOLDER.fullmatch(entry.name) for entry in Path(root).iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def latest_iteration(root: str | Path) -> int | None:
    """The newest published checkpoint's iteration, or None if `root` holds nothing of a checkpoint.

    What counts is what has been published. The tracker file may lag by one after a crash between the two; it is for
    people and other programs.

    Raises:
        CheckpointError: if the tracker file is unreadable, or names a checkpoint that is not there. "There is one that
            cannot be found" must not look like "there is none", or a run would begin anew over its own results.
    """
    if Path(root).exists() and not Path(root).is_dir():
        raise CheckpointError(f"Expected a folder of checkpoints at {root}, got a file.")
    published = published_iterations(root)
    tracker = Path(root) / TRACKER_FILE
    if not tracker.exists():
        if published:
            # A crash between the publication of the very first checkpoint and the tracker's.
            logger.warning("%s has no %s; taking its newest checkpoint, %d", root, TRACKER_FILE, published[-1])
        return published[-1] if published else None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(f"Expected an iteration in {tracker}, got {text!r}.")
    if int(text) not in published:
        raise CheckpointError(
            f"Expected {checkpoint_folder(root, int(text))}, which {tracker} names, got checkpoints {published}. "
            "Name one with --ckpt-step, or correct the file."
        )
    if int(text) != published[-1]:
        logger.warning(
            "%s names %s, and %d has been published since; taking that. To go back, use --ckpt-step.",
            tracker,
            text,
            published[-1],
        )
    return published[-1]


def save_checkpoint(root: str | Path, iteration: int, state: dict[str, Any], train_state: dict[str, Any]) -> Path:
    """Writes and publishes a checkpoint. Called by all ranks together; returns its folder.

    Args:
        root: the folder of all checkpoints, made if need be.
        iteration: names the checkpoint.
        state: nested dict of tensors (DTensors stay sharded: each rank writes what it has) and of what DCP pickles.
        train_state: plain data, for `train_state.json`; rank 0's is written.

    Raises:
        CheckpointError: on every rank, if any rank could not write. Nothing has been published then, unless all that
            failed was the tracker file, which comes after.
    """
    folder = checkpoint_folder(root, iteration)
    draft = folder.with_name(folder.name + ".saving")

    def prepare() -> None:
        if folder.exists():
            raise CheckpointError(f"Expected no checkpoint yet at {folder}, got a published one.")
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)

    def publish() -> None:
        _write_durably(draft / TRAIN_STATE_FILE, json.dumps(train_state, indent=1) + "\n")
        draft.rename(folder)
        sync_folder(folder.parent)
        _write_durably(Path(root) / TRACKER_FILE, f"{iteration}\n")

    on_first_rank(prepare, f"preparing {draft}")
    try:
        with _no_word_about_single_process():
            save(state, storage_writer=FileSystemWriter(draft, sync_files=True))
    except CheckpointException as failure:
        raise CheckpointError(f"Expected {draft} to be written, got {_causes(failure)}.") from failure
    on_first_rank(publish, f"publishing {folder}")
    return folder


def read_train_state(folder: Path) -> dict[str, Any]:
    """The plain data of a published checkpoint. CheckpointError if it is not there or not readable."""
    path = folder / TRAIN_STATE_FILE
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as failure:
        raise CheckpointError(
            f"Expected the run's state in {path}, got {type(failure).__name__}: {failure}."
        ) from failure
    if not isinstance(state, dict):
        raise CheckpointError(f"Expected an object in {path}, got {type(state).__name__}.")
    return state


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a published checkpoint. CheckpointError if it is not there or not readable."""
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as failure:  # unpickling a damaged file raises almost anything
        raise CheckpointError(
            f"Expected DCP metadata in {folder / '.metadata'}, got {type(failure).__name__}: {failure}."
        ) from failure


def load_tensors(folder: Path, metadata: Metadata, state: dict[str, Any], ignored_prefixes: tuple[str, ...]) -> None:
    """Reads a published checkpoint into `state`, whose tensors are written in place.

    Args:
        folder: the checkpoint.
        metadata: what `read_metadata(folder)` gave.
        state: a state dict like the one saved; sharding may differ.
        ignored_prefixes: beginnings of keys that may stay unread.

    Raises:
        CheckpointError: before anything is touched if a tensor is missing, unasked for, or of another shape or dtype;
            afterwards only if a file cannot be read.
    """
    check_tensors(str(folder), state, metadata, ignored_prefixes)
    try:
        with _no_word_about_single_process():
            load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as failure:
        raise CheckpointError(f"Expected {folder} to be readable, got {_causes(failure)}.") from failure


@contextmanager
def _no_word_about_single_process() -> Iterator[None]:
    """Without a process group DCP works alone, which is meant so here, and warns of it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def on_first_rank(action: Callable[[], T], what: str) -> T:
    """Runs `action` on rank 0 and gives every rank its result, or its error, so that no two ranks see different files
    and none waits for a rank that gave up.

    Raises:
        CheckpointError, ConfigError: as `action` raised them; anything else as a CheckpointError that begins with
            `what`.
    """
    outcome: list[Any] = [None, None]  # result, error
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (CheckpointError, ConfigError) as failure:
            outcome[1] = failure
        except Exception as failure:
            outcome[1] = CheckpointError(f"{what}: {type(failure).__name__}: {failure}")
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if error is not None:
        raise error
    returned: T = result
    return returned


def _causes(failure: CheckpointException) -> str:
    """What went wrong on which rank, in one line."""
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in failure.failures.items())


def _write_durably(path: Path, text: str) -> None:
    with published(path) as stream:
        stream.write(text.encode())
