"""The data files of a checkpoint that PyTorch DCP wrote, read without running anything.

DCP's own reader unpickles whatever is not a tensor, code included. Here every blob is read once,
held against what `.metadata` says of it before memory is taken for it, and checked in that memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.archive_directory import (
    MAX_BLOB_DIRECTORY_BYTES,
    ByteSource,
    Window,
)
from megatron.core.dist_checkpointing.format.blob_reading import (
    Archive,
    TensorPlace,
    open_memory,
    read_plain,
)
from megatron.core.dist_checkpointing.load.small_files import path_of, system_errors
from megatron.core.dist_checkpointing.store import Store

MAX_PLAIN_BYTES = 1 << 28  # of one piece of plain data
_MAX_FRAME_BYTES = 1 << 20  # more than `torch.save` writes around the data of one tensor


class _Chunk(NamedTuple):
    """What `.metadata` says of a chunk of a tensor."""

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
            checks_crc: whether to hold blobs against the CRC-32 of `torch.save` as they are read.
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
        return sorted(
            indices,
            key=lambda index: (self._places[index].relative_path, self._places[index].offset),
        )

    def check_sizes(self) -> None:
        """Holds the sizes in `.metadata` against the files, before anybody makes such tensors.

        Raises:
            CheckpointDamagedError: for a file that is not there or too short for what should be in
                it, and for a blob that is too short or too long for its tensor.
        """
        ends: dict[str, int] = {}
        for index, info in self._places.items():
            self._check_length(index, info)
            ends[info.relative_path] = max(
                ends.get(info.relative_path, 0), info.offset + info.length
            )
        for file, end in ends.items():
            source = self._path(file)
            with system_errors(source):
                size = self._store.size(f"{self._name}/{file}")
            if size < end:
                raise CheckpointDamagedError(
                    f"Expected {end} bytes or more in {source}, got {size}."
                )

    def check(self, index: MetadataIndex, stream: ByteSource) -> None:
        """Reads one blob in small pieces and holds it against `.metadata` and its CRC-32.

        Raises:
            CheckpointDamagedError, CheckpointError: as `tensor` and `plain`.
        """
        info, source = self._held(index)
        archive = Archive(
            Window(stream, info.offset, info.length),
            info.length,
            source,
            checks_crc=self._checks_crc,
            max_directory_nbytes=MAX_BLOB_DIRECTORY_BYTES,
        )
        if index in self._chunks:
            self._expect_chunk(index, archive.value, source)
        if self._checks_crc:
            archive.check_data()

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
        """What is stored under `key` that is no tensor.

        Raises:
            CheckpointDamagedError, CheckpointError: as `tensor`.
        """
        memory, source = self._read(MetadataIndex(key))
        return read_plain(memory, source, checks_crc=self._checks_crc)

    def _read(self, index: MetadataIndex) -> tuple[torch.Tensor, str]:
        """All bytes of a blob, read once."""
        info, source = self._held(index)
        path = f"{self._name}/{info.relative_path}"
        with system_errors(self._path(info.relative_path)):
            size = self._store.size(path)
            if info.offset + info.length > size:
                raise CheckpointDamagedError(
                    f"Expected {info.offset + info.length} bytes or more in "
                    f"{self._path(info.relative_path)}, "
                    f"got {size}."
                )
            memory = torch.empty(info.length, dtype=torch.uint8)
            self._store.read_into(path, info.offset, memory.numpy().data)
        return memory, source

    def _held(self, index: MetadataIndex) -> tuple[_StorageInfo, str]:
        """Where a blob lies, once its length is what it can be, and its name for messages."""
        info: _StorageInfo = self._places[index]
        source = f"{index.fqn!r} in {self._path(info.relative_path)}"
        if info.transform_descriptors:
            raise CheckpointError(
                f"Expected {source} as torch.save writes it, got it transformed by "
                f"{', '.join(info.transform_descriptors)}."
            )
        self._check_length(index, info)
        return info, source

    def _check_length(self, index: MetadataIndex, info: _StorageInfo) -> None:
        if info.transform_descriptors:
            return  # whose length says nothing
        chunk = self._chunks.get(index)
        smallest = 0 if chunk is None else chunk.nbytes
        largest = MAX_PLAIN_BYTES if chunk is None else chunk.nbytes + _MAX_FRAME_BYTES
        is_known = chunk is not None or index.offset is None
        if not is_known or not smallest <= info.length <= largest:
            wanted = (
                f"{smallest} to {largest} bytes"
                if is_known
                else f"a chunk at {tuple(index.offset or ())}"
            )
            raise CheckpointDamagedError(
                f"Expected {wanted} of {index.fqn!r} in {self._path(info.relative_path)}, got "
                f"{info.length} bytes."
            )

    def _expect_chunk(self, index: MetadataIndex, found: object, source: str) -> TensorPlace:
        wanted = self._chunks[index]
        if not isinstance(found, TensorPlace) or (found.dtype, found.shape) != wanted:
            got = (
                f"{found.dtype} {found.shape}"
                if isinstance(found, TensorPlace)
                else f"a {type(found).__name__}"
            )
            raise CheckpointDamagedError(
                f"Expected {wanted.dtype} {wanted.sizes} for {source}, got {got}."
            )
        return found

    def _path(self, file: str) -> str:
        return path_of(self._store, f"{self._name}/{file}")
