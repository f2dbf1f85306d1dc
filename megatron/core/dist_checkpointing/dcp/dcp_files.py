"""The data files of a checkpoint that PyTorch DCP wrote, read without running anything.

DCP's own reader unpickles whatever is not a tensor, code included. Here every blob is compared with
its `.metadata` before memory is taken for it, read once, and checked in that memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob import MAX_FRAME_BYTES
from megatron.core.dist_checkpointing.format.blob_reading import (
    MAX_PLAIN_BYTES,
    TensorPlace,
    open_memory,
    read_plain,
)
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.load.small_files import system_errors
from megatron.core.dist_checkpointing.store import Store


class _Chunk(NamedTuple):
    """A chunk of a tensor, as `.metadata` describes it."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class DcpFiles:
    """The data files of one checkpoint. Errors name the file, and the key where there is one."""

    def __init__(
        self, store: Store, name: str, metadata: Metadata, *, checks_crc: bool = True
    ) -> None:
        """
        Args:
            metadata: has passed `check_coverage`.
            checks_crc: whether to compare blobs with the CRC-32 of `torch.save` as they are read.
        """
        self._store = store
        self._name = name
        self._places = metadata.storage_data
        self._checks_crc = checks_crc
        self._chunks = {
            MetadataIndex(key, chunk.offsets): _Chunk(entry.properties.dtype, tuple(chunk.sizes))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def in_order(self, indices: Iterable[MetadataIndex]) -> list[MetadataIndex]:
        """Chunks and plain data in the order in which they lie in the files."""
        places = {index: self._places[index] for index in indices}
        return sorted(places, key=lambda i: (places[i].relative_path, places[i].offset))

    def check_sizes(self) -> None:
        """Compares the sizes in `.metadata` with the files, before anybody makes such tensors.

        Raises:
            CheckpointDamagedError: for a file that is missing or too short for what should be in
                it, and for a blob that is too short or too long for its tensor.
        """
        # A file's size is asked for once, however many blobs it has: stores may be remote.
        ends: dict[str, int] = {}
        for index, info in self._places.items():
            self._check_length(index, info)
            end = info.offset + info.length
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
        for file, end in ends.items():
            self._check_reaches(file, end)

    def check(self, index: MetadataIndex) -> None:
        """Reads one blob and compares it with `.metadata` and its CRC-32. Raises what `tensor` and
        `plain` do.
        """
        memory, source = self._read(index)
        archive = open_memory(memory, source, checks_crc=self._checks_crc)
        if index in self._chunks:
            self._expect_chunk(index, archive.value, source)

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        """A chunk of a tensor, in host memory.

        Raises:
            CheckpointDamagedError: if the bytes are not those of such a tensor.
            CheckpointError: if they name anything else, or were transformed by DCP's extensions.
        """
        memory, source = self._read(index)
        archive = open_memory(memory, source, checks_crc=self._checks_crc)
        return self._expect_chunk(index, archive.value, source).tensor(memory)

    def plain(self, key: str) -> object:
        """The plain data of a key.

        Raises:
            CheckpointDamagedError, CheckpointError: as `tensor`.
        """
        memory, source = self._read(MetadataIndex(key))
        return read_plain(memory, source, checks_crc=self._checks_crc)

    def _read(self, index: MetadataIndex) -> tuple[torch.Tensor, str]:
        """All bytes of a blob, read once."""
        info, source = self._checked_place(index)
        # Again, for files that have changed since: the length comes before the memory.
        self._check_reaches(info.relative_path, info.offset + info.length)
        memory = torch.empty(info.length, dtype=torch.uint8)
        with system_errors(self._path(info.relative_path)):
            path = f"{self._name}/{info.relative_path}"
            self._store.read_into(path, info.offset, [memory.numpy().data])
        return memory, source

    def _check_reaches(self, file: str, end: int) -> None:
        """CheckpointDamagedError if a file is missing, or ends before this byte."""
        source = self._path(file)
        with system_errors(source):
            size = self._store.size(f"{self._name}/{file}")
        if size < end:
            raise CheckpointDamagedError(f"Expected {end} bytes or more in {source}, got {size}.")

    def _checked_place(self, index: MetadataIndex) -> tuple[_StorageInfo, str]:
        """Where a blob lies, once its length has been checked, and its name for messages."""
        info: _StorageInfo = self._places[index]
        source = f"{index.fqn!r} in {self._path(info.relative_path)}"
        # Undoing a transform would run an extension of DCP that the file chooses.
        if info.transform_descriptors:
            raise CheckpointError(
                f"Expected {source} as torch.save writes it, got it transformed by "
                f"{', '.join(info.transform_descriptors)}."
            )
        self._check_length(index, info)
        return info, source

    def _check_length(self, index: MetadataIndex, info: _StorageInfo) -> None:
        if info.transform_descriptors:
            return  # compressed, say: the length tells nothing about the tensor

        chunk = self._chunks.get(index)
        smallest = 0 if chunk is None else chunk.nbytes
        largest = MAX_PLAIN_BYTES if chunk is None else chunk.nbytes + MAX_FRAME_BYTES
        wanted = f"{smallest} to {largest} bytes"
        is_known = chunk is not None or index.offset is None
        if not is_known:
            wanted = f"a chunk at {tuple(index.offset or ())}"
        if not is_known or not smallest <= info.length <= largest:
            raise CheckpointDamagedError(
                f"Expected {wanted} of {index.fqn!r} in {self._path(info.relative_path)}, got "
                f"{info.length} bytes."
            )

    def _expect_chunk(self, index: MetadataIndex, found: object, source: str) -> TensorPlace:
        wanted = self._chunks[index]
        if isinstance(found, TensorPlace) and (found.dtype, found.shape) == wanted:
            return found

        got = f"a {type(found).__name__}"
        if isinstance(found, TensorPlace):
            got = f"{found.dtype} {found.shape}"
        raise CheckpointDamagedError(
            f"Expected {wanted.dtype} {wanted.sizes} for {source}, got {got}."
        )

    def _path(self, file: str) -> str:
        return path_of(self._store, f"{self._name}/{file}")
