"""One rank's part of a save: its data file, then its manifest. No other rank is asked or told
anything.

Ranks meet in the draft's folder alone:

    __0_0.distcp, manifest_0.json   what rank 0 has written; the manifest comes last and says that the data is on disk
    failed_1.json                   why rank 1 could not
    abandoned.json                  why rank 0 has given the save up

[Note: last step] Rank 0 acts on a manifest as soon as it has its name, and renames the folder. So
that name is the last thing a rank does: everything in its files is on disk before, and nothing can
fail after it. Rank 0 brings the name itself to disk when it syncs the folder before it publishes.
The two other files are for ranks that run at the same time. They are not synced at all, so that a
rank whose disk no longer syncs can still say so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections import defaultdict
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.blob import blob_frame, plain_blob
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    ChunkRecord,
    Manifest,
    data_file,
    digests_of,
    dtype_name,
    manifest_file,
)
from megatron.core.dist_checkpointing.plan.file_plan import Placed, place
from megatron.core.dist_checkpointing.save.data_file import BufferPool, DataFileWriter
from megatron.core.dist_checkpointing.save.data_sink import DataSink, LateSink
from megatron.core.dist_checkpointing.state.entries import Contents, Entry
from megatron.core.dist_checkpointing.state.tensor_bytes import lies_on_device
from megatron.core.dist_checkpointing.store import Store
from megatron.core.files import Sync
from megatron.core.json_reading import parse_json
from megatron.core.lanes import Lane

logger = logging.getLogger(__name__)

ABANDONED_FILE = "abandoned.json"
_MAX_REASON_BYTES = 1 << 16


@dataclass(frozen=True)
class Draft:
    """A save under way, as every rank knows it without having asked.

    Attributes:
        store: where it is written.
        name: the draft's folder.
        final: the checkpoint's folder.
        save_id: in every file of this save, and in no other's.
        iteration: of the checkpoint.
        world_size: ranks that save together.
        is_cancelled: set, it ends the save on this rank as soon as possible.
        is_tracked: whether it is one of a run's checkpoints, the newest of which the tracker file
            names.
    """

    store: Store
    name: str
    final: str
    save_id: str
    iteration: int
    world_size: int
    is_cancelled: threading.Event
    is_tracked: bool = True

    def path(self, file: str) -> str:
        """Of a file in the draft's folder, for the store."""
        return f"{self.name}/{file}"

    def check(self, consequence: str = "") -> None:
        """CheckpointError, which ends with this sentence, if the save is to end."""
        if self.is_cancelled.is_set():
            message = "Expected time to finish the save, got the end of the run."
            raise CheckpointError(message + consequence)


def failure_file(rank: int) -> str:
    """Where a rank says why it could not write."""
    return f"failed_{rank}.json"


def give_up(draft: Draft, file: str, reason: str, *, makes_folder: bool = True) -> None:
    """Leaves a note for the other ranks, also on a full disk or one that does not sync.

    Raises nothing.

    Args:
        makes_folder: whether to make the draft's folder if it is not there: that may have failed.
    """
    if makes_folder:
        # A folder that was made but could not be synced is good enough for a note.
        with contextlib.suppress(Exception):  # remote stores have errors of their own
            draft.store.make_folder(draft.name)

    content = json.dumps({"save_id": draft.save_id, "reason": reason}) + "\n"
    # A full disk has room for an empty file where it has none for a reason.
    for text in (content, ""):
        with contextlib.suppress(Exception):
            draft.store.write(draft.path(file), text.encode(), Sync.NOTHING)
            return


def release(draft: Draft, rank: int) -> None:
    """Deletes a rank's data file of a save that has come to nothing, if that can be done. Raises
    nothing.

    Once a rank's manifest is there the file is rank 0's, which may be publishing it: only after
    rank 0's word that it has abandoned the save may the rank itself delete it.
    """
    with contextlib.suppress(Exception):
        # Where drafts have the checkpoints' names, it may be one after all.
        if draft.store.is_rename_atomic or not draft.store.exists(draft.path(MARKER_FILE)):
            draft.store.delete(draft.path(data_file(rank)))


def read_reason(draft: Draft, file: str) -> str | None:
    """What `give_up` left; None if there is none, or none of this save."""
    try:
        text = draft.store.read(draft.path(file), _MAX_REASON_BYTES)
        if not text:
            # Where drafts have no names of their own, it may be what an earlier save has left.
            return (
                "there was no room to say why: most likely, No space left on device"
                if draft.store.is_rename_atomic
                else None
            )
        content = parse_json(text)
        return str(content["reason"]) if content["save_id"] == draft.save_id else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RankWriter:
    """Writes this rank's shares of the contents, group by group; see the module's docstring.

    No method raises: a save that fails must not end what it runs beside. After the first failure
    the rest does nothing.

    Attributes:
        manifest: once all has been written.
        failure: what went wrong first.
        may_be_published: whether rank 0 may have found the manifest, whatever went wrong here.
    """

    def __init__(
        self, draft: Draft, contents: Contents, rank: int, pool: BufferPool, disk: Lane
    ) -> None:
        self.manifest: Manifest | None = None
        self.failure: BaseException | None = None
        self.may_be_published = False
        self._draft = draft
        self._contents = contents
        self._rank = rank
        self._pool = pool
        self._disk = disk
        self._file: DataFileWriter | None = None
        counts = (len(group.entries) for group in contents.groups)
        self._first_entries = list(
            itertools.accumulate(counts, initial=0)
        )  # of each group, by number
        self._shares: dict[int, list[Placed]] = {}  # by the entry's number
        self._records: list[ChunkRecord] = []

    def write_group(self, number: int) -> None:
        """Writes the shares of one group of entries, once the updates of its unit that are under
        way have ended.

        When this returns, its memory has been read, or will not be.
        """
        if self.failure is None:
            try:
                self._write_group(number)
            except BaseException as error:
                self._fail(error)

    def finish(self) -> None:
        """Writes what is no tensor, brings the file to disk, and says so in the manifest."""
        if self.failure is None:
            try:
                self._finish()
            except BaseException as error:
                self._fail(error)

    def _write_group(self, number: int) -> None:
        unit = self._contents.groups[number].unit
        if unit is not None and unit.updated is not None:
            unit.updated.synchronize()
        file = self._open()
        for index, entry in enumerate(
            self._contents.groups[number].entries, start=self._first_entries[number]
        ):
            for share in self._shares.get(index, ()):
                self._draft.check()
                self._write_share(file, entry, share, is_awaited=unit is not None)

    def _open(self) -> DataFileWriter:
        if self._file is None:
            self._draft.check()
            shares = defaultdict(list)
            for share in place([entry.saved_as for entry in self._contents.entries], self._rank):
                shares[share.tensor].append(share)
            self._shares = dict(shares)
            self._file = DataFileWriter(
                LateSink(self._make_file, self._draft.check), self._pool, self._disk
            )
        return self._file

    def _make_file(self) -> DataSink:
        """On the disk's lane."""
        store = self._draft.store
        if store.exists(f"{self._draft.final}/{MARKER_FILE}"):
            raise CheckpointError(
                f"Expected no checkpoint yet at {self._draft.final}, got a published one."
            )
        store.make_folder(self._draft.name)
        return store.open_data(self._draft.path(data_file(self._rank)))

    def _write_share(
        self, file: DataFileWriter, entry: Entry, share: Placed, *, is_awaited: bool
    ) -> None:
        """Writes a blob.

        Args:
            is_awaited: whether the next update of the tensor waits until it has been read.
        """
        header, footer = blob_frame(entry.saved_as.dtype, share.sizes)
        stored = entry.values.as_stored()
        file.is_staging = is_awaited and lies_on_device(stored.tensor)
        file.pad_to(share.blob_offset)
        file.write(header)
        digests = file.write_tensor(_rows_of(entry, share, stored.tensor), stored.scale)
        file.write(footer)
        self._records.append(
            ChunkRecord(
                entry.key,
                dtype_name(entry.saved_as.dtype),
                share.offsets,
                share.sizes,
                share.blob_offset,
                share.blob.nbytes,
                share.data_offset,
                share.blob.data_nbytes,
                digests,
            )
        )

    def _finish(self) -> None:
        file = self._open()
        if self._rank == 0:
            for key, value in self._contents.plain.items():
                blob, offset = plain_blob(value), file.position
                file.write(blob)
                place_of_blob = (offset, len(blob))
                self._records.append(
                    ChunkRecord(key, "", (), (), *place_of_blob, *place_of_blob, digests_of(blob))
                )
        self._draft.check()
        nbytes = file.finish()
        manifest = Manifest(
            self._draft.save_id, self._rank, data_file(self._rank), nbytes, tuple(self._records)
        )
        self._hand_over(manifest.to_bytes())
        self.manifest = manifest

    def _hand_over(self, content: bytes) -> None:
        """Makes the manifest visible. See [Note: last step]."""
        store, path = self._draft.store, self._draft.path(manifest_file(self._rank))
        self.may_be_published = True
        try:
            store.write(path, content, Sync.CONTENT)
        except Exception as error:
            # A rename or an upload may have been carried out although the answer was an error.
            try:
                is_there = store.read(path) == content
            except FileNotFoundError:
                is_there = False
            if is_there:
                logger.warning("%s/%s was written all the same: %s", store.root, path, error)
                return
            # If there is no folder, rank 0 has published it or another run has swept it.
            self.may_be_published = not store.exists(self._draft.name)
            raise

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if self._file is not None:
            self._file.abort()
        if not self.may_be_published:
            release(self._draft, self._rank)  # first: a full disk has room for the reason then
        file, reason = failure_file(self._rank), f"{type(error).__name__}: {error}"
        give_up(self._draft, file, reason, makes_folder=not self.may_be_published)


def _rows_of(entry: Entry, share: Placed, tensor: torch.Tensor) -> torch.Tensor:
    """What a share has of the memory that this rank holds: whole rows of it, as a view."""
    part = entry.part_of(tensor)
    if share.sizes:
        part = part.narrow(0, share.offsets[0] - entry.offsets[0], share.sizes[0])
    return part
