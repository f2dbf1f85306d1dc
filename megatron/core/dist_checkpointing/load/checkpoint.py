"""A published checkpoint, proven consistent before anything in it is used, and read in parts.

Damage is a CheckpointDamagedError that names the file, and the key where there is one. It is found
before the bytes are used: sizes, the index and the coverage of every tensor are checked when the
checkpoint is opened, a manifest when the first chunk of its rank is read, data block by block as it
is read.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob_reading import read_plain
from megatron.core.dist_checkpointing.format.index import Index, manifest_problems
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    INDEX_FILE,
    MARKER_FILE,
    TRAIN_STATE_FILE,
    Manifest,
    Marker,
    digest,
    manifest_file,
    num_blocks,
)
from megatron.core.dist_checkpointing.layout.boxes import (
    Box,
    BoxIndex,
    Range,
    range_of,
    ranges,
    row_major_strides,
)
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.store import MOST_METADATA_BYTES, Store, path_of
from megatron.core.files import UnusableFileError
from megatron.core.json_reading import parse_json


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
    def open(
        cls, store: Store, name: str, *, verify: bool = True, rank: int = 0, world_size: int = 1
    ) -> PublishedCheckpoint:
        """Opens the checkpoint in the directory `name` of `store`.

        Args:
            verify: whether to compare data with its digests as it is read. Everything else is
                verified in any case.
            rank, world_size: among ranks that open it together and share their errors. They divide
                the queries of file sizes: a thousand ranks would otherwise make millions.

        Raises:
            CheckpointDamagedError: if it is not whole: a file is missing or has another size, the
                marker, the index or `train_state.json` was changed, or chunks do not cover a
                tensor.
            CheckpointError: if it is of another version of the format, or cannot be read for a
                reason outside of its files.
        """
        # The marker first: it has the digests of the other small files.
        marker = read_marker(store, name)
        for file in list(marker.files)[rank::world_size]:
            check_size(store, name, file, marker)

        source = path_of(store, f"{name}/{INDEX_FILE}")
        index = Index.from_bytes(read_small(store, name, INDEX_FILE, marker), marker, source)
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
            CheckpointDamagedError: for other bytes than were written.
            CheckpointError: if there is no plain data of that key, or more than plain data.
        """
        saved = self.index.plain.get(key)
        if saved is None:
            raise CheckpointError(
                f"Expected plain data {key!r} in {self.path}, got {self._kind(key)}."
            )
        (chunk,) = saved.chunks
        source = f"{key!r} in {self.path}/{chunk.file}"
        content = torch.empty(saved.nbytes, dtype=torch.uint8)
        self._open_chunk(saved, chunk).read(0, content.numpy().data)
        # Without the CRC-32: digests cover all of the blob.
        return read_plain(content, f"plain data {source}", checks_crc=False)

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """Fills `out` with the box of a tensor at `offsets` with the shape of `out`.

        Only the blocks that the box needs are read, whichever chunks they belong to; without
        digests, only its bytes, give or take a page. Where they are contiguous in a chunk and in
        `out`, and `out` is in host memory, they are read to their place; others go through a few
        MiB of memory. If `out` is on the meta device, they are compared with their digests alone.

        Returns:
            The number of bytes of data read.

        Raises:
            CheckpointDamagedError: for other bytes than were written; a part of `out` may have been
                filled.
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
            CheckpointDamagedError: if it was changed, or belongs to another save.
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
        return "plain data" if key in self.index.plain else "no such key"

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


_STAGING_BYTES = 16 * BLOCK_BYTES  # for elements that cannot be read straight to their place
_PAGE_BYTES = 4096  # the system reads whole pages, so a gap within one is free


class ChunkData:
    """One chunk, to be read by one thread. Ranges are best read in ascending order.

    Attributes:
        num_read: bytes read so far.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        tensor: SavedTensor,
        chunk: SavedChunk,
        digests: Sequence[str] | None,
    ) -> None:
        """
        Args:
            name: of the checkpoint's directory in the store.
            tensor, chunk: a chunk of a tensor.
            digests: of its blocks, with which whole blocks are compared as they are read; None: no
                digest is compared.
        """
        self.num_read = 0
        self._store = store
        self._path = f"{name}/{chunk.file}"
        self._tensor = tensor
        self._chunk = chunk
        self._nbytes = tensor.chunk_nbytes(chunk)
        self._digests = digests
        # Number and bytes of the last block that was needed in part: the next range may need the
        # rest of it.
        self._edge = (-1, memoryview(b""))

    def read(self, begin: int, into: memoryview) -> None:
        """Fills `into` with the bytes of the data at offset `begin`.

        Raises:
            CheckpointDamagedError: for other bytes than were written; `into` may have been filled.
        """
        if self._digests is None:
            self._read_raw(begin, [into], self._count)
            return

        # Only whole blocks have digests. Blocks inside the range are read to their place, and parts
        # of the others, at its ends, are copied.
        nbytes, end, position = self._nbytes, begin + into.nbytes, begin
        while position < end:
            block, skipped = divmod(position, BLOCK_BYTES)
            block_end = min((block + 1) * BLOCK_BYTES, nbytes)
            if skipped or block_end > end or block == self._edge[0]:
                stop = min(block_end, end)
                part = self._block(block)[skipped : skipped + stop - position]
                into[position - begin : stop - begin] = part
            else:
                stop = end if end == nbytes else end // BLOCK_BYTES * BLOCK_BYTES
                self._read_blocks(block, _blocks_of(into[position - begin : stop - begin]))
            position = stop

    def read_box(self, box: Box, target: torch.Tensor) -> None:
        """Fills `target` with a box of the chunk; without a copy if both are contiguous.

        Args:
            box: relative to the chunk's origin; it must have elements.
            target: of the shape of the box, on any device. Values are converted to its dtype. On
                the meta device, blocks are compared with their digests, of which there must be
                some, and kept nowhere.

        Raises:
            CheckpointDamagedError: as `read`.
        """
        if target.is_meta:
            self._check_box(box)
            return
        sizes, dtype = self._chunk.box.sizes, self._tensor.dtype
        itemsize, whole = dtype.itemsize, range_of(box, sizes)
        is_in_place = target.is_cpu and target.is_contiguous() and target.dtype == dtype
        if whole.is_gapless and is_in_place:
            self.read(whole.start * itemsize, bytes_of(target))
            return

        max_span = _STAGING_BYTES // itemsize
        # A shorter gap contains no whole block or page that could be skipped.
        max_gap = ((BLOCK_BYTES if self._digests is not None else _PAGE_BYTES) - 1) // itemsize
        staging = torch.empty(min(max_span, whole.span), dtype=dtype)
        for part in ranges(box, sizes, max_span=max_span, max_gap=max_gap):
            self._read_part(part, staging, target[part.box.within(box.offsets).slices()])

    def _check_box(self, box: Box) -> None:
        """Reads the blocks that a box needs, each once, to compare them with their digests."""
        itemsize, done = self._tensor.dtype.itemsize, 0
        memory = memoryview(bytearray(min(BLOCK_BYTES, self._nbytes)))
        parts = ranges(
            box, self._chunk.box.sizes, max_span=self._nbytes, max_gap=(BLOCK_BYTES - 1) // itemsize
        )
        for part in parts:
            # Two ranges may meet in one block.
            first = max(part.start * itemsize // BLOCK_BYTES, done)
            done = num_blocks((part.start + part.span) * itemsize)
            nbytes = min(done * BLOCK_BYTES, self._nbytes) - first * BLOCK_BYTES
            starts = range(0, nbytes, BLOCK_BYTES)
            self._read_blocks(first, (memory[: min(BLOCK_BYTES, nbytes - i)] for i in starts))

    def _read_part(self, part: Range, staging: torch.Tensor, target: torch.Tensor) -> None:
        self.read(part.start * staging.element_size(), bytes_of(staging[: part.span]))
        target.copy_(staging.as_strided(part.box.sizes, row_major_strides(self._chunk.box.sizes)))

    def _block(self, number: int) -> memoryview:
        """One whole block; the last one is kept."""
        if self._edge[0] != number:
            begin = number * BLOCK_BYTES
            content = memoryview(bytearray(min(BLOCK_BYTES, self._nbytes - begin)))
            self._read_blocks(number, [content])
            self._edge = (number, content)
        return self._edge[1]

    def _read_blocks(self, first: int, blocks: Iterable[memoryview]) -> None:
        """Reads whole blocks, and compares each with its digest as soon as it is there."""
        digests, numbers = self._digests, count(first)
        assert digests is not None, "else no whole blocks are read"

        def compare(block: memoryview) -> None:
            number, got = next(numbers), digest(block)
            if got != digests[number]:
                path, offsets = path_of(self._store, self._path), self._chunk.box.offsets
                raise CheckpointDamagedError(
                    f"Expected digest {digests[number]} of block {number} of "
                    f"{self._tensor.key!r} at {offsets} in {path}, got {got}."
                )
            self._count(block)

        self._read_raw(first * BLOCK_BYTES, blocks, compare)

    def _read_raw(
        self, begin: int, buffers: Iterable[memoryview], then: Callable[[memoryview], None]
    ) -> None:
        with system_errors(path_of(self._store, self._path)):
            self._store.read_into(self._path, self._chunk.offset + begin, buffers, then)

    def _count(self, buffer: memoryview) -> None:
        self.num_read += buffer.nbytes


def _blocks_of(memory: memoryview) -> Iterator[memoryview]:
    """Memory cut into blocks; the last one may be shorter."""
    for begin in range(0, memory.nbytes, BLOCK_BYTES):
        yield memory[begin : begin + BLOCK_BYTES]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to read and to write."""
    # A contiguous tensor of one element may have any strides, and would keep them through a
    # reshape.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


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
    """The marker of a checkpoint. Raises as `Marker.from_bytes`."""
    source = path_of(store, f"{name}/{MARKER_FILE}")
    with system_errors(source):
        content = store.read(f"{name}/{MARKER_FILE}")
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
        content = store.read(f"{name}/{file}", MOST_METADATA_BYTES)
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
        content = store.read(f"{name}/{TRAIN_STATE_FILE}")
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
    # Parsed again, to reject a state that no load would accept.
    try:
        content = (json.dumps(state, indent=1) + "\n").encode()
        parse_json(content, allow_nan=True)
        return content
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"Expected a train state that {TRAIN_STATE_FILE} can hold, got {error}."
        ) from error
