"""Where every rank's shares of a state lie in its data file. Arithmetic: rank 0 knows all files,
and has seen one.

A file is blobs as `torch.save` writes them, one for each share, in the order of the state. Each is
placed so that its data begins at a multiple of 4096 bytes, as direct I/O wants it; what lies
between blobs is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.format.blob import BlobLayout, blob_layout
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT
from megatron.core.dist_checkpointing.plan.chunks import Holdings, shares


class SavedAs(NamedTuple):
    """A tensor as a checkpoint knows it."""

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
    ends: dict[int, int] = {}
    blobs: dict[
        tuple[torch.dtype, tuple[int, ...]], BlobLayout
    ] = {}  # most shares are as large as another
    for number, offsets, sizes, owner in shares(
        [(each.holdings, each.dtype.itemsize) for each in tensors], rank
    ):
        dtype = tensors[number].dtype
        blob = blobs.get((dtype, sizes))
        if blob is None:
            blob = blobs[dtype, sizes] = blob_layout(dtype, sizes)
        blob_offset = _round_up(ends.get(owner, 0) + blob.header_nbytes) - blob.header_nbytes
        ends[owner] = blob_offset + blob.nbytes
        yield Placed(number, offsets, sizes, owner, blob_offset, blob)


def _round_up(offset: int) -> int:
    return -(-offset // DATA_ALIGNMENT) * DATA_ALIGNMENT
