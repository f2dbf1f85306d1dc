"""`--ckpt-format torch_dcp`: checkpoints in PyTorch DCP's own format, for other engines.

A checkpoint consists of PyTorch DCP's files and `train_state.json`, which has everything that is
not a tensor as plain data. It is written as a draft and published by rename; DCP's own collectives
tell when all ranks have written.
"""

from __future__ import annotations

import io
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
from megatron.core.dist_checkpointing.format.metadata_reading import parse_covered, saved_tensors
from megatron.core.dist_checkpointing.format.names import checkpoint_name, track
from megatron.core.dist_checkpointing.load.small_files import system_errors, train_state_bytes
from megatron.core.dist_checkpointing.plan.boxes import Box
from megatron.core.dist_checkpointing.state.dcp_state import check_tensors
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, LocalStore, remove_or_warn
from megatron.core.files import read_regular, remove_empty_folder, sync_stream
from megatron.core.optimizer.state_loading import check_step

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
        state: nested dict of tensors (DTensors stay sharded: each rank writes its part) and of
            plain data: numbers, strings, and lists, tuples and dicts of them.
        train_state: plain data, for `train_state.json`; rank 0's is written. None: no such file.
        name: of the folder of a checkpoint that is not to count among a run's; the tracker file
            does not move to it. Default: `checkpoint_name(iteration)`.

    Raises:
        CheckpointError: on every rank, if any rank could not write. Nothing is published then, and
            nothing is left of it. Once the folder has its name, nothing counts as a failure: a
            failed sync, or a tracker that cannot be written, is a warning.
    """
    draft = _Draft(Path(root), checkpoint_name(iteration) if name is None else name)

    def prepare() -> None:
        # A run's own folders are made by its saves alone; this one is of the caller's choice.
        if name is not None:
            remove_empty_folder(draft.folder)
        draft.prepare(train_state)

    on_first_rank(prepare, f"preparing {draft.path}")
    try:
        with _no_word_about_single_process():
            writer = FileSystemWriter(draft.path, sync_files=True)
            save(state, storage_writer=writer, planner=_SavePlanner())
    except CheckpointException as failure:
        # DCP raises once all ranks have stopped writing.
        on_first_rank(draft.discard, f"discarding {draft.path}")
        got = _causes(failure)
        raise CheckpointError(f"Expected {draft.path} to be written, got {got}.") from failure

    tracked = iteration if name is None else None
    on_first_rank(lambda: draft.publish(tracked), f"publishing {draft.folder}")
    return draft.folder


class _Draft:
    """A checkpoint under way. All ranks know its paths; rank 0 alone calls the methods."""

    def __init__(self, root: Path, final: str) -> None:
        self.folder = root / final
        # Without a token: no sweep comes before these saves, so the next save of this checkpoint
        # has to find what a killed run has left.
        self.path = root / f"{final}.saving"
        self._store = LocalStore(root)
        self._train_state: bytes | None = None

    def prepare(self, train_state: dict[str, Any] | None) -> None:
        """Makes an empty folder."""
        if train_state is not None:
            self._train_state = train_state_bytes(train_state)
        if self.folder.exists():
            raise CheckpointError(
                f"Expected no checkpoint yet at {self.folder}, got a published one."
            )
        if self.path.exists():
            shutil.rmtree(self.path)
        with self._discarded_on_error():
            self._store.make_folder(self.path.name)

    def publish(self, tracked: int | None) -> None:
        """Publishes all ranks' files. `tracked`: the iteration for the tracker file."""
        with self._discarded_on_error():
            # DCP syncs this file while its content is still in a buffer of DCP's own.
            with (self.path / METADATA_FILE).open("rb") as stream:
                sync_stream(stream)
                num_bytes = os.fstat(stream.fileno()).st_size
            # A reader refuses more, and a checkpoint that cannot be loaded must not be published.
            if num_bytes > MAX_METADATA_BYTES:
                raise CheckpointError(
                    f"Expected metadata of at most {MAX_METADATA_BYTES} bytes, got {num_bytes}."
                )
            if self._train_state is not None:
                self._store.write(f"{self.path.name}/{TRAIN_STATE_FILE}", self._train_state)
            is_durable = self._store.publish(self.path.name, self.folder.name)

        # The tracker must not name a checkpoint that a crash may still undo.
        if is_durable and tracked is not None:
            track(self._store, tracked)

    def discard(self) -> None:
        """Deletes what a failed save has written: it must not keep a full disk full."""
        remove_or_warn(self._store, self.path.name)

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a published checkpoint, whose chunks cover every tensor exactly.

    Raises:
        CheckpointDamagedError: if it is missing or not readable, or leaves out a part of a tensor.
    """
    path, what = folder / METADATA_FILE, "the metadata of a checkpoint"
    with system_errors(str(path)):
        content = read_regular(path, max_bytes=MAX_METADATA_BYTES, what=what)
    return parse_covered(content, str(path))


def check_files(
    folder: Path,
    metadata: Metadata,
    *,
    rank: int = 0,
    world_size: int = 1,
    checks_data: bool = True,
    keys: Container[str] | None = None,
) -> None:
    """Compares a checkpoint's files with its metadata, and their data with torch.save's CRC-32.

    Args:
        rank, world_size: ranks divide the data among them.
        checks_data: False to compare the sizes alone.
        keys: whose data is read; default: all.

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
        files.check(index)


def check_steps(folder: Path, metadata: Metadata, *, verify: bool = True) -> None:
    """Checks an optimizer's counters of steps, the only states for which some values are invalid.

    An optimizer refuses such values too, but only once weights and states are in place.

    Args:
        verify: as in `load_tensors`.

    Raises:
        CheckpointError: for a counter that is no number of steps.
    """
    files = _files_of(folder, metadata, verify=verify)
    # `load_tensors` refuses tensors of more than one number for their shape.
    counters = {
        key
        for key, tensor in saved_tensors(metadata, str(folder)).items()
        if _STEP_KEY.fullmatch(key) is not None and Box.whole(tensor.shape).numel == 1
    }
    # There may be data of keys that the metadata does not list.
    for index in files.in_order(each for each in metadata.storage_data if each.fqn in counters):
        try:
            check_step(files.tensor(index).item(), index.fqn)
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
    """Reads a published checkpoint into the tensors of `state`. Called by all ranks together.

    DCP's planner tells which part of which chunk goes where. It does not read: see `dcp_files`.

    Args:
        folder: the checkpoint.
        metadata: what `read_metadata(folder)` gave; the file is not read again.
        state: a state dict like the one saved; sharding may differ.
        ignored_prefixes: prefixes of keys that may stay unread.
        verify: whether to compare the data with torch.save's CRC-32.

    Raises:
        CheckpointError: before anything is changed if a tensor is missing, extra, or of another
            shape or dtype, or if plain data is missing or more than that; afterwards only if a file
            cannot be read, which `check_files` finds out in advance.
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

    # A chunk may overlap several local shards. It is read once, for all of them.
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
    """Compares the wanted plain data with the metadata, before anything is changed."""
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
    """DCP's planner, used for its plan alone: it reads nothing itself."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """DCP's planner would unpickle plain data, and so run code in it."""
        raise NotImplementedError(
            f"Expected {read_item.dest_index.fqn} to be installed, got its bytes."
        )

    def install(self, key: str, value: object) -> None:
        """Puts plain data into its place in the state dict."""
        set_element(self.original_state_dict, self.mappings[key], value)


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also refuses plain data that a load would refuse."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        written = super().transform_object(write_item, object)
        # Reading back the very bytes is the surest test, and plain data is small.
        if write_item.type == WriteItemType.BYTE_IO:
            content = torch.frombuffer(bytearray(written.getbuffer()), dtype=torch.uint8)
            read_plain(content, repr(write_item.index.fqn))
        return written


@contextmanager
def _no_word_about_single_process() -> Iterator[None]:
    # Without a process group DCP works alone, as it should here, and warns of that every time.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _causes(failure: CheckpointException) -> str:
    """The errors of all ranks that failed, in one line."""
    return "; ".join(
        f"rank {rank}: {type(error).__name__}: {error}"
        for rank, (error, _) in failure.failures.items()
    )
