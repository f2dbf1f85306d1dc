"""The small files of a published checkpoint, read whole and held against the marker and against
each other.

    published.json  --sizes, digests-->  .metadata, train_state.json, manifests;  --sizes-->  data files
    .metadata       --chunks, places-->  manifests

What is held against each other is told as sentences, so that a load can stop at the first and a
tool can list all.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    TRAIN_STATE_FILE,
    Manifest,
    Marker,
    data_file,
    digest,
    dtype_name,
    dtype_named,
)
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, Store
from megatron.core.files import UnusableFileError
from megatron.core.json_reading import parse_json

_MAX_HEAD_BYTES = 1 << 26  # of the marker of half a million ranks, or of a train state

# Errors of the system that say that the file itself is at fault.
_DAMAGE = {errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR}


class Blob(NamedTuple):
    """What `.metadata` says about one blob of a data file."""

    key: str
    dtype: str  # as in ChunkRecord
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    nbytes: int


def path_of(store: Store, path: str) -> str:
    """A file of a store as messages name it."""
    return f"{store.root}/{path}"


@contextmanager
def system_errors(path: str) -> Iterator[None]:
    """What the system says about a file of a checkpoint, as a CheckpointError that names it."""
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
    """Raises CheckpointDamagedError if a file is not there or has another size than the marker
    says.
    """
    source = path_of(store, f"{name}/{file}")
    with system_errors(source):
        size = store.size(f"{name}/{file}")
    if size != marker.files[file].nbytes:
        raise CheckpointDamagedError(
            f"Expected {marker.files[file].nbytes} bytes in {source}, got {size}."
        )


def read_small(store: Store, name: str, file: str, marker: Marker) -> bytes:
    """A file whose digest the marker has. Raises CheckpointDamagedError if it is not what was
    written.
    """
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
    """The plain data of a checkpoint of any format. CheckpointDamagedError if it is not there or
    not readable.
    """
    source = path_of(store, f"{name}/{TRAIN_STATE_FILE}")
    with system_errors(source):
        content = store.read(f"{name}/{TRAIN_STATE_FILE}", _MAX_HEAD_BYTES)
    return parse_train_state(content, source)


def parse_train_state(content: bytes, source: str) -> dict[str, Any]:
    """Raises CheckpointDamagedError if it is no JSON object, or one that `parse_json` refuses."""
    try:
        # What a run's logger keeps may be a loss that was none.
        state = parse_json(content, allow_nan=True)
    except ValueError as error:
        raise CheckpointDamagedError(f"Expected JSON in {source}, got {error}.") from error
    if not isinstance(state, dict):
        raise CheckpointDamagedError(
            f"Expected a JSON object in {source}, got {type(state).__name__}."
        )
    return state


def train_state_bytes(state: Mapping[str, Any]) -> bytes:
    """The content of `train_state.json`. CheckpointError for what a load would not give back."""
    try:
        content = (json.dumps(state, indent=1) + "\n").encode()
        parse_json(content, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"Expected a train state that {TRAIN_STATE_FILE} can hold, got {error}."
        ) from error

    if len(content) > _MAX_HEAD_BYTES:
        got = f"{len(content)} bytes"
        raise CheckpointError(
            f"Expected at most {_MAX_HEAD_BYTES} bytes of {TRAIN_STATE_FILE}, got {got}."
        )
    return content


def blobs_by_file(metadata: Metadata) -> dict[str, list[Blob]]:
    """What each data file must hold. The metadata must have passed `check_coverage`."""
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    dtypes: dict[str, str] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            sizes[key] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
            dtypes[key] = dtype_name(entry.properties.dtype)
    blobs: dict[str, list[Blob]] = {}
    for index, info in metadata.storage_data.items():
        offsets = () if index.offset is None else tuple(index.offset)
        box = sizes.get(index.fqn, {}).get(offsets, ())
        blob = Blob(index.fqn, dtypes.get(index.fqn, ""), offsets, box, info.offset, info.length)
        blobs.setdefault(info.relative_path, []).append(blob)
    return blobs


def file_problems(
    blobs: Mapping[str, Sequence[Blob]], marker: Marker, source: str
) -> Iterator[str]:
    """Whether `.metadata` places all blobs within data files that the marker knows."""
    known = set(map(data_file, range(marker.world_size)))
    for file, inside in blobs.items():
        if file not in known:
            yield f"Expected data files of {marker.world_size} ranks in {source}, got {file}."
            continue
        for blob in inside:
            # Before anybody makes a tensor of that size.
            nbytes = math.prod(blob.sizes) * dtype_named(blob.dtype).itemsize if blob.dtype else 0
            if nbytes > blob.nbytes:
                yield f"Expected {nbytes} bytes or more of {blob.key!r} in {file} in {source}, got {blob.nbytes}."
        end = max(blob.offset + blob.nbytes for blob in inside)
        if end > marker.files[file].nbytes:
            yield f"Expected blobs within the {marker.files[file].nbytes} bytes of {file} in {source}, got byte {end}."


def manifest_problems(manifest: Manifest, rank: int, marker: Marker, source: str) -> Iterator[str]:
    """Whether a manifest belongs to the save that the marker is of."""
    if manifest.save_id != marker.save_id:
        yield f"Expected save id {marker.save_id} in {source}, got {manifest.save_id}."
    if manifest.rank != rank:
        yield f"Expected rank {rank} in {source}, got {manifest.rank}."
    nbytes = marker.files[data_file(rank)].nbytes
    if manifest.nbytes != nbytes:
        yield f"Expected {nbytes} bytes of {data_file(rank)} in {source}, got {manifest.nbytes}."


def chunk_problems(manifest: Manifest, blobs: Iterable[Blob], source: str) -> Iterator[str]:
    """Whether a manifest and `.metadata` say the same about what is in a data file."""
    wanted = {(blob.key, blob.offsets): blob for blob in blobs}
    for chunk in manifest.chunks:
        blob = wanted.pop((chunk.key, chunk.offsets), None)
        got = Blob(*chunk[:6])
        if blob is None:
            yield f"Expected chunks that .metadata has in {source}, got {got.key!r} at {got.offsets}."
        elif blob != got:
            yield f"Expected {blob}, as .metadata has it, in {source}, got {got}."
    for key, offsets in wanted:
        yield f"Expected the chunk of {key!r} at {offsets} in {source}, got none."


def check(problems: Iterator[str]) -> None:
    """Raises CheckpointDamagedError with the first problem, if there is one."""
    for problem in problems:
        raise CheckpointDamagedError(problem)
