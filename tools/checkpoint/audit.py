"""Whether every byte of a published checkpoint is what was written: all that is wrong with it, not
the first only.

A load believes the marker, the metadata and the digests of the data that it needs. This goes
through whole data files, also through what lies around the data, which PyTorch's own reader needs,
and it goes on after what it finds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.blob import blob_frame
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
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.load.small_files import (
    Blob,
    blobs_by_file,
    check_size,
    chunk_problems,
    file_problems,
    manifest_problems,
    parse_train_state,
    path_of,
    read_marker,
    read_small,
    system_errors,
)
from megatron.core.dist_checkpointing.plan.coverage import check_coverage
from megatron.core.dist_checkpointing.store import Store

T = TypeVar("T")

_READ_BYTES = 16 * BLOCK_BYTES  # at a time
_MAX_FRAME_BYTES = 1 << 20  # what stands around the data of one tensor is read whole


class Audit:
    """Goes through one checkpoint, once.

    Without a marker, or with a damaged one, what is left to hold against each other is still held.

    Attributes:
        problems: what is wrong, a sentence each.
        num_bytes: of data files that have been gone through.
    """

    def __init__(self, store: Store, name: str, progress: Callable[[int], object]) -> None:
        """
        Args:
            progress: called with every number of bytes that have been gone through.
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
        """What `action` returns; None, and a problem noted, if it raises."""
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
        """What each data file must hold; None if that is not known."""

        def parse() -> Metadata:
            content, source = self._content(METADATA_FILE, marker)
            metadata = parse_metadata(content, source)
            check_coverage(metadata, source)
            return metadata

        metadata = self._attempt(parse)
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
        data_end = chunk.data_offset + chunk.data_nbytes
        frame_nbytes = chunk.blob_nbytes - chunk.data_nbytes
        if frame_nbytes > _MAX_FRAME_BYTES:
            self.problems.append(
                f"Expected at most {_MAX_FRAME_BYTES} bytes around the data of {chunk.key!r} at "
                f"{chunk.offsets} in "
                f"{self._path(file)}, got {frame_nbytes}."
            )
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
                f"Expected the digests of {chunk.key!r} at {chunk.offsets} in {self._path(file)}, "
                "got others of "
                f"{len(wrong)} of {len(chunk.digests)} blocks, the first of them block {wrong[0]}."
            )
        footer = self._read_all(file, data_end, chunk.blob_offset + chunk.blob_nbytes - data_end)
        # Another version of torch may write another frame, which cannot be known here.
        if chunk.dtype and self._writer_torch == torch.__version__:
            try:
                wanted = blob_frame(dtype_named(chunk.dtype), chunk.sizes)
            except RuntimeError as error:  # of sizes of an empty tensor that torch cannot count
                self.problems.append(
                    f"Expected sizes of {chunk.key!r} in {self._path(file)}, got {error}."
                )
                return
            for name, part, written in zip(
                ("before", "behind"), (header, footer), wanted, strict=True
            ):
                if part != written:
                    self.problems.append(
                        f"Expected what torch.save writes {name} the data of {chunk.key!r} at "
                        f"{chunk.offsets} in "
                        f"{self._path(file)}, got other bytes."
                    )

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
