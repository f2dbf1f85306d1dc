"""A published checkpoint, proven consistent before anything in it is used, and read in parts.

Damage is a CheckpointDamagedError that names the file, and the key where there is one. It is found
before the bytes are used: sizes, the index and the coverage of every tensor are checked when the
checkpoint is opened, a manifest when the first chunk of its rank is read, data block by block as it
is read.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob_reading import MAX_PLAIN_BYTES, read_plain
from megatron.core.dist_checkpointing.format.index import Index, manifest_problems
from megatron.core.dist_checkpointing.format.manifest import (
    TRAIN_STATE_FILE,
    Manifest,
    Marker,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.layout.boxes import Box, BoxIndex
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.load.chunk_data import ChunkData
from megatron.core.dist_checkpointing.load.small_files import (
    check_size,
    parse_train_state,
    read_index,
    read_marker,
    read_small,
)
from megatron.core.dist_checkpointing.store import Store


class PublishedCheckpoint:
    """One published checkpoint of the format `fsdp_dtensor`. Any number of threads may read it.

    Attributes:
        path: where it is, for messages.
        marker: the content of `published.json`.
        index: the content of `index.json`; chunks cover every tensor in it exactly.
        train_state: plain data.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        marker: Marker,
        index: Index,
        train_state: dict[str, Any],
        *,
        verify: bool,
    ) -> None:
        """For `open`."""
        self.path = path_of(store, name)
        self.marker = marker
        self.index = index
        self.train_state = train_state
        self._store = store
        self._name = name
        self._verify = verify
        self._boxes: dict[str, BoxIndex] = {}  # of chunks, by key
        self._digests: dict[
            int, dict[SavedChunk, tuple[str, ...]]
        ] = {}  # by the rank that wrote them
        self._lock = threading.Lock()  # of the digests

    @classmethod
    def open(cls, store: Store, name: str, *, verify: bool = True) -> PublishedCheckpoint:
        """Opens the checkpoint in the folder `name` of `store`.

        Args:
            verify: whether to compare data with its digests as it is read. Everything else is
                verified in any case.

        Raises:
            CheckpointDamagedError: if it is not whole: a file is missing or has another size, the
                marker, the index or `train_state.json` is not what was written, or chunks do not
                cover a tensor.
            CheckpointError: if it is of another version of the format, or cannot be read for a
                reason that does not lie in its files.
        """
        # The marker first: it has the digests of the other small files.
        marker = read_marker(store, name)
        for file in marker.files:
            check_size(store, name, file, marker)

        index = read_index(store, name, marker)
        source = path_of(store, f"{name}/{TRAIN_STATE_FILE}")
        train_state = parse_train_state(read_small(store, name, TRAIN_STATE_FILE, marker), source)
        return cls(store, name, marker, index, train_state, verify=verify)

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors by key, in the order in which they were saved."""
        return self.index.tensors

    @property
    def plain(self) -> Collection[str]:
        """The keys of plain data."""
        return self.index.plain.keys()

    def read_plain(self, key: str) -> object:
        """The plain data of a key.

        Raises:
            CheckpointDamagedError: if the bytes are not those that were written.
            CheckpointError: if there is no plain data of that key, or more than plain data.
        """
        saved = self.index.plain.get(key)
        if saved is None:
            raise CheckpointError(
                f"Expected plain data {key!r} in {self.path}, got {self._kind(key)}."
            )
        (chunk,) = saved.chunks
        source = f"{key!r} in {self.path}/{chunk.file}"
        if saved.nbytes > MAX_PLAIN_BYTES:
            raise CheckpointDamagedError(
                f"Expected at most {MAX_PLAIN_BYTES} bytes of plain data {source}, got "
                f"{saved.nbytes}."
            )
        content = torch.empty(saved.nbytes, dtype=torch.uint8)
        self._open_chunk(saved, chunk).read(0, content.numpy().data)
        # Without the CRC-32: digests cover all of the blob.
        return read_plain(content, f"plain data {source}", checks_crc=False)

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """Fills `out` with the box of a tensor that begins at `offsets` and has `out`'s shape.

        Only the blocks that the box needs are read, whichever chunks they belong to; without
        digests, only its bytes, give or take a page. Where they are contiguous in a chunk and in
        `out`, and `out` is in host memory, they are read to their place; others go through a few
        MiB of memory. If `out` is on the meta device, they are compared with their digests alone.

        Returns:
            The number of bytes of data read.

        Raises:
            CheckpointDamagedError: if the bytes are not those that were written; some of `out` may
                have been filled.
            CheckpointError: if there is no tensor of that key.
            ValueError: for a box that is not in the tensor, or another dtype, except that values
                are converted from one floating-point dtype to another.
        """
        saved, box = self._tensor(key), Box(tuple(offsets), tuple(out.shape))
        whole = Box.whole(saved.shape)
        if not len(box.offsets) == len(box.sizes) == len(whole.sizes) or not whole.covers(box):
            raise ValueError(
                f"Expected a box of {key!r} of shape {whole.sizes}, got {box.sizes} at "
                f"{box.offsets}."
            )
        are_floats = out.dtype.is_floating_point and saved.dtype.is_floating_point
        if out.dtype != saved.dtype and not are_floats:
            raise ValueError(f"Expected {saved.dtype} for {key!r}, got {out.dtype}.")

        num_read = 0
        for chunk, overlap in self._overlaps(saved, box):
            data = self._open_chunk(saved, chunk)
            target = out.detach()[overlap.within(box.offsets).slices()]
            data.read_box(overlap.within(chunk.box.offsets), target)
            num_read += data.num_read
        return num_read

    def manifest(self, rank: int) -> Manifest:
        """The manifest of a rank, compared with the marker and the index.

        Raises:
            CheckpointDamagedError: if it is not what was written, or belongs to another save.
        """
        source = path_of(self._store, f"{self._name}/{manifest_file(rank)}")
        content = read_small(self._store, self._name, manifest_file(rank), self.marker)
        manifest = Manifest.from_bytes(content, source)
        for problem in manifest_problems(manifest, rank, self.index, source):
            raise CheckpointDamagedError(problem)
        return manifest

    def _tensor(self, key: str) -> SavedTensor:
        saved = self.index.tensors.get(key)
        if saved is None:
            raise CheckpointError(
                f"Expected the tensor {key!r} in {self.path}, got {self._kind(key)}."
            )
        return saved

    def _overlaps(self, saved: SavedTensor, box: Box) -> Iterator[tuple[SavedChunk, Box]]:
        """The chunks that overlap a box of a tensor, with the overlaps."""
        # Without a lock: threads that come first together make equal ones.
        if saved.key not in self._boxes:
            self._boxes[saved.key] = BoxIndex([chunk.box for chunk in saved.chunks])
        for number, overlap in self._boxes[saved.key].overlaps(box):
            yield saved.chunks[number], overlap

    def _kind(self, key: str) -> str:
        if key in self.index.tensors:
            return "a tensor"
        return "plain data" if key in self.index.plain else "nothing of that name"

    def _open_chunk(self, tensor: SavedTensor, chunk: SavedChunk) -> ChunkData:
        digests = self._digests_of(chunk) if self._verify else None
        return ChunkData(self._store, self._name, tensor, chunk, digests)

    def _digests_of(self, chunk: SavedChunk) -> tuple[str, ...]:
        """The digests of a chunk's blocks, from the manifest of its rank."""
        # Under the lock, so that threads do not read a large manifest side by side.
        with self._lock:
            # A load of a few tensors reads few of the manifests, of which there may be thousands.
            if chunk.rank not in self._digests:
                digests = self.manifest(chunk.rank).digests
                chunks = (each for _, each in self.index.chunks_by_rank[chunk.rank])
                self._digests[chunk.rank] = dict(zip(chunks, digests, strict=True))
            return self._digests[chunk.rank][chunk]
