"""What a checkpoint says of the tensors in it: their chunks, and the places of these in its files.

    box         a hyper-rectangle of a tensor (boxes.py)
    holding     a box, and the ranks that hold it (chunks.py)
    chunk       a box that one rank writes to one place in one file
    blob        what `torch.save` makes of a chunk in a `.distcp` file: data in a frame (blob.py)
    block       256 KiB of a chunk's data; each has a digest

Plain data is a tensor of bytes: the blob that `torch.save` makes of it, without a frame around it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.plan.boxes import Box


class Chunk(NamedTuple):
    """A box of a tensor in a file of a checkpoint. Its elements lie there row by row."""

    box: Box
    rank: int  # that writes it; -1 if that is not known, in files of other programs
    file: str  # in the checkpoint's folder
    offset: int  # bytes from the beginning of the file to the data


class SavedTensor(NamedTuple):
    """A tensor, and all of its chunks on all ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def chunk_nbytes(self, chunk: Chunk) -> int:
        """Of the data of one of its chunks."""
        return chunk.box.numel * self.dtype.itemsize


def differences(saved: SavedTensor, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """How a saved tensor differs from the one it is to be loaded into, each as a clause."""
    found = []
    if saved.shape != shape:
        found.append(f"{saved.key} has shape {saved.shape} where the model has {shape}")
    if saved.dtype != dtype:
        found.append(f"{saved.key} is {saved.dtype} where the model has {dtype}")
    return found
