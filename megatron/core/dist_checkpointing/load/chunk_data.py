"""The bytes of one chunk in a data file, read in parts and compared with their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES, digest, num_blocks
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.layout.boxes import (
    Box,
    Range,
    range_of,
    ranges,
    row_major_strides,
)
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.load.small_files import system_errors
from megatron.core.dist_checkpointing.store import Store

_STAGING_BYTES = 16 * BLOCK_BYTES  # for elements that cannot be read straight to their place
_PAGE_BYTES = 4096  # the system reads whole pages, so a gap within one costs nothing


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
            name: of the checkpoint's folder in the store.
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
        """Reads the bytes of the data from `begin` on, as many as `into` holds.

        Raises:
            CheckpointDamagedError: if they are not those that were written; `into` may have been
                filled.
        """
        if self._digests is None:
            self._read_raw(begin, [into], self._count)
            return

        # Only whole blocks have digests. Those within the range are read to their place; of the
        # others, at its ends, a copy is read, and a part of that is taken.
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
        # A shorter gap contains no whole block, or page, so leaving it out would save nothing.
        max_gap = ((BLOCK_BYTES if self._digests is not None else _PAGE_BYTES) - 1) // itemsize
        staging = torch.empty(min(max_span, whole.span), dtype=dtype)
        for part in ranges(box, sizes, max_span=max_span, max_gap=max_gap):
            self._read_part(part, staging, target[part.box.within(box.offsets).slices()])

    def _check_box(self, box: Box) -> None:
        """Reads the blocks that a box needs, each once, and keeps nothing."""
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
