"""Checkpoints of either format behind one interface, to look at without process group or model.

`fsdp_dtensor` checkpoints have a marker and manifests. Anything else with a `.metadata` is taken
for `torch_dcp`, which PyTorch itself writes, without digests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP
from megatron.core.dist_checkpointing.dcp.torch_dcp import TorchDcpCheckpoint
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    METADATA_FILE,
    manifest_file,
)
from megatron.core.dist_checkpointing.layout.boxes import Box, pieces
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint, read_train_state
from megatron.core.dist_checkpointing.store import SIGN_FILE, Store, expect_folder, path_of

_PIECE_BYTES = 16 << 20


class ReadableTensors(Protocol):
    """Tensors to read from, as a checkpoint has them."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors by key; chunks cover each of them exactly."""

    @property
    def plain(self) -> Collection[str]:
        """The keys of plain data."""

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`."""


class ReadableCheckpoint(ReadableTensors, Protocol):
    """A checkpoint to read from."""

    @property
    def train_state(self) -> dict[str, Any]:
        """Plain data."""

    def read_plain(self, key: str) -> object:
        """As `PublishedCheckpoint.read_plain`."""


def format_of(store: Store, name: str) -> str | None:
    """The format of the checkpoint in a directory, even if it has lost files; None without one."""
    if any(store.exists(f"{name}/{file}") for file in (MARKER_FILE, manifest_file(0))):
        return FSDP_DTENSOR
    if store.exists(f"{name}/{SIGN_FILE}"):
        return None  # created in a remote store and never published

    # Both files may be lost, of a checkpoint that a run wrote: its train state names its format.
    try:
        config = read_train_state(store, name).get("config")
    except CheckpointError:
        config = None
    named = config.get("ckpt_format") if isinstance(config, dict) else None
    if named in (FSDP_DTENSOR, TORCH_DCP):
        return str(named)
    return TORCH_DCP if store.exists(f"{name}/{METADATA_FILE}") else None


def open_checkpoint(store: Store, name: str) -> ReadableCheckpoint:
    """The checkpoint in the directory `name`, whatever its format.

    Raises:
        CheckpointNotFoundError: if there is no such directory.
        CheckpointError: if it has none, or it cannot be read, as `PublishedCheckpoint.open`.
    """
    expect_folder(store, name)
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
