"""Megatron's token files: `PREFIX.bin` holds the tokens of all sequences, `PREFIX.idx` says where each one lies.

The index, little endian throughout, as megatron-core writes and reads it:

    offset  bytes  what
         0      9  magic "MMIDIDX\\0\\0"
         9      8  version, uint64, 1
        17      1  code of the tokens' dtype, uint8
        18      8  num_sequences, uint64
        26      8  num_boundaries, uint64: number of documents + 1
        34     4s  length of each sequence, in tokens, int32
      34+4s    8s  where each sequence begins in the .bin, in bytes, int64
     34+12s    8b  the sequence each document begins with, and num_sequences at the end, int64
               1s  optional: the modality of each sequence, int8 (multimodal data; not read here)

A document is one or more sequences; text data has one sequence per document.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.files import sync_folder, sync_stream, temporary_path

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_CHUNK = 1 << 18  # sequences handled at a time
_LONGEST = (1 << 31) - 1  # tokens of a sequence: its length is an int32


class IndexedDatasetError(ValueError):
    """Token files on disk that cannot be read: missing, foreign, truncated or not belonging together."""


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron stores token ids in: uint16 for a vocabulary below 65500, otherwise int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | Path) -> Path:
    """The file of tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file that says where each sequence lies."""
    return Path(f"{prefix}.idx")


class FileVersion(NamedTuple):
    """What tells a file from another one that later stands under its name."""

    num_bytes: int
    mtime_ns: int


class IndexedDataset:
    """The sequences of a `.bin/.idx` pair, memory-mapped: opening costs the same whatever their size.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.

    Raises:
        IndexedDatasetError: a file is missing, is no such file, or is shorter than its counts say; or, where a pickled
            dataset is opened again, the files are no longer those it was pickled with.
    """

    # Of the files as mapped, whatever is put under their names later.
    idx_version: FileVersion
    bin_version: FileVersion
    # All three are views of the mapped file.
    sequence_lengths: npt.NDArray[np.int32]  # [num_sequences] tokens
    sequence_pointers: npt.NDArray[np.int64]  # [num_sequences] bytes
    document_indices: npt.NDArray[np.int64]  # [num_documents + 1] sequences

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise IndexedDatasetError(f"Expected the files {self.prefix}.bin and .idx, got no {path}.")
        self._map_index()
        self._map_tokens()

    @property
    def bin_path(self) -> Path:
        return bin_path(self.prefix)

    @property
    def idx_path(self) -> Path:
        return idx_path(self.prefix)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence: `length` of them from `offset` on, by default to the end.

        Returns:
            [length] of `dtype`; a read-only view of the file, not a copy.

        Raises:
            IndexError: no such sequence, or a part that reaches beyond it.
            IndexedDatasetError: the index points outside the .bin.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Expected a sequence in range({len(self)}), got {index}.")
        available = int(self.sequence_lengths[index])
        if length is None:
            length = available - offset
        if not (0 <= offset <= available and 0 <= length <= available - offset):
            raise IndexError(
                f"Expected a part of the {available} tokens of sequence {index}, got {length} from {offset} on."
            )
        begin = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        end = begin + length * self.dtype.itemsize
        if not 0 <= begin <= end <= len(self._tokens):
            raise IndexedDatasetError(
                f"{self.bin_path}: expected sequence {index} within its {len(self._tokens)} bytes, got bytes {begin} "
                f"to {end} from {self.idx_path}."
            )
        return self._tokens[begin:end].view(self.dtype)

    def gather_lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Lengths of the given sequences: int64 [n] -> int32 [n]; negative indices are not allowed."""
        # The 34-byte header leaves the lengths unaligned, which sends numpy's indexing down a path three times as
        # slow; as 4-byte blobs they are aligned.
        return self.sequence_lengths.view("V4").take(indices).view(np.dtype("<i4"))

    def num_tokens(self, sequences: range) -> int:
        """Number of tokens in a range of sequences."""
        chunks = range(sequences.start, sequences.stop, _CHUNK)
        return sum(
            int(self.sequence_lengths[begin : min(begin + _CHUNK, sequences.stop)].sum(dtype=np.int64))
            for begin in chunks
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would carry its content; a worker maps the files itself.
        return (_open_again, (type(self), self.prefix, self.idx_version, self.bin_version))

    def _map_index(self) -> None:
        with self.idx_path.open("rb") as stream:
            self.idx_version = _version(stream)
            header = stream.read(_HEADER.size)
            num_sequences, num_boundaries = self._read_header(header)
            mapped = np.asarray(np.memmap(stream, dtype=np.uint8, mode="r"))
        pointers_at = _HEADER.size + 4 * num_sequences
        documents_at = pointers_at + 8 * num_sequences
        self.sequence_lengths = mapped[_HEADER.size : pointers_at].view("<i4")
        self.sequence_pointers = mapped[pointers_at:documents_at].view("<i8")
        self.document_indices = mapped[documents_at : documents_at + 8 * num_boundaries].view("<i8")
        last = int(self.document_indices[-1]) if num_boundaries else None
        if last != num_sequences:
            raise IndexedDatasetError(
                f"{self.idx_path}: expected the documents to end with sequence {num_sequences}, got {last}."
            )

    def _read_header(self, header: bytes) -> tuple[int, int]:
        """Checks the header and takes the dtype from it; returns the number of sequences and of boundaries."""
        if not header.startswith(_MAGIC):
            raise IndexedDatasetError(
                f"{self.idx_path}: expected an index that begins with {_MAGIC!r}, got {header[: len(_MAGIC)]!r}."
            )
        if len(header) < _HEADER.size:
            raise IndexedDatasetError(f"{self.idx_path}: expected a header of {_HEADER.size} bytes, got {len(header)}.")
        _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
        if version != _VERSION:
            raise IndexedDatasetError(f"{self.idx_path}: expected version {_VERSION}, got {version}.")
        if code not in _DTYPES:
            raise IndexedDatasetError(
                f"{self.idx_path}: expected a dtype code from {min(_DTYPES)} to {max(_DTYPES)}, got {code}."
            )
        self.dtype = _DTYPES[code]
        expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
        size = self.idx_version.num_bytes
        if size not in (expected, expected + num_sequences):
            raise IndexedDatasetError(
                f"{self.idx_path}: expected {expected} bytes for {num_sequences} sequences and {num_boundaries} "
                f"document boundaries, got {size} bytes."
            )
        return num_sequences, num_boundaries

    def _map_tokens(self) -> None:
        with self.bin_path.open("rb") as stream:
            self.bin_version = _version(stream)
            size = self.bin_version.num_bytes
            # An empty file cannot be mapped.
            self._tokens: npt.NDArray[np.uint8] = (
                np.asarray(np.memmap(stream, dtype=np.uint8, mode="r")) if size else np.empty(0, dtype=np.uint8)
            )
        if len(self):
            needed = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
            if size < needed:
                raise IndexedDatasetError(
                    f"{self.bin_path}: expected at least {needed} bytes, as {self.idx_path} says, got {size}."
                )


def _version(stream: BinaryIO) -> FileVersion:
    """Of the file that is open, which may no longer be the one under its name."""
    status = os.fstat(stream.fileno())
    return FileVersion(status.st_size, status.st_mtime_ns)


def _open_again(
    kind: type[IndexedDataset], prefix: str, idx_version: FileVersion, bin_version: FileVersion
) -> IndexedDataset:
    """A pickled dataset, opened where it is unpickled."""
    dataset = kind(prefix)
    found, expected = (dataset.idx_version, dataset.bin_version), (idx_version, bin_version)
    if found != expected:
        raise IndexedDatasetError(
            f"{prefix}: expected the .idx and .bin the dataset was pickled with, {expected}, got {found}."
        )
    return dataset


class IndexedDatasetBuilder:
    """Writes a `.bin/.idx` pair document by document, in memory that does not grow with their number.

    Tokens and lengths go to temporary files beside the target. `finalize()` gives them their names; until then a
    reader finds the earlier files or none. As a context manager it finalizes at the end of the block, and leaves
    nothing behind if the block raises.

        with IndexedDatasetBuilder("data/web_text_document", optimal_dtype(50257)) as builder:
            builder.add_document([464, 3290, 50256])

    Args:
        prefix: the path of both files without `.bin` and `.idx`; its folder is made where it is missing.
        dtype: what the tokens are stored as.

    Raises:
        ValueError: a dtype the format has no code for.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise ValueError(f"Expected one of {', '.join(map(str, _CODES))}, got {self.dtype}.")
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0
        folder = bin_path(prefix).parent
        folder.mkdir(parents=True, exist_ok=True)
        self._temporary_bin = temporary_path(bin_path(prefix))
        self._temporary_idx = temporary_path(idx_path(prefix))
        # Unnamed: the system removes them whatever happens.
        self._lengths: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._boundaries: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._boundaries.write(struct.pack("<q", 0))
        self._tokens: BinaryIO = self._temporary_bin.open("xb")

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Adds one document.

        Args:
            tokens: integers [n] (a list, an array, a CPU tensor).
            lengths: how the tokens divide into sequences; by default the document is one sequence.

        Raises:
            ValueError: lengths that do not add up to n or do not fit into 31 bits, or a token that the dtype cannot
                hold.
        """
        given = np.asarray(tokens).reshape(-1)
        with np.errstate(invalid="ignore"):  # NaN; what does not fit is refused below
            stored = given.astype(self.dtype)
        if given.dtype != self.dtype and not np.array_equal(stored, given):
            wrong = given[stored != given][0]
            raise ValueError(f"Expected tokens that {self.dtype} can hold, got {wrong}.")
        each = [len(stored)] if lengths is None else [int(length) for length in lengths]
        if max(each, default=0) > _LONGEST:
            raise ValueError(f"Expected sequences of at most {_LONGEST} tokens, got {max(each)}.")
        if sum(each) != len(stored) or min(each, default=0) < 0:
            raise ValueError(f"Expected lengths that add up to {len(stored)} tokens, got {each}.")
        sequence_lengths = np.array(each, dtype="<i4")
        self._tokens.write(stored.tobytes())
        self._lengths.write(sequence_lengths.tobytes())
        self.num_sequences += len(sequence_lengths)
        self.num_documents += 1
        self.num_tokens += len(stored)
        self._boundaries.write(struct.pack("<q", self.num_sequences))

    def finalize(self) -> None:
        """Writes the index and publishes both files. They are on disk when this returns.

        Raises:
            RuntimeError: the builder was finalized or aborted before.
        """
        if self._tokens.closed:
            raise RuntimeError(f"Expected an open builder, got one of {self.prefix} that is finalized or aborted.")
        try:
            sync_stream(self._tokens)
            self._tokens.close()
            self._write_index()
            # Without its old index the new .bin is no dataset, rather than a wrong one, until the new index stands.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary_bin.replace(bin_path(self.prefix))
            self._temporary_idx.replace(idx_path(self.prefix))
            sync_folder(bin_path(self.prefix).parent)
        finally:
            self.abort()

    def abort(self) -> None:
        """Removes what is not published. Harmless at any time."""
        for stream in (self._tokens, self._lengths, self._boundaries):
            stream.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()

    def _write_index(self) -> None:
        with self._temporary_idx.open("xb") as index:
            index.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[self.dtype], self.num_sequences, self.num_documents + 1))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, index)
            self._write_pointers(index)
            self._boundaries.seek(0)
            shutil.copyfileobj(self._boundaries, index)
            sync_stream(index)

    def _write_pointers(self, index: BinaryIO) -> None:
        """Where each sequence begins: the running sum of the lengths before it, in bytes."""
        self._lengths.seek(0)
        position = 0
        while chunk := self._lengths.read(4 * _CHUNK):
            num_bytes = np.frombuffer(chunk, dtype="<i4").astype("<i8") * self.dtype.itemsize
            ends = position + np.cumsum(num_bytes)
            index.write((ends - num_bytes).tobytes())
            position = int(ends[-1])
