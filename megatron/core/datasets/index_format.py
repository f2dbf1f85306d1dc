"""The format of a `.idx`, and what must hold between it and its `.bin`.

Little endian throughout, as megatron-core writes and reads it:

    offset  bytes  what
         0      9  magic "MMIDIDX\\0\\0"
         9      8  version, uint64, 1
        17      1  code of the tokens' dtype, uint8
        18      8  num_sequences, uint64
        26      8  num_boundaries, uint64: number of documents + 1
        34     4s  length of each sequence, in tokens, int32
      34+4s    8s  where each sequence starts in the .bin, in bytes, int64
     34+12s    8b  the sequence each document starts with, and num_sequences at the end, int64
               1s  optional: the modality of each sequence, int8 (multimodal data; not read here)

A document is one or more sequences; text data has one sequence per document. The sequences follow
each other in the `.bin` without gaps, from its first byte to its last; the documents follow each
other in the same way. Behind the last document there may be sequences that belong to none, where a
writer added them without ending their document; they are sequences like all others.
"""

from __future__ import annotations

import logging
import struct
from typing import Any, NamedTuple

import numpy as np

from megatron.core.datasets.data_files import DataFile, IndexedDatasetError

logger = logging.getLogger(__name__)

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Sequences, or boundaries, checked at a time: few enough for the second-level cache.
_CHECKED = 1 << 15


class IndexHeader(NamedTuple):
    """The content of an index's first bytes, and the places of its parts, in bytes."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_boundaries: int

    @property
    def lengths_at(self) -> int:
        return _HEADER.size

    @property
    def pointers_at(self) -> int:
        return self.lengths_at + 4 * self.num_sequences

    @property
    def boundaries_at(self) -> int:
        return self.pointers_at + 8 * self.num_sequences

    @property
    def end(self) -> int:
        """Of the boundaries; modalities may follow."""
        return self.boundaries_at + 8 * self.num_boundaries


def pack_header(dtype: np.dtype[Any], num_sequences: int, num_boundaries: int) -> bytes:
    """The first bytes of an index."""
    return _HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], num_sequences, num_boundaries)


def read_header(index: DataFile) -> IndexHeader:
    """The header of an index. IndexedDatasetError unless its counts fit its size."""
    path, size = index.path, index.version.num_bytes
    content = index.read(0, min(size, _HEADER.size))
    if not content.startswith(_MAGIC):
        found = content[: len(_MAGIC)]
        expected = f"an index whose first bytes are {_MAGIC!r}"
        raise IndexedDatasetError(f"{path}: expected {expected}, got {found!r}.")

    if len(content) < _HEADER.size:
        expected = f"a header of {_HEADER.size} bytes"
        raise IndexedDatasetError(f"{path}: expected {expected}, got {len(content)}.")

    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(content)
    if version != _VERSION:
        raise IndexedDatasetError(f"{path}: expected version {_VERSION}, got {version}.")
    if code not in DTYPES:
        expected = f"a dtype code from {min(DTYPES)} to {max(DTYPES)}"
        raise IndexedDatasetError(f"{path}: expected {expected}, got {code}.")

    header = IndexHeader(DTYPES[code], num_sequences, num_boundaries)
    if size not in (header.end, header.end + num_sequences):
        raise IndexedDatasetError(
            f"{path}: expected {header.end} bytes for {num_sequences} sequences and "
            f"{num_boundaries} document boundaries, got {size} bytes."
        )

    return header


def check_index(index: DataFile, header: IndexHeader, tokens: DataFile) -> None:
    """Holds all of an index against its `.bin`.

    The index is read rather than mapped: once, in order, in memory that does not grow with it.

    Raises:
        IndexedDatasetError: unless the sequences account for each byte of the `.bin`, and documents
            are runs of them.
    """
    end = _check_sequences(index, header, tokens)
    size = tokens.version.num_bytes
    if end != size:
        expected = f"{end} bytes, as {index.path} says"
        raise IndexedDatasetError(f"{tokens.path}: expected {expected}, got {size}.")
    _check_boundaries(index, header)


def _check_sequences(index: DataFile, header: IndexHeader, tokens: DataFile) -> int:
    """Each sequence starts where the one before it ends. Returns where the last one ends."""
    end, size = 0, tokens.version.num_bytes
    for begin in range(0, header.num_sequences, _CHECKED):
        count = min(_CHECKED, header.num_sequences - begin)
        lengths = index.array(header.lengths_at + 4 * begin, count, "<i4")
        if lengths.min() < 0:
            wrong = int(np.flatnonzero(lengths < 0)[0])
            expected = f"a length >= 0 of sequence {begin + wrong}"
            raise IndexedDatasetError(f"{index.path}: expected {expected}, got {lengths[wrong]}.")

        # int64 does not overflow: `end` is within the .bin, and this chunk adds less than 2^49.
        ends = np.cumsum(lengths, dtype=np.int64)
        ends *= header.dtype.itemsize
        ends += end
        pointers = index.array(header.pointers_at + 8 * begin, count, "<i8")
        if pointers[0] != end or not np.array_equal(pointers[1:], ends[:-1]):
            starts = np.concatenate(([end], ends[:-1]))
            wrong = int(np.flatnonzero(pointers != starts)[0])
            where = f"at byte {starts[wrong]}, where the one before it ends"
            raise IndexedDatasetError(
                f"{index.path}: expected sequence {begin + wrong} to start {where}, got "
                f"{pointers[wrong]}."
            )

        end = int(ends[-1])
        if end > size:
            wrong = int(np.flatnonzero(ends > size)[0])
            raise IndexedDatasetError(
                f"{tokens.path}: expected at least {ends[wrong]} bytes for sequences 0 to "
                f"{begin + wrong} of {index.path}, got {size}."
            )

    return end


def _check_boundaries(index: DataFile, header: IndexHeader) -> None:
    """Documents start with sequence 0, do not go backwards, and end with the last sequence or
    before it.
    """
    last = 0
    for begin in range(0, header.num_boundaries, _CHECKED):
        count = min(_CHECKED, header.num_boundaries - begin)
        boundaries = index.array(header.boundaries_at + 8 * begin, count, "<i8")
        if begin == 0 and boundaries[0] != 0:
            expected = "the first document to start at sequence 0"
            raise IndexedDatasetError(f"{index.path}: expected {expected}, got {boundaries[0]}.")
        if boundaries[0] < last or (boundaries[1:] < boundaries[:-1]).any():
            whole = np.concatenate(([last], boundaries))
            wrong = int(np.flatnonzero(whole[1:] < whole[:-1])[0])
            raise IndexedDatasetError(
                f"{index.path}: expected document {begin + wrong} to start at sequence "
                f"{whole[wrong]} or a later one, got {whole[wrong + 1]}."
            )
        last = int(boundaries[-1])

    if header.num_boundaries == 0:
        expected = "the first document to start at sequence 0"
        raise IndexedDatasetError(f"{index.path}: expected {expected}, got no boundaries.")
    if last > header.num_sequences:
        expected = f"the documents to end with sequence {header.num_sequences} or before it"
        raise IndexedDatasetError(f"{index.path}: expected {expected}, got {last}.")
    if last < header.num_sequences:
        # Each rank opens each file: no warning, which would be as many lines.
        logger.info(
            "%s: the last %d of %d sequences belong to no document; the writer never called "
            "end_document. They are read like all others.",
            index.path,
            header.num_sequences - last,
            header.num_sequences,
        )
