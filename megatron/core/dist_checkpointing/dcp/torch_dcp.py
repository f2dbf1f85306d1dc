"""`--ckpt-format torch_dcp`: checkpoints that PyTorch DCP itself writes and reads, for the engines
of others.

A checkpoint is PyTorch DCP's files and `train_state.json`, which holds everything that is not a
tensor as plain data. It is written as a draft and published by rename; DCP's own collectives say
when all ranks have written.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.dcp.dcp_files import DcpFiles
from megatron.core.dist_checkpointing.errors import CheckpointError, few, other_model
from megatron.core.dist_checkpointing.format.blob_reading import read_plain
from megatron.core.dist_checkpointing.format.manifest import METADATA_FILE, TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.format.names import checkpoint_name, track
from megatron.core.dist_checkpointing.load.small_files import system_errors, train_state_bytes
from megatron.core.dist_checkpointing.plan.boxes import Box
from megatron.core.dist_checkpointing.plan.coverage import check_coverage
from megatron.core.dist_checkpointing.state.dcp_state import check_tensors
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, LocalStore
from megatron.core.files import open_regular, read_regular, sync_stream
from megatron.core.optimizer.state_loading import check_step

logger = logging.getLogger(__name__)

# Of the state of one parameter, in `torch_dcp` checkpoints and in those of `fsdp_checkpoint`.
_STEP_KEY = re.compile(r"optim(?:izer)?\.state\..+\.step")


def save_checkpoint(
    root: str | Path,
    iteration: int,
    state: dict[str, Any],
    train_state: dict[str, Any] | None,
    *,
    name: str | None = None,
) -> Path:
    """Writes and publishes a checkpoint. Called by all ranks together; returns its folder.

    Args:
        root: the folder of all checkpoints, made if need be.
        iteration: of the checkpoint.
        state: nested dict of tensors (DTensors stay sharded: each rank writes what it has) and of
            plain data: numbers, strings, and lists, tuples and dicts of them.
        train_state: plain data, for `train_state.json`; rank 0's is written. None: without that
            file.
        name: of its folder, for one that is not to count among a run's: the tracker file stays as
            it is. Default: `checkpoint_name(iteration)`.

    Raises:
        CheckpointError: on every rank, if any rank could not write. Nothing has been published
            then, and nothing is left of it. Once the folder has its name, nothing counts as a
            failure: what cannot be synced, or a tracker that cannot be written, is a warning.
    """
    store, final = LocalStore(Path(root)), checkpoint_name(iteration) if name is None else name
    # Always the same, since nothing else takes away what a killed run has left of this checkpoint.
    draft = f"{final}.saving"
    folder, unpublished = Path(root) / final, Path(root) / draft

    content = b""

    def prepare() -> None:
        nonlocal content
        content = b"" if train_state is None else train_state_bytes(train_state)
        if folder.exists():
            raise CheckpointError(f"Expected no checkpoint yet at {folder}, got a published one.")
        if unpublished.exists():
            shutil.rmtree(unpublished)
        with _discarded_on_error(store, draft):
            store.make_folder(draft)

    def publish() -> None:
        with _discarded_on_error(store, draft):
            # DCP asks for this file to be synced while its content is still in a buffer of its own.
            with (unpublished / METADATA_FILE).open("rb") as stream:
                sync_stream(stream)
                num_bytes = os.fstat(stream.fileno()).st_size
            # What is written must be what can be read.
            if num_bytes > MAX_METADATA_BYTES:
                raise CheckpointError(
                    f"Expected metadata of at most {MAX_METADATA_BYTES} bytes, got {num_bytes}."
                )
            if train_state is not None:
                store.write(f"{draft}/{TRAIN_STATE_FILE}", content)
            is_durable = store.publish(draft, final)
        # The tracker must not name what a crash may still take away.
        if is_durable and name is None:
            track(store, iteration)

    on_first_rank(prepare, f"preparing {unpublished}")
    try:
        with _no_word_about_single_process():
            save(
                state,
                storage_writer=FileSystemWriter(unpublished, sync_files=True),
                planner=_SavePlanner(),
            )
    except CheckpointException as failure:
        # DCP raises once all ranks have stopped writing.
        on_first_rank(lambda: _discard(store, draft), f"discarding {unpublished}")
        got = _causes(failure)
        raise CheckpointError(f"Expected {unpublished} to be written, got {got}.") from failure
    on_first_rank(publish, f"publishing {folder}")
    return folder


@contextmanager
def _discarded_on_error(store: LocalStore, draft: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _discard(store, draft)
        raise


def _discard(store: LocalStore, draft: str) -> None:
    """Deletes what a save that failed has written: a full disk should not stay full of it."""
    try:
        store.remove(draft)
    except FileNotFoundError:
        pass  # it could not even be made
    except OSError as error:
        logger.warning("Could not delete %s/%s: %s", store.root, draft, error)


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a published checkpoint, whose chunks cover every tensor exactly.

    Raises:
        CheckpointDamagedError: if it is not there or not readable, or leaves a part of a tensor
            out.
    """
    path = folder / METADATA_FILE
    with system_errors(str(path)):
        content = read_regular(
            path, max_bytes=MAX_METADATA_BYTES, what="the metadata of a checkpoint"
        )
    metadata = parse_metadata(content, str(path))
    check_coverage(metadata, str(path))
    return metadata


def check_files(
    folder: Path,
    metadata: Metadata,
    *,
    rank: int = 0,
    world_size: int = 1,
    checks_data: bool = True,
    keys: Container[str] | None = None,
) -> None:
    """Holds a published checkpoint's files against its metadata, and their data against
    torch.save's CRC-32.

    Args:
        rank, world_size: ranks share the data out among them.
        checks_data: else the sizes alone are held.
        keys: whose data is held; default: all.

    Raises:
        CheckpointDamagedError: naming the file, and the key where there is one.
        CheckpointError: for plain data that is more than that.
    """
    files = _files_of(folder, metadata, verify=checks_data)
    files.check_sizes()
    if not checks_data:
        return

    wanted = [index for index in metadata.storage_data if keys is None or index.fqn in keys]
    for index in files.in_order(wanted)[rank::world_size]:
        path = folder / metadata.storage_data[index].relative_path
        with system_errors(str(path)), open_regular(path, "the data of a checkpoint") as stream:
            files.check(index, io.BufferedReader(stream))


def check_steps(folder: Path, metadata: Metadata, *, verify: bool = True) -> None:
    """Reads an optimizer's counters of steps, which are all of its states that not every value
    fits.

    An optimizer refuses others too, but only once weights and states are in place.

    Args:
        verify: as in `load_tensors`.

    Raises:
        CheckpointError: for a counter that is no number of steps.
    """
    files = _files_of(folder, metadata, verify=verify)
    for index in files.in_order(metadata.storage_data):
        # There may be data of keys that the metadata does not list.
        entry = metadata.state_dict_metadata.get(index.fqn)
        if _STEP_KEY.fullmatch(index.fqn) is None or not isinstance(entry, TensorStorageMetadata):
            continue
        # More than one number is refused by `load_tensors`, for its shape.
        if entry.size.numel() == 1:
            step = files.tensor(index).item()
            try:
                check_step(step, index.fqn)
            except ValueError as error:
                raise CheckpointError(f"{error} The checkpoint is {folder}.") from None


def load_tensors(
    folder: Path,
    metadata: Metadata,
    state: dict[str, Any],
    ignored_prefixes: tuple[str, ...],
    *,
    verify: bool = True,
) -> None:
    """Reads a published checkpoint into `state`, whose tensors are written in place. Called by all
    ranks together.

    DCP's planner says which part of which chunk goes where. It is not asked to read: see
    `dcp_files`.

    Args:
        folder: the checkpoint.
        metadata: what `read_metadata(folder)` gave; the file is not read again.
        state: a state dict like the one saved; sharding may differ.
        ignored_prefixes: beginnings of keys that may stay unread.
        verify: whether to hold what is read against torch.save's CRC-32.

    Raises:
        CheckpointError: before anything is touched if a tensor is missing, unasked for, or of
            another shape or dtype, or if plain data is missing or more than that; afterwards only
            if a file cannot be read, which `check_files` has found out before.
    """
    on_all_ranks(lambda: _load(folder, metadata, state, ignored_prefixes, verify))


def _load(
    folder: Path,
    metadata: Metadata,
    state: dict[str, Any],
    ignored_prefixes: tuple[str, ...],
    verify: bool,
) -> None:
    check_tensors(str(folder), state, metadata, ignored_prefixes)
    planner = _LoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    _check_plain(str(folder), planner.state_dict, metadata)
    items = planner.create_local_plan().items

    files = _files_of(folder, metadata, verify=verify)
    plain = {
        item.dest_index.fqn: files.plain(item.storage_index.fqn)
        for item in items
        if item.type == LoadItemType.BYTE_IO
    }

    # A chunk may have parts of several tensors' shards: those that need it follow each other.
    parts: dict[MetadataIndex, list[ReadItem]] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            parts.setdefault(item.storage_index, []).append(item)
    for index in files.in_order(parts):
        chunk = files.tensor(index)
        for item in parts[index]:
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            planner.resolve_tensor(item).detach().copy_(chunk[box.slices()])

    for key, value in plain.items():
        planner.install(key, value)


def _check_plain(path: str, wanted: dict[str, Any], metadata: Metadata) -> None:
    """Holds what is wanted besides tensors against the metadata, before anything is touched."""
    saved = metadata.state_dict_metadata
    keys = [key for key, value in wanted.items() if not isinstance(value, torch.Tensor)]
    problems = []
    if missing := [key for key in keys if key not in saved]:
        problems.append(f"it lacks {few(missing)}")
    if tensors := [key for key in keys if isinstance(saved.get(key), TensorStorageMetadata)]:
        problems.append(f"it has tensors where the model has none: {few(tensors)}")
    if problems:
        raise other_model(path, problems)


def _files_of(folder: Path, metadata: Metadata, *, verify: bool) -> DcpFiles:
    return DcpFiles(LocalStore(folder.parent), folder.name, metadata, checks_crc=verify)


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's, for its plan: it is handed what has been read, and reads nothing itself."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """DCP's would unpickle, and run, what is no tensor."""
        raise NotImplementedError(
            f"Expected {read_item.dest_index.fqn} to be installed, got its bytes."
        )

    def install(self, key: str, value: object) -> None:
        """Puts plain data where the state dict has it."""
        set_element(self.original_state_dict, self.mappings[key], value)


class _SavePlanner(DefaultSavePlanner):
    """DCP's, but it writes no plain data that a load would refuse: the very bytes are read back."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        written = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            content = torch.frombuffer(bytearray(written.getbuffer()), dtype=torch.uint8)
            read_plain(content, repr(write_item.index.fqn))
        return written


@contextmanager
def _no_word_about_single_process() -> Iterator[None]:
    """Without a process group DCP works alone, which is meant so here, and warns of it each
    time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _causes(failure: CheckpointException) -> str:
    """What went wrong on which rank, in one line."""
    return "; ".join(
        f"rank {rank}: {type(error).__name__}: {error}"
        for rank, (error, _) in failure.failures.items()
    )
