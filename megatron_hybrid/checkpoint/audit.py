"""Verifies every byte of a published checkpoint, and lists all problems.

A load checks the marker, the index and the digests of the data that it reads. An audit reads whole
data files, including the bytes around the data, which PyTorch's reader needs, compares `.metadata`
with the index, and continues after a problem.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.format.blob import MAX_FRAME_BYTES, blob_frame
from megatron.core.dist_checkpointing.format.index import Index, manifest_problems
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    INDEX_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    Manifest,
    Marker,
    digests_of,
    files_of,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata import (
    parse_metadata,
)
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.load.checkpoint import (
    check_size,
    parse_train_state,
    read_marker,
    read_small,
    system_errors,
)
from megatron.core.dist_checkpointing.store import MOST_METADATA_BYTES, Store, path_of

T = TypeVar("T")

_READ_BYTES = 16 * BLOCK_BYTES  # at a time


class _Written(NamedTuple):
    """A chunk with the digests in its rank's manifest."""

    tensor: SavedTensor
    chunk: SavedChunk
    digests: Sequence[str]


class Audit:
    """Verifies one checkpoint, once.

    Without an intact marker, the other files are still compared with each other.

    Attributes:
        problems: a sentence for each problem.
        num_bytes: the bytes of data files that were read.
    """

    def __init__(self, store: Store, name: str, progress: Callable[[int], object]) -> None:
        """
        Args:
            progress: called with each number of bytes read.
        """
        self.problems: list[str] = []
        self.num_bytes = 0
        self._store = store
        self._name = name
        self._progress = progress
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._writer_torch = torch.__version__
        # Sizes of the header and footer around the data in each chunk's blob, from `.metadata`,
        # since they differ between versions of torch.
        self._frames: dict[SavedChunk, tuple[int, int]] = {}

    def run(self) -> None:
        """Verifies all files."""
        marker = self._attempt(lambda: read_marker(self._store, self._name))
        if marker is not None:
            for file in marker.files:
                self._attempt(functools.partial(check_size, self._store, self._name, file, marker))
        state = self._attempt(lambda: parse_train_state(*self._content(TRAIN_STATE_FILE, marker)))
        versions = (state or {}).get("versions")
        if isinstance(versions, dict):
            self._writer_torch = versions.get("torch", self._writer_torch)

        index = self._attempt(lambda: self._read_index(marker))
        self._attempt(lambda: self._read_metadata(marker, index))
        if marker is not None:
            self._check_further_files(marker)
        if index is not None:
            self._check_data_files(index, marker)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Returns the result of `action`; if it raises, adds the problem and returns None."""
        try:
            return action()
        except CheckpointError as error:
            self.problems.append(str(error))
            return None

    def _content(self, file: str, marker: Marker | None) -> tuple[bytes, str]:
        """Returns the content of a small file, and its path."""
        source = self._path(file)
        if marker is not None:
            return read_small(self._store, self._name, file, marker), source
        with system_errors(source):
            return self._store.read(f"{self._name}/{file}", MOST_METADATA_BYTES), source

    def _path(self, file: str) -> str:
        return path_of(self._store, f"{self._name}/{file}")

    def _read_index(self, marker: Marker | None) -> Index:
        content, source = self._content(INDEX_FILE, marker)
        return Index.from_bytes(content, marker, source)

    def _read_metadata(self, marker: Marker | None, index: Index | None) -> None:
        """Compares `.metadata`, which other programs read, with the index."""
        content, source = self._content(METADATA_FILE, marker)
        found, places, plain = parse_metadata(content, source)
        if index is None:
            return

        blobs = {(blob.file, blob.offset): blob.nbytes for blob in places.values()}
        listed = {tensor.key: tensor for tensor in index.in_blobs}
        for key, tensor in listed.items():
            if not self._is_same(tensor, found.get(key), blobs):
                self.problems.append(
                    f"Expected {key!r} in {source} as {INDEX_FILE} has it, got another, or none."
                )
        got, wanted = found.keys() | plain.keys(), listed.keys() | index.plain.keys()
        if got - wanted or index.plain.keys() - plain.keys():
            keys = few(sorted(got - wanted)) or f"not all of {few(list(index.plain))}"
            self.problems.append(f"Expected the keys of {INDEX_FILE} in {source}, got {keys}.")

    def _is_same(
        self, tensor: SavedTensor, found: SavedTensor | None, blobs: Mapping[tuple[str, int], int]
    ) -> bool:
        """Whether `.metadata` has the tensor with the same chunks in its blobs."""
        if found is None or found[:3] != tensor[:3] or len(found.chunks) != len(tensor.chunks):
            return False
        for own, blob in zip(tensor.chunks, found.chunks, strict=True):
            header = own.offset - blob.offset
            footer = blobs[blob.file, blob.offset] - header - tensor.chunk_nbytes(own)
            is_around = min(header, footer) >= 0 and header + footer <= MAX_FRAME_BYTES
            if own[:3] != blob[:3] or not is_around:
                return False
            self._frames[own] = (header, footer)
        return True

    def _check_further_files(self, marker: Marker) -> None:
        """Verifies small files that no load reads."""
        for file in marker.files.keys() - set(files_of(marker.world_size)):
            if marker.files[file].digest is not None:
                self._attempt(functools.partial(self._content, file, marker))

    def _check_data_files(self, index: Index, marker: Marker | None) -> None:
        """Verifies each data file, up to a premature end."""
        by_file: dict[str, list[_Written]] = {}
        for rank in sorted(index.chunks_by_rank):
            for written in self._written(rank, index, marker):
                by_file.setdefault(written.chunk.file, []).append(written)

        for file, chunks in by_file.items():
            self._attempt(functools.partial(self._check_file, file, chunks, marker))

    def _written(self, rank: int, index: Index, marker: Marker | None) -> Iterator[_Written]:
        """Yields the chunks of a rank with an intact manifest."""
        source = self._path(manifest_file(rank))
        manifest = self._attempt(
            lambda: Manifest.from_bytes(*self._content(manifest_file(rank), marker))
        )
        if manifest is None:
            return
        problems = list(manifest_problems(manifest, rank, index, source))
        self.problems += problems
        if not problems:
            for place, digests in zip(index.chunks_by_rank[rank], manifest.digests, strict=True):
                yield _Written(*place, digests)

    def _check_file(self, file: str, chunks: list[_Written], marker: Marker | None) -> None:
        # Without frames from `.metadata`, the bytes between data are unknown.
        is_known, end = bool(self._frames) or not file.endswith(".distcp"), 0
        for written in sorted(chunks, key=lambda each: each.chunk.offset):
            tensor, chunk, _ = written
            header, footer = self._frames.get(chunk, (0, 0))
            if is_known:
                self._check_zeros(file, end, chunk.offset - header)
            self._check_chunk(written, header, footer)
            end = chunk.offset + tensor.chunk_nbytes(chunk) + footer
        if is_known and marker is not None:
            self._check_zeros(file, end, marker.files[file].nbytes)

    def _check_chunk(self, written: _Written, header_nbytes: int, footer_nbytes: int) -> None:
        """Verifies a chunk's header, its data by their digests, and its footer."""
        (tensor, chunk, digests), file = written, written.chunk.file
        data_end = chunk.offset + tensor.chunk_nbytes(chunk)
        where = f"{tensor.key!r} at {chunk.box.offsets} in {self._path(file)}"
        header = self._read_all(file, chunk.offset - header_nbytes, header_nbytes)
        wrong = []
        for first in range(0, len(digests), _READ_BYTES // BLOCK_BYTES):
            begin = chunk.offset + first * BLOCK_BYTES
            got = digests_of(self._read(file, begin, min(_READ_BYTES, data_end - begin)))
            wrong += [number for number, each in enumerate(got, first) if each != digests[number]]
        if wrong:
            self.problems.append(
                f"Expected the digests of {where}, got others of {len(wrong)} of "
                f"{len(digests)} blocks, the first of them block {wrong[0]}."
            )
        footer = self._read_all(file, data_end, footer_nbytes)

        # Another version of torch may write another frame.
        if header_nbytes and self._writer_torch == torch.__version__:
            wanted = blob_frame(tensor.dtype, chunk.box.sizes)
            parts = zip(("before", "behind"), (header, footer), wanted, strict=True)
            self.problems += [
                f"Expected what torch.save writes {name} the data of {where}, got other bytes."
                for name, part, frame in parts
                if part != frame
            ]

    def _check_zeros(self, file: str, begin: int, end: int) -> None:
        for position in range(begin, end, _READ_BYTES):
            if bytes(self._read(file, position, min(_READ_BYTES, end - position))).strip(b"\0"):
                self.problems.append(
                    f"Expected zeros in {self._path(file)} from byte {begin} to {end}, got others."
                )
                return

    def _read_all(self, file: str, begin: int, nbytes: int) -> bytes:
        """Returns a header or a footer."""
        return bytes(self._read(file, begin, nbytes)) if nbytes else b""

    def _read(self, file: str, begin: int, nbytes: int) -> memoryview:
        """Returns bytes of a data file in a buffer that the next call overwrites."""
        into = self._buffer[:nbytes]
        with system_errors(self._path(file)):
            self._store.read_into(f"{self._name}/{file}", begin, [into])
        self.num_bytes += nbytes
        self._progress(nbytes)
        return into
