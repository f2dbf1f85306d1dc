"""The small files of a published checkpoint, read whole and compared with each other.

    published.json  --sizes, digests-->  .metadata, train_state.json, manifests
                    --sizes----------->  data files
    .metadata       --chunks, places-->  manifests

Every comparison yields its problems as sentences: a load stops at the first, a tool lists all.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

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
from megatron.core.dist_checkpointing.format.metadata import tensors_of
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.plan.coverage import check_coverage
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, Store
from megatron.core.files import UnusableFileError
from megatron.core.json_reading import parse_json

_MAX_HEAD_BYTES = 1 << 26  # of the marker of half a million ranks, or of a train state

# Errors of the system that mean that the file itself is at fault: an older checkpoint may do. Other
# errors, such as EACCES, would hit that one, too.
_DAMAGE = {errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR}


class Blob(NamedTuple):
    """One blob of a data file, as `.metadata` describes it."""

    key: str
    dtype: str  # as in ChunkRecord
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    nbytes: int


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


def parse_covered(content: bytes, source: str) -> Metadata:
    """A `.metadata` whose chunks tile every tensor.

    Raises what `parse_metadata` and `check_coverage` raise.
    """
    metadata = parse_metadata(content, source)
    check_coverage(metadata, source)
    return metadata


def blobs_by_file(metadata: Metadata) -> dict[str, list[Blob]]:
    """The blobs of each data file. The metadata must have passed `check_coverage`."""
    tensors = tensors_of(metadata)
    dtypes = {key: dtype_name(entry.properties.dtype) for key, entry in tensors.items()}
    sizes = {
        key: {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        for key, entry in tensors.items()
    }

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
    # The marker knows all other files, too, but no blob may lie in one of those.
    known = set(map(data_file, range(marker.world_size)))
    for file, inside in blobs.items():
        if file not in known:
            yield f"Expected data files of {marker.world_size} ranks in {source}, got {file}."
            continue

        for blob in inside:
            # Checked here because a load allocates a tensor of that size next.
            least = math.prod(blob.sizes) * dtype_named(blob.dtype).itemsize if blob.dtype else 0
            if least > blob.nbytes:
                what = f"{least} bytes or more of {blob.key!r} in {file}"
                yield f"Expected {what} in {source}, got {blob.nbytes}."
        end, nbytes = max(blob.offset + blob.nbytes for blob in inside), marker.files[file].nbytes
        if end > nbytes:
            what = f"blobs within the {nbytes} bytes of {file}"
            yield f"Expected {what} in {source}, got byte {end}."


def manifest_problems(manifest: Manifest, rank: int, marker: Marker, source: str) -> Iterator[str]:
    """Whether a manifest belongs to the same save as the marker."""
    if manifest.save_id != marker.save_id:
        yield f"Expected save id {marker.save_id} in {source}, got {manifest.save_id}."
    if manifest.rank != rank:
        yield f"Expected rank {rank} in {source}, got {manifest.rank}."
    nbytes = marker.files[data_file(rank)].nbytes
    if manifest.nbytes != nbytes:
        yield f"Expected {nbytes} bytes of {data_file(rank)} in {source}, got {manifest.nbytes}."


def chunk_problems(manifest: Manifest, blobs: Iterable[Blob], source: str) -> Iterator[str]:
    """Whether a manifest and `.metadata` agree about the content of a data file."""
    # Popped when found: a chunk that comes twice is a problem, too.
    wanted = {(blob.key, blob.offsets): blob for blob in blobs}
    for chunk in manifest.chunks:
        blob = wanted.pop((chunk.key, chunk.offsets), None)
        got = Blob(*chunk[:6])
        if blob is None:
            place = f"{got.key!r} at {got.offsets}"
            yield f"Expected chunks that .metadata has in {source}, got {place}."
        elif blob != got:
            yield f"Expected {blob}, as .metadata has it, in {source}, got {got}."

    for key, offsets in wanted:
        yield f"Expected the chunk of {key!r} at {offsets} in {source}, got none."


def check(problems: Iterator[str]) -> None:
    """Raises CheckpointDamagedError with the first problem, if there is one."""
    for problem in problems:
        raise CheckpointDamagedError(problem)
