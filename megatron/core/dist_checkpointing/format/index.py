"""`index.json`: all tensors and chunks of a checkpoint, computed for a save and read by a load.

    {"format_version": 4, "save_id": ..., "writers": [[file, rank], ...],
     "tensors": {key: [dtype, shape, division, [offset, ...]], ...}, "plain": ..., "exported": ...,
     "divisions": [[[writer, *box's offsets, *box's sizes], ...], ...]}

A *writer* is a file with a rank that writes to it. A *division* is the boxes of a tensor, each with
the number of its writer; a tensor names one by its number, and has an offset in a file for each
box. A thousand ranks write a million chunks, but in few divisions: each is read and checked once.
`.metadata` is a pickle with the same contents for PyTorch, of `.distcp` files only.

[Note: data files] Each rank computes the offsets in its file, and rank 0 the offsets of all ranks
(`build_index`). A data file consists of blobs as `torch.save` writes them, one per chunk, in the
order of the state. Their data is aligned to 4096 bytes for direct I/O. The bytes between
blobs are zeros. Plain data follows the tensors in rank 0's file. An `Export` describes files of
another format that a save writes, too.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
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
    MAX_COUNT,
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


class RankLayout(NamedTuple):
    """The data file and the chunks of a rank.

    Attributes:
        digest: of its chunks and their offsets.
        num_blocks: of each chunk, in the order of the digests in the rank's manifest.
    """

    digest: str
    num_blocks: Sequence[int]


_NOTHING = RankLayout(xxhash.xxh3_128().hexdigest(), ())


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
    def layouts(self) -> Mapping[int, RankLayout]:
        """The layout of each rank that writes chunks."""
        # In one pass, without the lists of chunks by rank: a thousand ranks write a million.
        states: defaultdict[int, Any] = defaultdict(xxhash.xxh3_128)
        counts: defaultdict[int, array[int]] = defaultdict(partial(array, "q"))
        # With the divisions themselves, whose numbers no other objects have while they exist.
        known: dict[tuple[int, torch.dtype], tuple[Division, list[tuple[int, str, int]]]] = {}
        for key, dtype, _, chunks in self.all_tensors:
            columns = ChunkColumns.of(chunks)
            division, which = columns.division, (id(columns.division), dtype)
            if which not in known:
                boxes = zip(*division, strict=True)
                known[which] = division, [_written(dtype, *each) for each in boxes]
            rows = zip(known[which][1], columns.offsets, strict=True)
            for (rank, text, number), offset in rows:
                states[rank].update(f"{key}\0{text}\0{offset}\n".encode())
                counts[rank].append(number)
        return {rank: RankLayout(one.hexdigest(), counts[rank]) for rank, one in states.items()}

    def layout_of(self, rank: int) -> str:
        """A digest of all that a rank writes, and of where."""
        return self.layouts.get(rank, _NOTHING).digest

    def to_bytes(self) -> bytes:
        """The content of the file, a line per tensor and division."""
        text = _Writer()
        members = [
            (name, text.tensors(tensors))
            for name, tensors in (
                ("tensors", self.tensors),
                ("plain", self.plain),
                ("exported", self.exported),
            )
        ]
        divisions = ",".join(f"\n[{','.join(rows)}]" for _, _, rows in text.divisions.values())
        members.append(("divisions", f"[{divisions}]"))
        head = {"format_version": FORMAT_VERSION, "save_id": self.save_id}
        head["writers"] = [*text.writers]
        body = ",".join(f"\n{to_json(name)}:{content}" for name, content in members)
        return f"{to_json(head)[:-1]},{body}\n}}\n".encode()

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
        names = ("save_id", "writers", "divisions", "tensors", "plain", "exported")
        save_id, writers, divisions, *groups = values_of(members, names, source)
        expect(is_text(save_id), "a save id", save_id, source)
        expect(isinstance(writers, list), "a list of writers", writers, source)
        if marker is not None:
            expect(save_id == marker.save_id, f"save id {marker.save_id}", save_id, source)

        expect(isinstance(divisions, list), "a list of divisions", divisions, source)
        own = [_writer(values, marker, source) for values in writers]
        reader = _Reader([_division(values, own, source) for values in divisions], source)
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


def _written(dtype: torch.dtype, box: Box, rank: int, file: str) -> tuple[int, str, int]:
    """The rank that writes a chunk, its text without key and offset, and its number of blocks."""
    text = f"{dtype}\0{box.offsets}{box.sizes}{file}"
    return rank, text, num_blocks(box.numel * dtype.itemsize)


def manifest_problems(manifest: Manifest, rank: int, index: Index, source: str) -> Iterator[str]:
    """The contradictions between a rank's manifest and the index."""
    if manifest.save_id != index.save_id:
        yield f"Expected save id {index.save_id} in {source}, got {manifest.save_id}."
    if manifest.rank != rank:
        yield f"Expected rank {rank} in {source}, got {manifest.rank}."
        return

    layout, counts = index.layouts.get(rank, _NOTHING)
    if manifest.layout != layout or len(manifest.digests) != len(counts):
        yield (
            f"Expected rank {rank} to have written the {len(counts)} chunks of the index, got "
            f"{len(manifest.digests)} others in {source}."
        )
        return
    for i, (number, digests) in enumerate(zip(counts, manifest.digests, strict=True)):
        if len(digests) != number:
            tensor, chunk = index.chunks_by_rank[rank][i]
            where = f"{tensor.key!r} at {chunk.box.offsets} in {source}"
            yield f"Expected {number} digests of {where}, got {len(digests)}."


class _Writer:
    """Makes the JSON of tensors.

    Attributes:
        writers: numbers of the files and ranks seen so far.
        divisions: the number and the rows of each division seen so far, by its id; with itself,
            whose id no other object has while it exists.
    """

    def __init__(self) -> None:
        self.writers: dict[tuple[str, int], int] = {}
        self.divisions: dict[int, tuple[Division, int, list[str]]] = {}
        self._heads: dict[tuple[torch.dtype, tuple[int, ...], int], str] = {}

    def tensors(self, tensors: Mapping[str, SavedTensor]) -> str:
        """The object of tensors by key."""
        lines = []
        for key, (_, dtype, shape, chunks) in tensors.items():
            columns = ChunkColumns.of(chunks)
            which = dtype, shape, self._number(columns.division)
            if which not in self._heads:
                self._heads[which] = to_json([dtype_name(dtype), *which[1:]])[:-1]
            lines.append(f"\n{to_json(key)}:{self._heads[which]},{to_json([*columns.offsets])}]")
        return "{" + ",".join(lines) + "}"

    def _number(self, division: Division) -> int:
        if id(division) not in self.divisions:
            rows = [
                to_json(
                    [self.writers.setdefault((file, rank), len(self.writers)), *offsets, *sizes]
                )
                for (offsets, sizes), rank, file in zip(*division, strict=True)
            ]
            self.divisions[id(division)] = division, len(self.divisions), rows
        return self.divisions[id(division)][1]


def _writer(values: object, marker: Marker | None, source: str) -> tuple[str, int]:
    is_pair = isinstance(values, list) and len(values) == 2 and is_text(values[0])
    expect(is_pair and is_count(values[1]), "a file and a rank", values, source)  # type: ignore[index]
    assert isinstance(values, list), "as just checked"
    file, rank = values
    may_hold_chunks = writer_of(file) >= 0 or FURTHER_FILE.fullmatch(file) is not None
    expect(may_hold_chunks, "a file with chunks in the directory", file, source)
    if marker is not None:
        entry = marker.files.get(file)
        is_known = entry is not None and entry.digest is None and rank < marker.world_size
        expect(is_known, f"data files of {marker.world_size} ranks", f"{file} of {rank}", source)
    return file, rank


def _division(values: object, writers: Sequence[tuple[str, int]], source: str) -> Division:
    expect(isinstance(values, list), "a list of boxes", values, source)
    assert isinstance(values, list), "as just checked"
    boxes, ranks, files = [], [], []
    for row in values:
        is_row = is_counts(row) and len(row) == len(values[0]) and len(row) % 2 == 1
        expect(is_row, "a writer and a box of the division's dims", row, source)
        writer, *numbers = row
        expect(writer < len(writers), f"one of {len(writers)} writers", writer, source)
        num_dims = len(numbers) // 2
        boxes.append(Box(tuple(numbers[:num_dims]), tuple(numbers[num_dims:])))
        expect(boxes[-1].numel > 0, "a box with elements", row, source)
        file, rank = writers[writer]
        ranks.append(rank)
        files.append(file)
    return Division(boxes, ranks, files)


class _Reader:
    """Makes tensors of JSON whose types have not been checked."""

    def __init__(self, divisions: Sequence[Division], source: str) -> None:
        self._divisions = divisions
        self._source = source

    def tensors(self, members: Any) -> dict[str, SavedTensor]:
        expect(isinstance(members, dict), "tensors by key", members, self._source)
        return {key: self._tensor(key, values) for key, values in members.items()}

    def _tensor(self, key: str, values: Any) -> SavedTensor:
        expect(key != "", "keys that are not empty", key, self._source)
        where = f"{key!r} in {self._source}"
        is_whole = isinstance(values, list) and len(values) == 4
        expect(is_whole, "dtype, shape, division and offsets of", values, where)
        dtype, shape, number, offsets = values
        expect(isinstance(dtype, str) and dtype in DTYPES, "a dtype", dtype, where)
        expect(is_counts(shape) and len(shape) <= _MAX_DIMS, "a shape", shape, where)
        is_division = is_count(number) and number < len(self._divisions)
        expect(is_division, f"one of {len(self._divisions)} divisions", number, where)
        division = self._divisions[number]
        is_whole = is_counts(offsets) and len(offsets) == len(division.boxes)
        expect(is_whole, f"an offset for each of {len(division.boxes)} boxes", offsets, where)
        columns = ChunkColumns(division, array("q", offsets))
        return SavedTensor(key, DTYPES[dtype], tuple(shape), columns)


def _check_places(index: Index, marker: Marker | None, source: str) -> None:
    """Checks that all chunks are inside their files and do not overlap."""
    # With that, a load never reads more than the files. In arrays, as there may be millions.
    tensors = list(index.all_tensors)
    numbers: dict[str, int] = {}  # of files
    known: dict[tuple[int, int], tuple[Division, array[int], array[int]]] = {}
    owners, files, begins, sizes = (array("q") for _ in range(4))
    for owner, (_, dtype, _, chunks) in enumerate(tensors):
        columns = ChunkColumns.of(chunks)
        division, which = columns.division, (id(columns.division), dtype.itemsize)
        if which not in known:
            own_files = array("q", [numbers.setdefault(f, len(numbers)) for f in division.files])
            own_sizes = [min(box.numel * dtype.itemsize, MAX_COUNT) for box in division.boxes]
            known[which] = division, own_files, array("q", own_sizes)
        owners.extend([owner] * len(columns))
        begins.extend(columns.offsets)
        files.extend(known[which][1])
        sizes.extend(known[which][2])
    if not owners:
        return

    # By file, and in each by offset.
    file, begin, size = (torch.frombuffer(one, dtype=torch.int64) for one in (files, begins, sizes))
    order = begin.argsort()
    order = order[file[order].argsort(stable=True)]
    file, begin, end = file[order], begin[order], (begin + size)[order]
    is_last = torch.ones_like(file, dtype=torch.bool)
    is_last[:-1] = file[1:] != file[:-1]
    names = [*numbers]
    for i in (~is_last[:-1] & (begin[1:] < end[:-1])).nonzero()[:1, 0].tolist():
        other, own = (tensors[owners[each]].key for each in order[i : i + 2].tolist())
        raise CheckpointDamagedError(
            f"Expected {own!r} from byte {int(end[i])} of {names[int(file[i])]} on in {source}, "
            f"where {other!r} ends, got byte {int(begin[i + 1])}."
        )

    for i in is_last.nonzero()[:, 0].tolist():
        name, stop = names[int(file[i])], int(end[i])
        nbytes = stop if marker is None else marker.files[name].nbytes
        if stop > nbytes:
            raise CheckpointDamagedError(
                f"Expected {tensors[owners[int(order[i])]].key!r} within the {nbytes} bytes of "
                f"{name} in {source}, got byte {stop}."
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
            offset = (ends[owner] + before) & -DATA_ALIGNMENT
            ends[owner] = offset + behind
            offsets.append(offset)
        return ChunkColumns(division, offsets)


def _frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(bytes of a blob before its data, including the most padding that alignment adds; bytes from
    the start of its data on).
    """
    before, _, nbytes = blob_layout(dtype, sizes)
    return before + DATA_ALIGNMENT - 1, nbytes - before


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
