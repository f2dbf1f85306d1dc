"""`--ckpt-format torch_dcp`: checkpoints that PyTorch DCP itself writes and reads, for the engines of others.

A checkpoint is PyTorch DCP's files and `train_state.json`, which holds everything that is not a tensor as plain data.
It is written as a draft and published by rename; DCP's own collectives say when all ranks have written.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
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
from megatron.core.dist_checkpointing.small_files import system_errors
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
    """DCP's metadata of a published checkpoint. CheckpointDamagedError if it is not there or not readable."""
    path = folder / METADATA_FILE
    with system_errors(str(path)):
        content = path.read_bytes()
    return parse_metadata(content, str(path))


def check_files(
    folder: Path, metadata: Metadata, *, rank: int = 0, world_size: int = 1, checks_data: bool = True
) -> None:
    """Holds a published checkpoint's files against its metadata, and their data against torch.save's CRC-32.

    Args:
        rank, world_size: ranks share the data out among them.
        checks_data: else the sizes alone are held.

    Raises:
        CheckpointDamagedError: naming the file, and the key where there is one.
    """
    places = sorted(metadata.storage_data.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    ends = {info.relative_path: info.offset + info.length for _, info in places}
    for file, end in ends.items():
        with system_errors(str(folder / file)):
            size = (folder / file).stat().st_size
        if size < end:
            raise CheckpointDamagedError(f"Expected {end} bytes or more in {folder / file}, got {size}.")
    for index, info in places[rank::world_size] if checks_data else ():
        path = folder / info.relative_path
        # What a transformation has written is for PyTorch to read.
        if info.transform_descriptors:
            continue
        with system_errors(str(path)), path.open("rb") as stream:
            problem = _problem(_Window(stream, info.offset, info.length))
        if problem is not None:
            raise CheckpointDamagedError(
                f"Expected {index.fqn!r} in {path} as torch.save wrote it, got {problem} "
                "(--no-verify-checkpoint loads it all the same)."
            )


def _problem(blob: _Window) -> str | None:
    """What is wrong with the bytes of one torch.save, in words; None: nothing."""
    try:
        # Both look: PyTorch's reader at what it needs to find its records, the other at what is in them.
        stream = io.BufferedReader(blob)
        torch._C.PyTorchFileReader(stream)
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # damaged archives raise almost anything
        reason = str(error).split("\n")[0]
        return f"no readable archive ({type(error).__name__}: {reason})"
    return None if bad is None else f"other bytes in its record {bad}"


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: BinaryIO, begin: int, nbytes: int) -> None:
        self._stream = stream
        self._begin = begin
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        self._stream.seek(self._begin + self._position)
        content = self._stream.read(len(view))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)


def load_tensors(folder: Path, metadata: Metadata, state: dict[str, Any], ignored_prefixes: tuple[str, ...]) -> None:
    """Reads a published checkpoint into `state`, whose tensors are written in place.

    Args:
        folder: the checkpoint.
        metadata: what `read_metadata(folder)` gave.
        state: a state dict like the one saved; sharding may differ.
        ignored_prefixes: beginnings of keys that may stay unread.

    Raises:
        CheckpointError: before anything is touched if a tensor is missing, unasked for, or of another shape or dtype;
            afterwards only if a file cannot be read, which `check_files` has found out before.
    """
    check_tensors(str(folder), state, metadata, ignored_prefixes)
    try:
        with _no_word_about_single_process():
            load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as failure:
        raise CheckpointDamagedError(f"Expected {folder} to be readable, got {_causes(failure)}.") from failure


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
