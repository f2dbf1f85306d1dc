"""Whether every byte of a published checkpoint is what was written, with all problems listed.

A load checks the marker, the metadata and the digests of the data that it needs. This reads whole
data files, including the bytes around the data, which PyTorch's own reader needs, and goes on after
a problem.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TypeVar

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.blob import MAX_FRAME_BYTES, blob_frame
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    ChunkRecord,
    Manifest,
    Marker,
    digests_of,
    dtype_named,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.load.small_files import (
    Blob,
    blobs_by_file,
    check_size,
    chunk_problems,
    file_problems,
    manifest_problems,
    parse_covered,
    parse_train_state,
    read_marker,
    read_small,
    system_errors,
)
from megatron.core.dist_checkpointing.store import Store

T = TypeVar("T")

_READ_BYTES = 16 * BLOCK_BYTES  # at a time


class Audit:
    """Goes through one checkpoint, once.

    Without a marker, or with a damaged one, the other files are still compared with each other.

    Attributes:
        problems: a sentence each.
        num_bytes: of data files that have been read.
    """

    def __init__(self, store: Store, name: str, progress: Callable[[int], object]) -> None:
        """
        Args:
            progress: called with each number of bytes that have been read.
        """
        self.problems: list[str] = []
        self.num_bytes = 0
        self._store = store
        self._name = name
        self._progress = progress
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._writer_torch = torch.__version__

    def run(self) -> None:
        """Goes through all files."""
        marker = self._attempt(lambda: read_marker(self._store, self._name))
        if marker is not None:
            for file in marker.files:
                self._attempt(functools.partial(check_size, self._store, self._name, file, marker))
        state = self._attempt(lambda: parse_train_state(*self._content(TRAIN_STATE_FILE, marker)))
        versions = (state or {}).get("versions")
        if isinstance(versions, dict):
            self._writer_torch = versions.get("torch", self._writer_torch)
        blobs = self._check_metadata(marker)
        for rank in range(marker.world_size if marker else self._num_manifests()):
            manifest = self._check_manifest(rank, marker, blobs)
            if manifest is not None:
                self._check_data(manifest)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """The result of `action`; if it raises, notes the problem and returns None."""
        try:
            return action()
        except CheckpointError as error:
            self.problems.append(str(error))
            return None

    def _content(self, file: str, marker: Marker | None) -> tuple[bytes, str]:
        """A small file, and its name for messages."""
        source = self._path(file)
        if marker is not None:
            return read_small(self._store, self._name, file, marker), source
        with system_errors(source):
            return self._store.read(f"{self._name}/{file}"), source

    def _path(self, file: str) -> str:
        return path_of(self._store, f"{self._name}/{file}")

    def _num_manifests(self) -> int:
        ranks = itertools.count()
        return next(
            rank for rank in ranks if not self._store.exists(f"{self._name}/{manifest_file(rank)}")
        )

    def _check_metadata(self, marker: Marker | None) -> dict[str, list[Blob]] | None:
        """The blobs of each data file; None if they are not known."""
        metadata = self._attempt(lambda: parse_covered(*self._content(METADATA_FILE, marker)))
        if metadata is None:
            return None

        blobs = blobs_by_file(metadata)
        if marker is not None:
            self.problems += file_problems(blobs, marker, self._path(METADATA_FILE))
        return blobs

    def _check_manifest(
        self, rank: int, marker: Marker | None, blobs: dict[str, list[Blob]] | None
    ) -> Manifest | None:
        source = self._path(manifest_file(rank))
        manifest = self._attempt(
            lambda: Manifest.from_bytes(*self._content(manifest_file(rank), marker))
        )
        if manifest is None:
            return None
        if marker is not None:
            self.problems += manifest_problems(manifest, rank, marker, source)
        if blobs is not None:
            self.problems += chunk_problems(manifest, blobs.get(manifest.file, ()), source)
        return manifest

    def _check_data(self, manifest: Manifest) -> None:
        """One data file from its beginning to its end, or to where it ends too early."""
        end = 0
        try:
            for chunk in manifest.chunks:
                self._check_zeros(manifest.file, end, chunk.blob_offset)
                self._check_chunk(manifest.file, chunk)
                end = chunk.blob_offset + chunk.blob_nbytes
            self._check_zeros(manifest.file, end, manifest.nbytes)
        except CheckpointError as error:
            self.problems.append(str(error))

    def _check_chunk(self, file: str, chunk: ChunkRecord) -> None:
        """One blob: the bytes before its data, the data by its digests, the bytes behind it."""
        data_end = chunk.data_offset + chunk.data_nbytes
        frame_nbytes = chunk.blob_nbytes - chunk.data_nbytes
        where = f"{chunk.key!r} at {chunk.offsets} in {self._path(file)}"
        if frame_nbytes > MAX_FRAME_BYTES:  # header and footer are read whole
            most = f"at most {MAX_FRAME_BYTES} bytes"
            self.problems.append(f"Expected {most} around the data of {where}, got {frame_nbytes}.")
            return

        header = self._read_all(file, chunk.blob_offset, chunk.data_offset - chunk.blob_offset)
        wrong = []
        for first in range(0, len(chunk.digests), _READ_BYTES // BLOCK_BYTES):
            begin = chunk.data_offset + first * BLOCK_BYTES
            got = digests_of(self._read(file, begin, min(_READ_BYTES, data_end - begin)))
            wrong += [
                block for block, each in enumerate(got, start=first) if each != chunk.digests[block]
            ]
        if wrong:
            self.problems.append(
                f"Expected the digests of {where}, got others of {len(wrong)} of "
                f"{len(chunk.digests)} blocks, the first of them block {wrong[0]}."
            )
        footer = self._read_all(file, data_end, chunk.blob_offset + chunk.blob_nbytes - data_end)

        # Another version of torch may write another frame, which cannot be known here.
        if chunk.dtype and self._writer_torch == torch.__version__:
            self._check_frame(file, chunk, where, header, footer)

    def _check_frame(
        self, file: str, chunk: ChunkRecord, where: str, header: bytes, footer: bytes
    ) -> None:
        try:
            wanted = blob_frame(dtype_named(chunk.dtype), chunk.sizes)
        except RuntimeError as error:  # for sizes of an empty tensor that overflow in torch
            self.problems.append(
                f"Expected sizes of {chunk.key!r} in {self._path(file)}, got {error}."
            )
            return

        parts = zip(("before", "behind"), (header, footer), wanted, strict=True)
        self.problems += [
            f"Expected what torch.save writes {name} the data of {where}, got other bytes."
            for name, part, written in parts
            if part != written
        ]

    def _check_zeros(self, file: str, begin: int, end: int) -> None:
        for position in range(begin, end, _READ_BYTES):
            if bytes(self._read(file, position, min(_READ_BYTES, end - position))).strip(b"\0"):
                self.problems.append(
                    f"Expected zeros in {self._path(file)} from byte {begin} to {end}, got others."
                )
                return

    def _read_all(self, file: str, begin: int, nbytes: int) -> bytes:
        """A header or a footer."""
        pieces = range(begin, begin + nbytes, _READ_BYTES)
        return b"".join(
            bytes(self._read(file, place, min(_READ_BYTES, begin + nbytes - place)))
            for place in pieces
        )

    def _read(self, file: str, begin: int, nbytes: int) -> memoryview:
        """Bytes of a data file, until the next are read."""
        into = self._buffer[:nbytes]
        with system_errors(self._path(file)):
            self._store.read_into(f"{self._name}/{file}", begin, into)
        self.num_bytes += nbytes
        self._progress(nbytes)
        return into
