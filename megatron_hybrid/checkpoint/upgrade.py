"""Checkpoints of format version 1 as checkpoints of the present format, without copying their data.

Version 1 had no index: every manifest named the chunks of its file, and `.metadata` the shapes. The
data files are the same in both, so a new checkpoint takes them over as links to the same content.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.json_members import parse_object, to_json
from megatron.core.dist_checkpointing.format.manifest import (
    INDEX_FILE,
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    FileRecord,
    Manifest,
    Marker,
    data_file,
    digest,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.format.names import path_of
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.coverage import check_coverage
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.load.small_files import check_size
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES, LocalStore
from megatron.core.files import sync_folder

_Record = tuple[str, int, list[str]]  # a file, the place of the data in it, digests


def upgrade_checkpoint(source: LocalStore, name: str, target: LocalStore) -> None:
    """Publishes a checkpoint of version 1 as `name` in another folder of checkpoints. The old one
    stays as it is.

    Raises:
        CheckpointDamagedError: if it is not what was written. Data is not read: `verify` does that.
        CheckpointError: if it is of another version, or `target` has a checkpoint of that name.
    """
    if target.exists(name):
        raise CheckpointError(
            f"Expected no checkpoint yet at {path_of(target, name)}, got something."
        )
    old = _OldCheckpoint(source, name)
    index, manifests = old.index_and_manifests()

    draft = target.draft_name(name, secrets.token_hex(4))
    target.make_folder(draft)
    try:
        small = {file: old.small(file) for file in (METADATA_FILE, TRAIN_STATE_FILE)}
        small[INDEX_FILE] = index.to_bytes()
        small |= {manifest_file(own.rank): own.to_bytes() for own in manifests}
        files = {}
        for file, content in small.items():
            target.write(f"{draft}/{file}", content)
            files[file] = FileRecord(len(content), digest(content))
        for own in manifests:
            file = data_file(own.rank)
            _take_over(Path(source.root) / name / file, Path(target.root) / draft / file)
            files[file] = old.files[file]
        sync_folder(Path(target.root) / draft)

        marker = Marker(index.save_id, old.iteration, old.world_size, files)
        target.write(f"{draft}/{MARKER_FILE}", marker.to_bytes())
        target.publish(draft, name)
    except BaseException:
        shutil.rmtree(Path(target.root) / draft, ignore_errors=True)
        raise


def _take_over(source: Path, target: Path) -> None:
    """A second name for a file; a copy where the file system gives none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as stream:
            os.fsync(stream.fileno())


class _OldCheckpoint:
    """The small files of a checkpoint of version 1, each held against its digest in the marker."""

    def __init__(self, store: LocalStore, name: str) -> None:
        self._store = store
        self._name = name
        source = path_of(store, f"{name}/{MARKER_FILE}")
        members = parse_object(store.read(f"{name}/{MARKER_FILE}"), source)
        written, version = members.pop("digest", None), members.get("format_version")
        got = digest(to_json(members, sort_keys=True).encode())
        if written != got:
            raise CheckpointDamagedError(f"Expected digest {written} of {source}, got {got}.")
        if version != 1:
            raise CheckpointError(
                f"Expected a checkpoint of format version 1 in {source}, got {version}."
            )
        # The digest vouches for what version 1 wrote, so types need no checks.
        self.save_id: str = members["save_id"]
        self.iteration: int = members["iteration"]
        self.world_size: int = members["world_size"]
        self.files = {file: FileRecord(*values) for file, values in members["files"].items()}
        marker = Marker(self.save_id, self.iteration, self.world_size, self.files)
        for file in self.files:
            check_size(store, name, file, marker)

    def small(self, file: str) -> bytes:
        """The content of a small file. CheckpointDamagedError if it is not what was written."""
        content = self._store.read(f"{self._name}/{file}", MAX_METADATA_BYTES)
        got, written = digest(content), self.files[file].digest
        if got != written:
            raise CheckpointDamagedError(
                f"Expected digest {written} of {self._path(file)}, got {got}."
            )
        return content

    def index_and_manifests(self) -> tuple[Index, list[Manifest]]:
        """What the present format says of the same data files."""
        records: dict[tuple[str, tuple[int, ...]], _Record] = {}
        plain: dict[str, SavedTensor] = {}
        for rank in range(self.world_size):
            content = self.small(manifest_file(rank))
            for values in parse_object(content, self._path(manifest_file(rank)))["chunks"]:
                key, dtype, offsets, _, _, _, offset, nbytes, digests = values
                records[key, tuple(offsets)] = (data_file(rank), offset, digests)
                if not dtype:
                    plain[key] = _plain(key, rank, offset, nbytes)

        source = self._path(METADATA_FILE)
        old = parse_metadata(self.small(METADATA_FILE), source).tensors
        check_coverage(old.values(), source)
        tensors = {
            key: tensor._replace(chunks=[_placed(key, chunk, records) for chunk in tensor.chunks])
            for key, tensor in old.items()
        }
        index = Index(self.save_id, tensors, plain)
        return index, [self._manifest(index, rank, records) for rank in range(self.world_size)]

    def _manifest(
        self, index: Index, rank: int, records: dict[tuple[str, tuple[int, ...]], _Record]
    ) -> Manifest:
        digests = []
        for tensor, chunk in index.chunks_by_rank.get(rank, ()):
            is_plain = tensor.key in index.plain
            _, _, own = records[tensor.key, () if is_plain else chunk.box.offsets]
            digests.append(tuple(own))
        return Manifest(self.save_id, rank, index.layout_of(rank), tuple(digests))

    def _path(self, file: str) -> str:
        return path_of(self._store, f"{self._name}/{file}")


def _plain(key: str, rank: int, offset: int, nbytes: int) -> SavedTensor:
    chunk = SavedChunk(Box.whole((nbytes,)), rank, data_file(rank), offset)
    return SavedTensor(key, torch.uint8, (nbytes,), [chunk])


def _placed(
    key: str, chunk: SavedChunk, records: dict[tuple[str, tuple[int, ...]], _Record]
) -> SavedChunk:
    """A chunk of `.metadata`, which knows its blob, with the place of its data."""
    _, offset, _ = records[key, chunk.box.offsets]
    return chunk._replace(offset=offset)
