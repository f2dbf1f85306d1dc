"""`index.json`: all tensors and chunks of a checkpoint, computed for a save and read by a load.

    {"format_version": 3, "save_id": ..., "writers": [[file, rank], ...],
     "tensors": {key: [dtype, shape, [[writer, offset, *box's offsets, *box's sizes], ...]], ...},
     "plain": ..., "exported": ...}

A *writer* is a file with a rank that writes to it; a chunk names it by its number. `.metadata` is a
pickle with the same contents for PyTorch, of `.distcp` files only.

[Note: data files] Each rank computes the places in its own file, and rank 0 those in the files of
all ranks (`build_index`). A data file consists of blobs as `torch.save` writes them, one per chunk,
in the order of the state. Their data is aligned to 4096 bytes for direct I/O. The bytes between
blobs are zeros. Plain data follows the tensors in rank 0's file. An `Export` describes files of
another format that a save writes, too.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.format.blob import blob_layout
from megatron.core.dist_checkpointing.format.manifest import (
    DATA_ALIGNMENT,
    DTYPES,
    FORMAT_VERSION,
    FURTHER_FILE,
    Manifest,
    Marker,
    check_version,
    data_file,
    dtype_name,
    expect,
    is_count,
    is_counts,
    is_text,
    num_blocks,
    parse_object,
    to_json,
    values_of,
    writer_of,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import Division, Holdings, shares
from megatron.core.dist_checkpointing.layout.saved import (
    ChunkColumns,
    SavedChunk,
    SavedTensor,
    check_coverage,
)

_MAX_DIMS = 64  # as torch's


class ExportedRows(NamedTuple):
    """Consecutive bytes of an exported file: rows of a box of one of its tensors."""

    name: str  # of the tensor in the file
    dtype: torch.dtype  # in which it is written
    box: Box  # of that tensor
    own: Box  # the same elements, in the entry's global tensor
    file: str  # its path in the checkpoint
    offset: int  # of the first byte in the file

    @property
    def nbytes(self) -> int:
        return self.own.numel * self.dtype.itemsize


class ExportedTensor(NamedTuple):
    """A tensor as the exported files have it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ExportFile(NamedTuple):
    """An exported file: a header, and behind it the rows of tensors without gaps."""

    header: bytes
    nbytes: int  # header included


class Export(Protocol):
    """Files that a save writes in addition to the entries. The same on every rank, except
    `small_files`.

    Attributes:
        files: by their paths in the checkpoint.
        tensors: by their names; each is in one file.
        is_exact: whether all rows are written in the dtypes of their entries, and so to the bit.
            The checkpoint then needs no other copy of these entries.
        small_files: the content of further files, by their paths; empty on ranks other than 0.
    """

    @property
    def files(self) -> Mapping[str, ExportFile]: ...

    @property
    def tensors(self) -> Mapping[str, ExportedTensor]: ...

    @property
    def is_exact(self) -> bool: ...

    @property
    def small_files(self) -> Mapping[str, bytes]: ...

    def rows(self, key: str, box: Box) -> Iterator[ExportedRows]:
        """The exported rows of a box of an entry; empty for an entry that is not exported.

        Args:
            box: of the entry's global tensor; it must have elements.
        """


class SavedAs(NamedTuple):
    """A tensor as a checkpoint describes it, and its parts on the ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holdings: Holdings


@dataclass(frozen=True)
class Index:
    """The content of the file. The order of all tensors is that of the digests in manifests.

    Attributes:
        save_id: as in the manifests and the marker.
        tensors: by key.
        plain: plain data by key, as bytes; see layout/saved.py.
        exported: tensors and headers of files in another format, by their names there.
        data_files: sizes of the `.distcp` files by rank, where they have been laid out here.
    """

    save_id: str
    tensors: Mapping[str, SavedTensor]
    plain: Mapping[str, SavedTensor] = field(default_factory=dict)
    exported: Mapping[str, SavedTensor] = field(default_factory=dict)
    data_files: Mapping[int, int] = field(default_factory=dict, compare=False)

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
    def chunks_by_rank(self) -> Mapping[int, list[tuple[SavedTensor, SavedChunk]]]:
        """The chunks of each rank, in the order of the digests in its manifest."""
        return _ChunksByRank(list(self.all_tensors))

    @cached_property
    def layouts(self) -> Mapping[int, str]:
        """By rank, a digest of the chunks that the rank writes, and of their offsets."""
        # In one pass, without the lists of chunks by rank: a thousand ranks write a million.
        states: defaultdict[int, Any] = defaultdict(xxhash.xxh3_128)
        # With the divisions themselves, whose numbers no other objects have while they exist.
        known: dict[tuple[int, torch.dtype], tuple[Division, list[str]]] = {}
        for key, dtype, _, chunks in self.all_tensors:
            columns = ChunkColumns.of(chunks)
            division, which = columns.division, (id(columns.division), dtype)
            if which not in known:
                boxes = zip(division.boxes, division.files, strict=True)
                texts = [f"{dtype}\0{box.offsets}{box.sizes}{file}" for box, file in boxes]
                known[which] = division, texts
            rows = zip(division.ranks, known[which][1], columns.offsets, strict=True)
            for rank, text, offset in rows:
                states[rank].update(f"{key}\0{text}\0{offset}\n".encode())
        return {rank: state.hexdigest() for rank, state in states.items()}

    def layout_of(self, rank: int) -> str:
        """A digest of all that a rank writes, and of where."""
        return self.layouts.get(rank) or xxhash.xxh3_128().hexdigest()

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
        tensors, plain, exported = map(reader.tensors, groups)
        index = cls(save_id, tensors, plain, exported)
        for key, (_, dtype, shape, chunks) in index.plain.items():
            is_blob = dtype is torch.uint8 and len(shape) == len(chunks) == 1
            got = f"{dtype} of shape {shape} in {len(chunks)} chunks"
            expect(is_blob and key not in index.tensors, f"{key!r} as plain data", got, source)
        check_coverage(index.all_tensors, source)
        _check_places(index, marker, source)
        return index


class _ChunksByRank(Mapping[int, list[tuple[SavedTensor, SavedChunk]]]):
    """Makes the list of a rank on demand: the lists of a thousand ranks take gigabytes."""

    def __init__(self, tensors: Sequence[SavedTensor]) -> None:
        self._tensors = tensors
        # For each rank the number of a tensor and the number of its chunk, in turn.
        self._numbers: dict[int, array[int]] = {}
        for number, tensor in enumerate(tensors):
            for i, rank in enumerate(ChunkColumns.of(tensor.chunks).division.ranks):
                if rank not in self._numbers:
                    self._numbers[rank] = array("L")
                self._numbers[rank].extend((number, i))

    def __getitem__(self, rank: int) -> list[tuple[SavedTensor, SavedChunk]]:
        numbers = iter(self._numbers[rank])
        tensors = ((self._tensors[number], next(numbers)) for number in numbers)
        return [(tensor, tensor.chunks[i]) for tensor, i in tensors]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


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
    heads: dict[tuple[torch.dtype, tuple[int, ...]], str] = {}
    # With the divisions themselves, whose numbers no other objects have while they exist.
    known: dict[int, tuple[Division, list[str], list[str]]] = {}
    for key, (_, dtype, shape, chunks) in tensors.items():
        columns = ChunkColumns.of(chunks)
        number = id(columns.division)
        if number not in known:
            known[number] = columns.division, *_division_to_json(columns.division, writers)
        around = zip(*known[number][1:], columns.offsets, strict=True)
        places = ",".join([f"{before}{offset}{behind}" for before, behind, offset in around])
        if (dtype, shape) not in heads:
            heads[dtype, shape] = to_json([dtype_name(dtype), shape])[:-1]
        lines.append(f"\n{to_json(key)}:{heads[dtype, shape]},[{places}]]")
    return "{" + ",".join(lines) + "}"


def _division_to_json(
    division: Division, writers: dict[tuple[str, int], int]
) -> tuple[list[str], list[str]]:
    """For each chunk the text before its offset in its file, and behind it."""
    before, behind = [], []
    for (offsets, sizes), rank, file in zip(*division, strict=True):
        before.append(f"[{writers.setdefault((file, rank), len(writers))},")
        behind.append("".join([f",{number}" for number in (*offsets, *sizes)]) + "]")
    return before, behind


def _writer(values: object, marker: Marker | None, source: str) -> tuple[str, int]:
    is_pair = isinstance(values, list) and len(values) == 2 and is_text(values[0])
    expect(is_pair and is_count(values[1]), "a file and a rank", values, source)  # type: ignore[index]
    assert isinstance(values, list), "as just checked"
    file, rank = values
    may_hold_chunks = writer_of(file) >= 0 or FURTHER_FILE.fullmatch(file) is not None
    expect(may_hold_chunks, "a file with chunks in the folder", file, source)
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


def build_index(
    save_id: str,
    tensors: Sequence[SavedAs],
    plain_nbytes: Mapping[str, int],
    rank: int | None = None,
    export: Export | None = None,
) -> Index:
    """The index of a checkpoint that is to be written.

    Args:
        tensors: the same on every rank.
        plain_nbytes: of the blob of each piece of plain data.
        export: further files. The chunks of an exact one are chunks of the tensors.
        rank: limits the index to its chunks, in time that does not grow with the number of ranks;
            None: the chunks of all ranks.
    """
    exported = {} if export is None else _exported(export, rank)
    files = _DataFiles()
    held = [(each.holdings, each.dtype.itemsize) for each in tensors]
    saved = {}
    for (key, dtype, shape, _), own in zip(tensors, shares(held, rank), strict=True):
        chunks: Sequence[SavedChunk] | None = None
        if export is not None:
            chunks = _exported_chunks(export, key, own, exported)
        saved[key] = SavedTensor(key, dtype, shape, chunks or files.append(dtype, own))

    plain = {}
    for key, nbytes in plain_nbytes.items() if rank in (None, 0) else ():
        chunk = SavedChunk(Box.whole((nbytes,)), 0, data_file(0), files.ends[0])
        plain[key] = SavedTensor(key, torch.uint8, (nbytes,), [chunk])
        files.ends[0] += nbytes
    return Index(save_id, saved, plain, exported, files.ends)


class _DataFiles:
    """Places blobs in the files of ranks, one behind the other. Lives for one `build_index`.

    Attributes:
        ends: of the files so far, by rank.
    """

    def __init__(self) -> None:
        self.ends: defaultdict[int, int] = defaultdict(int)
        # A thousand ranks have a hundred thousand chunks, in a few divisions of few shapes. With
        # the divisions themselves, whose numbers no other objects have while they exist.
        self._frames: dict[tuple[int, torch.dtype], tuple[Division, list[tuple[int, int]]]] = {}
        self._frame = cache(_frame)

    def append(self, dtype: torch.dtype, division: Division) -> ChunkColumns:
        """The chunks of a tensor."""
        which = (id(division), dtype)
        if which not in self._frames:
            frames = [self._frame(dtype, sizes) for _, sizes in division.boxes]
            self._frames[which] = division, frames

        ends, offsets = self.ends, array("q")
        for owner, (before, behind) in zip(division.ranks, self._frames[which][1], strict=True):
            # The data is aligned, not the blob: the header ends at the data.
            offset = -(-(ends[owner] + before) // DATA_ALIGNMENT) * DATA_ALIGNMENT
            ends[owner] = offset + behind
            offsets.append(offset)
        return ChunkColumns(division, offsets)


def _frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The bytes of a blob before its data, and from there on."""
    before, _, nbytes = blob_layout(dtype, sizes)
    return before, nbytes - before


def _exported_chunks(
    export: Export, key: str, own: Division, exported: Mapping[str, SavedTensor]
) -> list[SavedChunk]:
    """Adds the exported rows of a tensor to the exported tensors; of an exact export, returns them
    as the tensor's chunks.
    """
    found = []
    for box, owner in zip(own.boxes, own.ranks, strict=True):
        for name, _, there, here, file, offset in export.rows(key, box):
            if export.is_exact:
                found.append(SavedChunk(here, owner, file, offset))
            else:
                chunks = exported[name].chunks
                assert isinstance(chunks, list), "as `_exported` makes them"
                chunks.append(SavedChunk(there, owner, file, offset))
    return found


def _exported(export: Export, rank: int | None) -> dict[str, SavedTensor]:
    """The exported tensors, without chunks yet, and the headers, which rank 0 writes: a tensor of
    bytes under the name of each file.
    """
    found = {}
    if not export.is_exact:
        for name, (dtype, shape) in export.tensors.items():
            found[name] = SavedTensor(name, dtype, shape, [])
    for file, (header, _) in export.files.items() if rank in (None, 0) else ():
        chunk = SavedChunk(Box.whole((len(header),)), 0, file, 0)
        found[file] = SavedTensor(file, torch.uint8, (len(header),), [chunk])
    return found
