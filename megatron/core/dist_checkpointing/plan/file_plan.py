"""Where every rank's shares of a state lie in its data file. By arithmetic, rank 0 knows all files.

A file consists of blobs as `torch.save` writes them, one per share, in the order of the state. Each
is placed so that its data begins at a multiple of 4096 bytes, as direct I/O wants it. The bytes
between blobs are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.format.blob import BlobLayout, blob_layout
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT
from megatron.core.dist_checkpointing.plan.chunks import Holdings, shares


class SavedAs(NamedTuple):
    """A tensor as a checkpoint describes it, and how it lies on the ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holdings: Holdings


class Placed(NamedTuple):
    """A share, and its blob's place in the file of the rank that writes it."""

    tensor: int  # its number among those that were given
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    blob_offset: int  # bytes
    blob: BlobLayout

    @property
    def data_offset(self) -> int:
        """Bytes from the beginning of the file to the data, a multiple of 4096."""
        return self.blob_offset + self.blob.header_nbytes

    @property
    def stop(self) -> int:
        """Bytes from the beginning of the file to the end of the blob."""
        return self.blob_offset + self.blob.nbytes


def place(tensors: Sequence[SavedAs], rank: int | None = None) -> Iterator[Placed]:
    """The blobs of all files, or of one rank's, in the order of the tensors.

    Args:
        tensors: the same on every rank.
        rank: whose file; None: all.
    """
    ends: dict[int, int] = {}  # of the files so far, by rank
    # Most shares are as large as another: a layout is looked up a hundred thousand times.
    blobs: dict[tuple[torch.dtype, tuple[int, ...]], BlobLayout] = {}

    held = [(each.holdings, each.dtype.itemsize) for each in tensors]
    for number, offsets, sizes, owner in shares(held, rank):
        dtype = tensors[number].dtype
        blob = blobs.get((dtype, sizes))
        if blob is None:
            blob = blobs[dtype, sizes] = blob_layout(dtype, sizes)

        # The data is aligned, not the blob: the header ends where the data begins.
        blocks = -(-(ends.get(owner, 0) + blob.header_nbytes) // DATA_ALIGNMENT)
        blob_offset = blocks * DATA_ALIGNMENT - blob.header_nbytes
        ends[owner] = blob_offset + blob.nbytes
        yield Placed(number, offsets, sizes, owner, blob_offset, blob)
