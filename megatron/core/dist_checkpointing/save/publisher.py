"""The publication of all ranks' files: rank 0 composes the index, awaits manifests, publishes.

The chunks and offsets of each rank are computed. A manifest has a digest of its rank's result,
which detects a rank that saves another model or another part of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.format.index import Index, manifest_problems
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
from megatron.core.dist_checkpointing.format.metadata import compose_metadata
from megatron.core.dist_checkpointing.save.writer import (
    ABANDONED_FILE,
    Draft,
    failure_file,
    give_up,
    read_reason,
    release,
)
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import MOST_METADATA_BYTES, path_of, track
from megatron.core.files import Sync

logger = logging.getLogger(__name__)

_SHORTEST_WAIT, _LONGEST_WAIT = 0.002, 0.25  # seconds between looks at the directory
_PATIENCE = 10.0  # seconds for which the outcome of a save may be unreadable


@dataclass
class Publication:
    """Rank 0's part of a save besides its own data."""

    draft: Draft
    contents: Contents
    train_state: bytes  # the content of `train_state.json`
    _index: Index | None = None
    _small_files: dict[str, bytes] = field(default_factory=dict)

    def describe(self) -> None:
        """Composes the small files of all ranks without writing them."""
        export = self.contents.export
        self._index = index = self.contents.index(self.draft.save_id)
        self._small_files = {
            METADATA_FILE: compose_metadata(index.in_blobs, index.plain.values()),
            INDEX_FILE: index.to_bytes(),
            TRAIN_STATE_FILE: self.train_state,
            **({} if export is None else export.small_files),
        }

    def publish(self, timeout_seconds: float) -> bool:
        """Publishes the described checkpoint, once this rank's manifest is written.

        Args:
            timeout_seconds: how long to wait for the other ranks.

        Returns:
            Whether the tracker file now names the checkpoint. If not, the one it names must stay.

        Raises:
            CheckpointError: naming the rank that could not write or was too late, and the reason.
                No checkpoint has been published then.
            OSError: if the file system failed here.
        """
        draft, index, export = self.draft, self._index, self.contents.export
        assert index is not None, "it has been described"
        files = {}
        for name, content in self._small_files.items():
            # The store syncs the draft's own directory when it publishes it.
            sync = Sync.CONTENT
            if "/" in name:
                draft.store.make_folder(draft.path(name.rpartition("/")[0]))
                sync = Sync.ALL
            draft.store.write(draft.path(name), content, sync)
            files[name] = FileRecord(len(content), digest(content))

        for rank, (content, manifest) in sorted(_await_manifests(draft, timeout_seconds).items()):
            source = draft.shown(manifest_file(rank))
            for problem in manifest_problems(manifest, rank, index, source):
                raise CheckpointError(problem)
            files[manifest_file(rank)] = FileRecord(len(content), digest(content))
            nbytes = index.data_files.get(rank, 0)
            files[data_file(rank)] = _record(draft, data_file(rank), nbytes)
        for name, (_, nbytes) in ({} if export is None else export.files).items():
            files[name] = _record(draft, name, nbytes)

        draft.check()
        marker = Marker(draft.save_id, draft.iteration, draft.world_size, files)
        is_durable = _commit(draft, marker)

        # The checkpoint is published, so later errors are no failures. The tracker must not name a
        # checkpoint that a crash may still undo.
        return is_durable and draft.is_tracked and track(draft.store, draft.iteration)


def _commit(draft: Draft, marker: Marker) -> bool:
    """Publishes the draft. Returns whether that is durable; raises only if it is not published."""
    try:
        draft.store.write(draft.path(MARKER_FILE), marker.to_bytes(), Sync.CONTENT)
        return draft.store.publish(draft.name, draft.final)
    except FileNotFoundError:
        raise  # the draft, or a part of it, has been swept
    except Exception as error:  # remote stores raise other errors, too
        # An upload of the marker may have succeeded although it raised an error.
        try:
            is_published = _patiently(draft, lambda: _is_published(draft))
        except Exception:
            is_published = False
        if not is_published:
            raise

        final = path_of(draft.store, draft.final)
        logger.warning("%s is published, but may not outlive a crash: %s", final, error)
        return False


def abandon(draft: Draft, reason: str) -> None:
    """Reports to the other ranks that a save has failed."""
    release(draft, 0)
    give_up(draft, ABANDONED_FILE, reason)


def await_outcome(draft: Draft, rank: int, timeout_seconds: float) -> None:
    """The part of the other ranks: returns once rank 0 has published the checkpoint.

    An error while looking is no outcome, since rank 0 may be publishing all the same: the rank
    looks again.

    Raises:
        CheckpointError: with rank 0's reason for abandoning the save, or after the timeout.
        OSError: if the file system fails for so long that the outcome cannot be known.
    """

    def look() -> bool:
        # The draft first: if it vanishes in between, it has become the checkpoint.
        is_there = draft.store.exists(draft.name)
        if _is_published(draft):
            return True
        reason = read_reason(draft, ABANDONED_FILE)
        if reason is not None:
            release(draft, rank)
            raise CheckpointError(reason)
        if not is_there:
            name = path_of(draft.store, draft.name)
            reason = f"Expected the draft {name}, got none: it has been swept."
            # Rank 0 may yet come to look for this rank's part.
            give_up(draft, failure_file(rank), reason)
            raise CheckpointError(reason)
        return False

    def describe() -> str:
        return f"{path_of(draft.store, draft.final)} to be published by rank 0"

    consequence = " Rank 0 may publish the checkpoint all the same."
    _poll(draft, lambda: _patiently(draft, look), timeout_seconds, describe, consequence)


def _is_published(draft: Draft) -> bool:
    # A sweep by another run may leave only the marker of a draft in a remote store.
    if not draft.store.exists(f"{draft.final}/{METADATA_FILE}"):
        return False
    try:
        content = draft.store.read(f"{draft.final}/{MARKER_FILE}")
    except FileNotFoundError:
        return False
    return Marker.from_bytes(content, draft.final).save_id == draft.save_id


def _await_manifests(draft: Draft, timeout_seconds: float) -> dict[int, tuple[bytes, Manifest]]:
    """Waits for the manifests of all ranks. CheckpointError if one has failed or is late."""
    found: dict[int, tuple[bytes, Manifest]] = {}
    missing = set(range(draft.world_size))

    def look() -> bool:
        names = set(draft.store.files(draft.name))  # one listing, however many ranks are missing
        for rank in sorted(missing):
            if manifest_file(rank) in names:
                path = draft.path(manifest_file(rank))
                content = draft.store.read(path, MOST_METADATA_BYTES)
                manifest = Manifest.from_bytes(content, path)
                # Where drafts have no separate names, an earlier save may have left it.
                if manifest.save_id == draft.save_id:
                    found[rank] = content, manifest
            reason = read_reason(draft, failure_file(rank)) if failure_file(rank) in names else None
            if reason is not None:
                raise CheckpointError(
                    f"Expected every rank to write its part, got from rank {rank}: {reason}"
                )
        missing.difference_update(found)
        return not missing

    def describe() -> str:
        folder = path_of(draft.store, draft.name)
        late = few([str(rank) for rank in sorted(missing)])
        return f"a manifest of every rank in {folder}, got no manifest of rank {late}"

    _poll(draft, look, timeout_seconds, describe)
    return found


def _poll(
    draft: Draft,
    look: Callable[[], bool],
    timeout_seconds: float,
    describe: Callable[[], str],
    consequence: str = "",
) -> None:
    """Calls `look`, less and less often, until it returns True.

    Raises:
        CheckpointError: after the timeout, or at the end of the run, with this consequence.
    """
    deadline = time.monotonic() + timeout_seconds
    for _ in _pauses(draft):
        # Before the check: a checkpoint published by the end of the run is no failure.
        if look():
            return
        draft.check(consequence)
        if time.monotonic() > deadline:
            raise CheckpointError(f"Expected {describe()} within {timeout_seconds:g} s.")


def _patiently(draft: Draft, look: Callable[[], bool]) -> bool:
    """Calls `look` until it raises no error. Raises its error after `_PATIENCE`."""
    deadline = time.monotonic() + _PATIENCE
    for _ in _pauses(draft):
        try:
            return look()
        except CheckpointError:
            raise
        except Exception:  # remote stores raise other errors, too
            if time.monotonic() > deadline or draft.is_cancelled.is_set():
                raise
    raise AssertionError("pauses never end")


def _pauses(draft: Draft) -> Iterator[None]:
    """Yields for ever, with growing pauses in between, which the end of the run cuts short."""
    pause = _SHORTEST_WAIT
    while True:
        yield
        draft.is_cancelled.wait(pause)
        pause = min(2 * pause, _LONGEST_WAIT)


def _record(draft: Draft, file: str, nbytes: int) -> FileRecord:
    """Of a data file. CheckpointError if it has another size."""
    size = draft.store.size(draft.path(file))
    if size != nbytes:
        raise CheckpointError(f"Expected {nbytes} bytes in {draft.shown(file)}, got {size}.")
    return FileRecord(size, None)
