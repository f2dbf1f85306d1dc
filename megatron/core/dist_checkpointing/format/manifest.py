"""The files in which a checkpoint describes itself: a manifest per rank, and one marker.

    manifest_0.json     the chunks in rank 0's data file: their place, and a digest of every block
    published.json      the marker: sizes of all files, digests of the small ones and of itself

The marker is written last. Every byte that a load uses is covered: data by the digests of a
manifest, the manifest by the marker, the marker by itself. Digests are of blocks, not of chunks: a
load that needs ten rows of a chunk need not read all of it.

Both files are JSON and deterministic: the same content gives the same bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import xxhash

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError, shown
from megatron.core.json_reading import parse_json

METADATA_FILE = ".metadata"
TRAIN_STATE_FILE = "train_state.json"
MARKER_FILE = "published.json"

BLOCK_BYTES = 256 * 1024  # one digest each; the last block of a chunk may be shorter
DATA_ALIGNMENT = 4096  # bytes; direct I/O wants a tensor's data to begin at a multiple of it

FORMAT_VERSION = 1
_MAX_COUNT = (1 << 63) - 1  # the largest size or place in a file
_DIGEST = re.compile(r"[0-9a-f]{32}")

Buffer: TypeAlias = bytes | bytearray | memoryview

# By their own names, which manifests and pickles use; aliases such as torch.float are left out.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def data_file(rank: int) -> str:
    """The name of a rank's data file, as DCP itself would choose it."""
    return f"__{rank}_0.distcp"


def manifest_file(rank: int) -> str:
    """The name of a rank's manifest."""
    return f"manifest_{rank}.json"


def files_of(world_size: int) -> list[str]:
    """All files of a checkpoint that so many ranks saved, except the marker."""
    ranks = range(world_size)
    return [METADATA_FILE, TRAIN_STATE_FILE, *map(data_file, ranks), *map(manifest_file, ranks)]


def digest(data: Buffer) -> str:
    """xxh3-128 of contiguous bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digests_of(data: Buffer) -> tuple[str, ...]:
    """The digest of each block of contiguous bytes."""
    view = memoryview(data)
    if not view.nbytes:
        return ()  # a view without elements cannot be cast

    view = view.cast("B")
    return tuple(
        digest(view[begin : begin + BLOCK_BYTES]) for begin in range(0, view.nbytes, BLOCK_BYTES)
    )


def num_blocks(data_nbytes: int) -> int:
    """The number of digests of so many bytes."""
    return -(-data_nbytes // BLOCK_BYTES)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in manifests: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name from a manifest that has been checked."""
    return DTYPES[name]


class ChunkRecord(NamedTuple):
    """A box of one tensor, or one piece of plain data, in a data file."""

    key: str
    dtype: str  # "float32"; "" for plain data
    offsets: tuple[int, ...]  # of the box in the tensor; () for scalars and plain data
    sizes: tuple[int, ...]
    blob_offset: int  # bytes from the beginning of the file; so all that follow
    blob_nbytes: int
    data_offset: int  # for plain data, the blob is the data
    data_nbytes: int
    digests: tuple[str, ...]  # of each block of the data


@dataclass(frozen=True)
class Manifest:
    """The chunks of one rank's data file, in the order of the file."""

    save_id: str  # the same in all files of one save, and in no other save
    rank: int
    file: str
    nbytes: int  # of the data file
    chunks: tuple[ChunkRecord, ...]

    def to_bytes(self) -> bytes:
        """The content of the file: a line per chunk, its values in the order of `chunk_fields`."""
        head = {
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "rank": self.rank,
            "file": self.file,
            "nbytes": self.nbytes,
            "chunk_fields": ChunkRecord._fields,
        }
        # Put together by hand: `json.dumps` writes all on one line, or every number on its own.
        lines = ",".join(f"\n{_to_json(chunk)}" for chunk in self.chunks)
        return f'{_to_json(head)[:-1]},"chunks":[{lines}\n]}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Manifest:
        """Reads the output of `to_bytes`.

        Args:
            source: the file's name, for errors.

        Raises:
            CheckpointDamagedError: for anything that `to_bytes` does not write.
            CheckpointError: for another version of the format.
        """
        members = _parse(content, source)
        _check_version(members, source)
        names = ("save_id", "rank", "file", "nbytes", "chunk_fields", "chunks")
        save_id, rank, file, nbytes, fields, chunks = _members(members, names, source)

        _expect(isinstance(save_id, str) and save_id != "", "a save id", save_id, source)
        _expect(_is_count(rank), "a rank", rank, source)
        _expect(file == data_file(rank), f"the file {data_file(rank)}", file, source)
        _expect(_is_count(nbytes), "a number of bytes", nbytes, source)
        known = list(ChunkRecord._fields)
        _expect(fields == known, f"the fields {known}", fields, source)
        _expect(isinstance(chunks, list), "a list of chunks", chunks, source)

        records = tuple(_chunk(values, source) for values in chunks)
        _check_places(records, nbytes, source)
        return cls(save_id, rank, file, nbytes, records)


class FileRecord(NamedTuple):
    """One file, as the marker describes it."""

    nbytes: int
    digest: str | None  # None for data files: their digests are in the manifests


@dataclass(frozen=True)
class Marker:
    """Its presence makes a checkpoint published. It names every other file of it."""

    save_id: str
    iteration: int
    world_size: int  # ranks that saved
    files: dict[str, FileRecord]  # of `files_of(world_size)`

    def to_bytes(self) -> bytes:
        """The content of the file, a line per file in the order of their names."""
        head = _to_json(self._head())[:-1]
        lines = ",".join(
            f"\n{_to_json(name)}:{_to_json(record)}" for name, record in sorted(self.files.items())
        )
        return f'{head},"files":{{{lines}\n}},"digest":{_to_json(self._digest())}}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Marker:
        """Reads the output of `to_bytes`, and nothing else.

        Args:
            source: the file's name, for errors.

        Raises:
            CheckpointDamagedError: for anything that `to_bytes` does not write.
            CheckpointError: for another version of the format.
        """
        members = _parse(content, source)
        # Before the version: of a damaged marker, no other word is to be believed.
        written = members.pop("digest", None)
        got = digest(_to_json(members, sort_keys=True).encode())
        _expect(written == got, f"the digest {written!r}", got, source)
        _check_version(members, source)

        names = ("save_id", "iteration", "world_size", "files")
        save_id, iteration, world_size, files = _members(members, names, source)
        _expect(isinstance(save_id, str) and save_id != "", "a save id", save_id, source)
        _expect(_is_count(iteration), "an iteration", iteration, source)
        _expect(_is_count(world_size) and world_size > 0, "a number of ranks", world_size, source)
        _expect(isinstance(files, dict), "files by name", files, source)
        # Counted first: the names for a wrong, huge number of ranks may not fit into memory.
        is_all = len(files) == 2 + 2 * world_size and files.keys() == set(files_of(world_size))
        _expect(is_all, f"the files of {world_size} ranks", sorted(files), source)

        data_files = set(map(data_file, range(world_size)))
        records = {
            name: _file_record(name, values, name in data_files, source)
            for name, values in files.items()
        }
        marker = cls(save_id, iteration, world_size, records)
        # The same values can be spelled in many ways; only one of them was written.
        is_exact = marker.to_bytes() == content
        _expect(is_exact, "the bytes that were written", "others that mean the same", source)
        return marker

    def _head(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "iteration": self.iteration,
            "world_size": self.world_size,
        }

    def _digest(self) -> str:
        """Of all the rest, as JSON with sorted keys and without spaces."""
        return digest(_to_json({**self._head(), "files": self.files}, sort_keys=True).encode())


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=sort_keys)


def _parse(content: bytes, source: str) -> dict[str, Any]:
    try:
        members = parse_json(content)
    except ValueError as error:
        raise CheckpointDamagedError(f"Expected JSON in {source}, got {error}.") from error
    _expect(isinstance(members, dict), "a JSON object", members, source)
    return dict(members)


def _check_version(members: dict[str, Any], source: str) -> None:
    # A CheckpointError and no damage: a later version of this program can read the checkpoint.
    version = members.pop("format_version", None)
    _expect(_is_count(version), "a format version", version, source)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected format version {FORMAT_VERSION} in {source}, got {version}."
        )


def _members(members: dict[str, Any], names: Sequence[str], source: str) -> list[Any]:
    """The values of exactly these members, in the order of `names`."""
    got, wanted = sorted(members), sorted(names)
    _expect(got == wanted, f"the members {wanted}", got, source)
    return [members[name] for name in names]


def _expect(is_met: bool, what: str, got: object, source: str) -> None:
    if not is_met:
        raise CheckpointDamagedError(
            f"Expected {what} in {source}, got {got if isinstance(got, str) else shown(got)}."
        )


def _is_count(value: object) -> bool:
    # Not `isinstance`, for which JSON's `true` is an integer, too.
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _file_record(name: str, values: object, is_data: bool, source: str) -> FileRecord:
    is_pair = isinstance(values, list) and len(values) == 2 and _is_count(values[0])
    _expect(is_pair, f"a size and a digest of {name}", values, source)
    assert isinstance(values, list), "as just checked"
    nbytes, written = values
    is_right = written is None if is_data else _is_digest(written)
    _expect(is_right, f"the digest of {name}", written, source)
    return FileRecord(nbytes, written)


def _chunk(values: object, source: str) -> ChunkRecord:
    """One line of a manifest, each value held against the others."""
    is_whole = isinstance(values, list) and len(values) == len(ChunkRecord._fields)
    _expect(is_whole, f"a chunk of {len(ChunkRecord._fields)} values", values, source)
    assert isinstance(values, list), "as just checked"
    key, dtype, offsets, sizes, *places, digests = values
    _expect(isinstance(key, str) and key != "", "a key", key, source)

    where = f"{key!r} in {source}"
    _expect(isinstance(dtype, str) and (dtype == "" or dtype in DTYPES), "a dtype", dtype, where)
    is_box = _is_counts(offsets) and _is_counts(sizes) and len(offsets) == len(sizes)
    _expect(is_box, "as many offsets as sizes", (offsets, sizes), where)
    _expect(_is_counts(places), "places in the file", places, where)
    _expect(isinstance(digests, list) and all(map(_is_digest, digests)), "digests", digests, where)

    blob_offset, blob_nbytes, data_offset, data_nbytes = places
    number = num_blocks(data_nbytes)
    _expect(len(digests) == number, f"{number} digests", digests, where)
    if dtype:
        nbytes = math.prod(sizes) * DTYPES[dtype].itemsize
        _expect(data_nbytes == nbytes, f"{nbytes} bytes of data", data_nbytes, where)
        is_aligned = nbytes == 0 or data_offset % DATA_ALIGNMENT == 0
        _expect(is_aligned, "aligned data", data_offset, where)
    else:
        is_all_data = (blob_offset, blob_nbytes) == (data_offset, data_nbytes)
        _expect(is_all_data and offsets == [], "a blob that is all data", values, where)
    box = (tuple(offsets), tuple(sizes))
    return ChunkRecord(
        key, dtype, *box, blob_offset, blob_nbytes, data_offset, data_nbytes, tuple(digests)
    )


def _check_places(chunks: Iterable[ChunkRecord], nbytes: int, source: str) -> None:
    """Blobs follow each other in the file, and their data lies in them."""
    # With that, no byte belongs to two chunks, and a load never reads more than the file.
    end = 0
    for chunk in chunks:
        where = f"{chunk.key!r} in {source}"
        _expect(chunk.blob_offset >= end, f"a blob from byte {end} on", chunk.blob_offset, where)
        end = chunk.blob_offset + chunk.blob_nbytes
        data_end = chunk.data_offset + chunk.data_nbytes
        is_inside = chunk.blob_offset <= chunk.data_offset and data_end <= end
        _expect(is_inside, "data within the blob", chunk[4:8], where)
    _expect(end <= nbytes, f"blobs within the {nbytes} bytes of the file", end, source)
