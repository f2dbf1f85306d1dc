"""Writes published checkpoints chunk by chunk, for tests of readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.format.blob import blob_frame, plain_blob
from megatron.core.dist_checkpointing.format.index import Index, blob_place
from megatron.core.dist_checkpointing.format.manifest import (
    DATA_ALIGNMENT,
    INDEX_FILE,
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    FileRecord,
    Manifest,
    Marker,
    data_file,
    digest,
    digests_of,
    files_of,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata import compose_metadata
from megatron.core.dist_checkpointing.format.names import iteration_of
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.state.param_groups import install_options, match_param_groups


class Cut(NamedTuple):
    """A box of a tensor, and the rank that writes it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


def row_cuts(shape: Sequence[int], *num_rows: int) -> list[Cut]:
    """Returns the chunks of a tensor given each rank's number of rows. A rank without rows has no
    chunk.
    """
    cuts, first = [], 0
    for rank, number in enumerate(num_rows):
        if number:
            cuts.append(Cut((first, *(0,) * (len(shape) - 1)), (number, *shape[1:]), rank))
        first += number
    assert first == shape[0]
    return cuts


def whole(tensor: torch.Tensor, rank: int = 0) -> list[Cut]:
    """Returns the tensor as one chunk."""
    return [Cut((0,) * tensor.dim(), tuple(tensor.shape), rank)]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the row-major bytes of a tensor."""
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Tensor, list[Cut]]],
    plain: Mapping[str, Any],
    *,
    world_size: int,
    train_state: Mapping[str, Any] | None = None,
    save_id: str = "a-save",
) -> Path:
    """Writes all files of a published checkpoint; plain data goes into rank 0's file."""
    folder.mkdir(parents=True)
    files = [bytearray() for _ in range(world_size)]
    saved = {}
    for key, (tensor, cuts) in tensors.items():
        chunks = [_add(files[cut.rank], tensor, cut) for cut in cuts]
        saved[key] = SavedTensor(key, tensor.dtype, tuple(tensor.shape), chunks)
    plain_saved = {}
    for key, value in plain.items():
        blob = plain_blob(value)
        chunk = SavedChunk(Box.whole((len(blob),)), 0, data_file(0), len(files[0]))
        plain_saved[key] = SavedTensor(key, torch.uint8, (len(blob),), [chunk])
        files[0] += blob

    index = Index(save_id, saved, plain_saved)
    small = {
        METADATA_FILE: compose_metadata(saved.values(), plain_saved.values()),
        INDEX_FILE: index.to_bytes(),
    }
    small[TRAIN_STATE_FILE] = json.dumps(
        dict(train_state or {"progress": {"iteration": 10}})
    ).encode()
    for rank, content in enumerate(files):
        small[manifest_file(rank)] = manifest_for(index, rank, content).to_bytes()
    for rank, content in enumerate(files):
        (folder / data_file(rank)).write_bytes(content)
    for name, content in small.items():
        (folder / name).write_bytes(content)
    iteration = iteration_of(folder.name)
    mark(folder, Marker(save_id, 10 if iteration is None else iteration, world_size, {}))
    return folder


def manifest_for(index: Index, rank: int, content: bytes | bytearray) -> Manifest:
    """Returns the manifest of a rank for the content of its data file."""
    digests = [
        digests_of(content[chunk.offset : chunk.offset + tensor.chunk_nbytes(chunk)])
        for tensor, chunk in index.chunks_by_rank.get(rank, ())
    ]
    return Manifest(index.save_id, rank, index.layout_of(rank), tuple(digests))


def mark(folder: Path, marker: Marker) -> None:
    """Writes a marker with the sizes and digests of the current files."""
    files = {}
    for name in files_of(marker.world_size):
        content = (folder / name).read_bytes()
        is_data = name.endswith(".distcp")
        files[name] = FileRecord(len(content), None if is_data else digest(content))
    (folder / MARKER_FILE).write_bytes(replace(marker, files=files).to_bytes())


def mark_again(folder: Path, **changed: Any) -> None:
    """Updates the marker after a test replaced files, so that the marker does not reveal it.

    Args:
        changed: fields of the marker to replace.
    """
    old = Marker.from_bytes((folder / MARKER_FILE).read_bytes(), "")
    mark(folder, replace(old, **changed))


def read_index(folder: Path) -> Index:
    """Reads the index of a checkpoint."""
    return Index.from_bytes((folder / INDEX_FILE).read_bytes(), None, "")


def read_manifest(folder: Path, rank: int) -> Manifest:
    """Reads the manifest of a rank."""
    return Manifest.from_bytes((folder / manifest_file(rank)).read_bytes(), "")


def chunks_of(folder: Path, rank: int) -> list[tuple[SavedTensor, SavedChunk]]:
    """Returns the chunks that a rank wrote, in the order of its file."""
    chunks = read_index(folder).chunks_by_rank[rank]
    return sorted(chunks, key=lambda each: each[1].offset)


def blob_span(folder: Path, tensor: SavedTensor, chunk: SavedChunk) -> tuple[int, int]:
    """Returns the start and end of a chunk's blob, or of plain data, in its file."""
    if tensor.key in read_index(folder).plain:
        return chunk.offset, chunk.offset + tensor.nbytes
    begin, nbytes = blob_place(tensor, chunk)
    return begin, begin + nbytes


def _add(content: bytearray, tensor: torch.Tensor, cut: Cut) -> SavedChunk:
    """Appends the blob of a part of a tensor to a file."""
    box = Box(cut.offsets, cut.sizes)
    part = tensor[box.slices()]
    header, footer = blob_frame(part.dtype, part.shape)
    content += bytes(-(len(content) + len(header)) % DATA_ALIGNMENT)
    offset = len(content) + len(header)
    content += header + raw_bytes(part) + footer
    return SavedChunk(box, cut.rank, data_file(cut.rank), offset)


def install_param_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
) -> None:
    """Installs saved parameter groups as a load does."""
    install_options(optimizer, match_param_groups(optimizer, names, saved))
