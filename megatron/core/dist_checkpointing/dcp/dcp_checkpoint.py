"""A checkpoint that PyTorch DCP wrote, read without executing code.

DCP's own reader unpickles whatever is not a tensor, code included. Here every blob is compared with
its `.metadata` before memory is taken for it, read once, and checked in that memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob import MAX_FRAME_BYTES
from megatron.core.dist_checkpointing.format.blob_reading import (
    read_archive,
    read_plain,
)
from megatron.core.dist_checkpointing.format.manifest import METADATA_FILE, TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.metadata import (
    Blob,
    DcpIndex,
    parse_metadata,
)
from megatron.core.dist_checkpointing.layout.boxes import Box, BoxIndex
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor, check_coverage
from megatron.core.dist_checkpointing.load.checkpoint import read_train_state, system_errors
from megatron.core.dist_checkpointing.store import MOST_METADATA_BYTES, Store, path_of


class TorchDcpCheckpoint:
    """A checkpoint as PyTorch DCP wrote it, read chunk by chunk. For one thread. Errors name the
    file, and the key where there is one.

    Attributes:
        path, tensors, plain: as in `ReadableCheckpoint`. A chunk's offset is that of its blob.
    """

    def __init__(
        self, store: Store, name: str, index: DcpIndex, *, checks_crc: bool = True
    ) -> None:
        """For `open`."""
        self.path = path_of(store, name)
        self.tensors: Mapping[str, SavedTensor] = index.tensors
        self.plain: Collection[str] = index.plain.keys()
        self._store = store
        self._name = name
        self._index = index
        self._checks_crc = checks_crc
        # A blob's checksum covers all of it, so chunks are read whole. Tensors are read piece by
        # piece, in order: the tensor and the chunk that were read last are mostly needed again.
        self._boxes = ("", BoxIndex([]))
        self._loaded: tuple[str, SavedChunk, torch.Tensor] | None = None

    @classmethod
    def open(cls, store: Store, name: str, *, checks_crc: bool = True) -> TorchDcpCheckpoint:
        """Opens the checkpoint in the directory `name`, and compares the sizes in `.metadata` with
        the files, before tensors are allocated.

        Args:
            checks_crc: whether to compare blobs with the CRC-32 of `torch.save` as they are read.

        Raises:
            CheckpointDamagedError: if its metadata cannot be read, or does not cover all tensors,
                for a file that is missing or too short, and for a blob that is too short or too
                long for its tensor.
        """
        source = path_of(store, f"{name}/{METADATA_FILE}")
        with system_errors(source):
            content = store.read(f"{name}/{METADATA_FILE}", MOST_METADATA_BYTES)
        index = parse_metadata(content, source)
        check_coverage(index.tensors.values(), source)
        found = cls(store, name, index, checks_crc=checks_crc)
        found._check_sizes()
        return found

    @property
    def train_state(self) -> dict[str, Any]:
        """As in `ReadableCheckpoint`; may be empty."""
        has_state = self._store.exists(f"{self._name}/{TRAIN_STATE_FILE}")
        return read_train_state(self._store, self._name) if has_state else {}

    @property
    def keys(self) -> list[str]:
        """Of tensors and of plain data."""
        return [*self.tensors, *self.plain]

    def in_order(self, keys: Iterable[str]) -> list[str]:
        """Keys of tensors in the order of their first chunks in the files."""
        return sorted(keys, key=lambda key: [chunk[2:] for chunk in self.tensors[key].chunks[:1]])

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`, but by whole chunks, of which the last one is kept.

        Raises:
            CheckpointDamagedError: for bytes of another tensor.
            CheckpointError: if they name anything else, or were transformed by DCP's extensions.
        """
        chunks = self.tensors[key].chunks
        if self._boxes[0] != key:
            self._boxes = (key, BoxIndex([chunk.box for chunk in chunks]))

        index, box, num_read = self._boxes[1], Box(tuple(offsets), tuple(out.shape)), 0
        for number, overlap in index.overlaps(box):
            chunk = chunks[number]
            if self._loaded is None or self._loaded[:2] != (key, chunk):
                self._loaded = None  # its memory first
                self._loaded = (key, chunk, self._chunk(key, chunk))
                num_read += self._loaded[2].nbytes
            part = self._loaded[2][overlap.within(chunk.box.offsets).slices()]
            out[overlap.within(box.offsets).slices()].copy_(part)
        return num_read

    def read_plain(self, key: str) -> object:
        """The plain data of a key. Raises as `read`."""
        memory, source = self._read(key, self._index.plain[key])
        return read_plain(memory, source, checks_crc=self._checks_crc)

    def check(
        self, keys: Collection[str] | None = None, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Reads blobs, and compares each with `.metadata` and its CRC-32. Raises as `read`.

        Args:
            keys: whose; None: all.
            rank, world_size: ranks divide the blobs among them.
        """
        blobs = {
            (key, chunk): self._index.blobs[key, chunk.box.offsets]
            for key, tensor in self.tensors.items()
            for chunk in tensor.chunks
        } | {(key, None): blob for key, blob in self._index.plain.items()}
        wanted = [each for each in blobs if keys is None or each[0] in keys]
        for key, chunk in sorted(wanted, key=lambda each: blobs[each][:2])[rank::world_size]:
            if chunk is not None:
                self._chunk(key, chunk)
            else:
                read_archive(*self._read(key, blobs[key, None]), checks_crc=self._checks_crc)

    def _chunk(self, key: str, chunk: SavedChunk) -> torch.Tensor:
        """A chunk of a tensor, in host memory."""
        memory, source = self._read(key, self._index.blobs[key, chunk.box.offsets])
        found = read_archive(memory, source, checks_crc=self._checks_crc)
        wanted = (self.tensors[key].dtype, chunk.box.sizes)
        if isinstance(found, torch.Tensor) and (found.dtype, tuple(found.shape)) == wanted:
            return found

        got = f"a {type(found).__name__}"
        if isinstance(found, torch.Tensor):
            got = f"{found.dtype} {tuple(found.shape)}"
        raise CheckpointDamagedError(f"Expected {wanted[0]} {wanted[1]} for {source}, got {got}.")

    def _read(self, key: str, blob: Blob) -> tuple[torch.Tensor, str]:
        """All bytes of a blob, read once, and its name for messages."""
        source = f"{key!r} in {self.path}/{blob.file}"
        # Undoing a transform would run an extension of DCP that the file chooses.
        if blob.transforms:
            raise CheckpointError(
                f"Expected {source} as torch.save writes it, got it transformed by "
                f"{', '.join(blob.transforms)}."
            )
        # Again, for files that have changed since: the length comes before the memory.
        self._check_reaches(blob.file, blob.offset + blob.nbytes)
        memory = torch.empty(blob.nbytes, dtype=torch.uint8)
        with system_errors(f"{self.path}/{blob.file}"):
            path = f"{self._name}/{blob.file}"
            self._store.read_into(path, blob.offset, [memory.numpy().data])
        return memory, source

    def _check_sizes(self) -> None:
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                least, blob = tensor.chunk_nbytes(chunk), self._index.blobs[key, chunk.box.offsets]
                most = least + MAX_FRAME_BYTES
                # The length of a transformed blob does not depend on the tensor alone.
                if not least <= blob.nbytes <= most and not blob.transforms:
                    raise CheckpointDamagedError(
                        f"Expected {least} to {most} bytes of {key!r} in {self.path}/{blob.file}, "
                        f"got {blob.nbytes} bytes."
                    )

        ends: dict[str, int] = {}
        for blob in (*self._index.plain.values(), *self._index.blobs.values()):
            ends[blob.file] = max(ends.get(blob.file, 0), blob.offset + blob.nbytes)
        # A file's size is asked for once, however many blobs it has: stores may be remote.
        for file, end in ends.items():
            self._check_reaches(file, end)

    def _check_reaches(self, file: str, end: int) -> None:
        """CheckpointDamagedError if a file is missing, or ends before this byte."""
        source = f"{self.path}/{file}"
        with system_errors(source):
            size = self._store.size(f"{self._name}/{file}")
        if size < end:
            raise CheckpointDamagedError(f"Expected {end} bytes or more in {source}, got {size}.")
