"""A published checkpoint, proven consistent before anything in it is used, and read in parts.

Damage is a CheckpointDamagedError that names the file, and the key where there is one. It is found
before the bytes are used: sizes, `.metadata` and the coverage of every tensor are checked when the
checkpoint is opened, a manifest when the first chunk of its file is read, data block by block as it
is read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob_reading import MAX_PLAIN_BYTES, read_plain
from megatron.core.dist_checkpointing.format.manifest import (
    METADATA_FILE,
    TRAIN_STATE_FILE,
    ChunkRecord,
    Manifest,
    Marker,
    data_file,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata import tensors_of
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.load.chunk_data import ChunkData
from megatron.core.dist_checkpointing.load.small_files import (
    Blob,
    blobs_by_file,
    check,
    check_size,
    chunk_problems,
    file_problems,
    manifest_problems,
    parse_covered,
    parse_train_state,
    read_marker,
    read_small,
)
from megatron.core.dist_checkpointing.plan.boxes import Box, BoxIndex
from megatron.core.dist_checkpointing.store import Store


class PublishedCheckpoint:
    """One published checkpoint of the format `fsdp_dtensor`. Any number of threads may read it.

    Attributes:
        path: where it is, for messages.
        marker: the content of `published.json`.
        metadata: DCP's; chunks cover every tensor in it exactly.
        train_state: plain data.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        marker: Marker,
        metadata: Metadata,
        blobs: dict[str, list[Blob]],
        train_state: dict[str, Any],
        *,
        verify: bool,
    ) -> None:
        """For `open`."""
        self.path = path_of(store, name)
        self.marker = marker
        self.metadata = metadata
        self.train_state = train_state
        self._store = store
        self._name = name
        self._blobs = blobs
        self._verify = verify
        self._indexes: dict[str, BoxIndex] = {}  # by key
        # By file; then by key and offsets.
        self._records: dict[str, dict[tuple[str, tuple[int, ...]], ChunkRecord]] = {}
        self._ranks = {data_file(rank): rank for rank in range(marker.world_size)}
        self._lock = threading.Lock()  # of the records

    @classmethod
    def open(cls, store: Store, name: str, *, verify: bool = True) -> PublishedCheckpoint:
        """Opens the checkpoint in the folder `name` of `store`.

        Args:
            verify: whether to compare data with its digests as it is read. Everything else is
                verified in any case.

        Raises:
            CheckpointDamagedError: if it is not whole: a file is missing or has another size, the
                marker, `.metadata` or `train_state.json` is not what was written, or chunks do not
                cover a tensor.
            CheckpointError: if it is of another version of the format, names what may not be
                unpickled, or cannot be read for a reason that does not lie in its files.
        """
        # The marker first: it has the digests of the other small files.
        marker = read_marker(store, name)
        for file in marker.files:
            check_size(store, name, file, marker)

        source = path_of(store, f"{name}/{METADATA_FILE}")
        metadata = parse_covered(read_small(store, name, METADATA_FILE, marker), source)
        blobs = blobs_by_file(metadata)
        check(file_problems(blobs, marker, source))

        source = path_of(store, f"{name}/{TRAIN_STATE_FILE}")
        train_state = parse_train_state(read_small(store, name, TRAIN_STATE_FILE, marker), source)
        return cls(store, name, marker, metadata, blobs, train_state, verify=verify)

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The tensors by key, in the order of the metadata."""
        return tensors_of(self.metadata)

    def read_plain(self, key: str) -> object:
        """The plain data of a key.

        Raises:
            CheckpointDamagedError: if the bytes are not those that were written.
            CheckpointError: if there is no plain data of that key, or more than plain data.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, BytesStorageMetadata):
            raise CheckpointError(
                f"Expected plain data {key!r} in {self.path}, got {self._kind(key)}."
            )
        file = self.metadata.storage_data[MetadataIndex(key)].relative_path
        record = self._record(file, key, ())
        source = f"{key!r} in {self.path}/{file}"
        if record.data_nbytes > MAX_PLAIN_BYTES:
            raise CheckpointDamagedError(
                f"Expected at most {MAX_PLAIN_BYTES} bytes of plain data {source}, got "
                f"{record.data_nbytes}."
            )
        content = torch.empty(record.data_nbytes, dtype=torch.uint8)
        self._open_chunk(file, record).read(0, content.numpy().data)
        # Without the CRC-32: digests cover all of the blob.
        return read_plain(content, f"plain data {source}", checks_crc=False)

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """Fills `out` with the box of a tensor that begins at `offsets` and has `out`'s shape.

        Only the blocks that the box needs are read, whichever chunks they belong to; without
        digests, only its bytes, give or take a page. Where they are contiguous in a chunk and in
        `out`, and `out` is in host memory, they are read to their place; others go through a few
        MiB of memory.

        Returns:
            The number of bytes of data read.

        Raises:
            CheckpointDamagedError: if the bytes are not those that were written; some of `out` may
                have been filled.
            CheckpointError: if there is no tensor of that key.
            ValueError: for a box that is not in the tensor, or another dtype.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"Expected the tensor {key!r} in {self.path}, got {self._kind(key)}."
            )

        whole, box = Box.whole(entry.size), Box(tuple(offsets), tuple(out.shape))
        if not len(box.offsets) == len(box.sizes) == len(whole.sizes) or not whole.covers(box):
            raise ValueError(
                f"Expected a box of {key!r} of shape {whole.sizes}, got {box.sizes} at "
                f"{box.offsets}."
            )
        if out.dtype != entry.properties.dtype:
            raise ValueError(f"Expected {entry.properties.dtype} for {key!r}, got {out.dtype}.")

        # Without a lock: threads that come first together make equal ones.
        if key not in self._indexes:
            self._indexes[key] = BoxIndex.of_chunks(entry.chunks)
        index, num_read = self._indexes[key], 0
        for place, overlap in index.overlaps(box):
            origin = index.boxes[place].offsets
            file = self.metadata.storage_data[MetadataIndex(key, origin)].relative_path
            data = self._open_chunk(file, self._record(file, key, origin))
            target = out.detach()[overlap.within(box.offsets).slices()]
            data.read_box(overlap.within(origin), target)
            num_read += data.num_read
        return num_read

    def manifest(self, rank: int) -> Manifest:
        """The manifest of a rank, compared with the marker and `.metadata`.

        Raises:
            CheckpointDamagedError: if it is not what was written, or belongs to another save.
        """
        source = path_of(self._store, f"{self._name}/{manifest_file(rank)}")
        content = read_small(self._store, self._name, manifest_file(rank), self.marker)
        manifest = Manifest.from_bytes(content, source)
        check(manifest_problems(manifest, rank, self.marker, source))
        check(chunk_problems(manifest, self._blobs.get(manifest.file, ()), source))
        return manifest

    def _kind(self, key: str) -> str:
        entry = self.metadata.state_dict_metadata.get(key)
        if entry is None:
            return "nothing of that name"
        return "a tensor" if isinstance(entry, TensorStorageMetadata) else "plain data"

    def _open_chunk(self, file: str, record: ChunkRecord) -> ChunkData:
        return ChunkData(self._store, f"{self._name}/{file}", record, verify=self._verify)

    def _record(self, file: str, key: str, offsets: tuple[int, ...]) -> ChunkRecord:
        """A chunk as its file's manifest describes it."""
        # Under the lock, so that threads do not read a large manifest side by side.
        with self._lock:
            # A load of a few tensors reads few of the manifests, of which there may be thousands.
            if file not in self._records:
                manifest = self.manifest(self._ranks[file])
                self._records[file] = {
                    (chunk.key, chunk.offsets): chunk for chunk in manifest.chunks
                }
            return self._records[file][key, offsets]
