"""Checkpoints of either format behind one interface, to look at without process group or model.

`fsdp_dtensor` checkpoints have a marker and manifests. Anything else with a `.metadata` is taken
for `torch_dcp`, which PyTorch itself writes, without digests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP
from megatron.core.dist_checkpointing.dcp.dcp_files import DcpFiles
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata_reading import (
    parse_covered,
    plain_keys,
    saved_tensors,
)
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.small_files import read_train_state, system_errors
from megatron.core.dist_checkpointing.plan.boxes import Box, BoxIndex, pieces
from megatron.core.dist_checkpointing.plan.saved import SavedTensor
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, SIGN_FILE, Store

_PIECE_BYTES = 16 << 20


class ReadableCheckpoint(Protocol):
    """A checkpoint to read from."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors by key; chunks cover each of them exactly."""

    @property
    def plain(self) -> Collection[str]:
        """The keys of plain data."""

    @property
    def train_state(self) -> dict[str, Any]:
        """Plain data."""

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`."""

    def read_plain(self, key: str) -> object:
        """As `PublishedCheckpoint.read_plain`."""


def format_of(store: Store, name: str) -> str | None:
    """The format of the checkpoint in a folder, even if it has lost files; None without one."""
    if any(store.exists(f"{name}/{file}") for file in (MARKER_FILE, manifest_file(0))):
        return FSDP_DTENSOR
    if store.exists(f"{name}/{SIGN_FILE}"):
        return None  # begun in a remote store and never published

    # Both files may be lost, of a checkpoint that a run wrote: its train state names its format.
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
    if found == FSDP_DTENSOR:
        return PublishedCheckpoint.open(store, name)
    return TorchDcpCheckpoint.open(store, name)


def pieces_of(tensor: SavedTensor) -> Iterator[Box]:
    """Cuts a tensor into boxes of a few MiB that follow each other in its memory."""
    return pieces(tensor.shape, _PIECE_BYTES // tensor.dtype.itemsize)


def read_piece(checkpoint: ReadableCheckpoint, key: str, box: Box) -> torch.Tensor:
    """A box of a tensor, in new memory."""
    out = torch.empty(box.sizes, dtype=checkpoint.tensors[key].dtype)
    checkpoint.read(key, box.offsets, out)
    return out


class TorchDcpCheckpoint:
    """A checkpoint as PyTorch DCP wrote it, read chunk by chunk. For one thread.

    Attributes:
        path, tensors, plain, train_state: as in `ReadableCheckpoint`; `train_state` is empty if
            there is none. A chunk's offset is that of its blob.
    """

    def __init__(
        self, store: Store, name: str, metadata: Metadata, train_state: dict[str, Any]
    ) -> None:
        """For `open`."""
        self.path = path_of(store, name)
        self.tensors = saved_tensors(metadata, self.path)
        self.plain: Collection[str] = plain_keys(metadata)
        self.train_state = train_state
        self._files = DcpFiles(store, name, metadata)
        # A blob's checksum covers all of it, so chunks are read whole. Tensors are read piece by
        # piece, in order: the tensor and the chunk that were read last are mostly needed again.
        self._index = ("", BoxIndex([]))
        self._loaded: tuple[MetadataIndex, torch.Tensor] | None = None

    @classmethod
    def open(cls, store: Store, name: str) -> TorchDcpCheckpoint:
        """Opens the checkpoint in the folder `name`.

        Raises:
            CheckpointError: if its metadata cannot be read, or does not cover all tensors.
        """
        source = path_of(store, f"{name}/{METADATA_FILE}")
        with system_errors(source):
            content = store.read(f"{name}/{METADATA_FILE}", MAX_METADATA_BYTES)
        metadata = parse_covered(content, source)
        # Before anybody allocates a tensor of a size that `.metadata` merely states.
        DcpFiles(store, name, metadata).check_sizes()
        has_state = store.exists(f"{name}/{TRAIN_STATE_FILE}")
        train_state = read_train_state(store, name) if has_state else {}
        return cls(store, name, metadata, train_state)

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`, but by whole chunks, of which the last one is kept."""
        chunks = self.tensors[key].chunks
        if self._index[0] != key:
            self._index = (key, BoxIndex([chunk.box for chunk in chunks]))

        index, box, num_read = self._index[1], Box(tuple(offsets), tuple(out.shape)), 0
        for number, overlap in index.overlaps(box):
            chunk = chunks[number].box
            where = MetadataIndex(key, torch.Size(chunk.offsets))
            if self._loaded is None or self._loaded[0] != where:
                self._loaded = (where, self._files.tensor(where))
                num_read += self._loaded[1].nbytes
            part = self._loaded[1][overlap.within(chunk.offsets).slices()]
            out[overlap.within(box.offsets).slices()].copy_(part)
        return num_read

    def read_plain(self, key: str) -> object:
        """As `PublishedCheckpoint.read_plain`."""
        return self._files.plain(key)
