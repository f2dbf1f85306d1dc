"""Converts a checkpoint to one file, for `torch.load` or in safetensors, in pieces of tensors.

The file is a flat dict with the checkpoint's keys, and `train_state.json` as "train_state".
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.blob import fake_tensor_mode
from megatron.core.dist_checkpointing.format.blob_reading import read_archive
from megatron.core.dist_checkpointing.formats import (
    ReadableCheckpoint,
    pieces_of,
    read_piece,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.files import published

TRAIN_STATE_KEY = "train_state"

_ALIGNMENT = 64  # bytes

Progress = Callable[[int], object]  # called with each number of bytes of tensors written


def export_torch_save(checkpoint: ReadableCheckpoint, path: Path, progress: Progress) -> None:
    """Writes a file for `torch.load(path, weights_only=True)`: {key: tensor or plain data}.

    The CRC-32 of tensors is 0 in the zip; torch does not check it.

    Raises:
        CheckpointError: the checkpoint is damaged; no file is left at `path`.
    """
    state: dict[str, object] = {key: checkpoint.read_plain(key) for key in checkpoint.plain}
    state[TRAIN_STATE_KEY] = checkpoint.train_state
    with fake_tensor_mode():
        for key, saved in checkpoint.tensors.items():
            state[key] = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")

    with published(path) as stream:
        # Leaves space for the tensors' data.
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, stream)
        stream.flush()

        # The tensors of this state are views of the mapped file.
        memory = _mapped(stream.fileno(), Path(stream.name), stream.tell())
        placed = read_archive(memory, str(path), checks_crc=False)
        assert isinstance(placed, dict), "written above"
        for key, value in state.items():
            for leaf, place in zip(tree_leaves(value), tree_leaves(placed[key]), strict=True):
                if isinstance(leaf, FakeTensor):
                    for box, piece in _pieces(checkpoint, key, progress):
                        place[box.slices()] = piece
                elif isinstance(leaf, torch.Tensor):
                    place.copy_(leaf)


def export_safetensors(checkpoint: ReadableCheckpoint, path: Path, progress: Progress) -> None:
    """Writes a safetensors file. Its metadata has the plain data as JSON, with lists for tuples.

    The library requires all tensors at once, so they are assembled in a mapped temporary file.

    Raises:
        CheckpointError: plain data that JSON cannot represent, a dtype that safetensors does not
            have, or a damaged checkpoint; no file is left at `path`.
    """
    metadata = {key: _to_json(key, checkpoint.read_plain(key)) for key in checkpoint.plain}
    metadata[TRAIN_STATE_KEY] = json.dumps(checkpoint.train_state)
    metadata["format"] = "pt"  # the framework, which some readers require
    with (
        published(path) as stream,
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as memory,
    ):
        tensors = _tensors_over(memory.fileno(), Path(memory.name), checkpoint.tensors)
        for key, tensor in tensors.items():
            for box, piece in _pieces(checkpoint, key, progress):
                tensor[box.slices()] = piece
        try:
            save_file(tensors, stream.name, metadata)
        except SafetensorError as error:
            raise CheckpointError(
                f"Expected tensors that safetensors takes, got {error}."
            ) from error


def _mapped(descriptor: int, path: Path, nbytes: int) -> torch.Tensor:
    """Maps a whole file for writing: [nbytes] uint8."""
    # Writing to a mapped page without disk space would kill the process.
    os.posix_fallocate(descriptor, 0, nbytes)
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _tensors_over(
    descriptor: int, path: Path, saved: Mapping[str, SavedTensor]
) -> dict[str, torch.Tensor]:
    """Returns aligned tensors in a mapped file."""
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for key, tensor in saved.items():
        places[key] = (end, tensor.nbytes)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = _mapped(descriptor, path, max(end, 1))
    return {
        key: memory[begin : begin + nbytes].view(saved[key].dtype).view(saved[key].shape)
        for key, (begin, nbytes) in places.items()
    }


def _pieces(
    checkpoint: ReadableCheckpoint, key: str, progress: Progress
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yields a tensor of the checkpoint in pieces, in memory order."""
    for box in pieces_of(checkpoint.tensors[key]):
        piece = read_piece(checkpoint, key, box)
        yield box, piece
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
    """Converts tuples to lists."""
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return value
