"""A checkpoint as one file: for `torch.load`, or in safetensors. Piece by piece: no tensor is in memory as a whole.

Keys stay as they are in the checkpoint, in one flat dict. `train_state.json` goes along under the key "train_state".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from megatron.core.dist_checkpointing.chunk_data import bytes_of
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import (
    ReadableCheckpoint,
    pieces_of,
    plain_keys_of,
    read_piece,
    tensors_of,
)
from megatron.core.dist_checkpointing.safetensors_file import TensorShape, data_order, write_header
from megatron.core.files import published

TRAIN_STATE_KEY = "train_state"

Progress = Callable[[int], object]  # called with every number of bytes of tensors that have been written


def export_torch_save(checkpoint: ReadableCheckpoint, path: Path, progress: Progress) -> None:
    """Writes what `torch.load(path, weights_only=True)` reads as {key: tensor or plain data}.

    The checksums of the zip are those of a file without data; torch does not look at them.

    Raises:
        CheckpointError: if the checkpoint turns out to be damaged; nothing is left at `path` then.
    """
    tensors = tensors_of(checkpoint)
    state: dict[str, object] = {key: checkpoint.read_plain(key) for key in plain_keys_of(checkpoint)}
    state[TRAIN_STATE_KEY] = checkpoint.train_state
    with FakeTensorMode():
        for key, entry in tensors.items():
            state[key] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="cpu")
    with published(path) as stream:
        # Everything but the tensors' data, whose places stay free.
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, stream)
        stream.flush()
        with FakeTensorMode():
            placed = torch.load(stream.name, weights_only=True)
        for key, value in state.items():
            for leaf, place in zip(tree_leaves(value), tree_leaves(placed[key]), strict=True):
                if isinstance(place, torch.Tensor) and place.numel():
                    offset = place.untyped_storage()._checkpoint_offset
                    assert offset is not None, "torch.load knows it of every tensor"
                    stream.seek(offset)
                    _write_tensor(stream, checkpoint, key, leaf, progress)


def export_safetensors(checkpoint: ReadableCheckpoint, path: Path, progress: Progress) -> None:
    """Writes a safetensors file. Plain data stands in its metadata, as JSON, which has lists for tuples.

    Raises:
        CheckpointError: for plain data that JSON cannot hold, a dtype that safetensors does not have, or a damaged
            checkpoint; nothing is left at `path` then.
    """
    entries = tensors_of(checkpoint)
    tensors = {key: TensorShape(entry.properties.dtype, tuple(entry.size)) for key, entry in entries.items()}
    metadata = {key: _to_json(key, checkpoint.read_plain(key)) for key in plain_keys_of(checkpoint)}
    metadata[TRAIN_STATE_KEY] = json.dumps(checkpoint.train_state)
    # The framework, which some readers insist on.
    metadata["format"] = "pt"
    with published(path) as stream:
        try:
            write_header(stream, tensors, metadata)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        for key in data_order(tensors):
            _write_stored(stream, checkpoint, key, progress)


def _write_tensor(
    stream: BinaryIO, checkpoint: ReadableCheckpoint, key: str, value: torch.Tensor, progress: Progress
) -> None:
    """A tensor of the checkpoint, or one in plain data."""
    if isinstance(value, FakeTensor):
        _write_stored(stream, checkpoint, key, progress)
    else:
        stream.write(bytes_of(value.contiguous()))


def _write_stored(stream: BinaryIO, checkpoint: ReadableCheckpoint, key: str, progress: Progress) -> None:
    for box in pieces_of(tensors_of(checkpoint)[key]):
        piece = read_piece(checkpoint, key, box)
        stream.write(bytes_of(piece))
        progress(piece.nbytes)


def _to_json(key: str, value: object) -> str:
    try:
        text = json.dumps(value)
        if json.loads(text) == _with_lists(value):
            return text
        got = repr(value)
    except (TypeError, ValueError) as error:
        got = str(error)
    raise CheckpointError(f"Expected plain data that JSON can hold under {key!r}, got {got[:200]}.")


def _with_lists(value: object) -> object:
    """The same with lists for tuples."""
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return value
