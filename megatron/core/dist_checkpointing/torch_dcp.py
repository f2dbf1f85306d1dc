"""`--ckpt-format torch_dcp`: checkpoints that PyTorch DCP itself writes and reads, for the engines of others.

A checkpoint is PyTorch DCP's files and `train_state.json`, which holds everything that is not a tensor as plain data.
It is written as a draft and published by rename; DCP's own collectives say when all ranks have written.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER_FILE, checkpoint_name
from megatron.core.dist_checkpointing.manifest import METADATA_FILE, TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.state import check_tensors
from megatron.core.files import published, sync_folder


def save_checkpoint(
    root: str | Path,
    iteration: int,
    state: dict[str, Any],
    train_state: dict[str, Any],
    *,
    name: str | None = None,
) -> Path:
    """Writes and publishes a checkpoint. Called by all ranks together; returns its folder.

    Args:
        root: the folder of all checkpoints, made if need be.
        iteration: of the checkpoint.
        state: nested dict of tensors (DTensors stay sharded: each rank writes what it has) and of what DCP pickles.
        train_state: plain data, for `train_state.json`; rank 0's is written.
        name: of its folder, for one that is not to count among a run's: the tracker file stays as it is. Default:
            `checkpoint_name(iteration)`.

    Raises:
        CheckpointError: on every rank, if any rank could not write. Nothing has been published then, unless all that
            failed was the tracker file, which comes after.
    """
    folder = Path(root) / (name or checkpoint_name(iteration))
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
        if name is None:
            _write_durably(Path(root) / TRACKER_FILE, f"{iteration}\n")

    on_first_rank(prepare, f"preparing {draft}")
    try:
        with _no_word_about_single_process():
            save(state, storage_writer=FileSystemWriter(draft, sync_files=True))
    except CheckpointException as failure:
        raise CheckpointError(f"Expected {draft} to be written, got {_causes(failure)}.") from failure
    on_first_rank(publish, f"publishing {folder}")
    return folder


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a published checkpoint. CheckpointError if it is not there or not readable."""
    path = folder / METADATA_FILE
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise CheckpointError(f"Expected DCP metadata in {path}, got {type(failure).__name__}: {failure}.") from failure
    return parse_metadata(content, str(path))


def check_files(folder: Path, metadata: Metadata) -> None:
    """Holds the sizes of a published checkpoint's files against its metadata: all that can be checked of this format.

    Raises:
        CheckpointDamagedError: naming the file that is missing, or too short.
    """
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in sorted(ends.items()):
        path = folder / file
        try:
            size = path.stat().st_size
        except OSError as failure:
            raise CheckpointDamagedError(f"Expected to read {path}, got {failure.strerror}.") from failure
        if size < end:
            raise CheckpointDamagedError(f"Expected {end} bytes or more in {path}, got {size}.")


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


def _causes(failure: CheckpointException) -> str:
    """What went wrong on which rank, in one line."""
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in failure.failures.items())


def _write_durably(path: Path, text: str) -> None:
    with published(path) as stream:
        stream.write(text.encode())
