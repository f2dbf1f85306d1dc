"""Converts a single file of tensors, by `torch.save` or in safetensors, to a checkpoint.

A file may be flat, {key: tensor or plain data}, or nested, as written by `dcp_to_torch_save`: dicts
with tensors are flattened, and values without tensors are plain data.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_leaves

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError, shown
from megatron.core.dist_checkpointing.format.blob import plain_blob
from megatron.core.dist_checkpointing.format.blob_reading import read_archive
from megatron.core.dist_checkpointing.format.index import SavedAs
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.layout.holdings import replicated
from megatron.core.dist_checkpointing.load.checkpoint import train_state_bytes
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.save.publisher import Publication
from megatron.core.dist_checkpointing.save.writer import Draft, RankWriter
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, EntryGroup, Values
from megatron.core.dist_checkpointing.store import Store, path_of
from megatron.core.files import open_regular
from megatron.core.json_reading import parse_json
from megatron.core.lanes import Event, ThreadEvent
from megatron.training.checkpoint.hf_files import open_safetensors
from megatron_hybrid.checkpoint.to_file import TRAIN_STATE_KEY, Progress

SAFETENSORS_SUFFIX = ".safetensors"


class FileContent(NamedTuple):
    """The content of a file by its keys in the checkpoint."""

    tensors: dict[str, torch.Tensor]  # in the mapped file
    plain: dict[str, object]
    train_state: dict[str, Any] | None


def read_file(path: Path, prefix: str = "") -> FileContent:
    """Maps a file in the format of its suffix.

    Args:
        prefix: a prefix for the keys in the file, such as "model." for a model's state dict.

    Raises:
        CheckpointError: the file has more than tensors and plain data, or data that a checkpoint
            cannot contain.
        OSError: the file is unreadable.
    """
    state = _read_safetensors(path) if path.suffix == SAFETENSORS_SUFFIX else _read_torch_save(path)
    train_state = state.pop(TRAIN_STATE_KEY, None)
    if train_state is not None and not isinstance(train_state, dict):
        raise CheckpointError(
            f"Expected a dict {TRAIN_STATE_KEY!r} in {path}, got {type(train_state).__name__}."
        )

    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, object] = {}
    for key, value in _flat(state, prefix):
        if not key or key in tensors or key in plain:
            got = f"several of {key!r}" if key else "an empty one"
            raise CheckpointError(f"Expected each key once in {path}, got {got}.")
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            plain[key] = _checked(path, key, value)
    return FileContent(tensors, plain, train_state)


def publish_content(
    store: Store,
    iteration: int,
    content: FileContent,
    train_state: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Writes and publishes the checkpoint of this iteration, as `publish_entries`."""
    entries = [_entry(key, tensor) for key, tensor in content.tensors.items()]
    publish_entries(store, iteration, entries, content.plain, train_state, progress)


def publish_entries(
    store: Store,
    iteration: int,
    entries: Sequence[Entry],
    plain: Mapping[str, Any],
    train_state: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Writes and publishes the checkpoint of this iteration, entry by entry.

    Raises:
        CheckpointError: the checkpoint exists or cannot be written. A failure leaves no files.
    """
    final = checkpoint_name(iteration)
    if store.exists(final):
        raise CheckpointError(f"Expected no checkpoint yet at {path_of(store, final)}, got one.")
    token = secrets.token_hex(8)
    draft = Draft(
        store, store.draft_name(final, token), final, token, iteration, 1, threading.Event()
    )
    try:
        _write(draft, entries, plain, train_state, progress)
    except BaseException as error:
        with contextlib.suppress(OSError):
            store.remove(draft.name)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"Expected to write {path_of(store, final)}, got {error}."
            ) from error
        raise


def _write(
    draft: Draft,
    entries: Sequence[Entry],
    plain: Mapping[str, Any],
    train_state: Mapping[str, Any],
    progress: Progress,
) -> None:
    # A group for each tensor: progress is reported between groups.
    contents = Contents([EntryGroup(None, [entry]) for entry in entries], dict(plain), {})
    device = Device("cpu")
    disk = device.host_lane("checkpoint disk")
    try:
        publication = Publication(draft, contents, train_state_bytes(train_state))
        writer = RankWriter(draft, contents, 0, BufferPool(device), disk)
        last: Event = ThreadEvent.done()
        for number, entry in enumerate(entries):
            read = writer.write_group(number)
            # A tensor is kept until it is written: at most this one and the previous one.
            last.synchronize()
            last = read
            progress(math.prod(entry.saved_as.shape) * entry.saved_as.dtype.itemsize)
        writer.finish(publication.describe)
    finally:
        disk.close()
    if writer.failure is not None:
        raise writer.failure
    publication.publish(timeout_seconds=0.0)


def _entry(key: str, tensor: torch.Tensor) -> Entry:
    shape = tuple(tensor.shape)
    saved_as = SavedAs(key, tensor.dtype, shape, replicated(shape, [0]))
    return Entry(saved_as, (0,) * len(shape), Values(tensor))


def _read_torch_save(path: Path) -> dict[str, object]:
    """Maps the file. Tensors are read when they are used."""
    with open_regular(path, "what torch.save writes") as stream:
        try:
            # Copy-on-write, because torch warns about read-only memory.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # larger than memory may be, or empty
            raise CheckpointError(f"Expected to map {path}, got {error}.") from error
    # Without checking the CRC-32 of tensors, which would read the whole file again.
    state = read_archive(torch.frombuffer(mapped, dtype=torch.uint8), str(path), checks_crc=False)
    if not isinstance(state, dict):
        raise CheckpointError(f"Expected a dict in {path}, got {type(state).__name__}.")
    return state


def _read_safetensors(path: Path) -> dict[str, object]:
    """Returns the tensors, and the metadata, which has plain data as JSON."""
    try:
        with open_safetensors(path) as file:
            metadata = file.metadata() or {}
            keys = file.keys()
            state: dict[str, object] = {key: file.get_tensor(key) for key in keys}
    except SafetensorError as error:
        raise CheckpointError(f"Expected to read the tensors of {path}, got {error}.") from error

    for key, text in metadata.items():
        if key == "format":
            continue
        if key in state:
            raise CheckpointError(f"Expected each key once in {path}, got several of {key!r}.")
        try:
            state[key] = parse_json(text, max_depth=100, allow_nan=True)
        except ValueError as error:
            what, got = f"the metadata {shown(key)} of {path}", shown(text, 60)
            raise CheckpointError(f"Expected JSON in {what}, got {got}: {error}.") from error
    return state


def _flat(state: Mapping[Any, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Yields the items of nested dicts with tensors."""
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and any(
            isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)
        ):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _checked(path: Path, key: str, value: object) -> object:
    """Returns plain data that a checkpoint can contain. CheckpointError for other data."""
    plain = _without_subclasses(value)
    try:
        plain_blob(plain)
    except ValueError as error:
        raise CheckpointError(f"Expected plain data {key!r} in {path}, got: {error}") from error
    return plain


def _without_subclasses(value: object) -> object:
    """Converts subclasses of dict, list and tuple."""
    if isinstance(value, Mapping):
        return {key: _without_subclasses(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_without_subclasses(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
