"""Checkpoints of either format behind one face, for what only looks at them: no process group, no
model.

`fsdp_dtensor` checkpoints have a marker and manifests. Whatever else has a `.metadata` is taken for
`torch_dcp`: what PyTorch itself wrote, without digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP
from megatron.core.dist_checkpointing.dcp.dcp_files import DcpFiles
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.small_files import (
    path_of,
    read_train_state,
    system_errors,
)
from megatron.core.dist_checkpointing.plan.boxes import Box, BoxIndex, ranges
from megatron.core.dist_checkpointing.plan.coverage import check_coverage
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, SIGN_FILE, Store

_PIECE_BYTES = 16 << 20


class ReadableCheckpoint(Protocol):
    """A checkpoint to read from."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def metadata(self) -> Metadata:
        """DCP's; every tensor in it is covered by its chunks exactly."""

    @property
    def train_state(self) -> dict[str, Any]:
        """Plain data."""

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`."""

    def read_plain(self, key: str) -> object:
        """As `PublishedCheckpoint.read_plain`."""


def format_of(store: Store, name: str) -> str | None:
    """The format of the checkpoint in a folder, also of one that has lost files; None if there is
    none.
    """
    if any(store.exists(f"{name}/{file}") for file in (MARKER_FILE, manifest_file(0))):
        return FSDP_DTENSOR
    if store.exists(f"{name}/{SIGN_FILE}"):
        return None
    try:
        config = read_train_state(store, name).get("config")
    except CheckpointError:
        config = None
    named = config.get("ckpt_format") if isinstance(config, dict) else None
    for known in (FSDP_DTENSOR, TORCH_DCP):
        if named == known:
            return known
    return TORCH_DCP if store.exists(f"{name}/{METADATA_FILE}") else None


def open_checkpoint(store: Store, name: str) -> ReadableCheckpoint:
    """The checkpoint in the folder `name`, whatever its format.

    Raises:
        CheckpointError: if there is none, or it cannot be read, as `PublishedCheckpoint.open`.
    """
    found = format_of(store, name)
    if found is None:
        raise CheckpointError(
            f"Expected a checkpoint in {path_of(store, name)}, got neither marker nor "
            f"{METADATA_FILE}."
        )
    return (
        PublishedCheckpoint.open(store, name)
        if found == FSDP_DTENSOR
        else TorchDcpCheckpoint.open(store, name)
    )


def tensors_of(checkpoint: ReadableCheckpoint) -> dict[str, TensorStorageMetadata]:
    """The tensors by key."""
    entries = checkpoint.metadata.state_dict_metadata.items()
    return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def plain_keys_of(checkpoint: ReadableCheckpoint) -> list[str]:
    """The keys of what is no tensor."""
    entries = checkpoint.metadata.state_dict_metadata.items()
    return [key for key, entry in entries if isinstance(entry, BytesStorageMetadata)]


def nbytes_of(entry: TensorStorageMetadata) -> int:
    """Bytes of a whole tensor's elements."""
    return entry.size.numel() * entry.properties.dtype.itemsize


def pieces_of(entry: TensorStorageMetadata) -> Iterator[Box]:
    """Cuts a tensor into boxes of a few MiB that follow each other in its memory."""
    shape = tuple(entry.size)
    if entry.size.numel():
        max_span = _PIECE_BYTES // entry.properties.dtype.itemsize
        yield from (
            part.box
            for part in ranges(Box((0,) * len(shape), shape), shape, max_span=max_span, max_gap=0)
        )


def read_piece(checkpoint: ReadableCheckpoint, key: str, box: Box) -> torch.Tensor:
    """A box of a tensor, in new memory."""
    entry = checkpoint.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), "the key of a tensor"
    out = torch.empty(box.sizes, dtype=entry.properties.dtype)
    checkpoint.read(key, box.offsets, out)
    return out


class TorchDcpCheckpoint:
    """A checkpoint as PyTorch DCP wrote it, read chunk by chunk. For one thread.

    Attributes:
        path, metadata, train_state: as in `ReadableCheckpoint`; `train_state` is empty if there is
            none.
    """

    def __init__(
        self, store: Store, name: str, metadata: Metadata, train_state: dict[str, Any]
    ) -> None:
        """For `open`."""
        self.path = path_of(store, name)
        self.metadata = metadata
        self.train_state = train_state
        self._files = DcpFiles(store, name, metadata)
        self._index: tuple[str, BoxIndex] = (
            "",
            BoxIndex([]),
        )  # of the tensor that was read from last
        self._loaded: tuple[MetadataIndex, torch.Tensor] | None = (
            None  # the chunk that was read last
        )

    @classmethod
    def open(cls, store: Store, name: str) -> TorchDcpCheckpoint:
        """Opens the checkpoint in the folder `name`.

        Raises:
            CheckpointError: if its metadata cannot be read, or does not cover all tensors.
        """
        source = path_of(store, f"{name}/{METADATA_FILE}")
        with system_errors(source):
            metadata = parse_metadata(
                store.read(f"{name}/{METADATA_FILE}", MAX_METADATA_BYTES), source
            )
        check_coverage(metadata, source)
        DcpFiles(store, name, metadata).check_sizes()
        train_state = (
            read_train_state(store, name) if store.exists(f"{name}/{TRAIN_STATE_FILE}") else {}
        )
        return cls(store, name, metadata, train_state)

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`, by whole chunks, of which the last one is kept; returns
        the bytes read.
        """
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata), "the key of a tensor"
        if self._index[0] != key:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            self._index = (key, BoxIndex(boxes))
        index, box, num_read = self._index[1], Box(tuple(offsets), tuple(out.shape)), 0
        for place, overlap in index.overlaps(box):
            chunk = index.boxes[place]
            where = MetadataIndex(key, chunk.offsets)
            if self._loaded is None or self._loaded[0] != where:
                self._loaded = (where, self._files.tensor(where))
                num_read += self._loaded[1].nbytes
            part = self._loaded[1][overlap.within(chunk.offsets).slices()]
            out[overlap.within(box.offsets).slices()].copy_(part)
        return num_read

    def read_plain(self, key: str) -> object:
        """As `PublishedCheckpoint.read_plain`."""
        return self._files.plain(key)
