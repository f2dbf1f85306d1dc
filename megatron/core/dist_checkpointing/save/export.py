"""The seam for a second form of the weights within a checkpoint.

An `Export` says by arithmetic, and the same on every rank, where the rows of our tensors lie in
files that other programs read. A save writes them while it writes the tensors themselves: the rank
that writes a chunk of an entry also writes that chunk's rows, so nothing is sent and nothing is
read twice from a device. This package does not know what the files are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from megatron.core.dist_checkpointing.layout.boxes import Box


class ExportedRows(NamedTuple):
    """Consecutive bytes of an exported file: a box of one of its tensors, row by row."""

    name: str  # of the tensor in the file
    dtype: torch.dtype  # in which it is written
    box: Box  # of that tensor
    own: Box  # the same elements, in the entry's global tensor
    file: str  # its path in the checkpoint
    offset: int  # of the first byte in the file

    @property
    def nbytes(self) -> int:
        return self.own.numel * self.dtype.itemsize


class ExportedTensor(NamedTuple):
    """A tensor as the exported files have it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ExportFile(NamedTuple):
    """An exported file: a header, and behind it the rows of tensors without gaps."""

    header: bytes
    nbytes: int  # header included


class Export(Protocol):
    """What a save writes besides the entries. The same on every rank, `small_files` excepted.

    Attributes:
        files: by their paths in the checkpoint.
        tensors: by their names; each lies in one file.
        is_exact: whether all rows are written in the dtypes of their entries, and so to the bit.
            The checkpoint then needs no other copy of these entries.
        small_files: the content of further files, by their paths; empty on ranks other than 0.
    """

    @property
    def files(self) -> Mapping[str, ExportFile]: ...

    @property
    def tensors(self) -> Mapping[str, ExportedTensor]: ...

    @property
    def is_exact(self) -> bool: ...

    @property
    def small_files(self) -> Mapping[str, bytes]: ...

    def rows(self, key: str, box: Box) -> Iterator[ExportedRows]:
        """Where the elements of a box of an entry go; nothing for an entry that is not exported.

        Args:
            box: of the entry's global tensor; it must have elements.
        """
