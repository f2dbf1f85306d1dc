"""A published checkpoint, opened and proven consistent before anything of it is used, and read in
parts.

Whatever is wrong with its files is a CheckpointDamagedError that names the file, and the key where
there is one, and comes before the bytes are believed: sizes, `.metadata` and the coverage of every
tensor when it is opened, manifests when the first chunk of a file is read, data block by block as
it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.dcp.dcp_files import MAX_PLAIN_BYTES
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob_reading import read_plain
from megatron.core.dist_checkpointing.format.manifest import (
    METADATA_FILE,
    TRAIN_STATE_FILE,
    ChunkRecord,
    Manifest,
    Marker,
    data_file,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.load.chunk_data import ChunkData
from megatron.core.dist_checkpointing.load.small_files import (
    Blob,
    blobs_by_file,
    check,
    check_size,
    chunk_problems,
    file_problems,
    manifest_problems,
    parse_train_state,
    path_of,
    read_marker,
    read_small,
)
from megatron.core.dist_checkpointing.plan.boxes import Box, BoxIndex
from megatron.core.dist_checkpointing.plan.coverage import check_coverage
from megatron.core.dist_checkpointing.store import Store


class PublishedCheckpoint:
    """One published checkpoint of the format `fsdp_dtensor`, to read from. Any number of threads
    may read at a time.

    Attributes:
        path: where it is, for messages.
        marker: what `published.json` says.
        metadata: DCP's; every tensor in it is covered by its chunks exactly.
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
        self._indexes: dict[str, _TensorIndex] = {}  # by key
        self._records: dict[
            str, dict[tuple[str, tuple[int, ...]], ChunkRecord]
        ] = {}  # by file; key and offsets
        self._ranks = {data_file(rank): rank for rank in range(marker.world_size)}
        self._lock = threading.Lock()  # of the records

    @classmethod
    def open(cls, store: Store, name: str, *, verify: bool = True) -> PublishedCheckpoint:
        """Opens the checkpoint in the folder `name` of `store`.

        Args:
            verify: whether to hold data against its digests as it is read. Everything else is
                verified in any case.

        Raises:
            CheckpointDamagedError: if it is not whole: a file is missing or has another size, the
                marker, `.metadata` or `train_state.json` is not what was written, a tensor is not
                covered by its chunks.
            CheckpointError: if it is of another version of the format, names what may not be
                unpickled, or cannot be read for a reason that does not lie in its files.
        """
        marker = read_marker(store, name)
        for file in marker.files:
            check_size(store, name, file, marker)
        source = path_of(store, f"{name}/{METADATA_FILE}")
        metadata = parse_metadata(read_small(store, name, METADATA_FILE, marker), source)
        check_coverage(metadata, source)
        blobs = blobs_by_file(metadata)
        check(file_problems(blobs, marker, source))
        train_state = parse_train_state(
            read_small(store, name, TRAIN_STATE_FILE, marker),
            path_of(store, f"{name}/{TRAIN_STATE_FILE}"),
        )
        return cls(store, name, marker, metadata, blobs, train_state, verify=verify)

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The tensors by key, in the order of the metadata."""
        entries = self.metadata.state_dict_metadata.items()
        return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def plain_keys(self) -> list[str]:
        """The keys of what is no tensor."""
        entries = self.metadata.state_dict_metadata.items()
        return [key for key, entry in entries if isinstance(entry, BytesStorageMetadata)]

    def keys(self) -> list[str]:
        """The keys of everything."""
        return list(self.metadata.state_dict_metadata)

    def read_plain(self, key: str) -> object:
        """What is stored under `key` that is no tensor.

        Raises:
            CheckpointDamagedError: if the bytes are not those that were written.
            CheckpointError: if there is no plain data of that key, or more than plain data.
        """
        if not isinstance(self.metadata.state_dict_metadata.get(key), BytesStorageMetadata):
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
        return read_plain(content, f"plain data {source}", checks_crc=False)

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """Fills `out` with the box of tensor `key` that begins at `offsets` and has the shape of
        `out`.

        Only the blocks that the box needs are read, whichever chunks they belong to; without
        digests, the bytes alone, give or take a page. Where they lie together in a chunk and in
        `out`, and `out` is in host memory, they are read to where they belong; others go through a
        few MiB of memory.

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
        whole, box = (
            Box((0,) * len(entry.size), tuple(entry.size)),
            Box(tuple(offsets), tuple(out.shape)),
        )
        if not len(box.offsets) == len(box.sizes) == len(whole.sizes) or not whole.covers(box):
            raise ValueError(
                f"Expected a box of {key!r} of shape {whole.sizes}, got {box.sizes} at "
                f"{box.offsets}."
            )
        if out.dtype != entry.properties.dtype:
            raise ValueError(f"Expected {entry.properties.dtype} for {key!r}, got {out.dtype}.")
        index, num_read = self._index(key, entry), 0
        for place, overlap in index.boxes.overlaps(box):
            origin, file = index.boxes.boxes[place].offsets, index.files[place]
            data = self._open_chunk(file, self._record(file, key, origin))
            data.read_box(
                overlap.within(origin), out.detach()[overlap.within(box.offsets).slices()]
            )
            num_read += data.num_read
        return num_read

    def manifest(self, rank: int) -> Manifest:
        """The manifest of a rank, held against the marker and `.metadata`.

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

    def _index(self, key: str, entry: TensorStorageMetadata) -> _TensorIndex:
        index = self._indexes.get(key)
        if index is None:
            boxes = BoxIndex(
                [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            )
            places = self.metadata.storage_data
            files = [places[MetadataIndex(key, box.offsets)].relative_path for box in boxes.boxes]
            index = self._indexes[key] = _TensorIndex(boxes, files)
        return index

    def _open_chunk(self, file: str, record: ChunkRecord) -> ChunkData:
        return ChunkData(self._store, f"{self._name}/{file}", record, verify=self._verify)

    def _record(self, file: str, key: str, offsets: tuple[int, ...]) -> ChunkRecord:
        """What the file's manifest, which is read once, says of a chunk."""
        with self._lock:
            if file not in self._records:
                manifest = self.manifest(self._ranks[file])
                self._records[file] = {
                    (chunk.key, chunk.offsets): chunk for chunk in manifest.chunks
                }
            return self._records[file][key, offsets]


class _TensorIndex(NamedTuple):
    """The chunks of one tensor."""

    boxes: BoxIndex
    files: list[str]  # of each, in the order of `boxes.boxes`
