"""Published checkpoints made by hand, chunk by chunk, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.format.blob import blob_frame, plain_blob
from megatron.core.dist_checkpointing.format.manifest import (
    DATA_ALIGNMENT,
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    ChunkRecord,
    FileRecord,
    Manifest,
    Marker,
    data_file,
    digest,
    digests_of,
    dtype_name,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata import (
    SavedChunk,
    SavedPlain,
    SavedTensor,
    compose_metadata,
)
from megatron.core.dist_checkpointing.format.names import iteration_of


class Cut(NamedTuple):
    """A box of a tensor, and the rank that writes it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


def row_cuts(shape: Sequence[int], *num_rows: int) -> list[Cut]:
    """Rows of a tensor: so many for rank 0, so many for rank 1, and so on; a rank without rows has
    no chunk.
    """
    cuts, first = [], 0
    for rank, number in enumerate(num_rows):
        if number:
            cuts.append(Cut((first, *(0,) * (len(shape) - 1)), (number, *shape[1:]), rank))
        first += number
    assert first == shape[0]
    return cuts


def whole(tensor: torch.Tensor, rank: int = 0) -> list[Cut]:
    """The tensor as one chunk."""
    return [Cut((0,) * tensor.dim(), tuple(tensor.shape), rank)]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The data of a tensor, row-major."""
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
    records: list[list[ChunkRecord]] = [[] for _ in range(world_size)]
    saved = []
    for key, (tensor, cuts) in tensors.items():
        chunks = []
        for cut in cuts:
            content = files[cut.rank]
            part = tensor[
                tuple(slice(o, o + n) for o, n in zip(cut.offsets, cut.sizes, strict=True))
            ]
            record = _add(content, key, part, cut)
            records[cut.rank].append(record)
            chunks.append(SavedChunk(*cut, record.blob_offset, record.blob_nbytes))
        saved.append(SavedTensor(key, tensor.dtype, tuple(tensor.shape), chunks))
    plain_saved = []
    for key, value in plain.items():
        blob, offset = plain_blob(value), len(files[0])
        files[0] += blob
        records[0].append(
            ChunkRecord(key, "", (), (), offset, len(blob), offset, len(blob), digests_of(blob))
        )
        plain_saved.append(SavedPlain(key, 0, offset, len(blob)))
    small = {METADATA_FILE: compose_metadata(saved, plain_saved)}
    small[TRAIN_STATE_FILE] = json.dumps(
        dict(train_state or {"progress": {"iteration": 10}})
    ).encode()
    for rank, (content, chunk_records) in enumerate(zip(files, records, strict=True)):
        manifest = Manifest(save_id, rank, data_file(rank), len(content), tuple(chunk_records))
        small[manifest_file(rank)] = manifest.to_bytes()
    marked = {name: FileRecord(len(content), digest(content)) for name, content in small.items()}
    for rank, content in enumerate(files):
        (folder / data_file(rank)).write_bytes(content)
        marked[data_file(rank)] = FileRecord(len(content), None)
    for name, content in small.items():
        (folder / name).write_bytes(content)
    iteration = iteration_of(folder.name)
    marker = Marker(save_id, 10 if iteration is None else iteration, world_size, marked)
    (folder / MARKER_FILE).write_bytes(marker.to_bytes())
    return folder


def _add(content: bytearray, key: str, part: torch.Tensor, cut: Cut) -> ChunkRecord:
    header, footer = blob_frame(part.dtype, part.shape)
    data = raw_bytes(part)
    content += bytes(-(len(content) + len(header)) % DATA_ALIGNMENT)
    offset = len(content)
    content += header + data + footer
    place = (offset, len(content) - offset, offset + len(header), len(data))
    return ChunkRecord(
        key, dtype_name(part.dtype), cut.offsets, cut.sizes, *place, digests_of(data)
    )
