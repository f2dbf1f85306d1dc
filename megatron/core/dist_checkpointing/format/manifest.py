"""The files that prove a checkpoint intact: a manifest per rank, and one marker.

    manifest_0.json     a digest of every block that rank 0 has written
    published.json      the marker: sizes of all files, digests of the small ones and of itself

The marker is written last. Every byte that a load uses is covered: data by the digests of a
manifest, the manifest and the index by the marker, the marker by itself. Digests are of blocks, not
of chunks: a load that needs ten rows of a chunk need not read all of it.

Both files are JSON and deterministic: the same content gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import xxhash

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    fail,
    shown,
)
from megatron.core.json_reading import parse_json

FORMAT_VERSION = 4

MAX_COUNT = (1 << 62) - 1  # the largest size or offset; a sum of two is an int64
_DIGEST = re.compile(r"[0-9a-f]{32}")


# `json.dumps` would make one for each call.
_ENCODERS = [json.JSONEncoder(separators=(",", ":"), sort_keys=sorts) for sorts in (False, True)]


def to_json(value: object, *, sort_keys: bool = False) -> str:
    """JSON without spaces."""
    return _ENCODERS[sort_keys].encode(value)


def parse_object(content: bytes, source: str) -> dict[str, Any]:
    """A JSON object. CheckpointDamagedError for anything else."""
    try:
        members = parse_json(content)
    except ValueError as error:
        raise CheckpointDamagedError(f"Expected JSON in {source}, got {error}.") from error
    expect(isinstance(members, dict), "a JSON object", members, source)
    return dict(members)


def check_version(members: dict[str, Any], source: str) -> None:
    """Takes out `format_version`. CheckpointError if it is another than this program's."""
    # Not damage: another version of this program can read the checkpoint.
    version = members.pop("format_version", None)
    expect(is_count(version), "a format version", version, source)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected format version {FORMAT_VERSION} in {source}, got {version}. The version of "
            "this program that wrote the checkpoint reads it."
        )


def values_of(members: dict[str, Any], names: Sequence[str], source: str) -> list[Any]:
    """The values of exactly these members, in the order of `names`."""
    got, wanted = sorted(members), sorted(names)
    expect(got == wanted, f"the members {wanted}", got, source)
    return [members[name] for name in names]


def expect(is_met: bool, what: str, got: object, source: str) -> None:
    """CheckpointDamagedError unless the condition is met."""
    if not is_met:
        fail(what, got if isinstance(got, str) else shown(got), source)


def is_count(value: object) -> bool:
    """Whether it is a number of bytes, elements, ranks."""
    # Not `isinstance`, for which JSON's `true` is an integer, too.
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_counts(value: object) -> bool:
    """Whether it is a list of counts. Without a call for each of them: there may be millions."""
    if not isinstance(value, list) or not {int}.issuperset(map(type, value)):
        return False
    return not value or (min(value) >= 0 and max(value) <= MAX_COUNT)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def is_digest(value: object) -> bool:
    """Whether it is an xxh3-128 as 32 hex digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


METADATA_FILE = ".metadata"
INDEX_FILE = "index.json"
TRAIN_STATE_FILE = "train_state.json"
MARKER_FILE = "published.json"

BLOCK_BYTES = 256 * 1024  # one digest each; the last block of a chunk may be shorter
DATA_ALIGNMENT = 4096  # bytes; the alignment of tensors for direct I/O

_DATA_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp")  # of DCP, with the rank that wrote it
# A file in a subdirectory of the checkpoint.
FURTHER_FILE = re.compile(r"(?:\w[\w.-]*/)+\w[\w.-]*", re.ASCII)

Buffer: TypeAlias = bytes | bytearray | memoryview

# By the names in indexes and pickles; aliases such as torch.float are left out.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def data_file(rank: int) -> str:
    """The name of a rank's data file, as DCP itself would choose it."""
    return f"__{rank}_0.distcp"


def writer_of(file: str) -> int:
    """The rank that wrote a data file, by its name; -1 for any other name."""
    match = _DATA_FILE.fullmatch(file)
    return int(match[1]) if match else -1


def manifest_file(rank: int) -> str:
    """The name of a rank's manifest."""
    return f"manifest_{rank}.json"


def files_of(world_size: int) -> list[str]:
    """The files that every checkpoint of so many ranks has, except the marker."""
    ranks = range(world_size)
    return [
        *(METADATA_FILE, INDEX_FILE, TRAIN_STATE_FILE),
        *map(data_file, ranks),
        *map(manifest_file, ranks),
    ]


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
    """A dtype's name in indexes: "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Manifest:
    """What one rank has written.

    Attributes:
        save_id: the same in all files of one save, and in no other save.
        rank: that wrote it.
        layout: a digest of the places of its chunks (`Index.layout_of`): the ranks have to agree on
            them without a word.
        digests: for each of its chunks, in the order of the index, the digests of its blocks.
    """

    save_id: str
    rank: int
    layout: str
    digests: tuple[tuple[str, ...], ...]

    def to_bytes(self) -> bytes:
        """The content of the file: a line per chunk."""
        head = {
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "rank": self.rank,
            "layout": self.layout,
        }
        # Put together by hand: `json.dumps` writes all on one line, or every digest on a separate
        # line.
        lines = ",".join(f"\n{to_json(digests)}" for digests in self.digests)
        return f'{to_json(head)[:-1]},"digests":[{lines}\n]}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Manifest:
        """Reads the output of `to_bytes`.

        Args:
            source: the file's name, for errors.

        Raises:
            CheckpointDamagedError: for anything that `to_bytes` does not write.
            CheckpointError: for another version of the format.
        """
        members = parse_object(content, source)
        check_version(members, source)
        names = ("save_id", "rank", "layout", "digests")
        save_id, rank, layout, digests = values_of(members, names, source)

        expect(is_text(save_id), "a save id", save_id, source)
        expect(is_count(rank), "a rank", rank, source)
        expect(is_digest(layout), "the digest of a layout", layout, source)
        are_lists = isinstance(digests, list) and all(isinstance(each, list) for each in digests)
        expect(are_lists, "lists of digests", digests, source)
        for number, each in enumerate(digests):
            expect(all(map(is_digest, each)), f"digests of chunk {number}", each, source)
        return cls(save_id, rank, layout, tuple(map(tuple, digests)))


class FileRecord(NamedTuple):
    """One file, as the marker describes it."""

    nbytes: int
    digest: str | None  # None for files with chunks: their digests are in the manifests


@dataclass(frozen=True)
class Marker:
    """Its presence makes a checkpoint published. It names every other file of it."""

    save_id: str
    iteration: int
    world_size: int  # ranks that saved
    files: dict[str, FileRecord]  # of `files_of(world_size)`, and further ones in directories

    def to_bytes(self) -> bytes:
        """The content of the file, a line per file in the order of their names."""
        head = to_json(self._head())[:-1]
        lines = ",".join(
            f"\n{to_json(name)}:{to_json(record)}" for name, record in sorted(self.files.items())
        )
        return f'{head},"files":{{{lines}\n}},"digest":{to_json(self._digest())}}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Marker:
        """Reads the output of `to_bytes`.

        Args:
            source: the file's name, for errors.

        Raises:
            CheckpointDamagedError: for anything that `to_bytes` does not write.
            CheckpointError: for another version of the format.
        """
        members = parse_object(content, source)
        # Before the version: of a damaged marker, no other word is to be believed.
        written = members.pop("digest", None)
        got = digest(to_json(members, sort_keys=True).encode())
        expect(written == got, f"the digest {written!r}", got, source)
        check_version(members, source)

        names = ("save_id", "iteration", "world_size", "files")
        save_id, iteration, world_size, files = values_of(members, names, source)
        expect(is_text(save_id), "a save id", save_id, source)
        expect(is_count(iteration), "an iteration", iteration, source)
        expect(is_count(world_size) and world_size > 0, "a number of ranks", world_size, source)
        expect(isinstance(files, dict), "files by name", files, source)
        # Counted first: the names for a wrong, huge number of ranks may not fit into memory.
        is_all = len(files) >= 2 * world_size and files.keys() >= set(files_of(world_size))
        expect(is_all, f"the files of {world_size} ranks", sorted(files), source)
        further = sorted(files.keys() - set(files_of(world_size)))
        for name in further:
            is_safe = FURTHER_FILE.fullmatch(name) is not None
            expect(is_safe, "further files in subdirectories", name, source)

        # The bytes of data files are covered by manifests.
        data_files = set(map(data_file, range(world_size)))
        records = {
            name: _file_record(name, values, name in data_files, name in further, source)
            for name, values in files.items()
        }
        marker = cls(save_id, iteration, world_size, records)
        # The same values can be spelled in many ways; only one of them was written.
        is_exact = marker.to_bytes() == content
        expect(is_exact, "the bytes that were written", "others that mean the same", source)
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
        return digest(to_json({**self._head(), "files": self.files}, sort_keys=True).encode())


def _file_record(
    name: str, values: object, is_data: bool, may_be_data: bool, source: str
) -> FileRecord:
    is_pair = isinstance(values, list) and len(values) == 2 and is_count(values[0])
    expect(is_pair, f"a size and a digest of {name}", values, source)
    assert isinstance(values, list), "as just checked"
    nbytes, written = values
    is_right = written is None if is_data else is_digest(written)
    is_right = is_right or (may_be_data and written is None)
    expect(is_right, f"the digest of {name}", written, source)
    return FileRecord(nbytes, written)
