"""The layout of every rank's data file, and the seam for files of another format. Each rank
computes the layout of all files.

A file consists of blobs as `torch.save` writes them, one per chunk, in the order of the state. Data
is aligned to 4096 bytes for direct I/O. The bytes between blobs are zeros. Plain data follows the
tensors in rank 0's file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from megatron.core.dist_checkpointing.format.blob import BlobLayout, blob_layout
from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT, data_file
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import Holdings, shares
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor


class ExportedRows(NamedTuple):
    """Consecutive bytes of an exported file: rows of a box of one of its tensors."""

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
    """Files that a save writes in addition to the entries. The same on every rank, except
    `small_files`.

    Attributes:
        files: by their paths in the checkpoint.
        tensors: by their names; each is in one file.
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
        """The exported rows of a box of an entry; empty for an entry that is not exported.

        Args:
            box: of the entry's global tensor; it must have elements.
        """


class SavedAs(NamedTuple):
    """A tensor as a checkpoint describes it, and its parts on the ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holdings: Holdings


def build_index(
    save_id: str,
    tensors: Sequence[SavedAs],
    plain_nbytes: Mapping[str, int],
    rank: int | None = None,
    export: Export | None = None,
) -> Index:
    """The index of a checkpoint that is to be written.

    Args:
        tensors: the same on every rank.
        plain_nbytes: of the blob of each piece of plain data.
        export: further files. The chunks of an exact one are chunks of the tensors.
        rank: limits the index to its chunks, in time that does not grow with the number of ranks;
            None: the chunks of all ranks.

    Raises:
        ValueError: for two tensors, or plain data, of one key, and for an empty key.
    """
    _check_keys([*(tensor.key for tensor in tensors), *plain_nbytes])
    saved = [SavedTensor(key, dtype, shape, []) for key, dtype, shape, _ in tensors]
    exported = {} if export is None else _exported(export, rank)
    ends: dict[int, int] = {}  # of the files so far, by rank
    # Most chunks are as large as another: a layout is looked up a hundred thousand times.
    layouts: dict[tuple[torch.dtype, tuple[int, ...]], BlobLayout] = {}

    held = [(each.holdings, each.dtype.itemsize) for each in tensors]
    for number, box, owner in shares(held, rank):
        key, dtype, _, chunks = saved[number]
        rows = [] if export is None else list(export.rows(key, box))
        if rows and export is not None and export.is_exact:
            chunks += [SavedChunk(each.own, owner, each.file, each.offset) for each in rows]
            continue
        for name, _, there, _, file, offset in rows:
            exported[name].chunks.append(SavedChunk(there, owner, file, offset))

        layout = layouts.get((dtype, box.sizes))
        if layout is None:
            layout = layouts[dtype, box.sizes] = blob_layout(dtype, box.sizes)

        # The data is aligned, not the blob: the header ends at the data.
        blocks = -(-(ends.get(owner, 0) + layout.header_nbytes) // DATA_ALIGNMENT)
        offset = blocks * DATA_ALIGNMENT
        ends[owner] = offset - layout.header_nbytes + layout.nbytes
        chunks.append(SavedChunk(box, owner, data_file(owner), offset))

    plain = {}
    for key, nbytes in plain_nbytes.items() if rank in (None, 0) else ():
        chunk = SavedChunk(Box.whole((nbytes,)), 0, data_file(0), ends.get(0, 0))
        plain[key] = SavedTensor(key, torch.uint8, (nbytes,), [chunk])
        ends[0] = chunk.offset + nbytes
    return Index(save_id, {tensor.key: tensor for tensor in saved}, plain, exported)


def _exported(export: Export, rank: int | None) -> dict[str, SavedTensor]:
    """The exported tensors, without chunks yet, and the headers, which rank 0 writes: a tensor of
    bytes under the name of each file.
    """
    found = {}
    if not export.is_exact:
        for name, (dtype, shape) in export.tensors.items():
            found[name] = SavedTensor(name, dtype, shape, [])
    for file, (header, _) in export.files.items() if rank in (None, 0) else ():
        chunk = SavedChunk(Box.whole((len(header),)), 0, file, 0)
        found[file] = SavedTensor(file, torch.uint8, (len(header),), [chunk])
    return found


def _check_keys(keys: Sequence[str]) -> None:
    # Our readers would reject such a checkpoint.
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise ValueError(f"Expected each key once, got several of {', '.join(repeated)}.")
    if "" in keys:
        raise ValueError("Expected keys that are not empty, got an empty one.")
