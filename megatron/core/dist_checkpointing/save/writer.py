"""One rank's part of a save: its data file, then its manifest, without any communication.

Ranks meet only in the draft's directory:

    __0_0.distcp      rank 0's data
    manifest_0.json   comes last: rank 0's data is on disk
    failed_1.json     why rank 1 could not write
    abandoned.json    why rank 0 has given up the save

[Note: last step] Rank 0 may publish, and so rename the directory, as soon as a manifest appears
under its name. So the rename that gives it this name is a rank's last operation: its files are on
disk before, and no later operation can fail. The name itself reaches the disk when rank 0 syncs the
directory before publishing. The other two files are notes for ranks that run at the same time. They
are not synced at all, so a rank whose disk no longer syncs can still leave one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.blob import blob_frame
from megatron.core.dist_checkpointing.format.index import ExportedRows, Index, blob_place
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    Manifest,
    data_file,
    digests_of,
    manifest_file,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk
from megatron.core.dist_checkpointing.save.data_file import BufferPool, DataFileWriter, DataSink
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, lies_on_device
from megatron.core.dist_checkpointing.store import MOST_METADATA_BYTES, Store, path_of
from megatron.core.files import Sync
from megatron.core.json_reading import parse_json
from megatron.core.lanes import Event, Lane, ThreadEvent
from megatron.core.shared_file import SharedFile
from megatron.core.timeline import NO_TIMELINE, AnyTimeline
from megatron.core.trace_file import CHECKPOINT

logger = logging.getLogger(__name__)

ABANDONED_FILE = "abandoned.json"


@dataclass(frozen=True)
class Draft:
    """A save in flight, with the same values on every rank.

    Attributes:
        store: where it is written.
        name: the draft's directory.
        final: the checkpoint's directory.
        save_id: in every file of this save, and in no other's.
        iteration: of the checkpoint.
        world_size: ranks that save together.
        is_cancelled: once set, the save ends on this rank as soon as possible.
        is_tracked: whether the tracker file is to name the checkpoint.
        shared_files: that all ranks write together.
    """

    store: Store
    name: str
    final: str
    save_id: str
    iteration: int
    world_size: int
    is_cancelled: threading.Event
    is_tracked: bool
    shared_files: tuple[str, ...] = ()

    def path(self, file: str) -> str:
        """The path of a file in the draft's directory, for the store."""
        return f"{self.name}/{file}"

    def shown(self, file: str) -> str:
        """The same, for messages."""
        return path_of(self.store, self.path(file))

    def check(self, consequence: str = "") -> None:
        """CheckpointError, with this sentence at its end, if the save is cancelled."""
        if self.is_cancelled.is_set():
            message = "Expected time to finish the save, got the end of the run."
            raise CheckpointError(message + consequence)


def failure_file(rank: int) -> str:
    """The file in which a rank leaves the reason why it could not write."""
    return f"failed_{rank}.json"


def is_only_draft(store: Store, name: str) -> bool:
    """Whether a draft of this save may be deleted: it has not become a checkpoint after all."""
    # Where drafts have the checkpoints' names, the upload of the marker may have succeeded although
    # it raised an error.
    return store.is_rename_atomic or not store.exists(f"{name}/{MARKER_FILE}")


def give_up(draft: Draft, file: str, reason: str, *, makes_folder: bool = True) -> None:
    """Leaves a note for the other ranks, even on a disk that is full or does not sync. Never
    raises.

    Args:
        makes_folder: whether to make the draft's directory first, which may have failed before.
    """
    if makes_folder:
        # A directory that was made but could not be synced is good enough for a note.
        with contextlib.suppress(Exception):  # remote stores raise other errors, too
            draft.store.make_folder(draft.name)

    content = json.dumps({"save_id": draft.save_id, "reason": reason}) + "\n"
    # A full disk may still have room for an empty file, which is a note, too.
    for text in (content, ""):
        with contextlib.suppress(Exception):
            draft.store.write(draft.path(file), text.encode(), Sync.NOTHING)
            return


def release(draft: Draft, rank: int) -> None:
    """Deletes a rank's data file of a failed save, and the files that all ranks write together, if
    possible. Never raises.

    As soon as a rank's manifest is there, rank 0 may be publishing the file. From then on the rank
    must not delete it until rank 0 has written that it has abandoned the save.
    """
    with contextlib.suppress(Exception):
        if is_only_draft(draft.store, draft.name):
            for file in (data_file(rank), *draft.shared_files):
                draft.store.delete(draft.path(file))


def read_reason(draft: Draft, file: str) -> str | None:
    """The reason that `give_up` left for this save, or None."""
    try:
        text = draft.store.read(draft.path(file))
        if not text:
            # Where drafts have no separate names, an earlier save may have left the file.
            if not draft.store.is_rename_atomic:
                return None
            return "the reason could not be written: most likely, No space left on device"
        content = parse_json(text)
        return str(content["reason"]) if content["save_id"] == draft.save_id else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RankWriter:
    """Writes this rank's chunks of the contents, group by group.

    No method raises: training continues when a save fails. After the first failure, the other calls
    have no effect.

    Attributes:
        failure: the first error.
        may_be_published: whether rank 0 may have found the manifest, whatever failed here.
    """

    def __init__(
        self,
        draft: Draft,
        contents: Contents,
        rank: int,
        pool: BufferPool,
        disk: Lane,
        timeline: AnyTimeline = NO_TIMELINE,
    ) -> None:
        self.failure: BaseException | None = None
        self.may_be_published = False
        self._draft = draft
        self._contents = contents
        self._rank = rank
        self._pool = pool
        self._disk = disk
        self._timeline = timeline
        self._file: DataFileWriter | None = None
        self._index: Index | None = None  # of this rank's chunks alone
        self._digests: dict[tuple[str, int], tuple[str, ...]] = {}  # of chunks, by their places

    def write_group(self, number: int) -> Event:
        """Waits for pending updates of the group's unit, and writes the group's chunks.

        Returns:
            An event that completes once the group's memory is no longer read.
        """
        if self.failure is None:
            try:
                return self._write_group(number)
            except BaseException as error:
                self._fail(error)
        return ThreadEvent.done()

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Writes plain data, syncs the file to disk, and writes the manifest.

        Args:
            meanwhile: called while the disk is still writing. Its errors fail the save.
        """
        if self.failure is None:
            try:
                self._finish(meanwhile)
            except BaseException as error:
                self._fail(error)

    def _write_group(self, number: int) -> Event:
        unit, entries = self._contents.groups[number]
        if unit is not None and unit.updated is not None:
            unit.updated.synchronize()

        write = partial(self._write_entries, entries, is_awaited=unit is not None)
        return self._timeline.timed(CHECKPOINT, f"group {number}", write)()

    def _write_entries(self, entries: Sequence[Entry], *, is_awaited: bool) -> Event:
        file, index = self._open()
        for entry in entries:
            for chunk in index.tensors[entry.key].chunks:
                self._draft.check()
                self._write_chunk(file, index, entry, chunk, is_awaited=is_awaited)
        return file.read_in_place() or ThreadEvent.done()

    def _open(self) -> tuple[DataFileWriter, Index]:
        # On the lane: the index of many tensors takes long to build, and training waits for `save`.
        if self._file is None or self._index is None:
            self._draft.check()
            self._index = self._contents.index(self._draft.save_id, self._rank)
            self._file = DataFileWriter(
                self._make_file,
                self._pool,
                self._disk,
                self._timeline,
                open_exported=self._open_shared,
                check=self._draft.check,
            )
        return self._file, self._index

    def _make_file(self) -> DataSink:
        """On the disk's lane."""
        self._make_folder()
        return self._draft.store.open_data(self._draft.path(data_file(self._rank)))

    def _open_shared(self, name: str) -> SharedFile:
        """On the disk's lane."""
        self._make_folder()
        path, export = self._draft.path(name), self._contents.export
        self._draft.store.make_folder(path.rpartition("/")[0])
        assert export is not None, "one of its files is written"
        return SharedFile(Path(self._draft.store.root) / path, export.files[name].nbytes)

    def _make_folder(self) -> None:
        # Now rather than when it is published: another run may save to the same directory.
        if self._draft.store.exists(f"{self._draft.final}/{MARKER_FILE}"):
            raise CheckpointError(
                f"Expected no checkpoint yet at {self._draft.final}, got a published one."
            )
        self._draft.store.make_folder(self._draft.name)

    def _write_chunk(
        self,
        file: DataFileWriter,
        index: Index,
        entry: Entry,
        chunk: SavedChunk,
        *,
        is_awaited: bool,
    ) -> None:
        """Writes a blob, unless the tensor is held by exported files; and the exported rows.

        Args:
            is_awaited: whether the next update of the tensor waits until it has been read.
        """
        export = self._contents.export
        tensor, stored = index.tensors[entry.key], entry.values.as_stored()
        # Only an update that waits is worth memory for staging; the disk can make others wait.
        file.is_staging = is_awaited and lies_on_device(stored.tensor)

        if chunk.file == data_file(self._rank):
            header, footer = blob_frame(tensor.dtype, chunk.box.sizes)
            file.pad_to(blob_place(tensor, chunk)[0])
            file.write(header)
            values = entry.box_of(chunk.box, stored.tensor)
            self._digests[chunk.file, chunk.offset] = file.write_tensor(values, stored.scale)
            file.write(footer)
        for rows in () if export is None else export.rows(entry.key, chunk.box):
            values = entry.box_of(rows.own, stored.tensor)
            self._digests[rows.file, rows.offset] = file.write_rows(rows, values, stored.scale)

    def _finish(self, meanwhile: Callable[[], None]) -> None:
        file, index = self._open()
        # Plain data and headers are the same on every rank, and rank 0's are written.
        for key, tensor in index.plain.items():
            blob = self._contents.plain_blobs[key]
            file.write(blob)
            self._digests[_place(tensor.chunks[0])] = digests_of(blob)
        export = self._contents.export
        for name, (header, _) in export.files.items() if export and self._rank == 0 else ():
            box = Box.whole((len(header),))
            rows = ExportedRows(name, torch.uint8, box, box, name, 0)
            content = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            self._digests[name, 0] = file.write_rows(rows, content)

        self._draft.check()
        file.finish(meanwhile)
        chunks = index.chunks_by_rank.get(self._rank, [])
        digests = tuple(self._digests[_place(chunk)] for _, chunk in chunks)
        layout = index.layout_of(self._rank)
        self._hand_over(Manifest(self._draft.save_id, self._rank, layout, digests).to_bytes())

    def _hand_over(self, content: bytes) -> None:
        """Makes the manifest visible. See [Note: last step]."""
        store, path = self._draft.store, self._draft.path(manifest_file(self._rank))
        self.may_be_published = True
        try:
            store.write(path, content, Sync.CONTENT)
        except Exception as error:
            # A rename or an upload may have succeeded although it raised an error.
            try:
                is_there = store.read(path, MOST_METADATA_BYTES) == content
            except FileNotFoundError:
                is_there = False
            if is_there:
                logger.warning("%s was written all the same: %s", path_of(store, path), error)
                return

            # If the directory is gone, rank 0 has published it or another run has swept it.
            self.may_be_published = not store.exists(self._draft.name)
            raise

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if self._file is not None:
            self._file.abort()
        if not self.may_be_published:
            release(self._draft, self._rank)  # first, to make room for the reason on a full disk
        file, reason = failure_file(self._rank), f"{type(error).__name__}: {error}"
        give_up(self._draft, file, reason, makes_folder=not self.may_be_published)


def _place(chunk: SavedChunk) -> tuple[str, int]:
    return chunk.file, chunk.offset
