"""Megatron's token files: `PREFIX.bin` holds the tokens of all sequences, `PREFIX.idx` the place of
each one.

index_format.py describes the index. A document is one or more sequences; text data has one sequence
per document.
"""

from __future__ import annotations

import contextlib
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.config import bin_path, idx_path
from megatron.core.datasets.data_files import DataFile, FileVersion, IndexedDatasetError
from megatron.core.datasets.index_format import (
    DTYPES,
    IndexHeader,
    check_index,
    pack_header,
    read_header,
)
from megatron.core.files import failures_named, sync_folder, sync_stream, temporary_path

_CHUNK = 1 << 18  # sequences handled at a time
_PIECE_BYTES = 1 << 24  # of tokens copied at a time
_LONGEST = (1 << 31) - 1  # tokens of a sequence: its length is an int32


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron stores token ids in: uint16 for a vocabulary below 65500, otherwise
    int32.
    """
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


class IndexedDataset:
    """The sequences of a `.bin/.idx` pair. The index is mapped; tokens are read when asked for.

    `dataset[3]` and `dataset[-1]` are the tokens of a sequence, `dataset[3:7]` a list of several.

    Opening reads the index once from end to end and holds it against the `.bin`: lengths and
    pointers must account for each byte of it, in order. So a wrong index never leads to an
    allocation, and no token is read as part of another sequence. The memory that takes does not
    grow with the index.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.
        multimodal: must be False.
        mmap: has no effect: the index is mapped and tokens are read.
        verified: versions of `.idx` and `.bin` that another process has held against each other
            already. They must be the versions that are found, and are not checked again.

    Raises:
        NotImplementedError: for multimodal files.
        IndexedDatasetError: a file is missing, is no such file, or contradicts the other one;
            or they are not the `verified` ones.
    """

    # Of the files as opened, whatever is put under their names later.
    idx_version: FileVersion
    bin_version: FileVersion
    # All three are views of the mapped file.
    sequence_lengths: npt.NDArray[np.int32]  # [num_sequences] tokens
    sequence_pointers: npt.NDArray[np.int64]  # [num_sequences] bytes
    document_indices: npt.NDArray[np.int64]  # [num_documents + 1] sequences

    def __init__(
        self,
        prefix: str | Path,
        multimodal: bool = False,
        mmap: bool = True,  # noqa: ARG002
        *,
        verified: tuple[FileVersion, FileVersion] | None = None,
    ) -> None:
        _refuse_modes(multimodal)
        self.prefix = str(prefix)
        index = DataFile(self.idx_path, "an index of token files")
        self._tokens = DataFile(self.bin_path, "a file of tokens")
        self.idx_version, self.bin_version = found = (index.version, self._tokens.version)
        if verified is not None and verified != found:
            expected = f"the .idx and .bin the dataset was pickled with, {verified}"
            raise IndexedDatasetError(f"{prefix}: expected {expected}, got {found}.")

        header = read_header(index)
        self.dtype = header.dtype
        if verified is None:
            check_index(index, header, self._tokens)
        self._map_index(index, header)

    @staticmethod
    def exists(prefix: str | Path) -> bool:
        """Whether both files of a prefix are there."""
        return idx_path(prefix).is_file() and bin_path(prefix).is_file()

    @property
    def bin_path(self) -> Path:
        return bin_path(self.prefix)

    @property
    def idx_path(self) -> Path:
        return idx_path(self.prefix)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[npt.NDArray[Any]]: ...

    def __getitem__(self, index: int | slice) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        """Tokens of one sequence, counted from the end if negative, or of a run of sequences.

        Raises:
            IndexError: no such sequence.
            ValueError: a slice with another step than 1.
            TypeError: another kind of index.
            IndexedDatasetError: as `get`.
        """
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"Expected a slice with step 1, got {index}.")
            return [self.get(each) for each in range(begin, end)]

        if not isinstance(index, (int, np.integer)):
            raise TypeError(f"Expected an integer or a slice, got {type(index).__name__}.")
        if not -len(self) <= index < len(self):
            raise IndexError(f"Expected one of {len(self)} sequences, got {index}.")
        return self.get(int(index) % len(self))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence: `length` of them from `offset` on, by default to the end.

        Returns:
            [length] of `dtype`, read-only.

        Raises:
            IndexError: no such sequence, or a part that reaches beyond it.
            IndexedDatasetError: the files have changed or cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Expected a sequence in range({len(self)}), got {index}.")
        self._index.check_size()
        available = int(self.sequence_lengths[index])
        if length is None:
            length = available - offset
        if not (0 <= offset <= available and 0 <= length <= available - offset):
            raise IndexError(
                f"Expected a part of the {available} tokens of sequence {index}, got {length} from "
                f"{offset} on."
            )

        begin = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        return self._tokens.array(begin, length, self.dtype)

    def gather_lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Lengths of the given sequences: int64 [n] -> int32 [n]; negative indices are not
        allowed.
        """
        self._index.check_size()
        # The 34-byte header leaves the lengths unaligned, which sends numpy's indexing down a path
        # three times as slow; as 4-byte blobs they are aligned.
        return self.sequence_lengths.view("V4").take(indices).view(np.dtype("<i4"))

    def num_tokens(self, sequences: range) -> int:
        """Number of tokens in a range of sequences, which follow each other without a gap."""
        self._index.check_size()
        begin = self._begin_of(sequences.start)
        end = self._begin_of(max(sequences.start, sequences.stop))
        return (end - begin) // self.dtype.itemsize

    def pieces(self) -> Iterator[bytes]:
        """All of the `.bin`, in order, some MiB at a time."""
        num_bytes = self.bin_version.num_bytes
        for begin in range(0, num_bytes, _PIECE_BYTES):
            yield self._tokens.read(begin, min(_PIECE_BYTES, num_bytes - begin))

    def in_chunks(self, array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """All of one of the arrays of the index, in order, some MiB at a time."""
        for begin in range(0, len(array), _CHUNK):
            self._index.check_size()
            yield array[begin : begin + _CHUNK]

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would carry its content; a worker opens the files itself.
        return (_open_again, (type(self), self.prefix, self.idx_version, self.bin_version))

    def _begin_of(self, sequence: int) -> int:
        """Where a sequence starts, in bytes; the end of the file for the one after the last."""
        is_there = sequence < len(self)
        return int(self.sequence_pointers[sequence]) if is_there else self.bin_version.num_bytes

    def _map_index(self, index: DataFile, header: IndexHeader) -> None:
        self._index = index.map()
        content = self._index.content
        self.sequence_lengths = content[header.lengths_at : header.pointers_at].view("<i4")
        self.sequence_pointers = content[header.pointers_at : header.boundaries_at].view("<i8")
        self.document_indices = content[header.boundaries_at : header.end].view("<i8")


def _refuse_modes(multimodal: bool) -> None:
    if multimodal:
        raise NotImplementedError(
            "Expected token files of text, got multimodal=True: there are no modes of sequences."
        )


def _open_again(
    kind: type[IndexedDataset], prefix: str, idx_version: FileVersion, bin_version: FileVersion
) -> IndexedDataset:
    """A pickled dataset, opened where it is unpickled."""
    return kind(prefix, verified=(idx_version, bin_version))


class IndexedDatasetBuilder:
    """Streams documents into a `.bin/.idx` pair; memory is independent of their number.

    Tokens and lengths go to temporary files next to the target. `finalize()` gives them their
    names; until then a reader finds the earlier files or none. As a context manager it finalizes at
    the end of the block, and removes everything if the block raises.

        with IndexedDatasetBuilder("data/web_text_document", optimal_dtype(50257)) as builder:
            builder.add_document([464, 3290, 50256])
            builder.add_item([11, 12])  # a document of two sequences
            builder.add_item([13])
            builder.end_document()
            builder.add_index("data/more_text_document")

    As in megatron-core, sequences whose document is not ended belong to the document that comes
    next, or to none.

    Args:
        prefix: the path of both files without `.bin` and `.idx`, or that of the `.bin`; its
            directory is made where it is missing.
        dtype: of the stored tokens.
        multimodal: must be False.

    Raises:
        ValueError: a dtype the format has no code for.
        NotImplementedError: for multimodal files.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike = np.int32, multimodal: bool = False
    ) -> None:
        _refuse_modes(multimodal)
        # megatron-core's builder is given the path of the file.
        self.prefix = prefix = str(prefix).removesuffix(".bin")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"Expected one of {known}, got {self.dtype}.")

        self._is_complete = False
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
            ValueError: lengths that do not add up to n or do not fit into 31 bits, or a token that
                the dtype cannot hold.
        """
        stored = self._stored(tokens)
        self._add(stored, [len(stored)] if lengths is None else [int(each) for each in lengths])
        self.end_document()

    def add_item(self, tokens: npt.ArrayLike) -> None:
        """Adds one sequence to the document that `end_document` will end.

        Args:
            tokens: as for `add_document`.

        Raises:
            ValueError: a token that the dtype cannot hold, or too many of them for 31 bits.
        """
        stored = self._stored(tokens)
        self._add(stored, [len(stored)])

    def end_document(self) -> None:
        """Ends a document: the sequences since the end of the one before it, perhaps none."""
        with failures_named(bin_path(self.prefix)):
            self._boundaries.write(struct.pack("<q", self.num_sequences))
        self.num_documents += 1

    def add_index(self, path_prefix: str | Path) -> None:
        """Adds all sequences and documents of other token files.

        Args:
            path_prefix: their path without `.bin` and `.idx`.

        Raises:
            ValueError: tokens of another dtype.
            IndexedDatasetError: files that cannot be used. If they fail while they are read, this
                builder is aborted.
        """
        other = IndexedDataset(path_prefix)
        if other.dtype != self.dtype:
            raise ValueError(
                f"Expected tokens of {self.dtype} in {path_prefix}, as in the files that are being "
                f"written, got {other.dtype}."
            )

        try:
            with failures_named(bin_path(self.prefix)):
                for content in other.pieces():
                    self._tokens.write(content)
                for lengths in other.in_chunks(other.sequence_lengths):
                    self._lengths.write(lengths.tobytes())
                for ends in other.in_chunks(other.document_indices[1:]):
                    self._boundaries.write((ends + self.num_sequences).astype("<i8").tobytes())
        except BaseException:
            self.abort()
            raise

        self.num_tokens += other.bin_version.num_bytes // self.dtype.itemsize
        self.num_documents += len(other.document_indices) - 1
        self.num_sequences += len(other)

    def finalize(self, path: str | Path | None = None) -> None:
        """Writes the index and publishes both files. They are on disk when this returns.

        Args:
            path: of the index, which goes next to the `.bin`; default: there.

        Raises:
            RuntimeError: the builder was finalized or aborted before.
            ValueError: an index that is not to be next to the `.bin`.
        """
        if path is not None and Path(path).resolve() != idx_path(self.prefix).resolve():
            raise ValueError(
                f"Expected the index at {idx_path(self.prefix)}, next to its .bin, got {path}."
            )
        try:
            self.complete()
            # Without its old index the new .bin is no dataset, rather than a wrong one, until the
            # new index is there.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary_bin.replace(bin_path(self.prefix))
            self._temporary_idx.replace(idx_path(self.prefix))
            sync_folder(bin_path(self.prefix).parent)
        finally:
            self.abort()

    def complete(self) -> None:
        """Flushes all data to the temporary files. No sequence can be added afterwards.

        A full disk raises here at the latest, so a program that writes several data sets completes
        all of them before it finalizes the first.

        Raises:
            RuntimeError: the builder was finalized or aborted before.
        """
        if self._is_complete:
            return
        if self._tokens.closed:
            raise RuntimeError(
                f"Expected an open builder, got one of {self.prefix} that is finalized or aborted."
            )
        with failures_named(bin_path(self.prefix)):
            sync_stream(self._tokens)
            self._tokens.close()
        with failures_named(idx_path(self.prefix)):
            self._write_index()
        self._is_complete = True

    def abort(self) -> None:
        """Removes unpublished files. Harmless at any time."""
        self._is_complete = False
        for stream in (self._tokens, self._lengths, self._boundaries):
            # Closing writes the buffer, and fails once more on a full disk.
            with contextlib.suppress(OSError):
                stream.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()

    def _stored(self, tokens: npt.ArrayLike) -> npt.NDArray[Any]:
        """Tokens as they are stored, [n]. ValueError for one that the dtype cannot hold."""
        given = np.asarray(tokens).reshape(-1)
        with np.errstate(invalid="ignore"):  # NaN; other values are rejected below
            stored = given.astype(self.dtype)
        if given.dtype != self.dtype and not np.array_equal(stored, given):
            wrong = given[stored != given][0]
            raise ValueError(f"Expected tokens that {self.dtype} can hold, got {wrong}.")
        return stored

    def _add(self, stored: npt.NDArray[Any], lengths: list[int]) -> None:
        """Adds sequences. ValueError for lengths that do not fit the tokens, or too large."""
        if max(lengths, default=0) > _LONGEST:
            raise ValueError(
                f"Expected sequences of at most {_LONGEST} tokens, got {max(lengths)}."
            )
        if sum(lengths) != len(stored) or min(lengths, default=0) < 0:
            raise ValueError(
                f"Expected lengths that add up to {len(stored)} tokens, got {lengths}."
            )
        with failures_named(bin_path(self.prefix)):
            self._tokens.write(stored.tobytes())
            self._lengths.write(np.array(lengths, dtype="<i4").tobytes())
        self.num_sequences += len(lengths)
        self.num_tokens += len(stored)

    def _write_index(self) -> None:
        with self._temporary_idx.open("xb") as index:
            index.write(pack_header(self.dtype, self.num_sequences, self.num_documents + 1))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, index)
            self._write_pointers(index)
            self._boundaries.seek(0)
            shutil.copyfileobj(self._boundaries, index)
            sync_stream(index)

    def _write_pointers(self, index: BinaryIO) -> None:
        """Where each sequence starts: the running sum of the lengths before it, in bytes."""
        self._lengths.seek(0)
        position = 0
        while chunk := self._lengths.read(4 * _CHUNK):
            num_bytes = np.frombuffer(chunk, dtype="<i4").astype("<i8") * self.dtype.itemsize
            ends = position + np.cumsum(num_bytes)
            index.write((ends - num_bytes).tobytes())
            position = int(ends[-1])
