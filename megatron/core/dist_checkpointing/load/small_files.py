"""The small files of a published checkpoint, read whole and compared with each other.

    published.json  --sizes, digests-->  index.json, train_state.json, manifests, .metadata
                    --sizes----------->  data files
    index.json      --chunks, places-->  data files, manifests, .metadata

A load reads the index and the manifests that it needs; `.metadata` is for other programs.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.manifest import (
    INDEX_FILE,
    MARKER_FILE,
    TRAIN_STATE_FILE,
    Marker,
    digest,
)
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, Store
from megatron.core.files import UnusableFileError
from megatron.core.json_reading import parse_json

_MAX_HEAD_BYTES = 1 << 26  # of the marker of half a million ranks, or of a train state

# Errors of the system that mean that the file itself is at fault: an older checkpoint may do. Other
# errors, such as EACCES, would hit that one, too.
_DAMAGE = {errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR}


@contextmanager
def system_errors(path: str) -> Iterator[None]:
    """Turns OSErrors about a file of a checkpoint into CheckpointErrors that name it."""
    try:
        yield
    except OSError as error:
        is_damage = error.errno in _DAMAGE or isinstance(
            error, FileNotFoundError | UnusableFileError
        )
        kind = CheckpointDamagedError if is_damage else CheckpointError
        got = f"{type(error).__name__}: {error.strerror or error}"
        raise kind(f"Expected to read {path}, got {got}.") from error


def read_marker(store: Store, name: str) -> Marker:
    """The marker of the checkpoint in the folder `name`. Raises what `Marker.from_bytes` does."""
    source = path_of(store, f"{name}/{MARKER_FILE}")
    with system_errors(source):
        content = store.read(f"{name}/{MARKER_FILE}", _MAX_HEAD_BYTES)
    return Marker.from_bytes(content, source)


def check_size(store: Store, name: str, file: str, marker: Marker) -> None:
    """CheckpointDamagedError if a file is missing, or not of the size that the marker states."""
    source = path_of(store, f"{name}/{file}")
    with system_errors(source):
        size = store.size(f"{name}/{file}")
    if size != marker.files[file].nbytes:
        raise CheckpointDamagedError(
            f"Expected {marker.files[file].nbytes} bytes in {source}, got {size}."
        )


def read_small(store: Store, name: str, file: str, marker: Marker) -> bytes:
    """A file whose digest is in the marker. CheckpointDamagedError if it has another."""
    source = path_of(store, f"{name}/{file}")
    with system_errors(source):
        content = store.read(f"{name}/{file}", MAX_METADATA_BYTES)
    got, written = digest(content), marker.files[file].digest
    if got != written:
        raise CheckpointDamagedError(
            f"Expected digest {written} of {source}, got {got} of {len(content)} bytes."
        )
    return content


def read_train_state(store: Store, name: str) -> dict[str, Any]:
    """The train state of a checkpoint of any format. CheckpointDamagedError if it has none."""
    source = path_of(store, f"{name}/{TRAIN_STATE_FILE}")
    with system_errors(source):
        content = store.read(f"{name}/{TRAIN_STATE_FILE}", _MAX_HEAD_BYTES)
    return parse_train_state(content, source)


def parse_train_state(content: bytes, source: str) -> dict[str, Any]:
    """CheckpointDamagedError for anything but a JSON object that `parse_json` accepts."""
    try:
        # A run's logger keeps losses, which may be NaN.
        state = parse_json(content, allow_nan=True)
    except ValueError as error:
        raise CheckpointDamagedError(f"Expected JSON in {source}, got {error}.") from error
    if not isinstance(state, dict):
        raise CheckpointDamagedError(
            f"Expected a JSON object in {source}, got {type(state).__name__}."
        )
    return state


def train_state_bytes(state: Mapping[str, Any]) -> bytes:
    """The content of `train_state.json`. CheckpointError for a state that could not be read."""
    # Parsed again, to refuse now what no load would accept later.
    try:
        content = (json.dumps(state, indent=1) + "\n").encode()
        parse_json(content, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"Expected a train state that {TRAIN_STATE_FILE} can hold, got {error}."
        ) from error

    most, got = _MAX_HEAD_BYTES, len(content)
    if got > most:
        raise CheckpointError(
            f"Expected at most {most} bytes of {TRAIN_STATE_FILE}, got {got} bytes."
        )
    return content


def read_index(store: Store, name: str, marker: Marker) -> Index:
    """The index of the checkpoint in the folder `name`. Raises what `Index.from_bytes` does."""
    source = path_of(store, f"{name}/{INDEX_FILE}")
    return Index.from_bytes(read_small(store, name, INDEX_FILE, marker), marker, source)
