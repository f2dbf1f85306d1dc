"""`index.json`: all tensors and chunks of a checkpoint, in one file for loads.

    {"format_version": 3, "save_id": ..., "writers": [[file, rank], ...],
     "tensors": {key: [dtype, shape, [[writer, offset, *box's offsets, *box's sizes], ...]], ...},
     "plain": ..., "exported": ...}

A *writer* is a file with a rank that writes to it; a chunk names it by its number. `.metadata` is a
pickle with the same contents for PyTorch, of `.distcp` files only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import xxhash

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.format.blob import blob_layout
from megatron.core.dist_checkpointing.format.manifest import (
    DTYPES,
    FORMAT_VERSION,
    Manifest,
    Marker,
    check_version,
    data_file,
    dtype_name,
    expect,
    is_count,
    is_counts,
    is_text,
    may_hold_chunks,
    num_blocks,
    parse_object,
    to_json,
    values_of,
    writer_of,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor, check_coverage

_MAX_DIMS = 64  # as torch's


@dataclass(frozen=True)
class Index:
    """The content of the file. The order of all tensors is that of the digests in manifests.

    Attributes:
        save_id: as in the manifests and the marker.
        tensors: by key.
        plain: plain data by key, as bytes; see layout/saved.py.
        exported: tensors and headers of files in another format, by their names there.
    """

    save_id: str
    tensors: Mapping[str, SavedTensor]
    plain: Mapping[str, SavedTensor] = field(default_factory=dict)
    exported: Mapping[str, SavedTensor] = field(default_factory=dict)

    @property
    def all_tensors(self) -> Iterator[SavedTensor]:
        """With exported ones and plain data."""
        return chain(self.tensors.values(), self.exported.values(), self.plain.values())

    @property
    def in_blobs(self) -> list[SavedTensor]:
        """The tensors that `.metadata` lists. The others are in an exported file."""
        return [
            tensor
            for tensor in self.tensors.values()
            if not tensor.chunks or writer_of(tensor.chunks[0].file) >= 0
        ]

    @cached_property
    def chunks_by_rank(self) -> dict[int, list[tuple[SavedTensor, SavedChunk]]]:
        """The chunks of each rank, in the order of the digests in its manifest."""
        found: dict[int, list[tuple[SavedTensor, SavedChunk]]] = {}
        for tensor in self.all_tensors:
            for chunk in tensor.chunks:
                found.setdefault(chunk.rank, []).append((tensor, chunk))
        return found

    def layout_of(self, rank: int) -> str:
        """A digest of all that a rank writes, and of where."""
        return layout_digest(self.chunks_by_rank.get(rank, ()))

    def data_file_nbytes(self, rank: int) -> int:
        """The size of a rank's `.distcp` file: it ends with the last of its blobs."""
        end, file = 0, data_file(rank)
        for tensor, chunk in self.chunks_by_rank.get(rank, ()):
            if chunk.file == file:
                is_plain = tensor.key in self.plain
                place = (chunk.offset, tensor.nbytes) if is_plain else blob_place(tensor, chunk)
                end = max(end, sum(place))
        return end

    def to_bytes(self) -> bytes:
        """The content of the file, a line per tensor."""
        # Numbered as they come: few of them write thousands of chunks.
        writers: dict[tuple[str, int], int] = {}
        members = [
            (name, _tensors_to_json(tensors, writers))
            for name, tensors in (
                ("tensors", self.tensors),
                ("plain", self.plain),
                ("exported", self.exported),
            )
        ]
        head = {"format_version": FORMAT_VERSION, "save_id": self.save_id, "writers": [*writers]}
        text = ",".join(f"\n{to_json(name)}:{content}" for name, content in members)
        return f"{to_json(head)[:-1]},{text}\n}}\n".encode()

    @classmethod
    def from_bytes(cls, content: bytes, marker: Marker | None, source: str) -> Index:
        """Reads the output of `to_bytes`.

        Args:
            marker: of the checkpoint, with the sizes of its files; None if that is damaged.
            source: the file's name, for errors.

        Raises:
            CheckpointDamagedError: for anything that `to_bytes` does not write, for chunks that do
                not tile their tensor, and for places that are not in the checkpoint's files or
                belong to two chunks.
            CheckpointError: for another version of the format.
        """
        members = parse_object(content, source)
        check_version(members, source)
        names = ("save_id", "writers", "tensors", "plain", "exported")
        save_id, writers, *groups = values_of(members, names, source)
        expect(is_text(save_id), "a save id", save_id, source)
        expect(isinstance(writers, list), "a list of writers", writers, source)
        if marker is not None:
            expect(save_id == marker.save_id, f"save id {marker.save_id}", save_id, source)

        reader = _Reader([_writer(values, marker, source) for values in writers], source)
        index = cls(save_id, *map(reader.tensors, groups))
        for key, (_, dtype, shape, chunks) in index.plain.items():
            is_blob = dtype is torch.uint8 and len(shape) == len(chunks) == 1
            got = f"{dtype} of shape {shape} in {len(chunks)} chunks"
            expect(is_blob and key not in index.tensors, f"{key!r} as plain data", got, source)
        check_coverage(index.all_tensors, source)
        _check_places(index, marker, source)
        return index


def layout_digest(chunks: Iterable[tuple[SavedTensor, SavedChunk]]) -> str:
    """A digest of the chunks of a rank, in this order, and of their offsets."""
    state = xxhash.xxh3_128()
    for tensor, (box, _, file, offset) in chunks:
        what = f"{tensor.key}\0{tensor.dtype}\0{box.offsets}{box.sizes}{file}\0{offset}\n"
        state.update(what.encode())
    return state.hexdigest()


def manifest_problems(manifest: Manifest, rank: int, index: Index, source: str) -> Iterator[str]:
    """The contradictions between a rank's manifest and the index."""
    if manifest.save_id != index.save_id:
        yield f"Expected save id {index.save_id} in {source}, got {manifest.save_id}."
    if manifest.rank != rank:
        yield f"Expected rank {rank} in {source}, got {manifest.rank}."
        return

    chunks = index.chunks_by_rank.get(rank, [])
    if manifest.layout != index.layout_of(rank) or len(manifest.digests) != len(chunks):
        yield (
            f"Expected rank {rank} to have written the {len(chunks)} chunks of the index, got "
            f"{len(manifest.digests)} others in {source}."
        )
        return
    for (tensor, chunk), digests in zip(chunks, manifest.digests, strict=True):
        number = num_blocks(tensor.chunk_nbytes(chunk))
        if len(digests) != number:
            where = f"{tensor.key!r} at {chunk.box.offsets} in {source}"
            yield f"Expected {number} digests of {where}, got {len(digests)}."


def _tensors_to_json(
    tensors: Mapping[str, SavedTensor], writers: dict[tuple[str, int], int]
) -> str:
    lines = []
    for key, (_, dtype, shape, chunks) in tensors.items():
        places = [
            [writers.setdefault((file, rank), len(writers)), offset, *offsets, *sizes]
            for (offsets, sizes), rank, file, offset in chunks
        ]
        lines.append(f"\n{to_json(key)}:{to_json([dtype_name(dtype), shape, places])}")
    return "{" + ",".join(lines) + "}"


def _writer(values: object, marker: Marker | None, source: str) -> tuple[str, int]:
    is_pair = isinstance(values, list) and len(values) == 2 and is_text(values[0])
    expect(is_pair and is_count(values[1]), "a file and a rank", values, source)  # type: ignore[index]
    assert isinstance(values, list), "as just checked"
    file, rank = values
    expect(may_hold_chunks(file), "a file with chunks in the folder", file, source)
    if marker is not None:
        entry = marker.files.get(file)
        is_known = entry is not None and entry.digest is None and rank < marker.world_size
        expect(is_known, f"data files of {marker.world_size} ranks", f"{file} of {rank}", source)
    return file, rank


class _Reader:
    """Makes tensors of JSON whose types have not been checked."""

    def __init__(self, writers: list[tuple[str, int]], source: str) -> None:
        self._writers = writers
        self._source = source

    def tensors(self, members: Any) -> dict[str, SavedTensor]:
        expect(isinstance(members, dict), "tensors by key", members, self._source)
        return {key: self._tensor(key, values) for key, values in members.items()}

    def _tensor(self, key: str, values: Any) -> SavedTensor:
        expect(key != "", "keys that are not empty", key, self._source)
        where = f"{key!r} in {self._source}"
        is_whole = isinstance(values, list) and len(values) == 3
        expect(is_whole, "dtype, shape and chunks of", values, where)
        dtype, shape, chunks = values
        expect(isinstance(dtype, str) and dtype in DTYPES, "a dtype", dtype, where)
        expect(is_counts(shape) and len(shape) <= _MAX_DIMS, "a shape", shape, where)
        expect(isinstance(chunks, list), "a list of chunks", chunks, where)
        found = [self._chunk(chunk, len(shape), where) for chunk in chunks]
        return SavedTensor(key, DTYPES[dtype], tuple(shape), found)

    def _chunk(self, values: Any, num_dims: int, where: str) -> SavedChunk:
        is_whole = is_counts(values) and len(values) == 2 + 2 * num_dims
        expect(is_whole, f"a chunk of {2 + 2 * num_dims} numbers", values, where)
        writer, offset = values[:2]
        expect(writer < len(self._writers), f"one of {len(self._writers)} writers", writer, where)
        box = Box(tuple(values[2 : 2 + num_dims]), tuple(values[2 + num_dims :]))
        expect(box.numel > 0, "a box with elements", values, where)
        file, rank = self._writers[writer]
        return SavedChunk(box, rank, file, offset)


def _check_places(index: Index, marker: Marker | None, source: str) -> None:
    """Checks that all chunks are inside their files and do not overlap."""
    # With that, a load never reads more than the files.
    ends: dict[str, tuple[int, str]] = {}
    places = ((chunk, tensor) for tensor in index.all_tensors for chunk in tensor.chunks)
    for chunk, tensor in sorted(places, key=lambda each: (each[0].file, each[0].offset)):
        end, other = ends.get(chunk.file, (0, ""))
        if chunk.offset < end:
            raise CheckpointDamagedError(
                f"Expected {tensor.key!r} from byte {end} of {chunk.file} on in {source}, where "
                f"{other!r} ends, got byte {chunk.offset}."
            )
        ends[chunk.file] = chunk.offset + tensor.chunk_nbytes(chunk), tensor.key

    sizes = {} if marker is None else {name: each.nbytes for name, each in marker.files.items()}
    for file, (end, key) in ends.items():
        nbytes = sizes.get(file, end)
        if end > nbytes:
            raise CheckpointDamagedError(
                f"Expected {key!r} within the {nbytes} bytes of {file} in {source}, got byte {end}."
            )


def blob_place(tensor: SavedTensor, chunk: SavedChunk) -> tuple[int, int]:
    """Offset and length in bytes of the blob of a chunk in a `.distcp` file."""
    layout = blob_layout(tensor.dtype, chunk.box.sizes)
    return chunk.offset - layout.header_nbytes, layout.nbytes
