"""What makes a checkpoint of all ranks' files: rank 0 composes the metadata, waits for the
manifests, and publishes.

What each rank must have written is arithmetic, so a manifest is held against it: key by key, offset
by offset.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
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
from megatron.core.dist_checkpointing.format.metadata import (
    SavedChunk,
    SavedPlain,
    SavedTensor,
    compose_metadata,
)
from megatron.core.dist_checkpointing.format.names import track
from megatron.core.dist_checkpointing.plan.file_plan import Placed, place
from megatron.core.dist_checkpointing.save.writer import (
    ABANDONED_FILE,
    Draft,
    failure_file,
    give_up,
    read_reason,
    release,
)
from megatron.core.dist_checkpointing.state.entries import Contents, Entry
from megatron.core.dist_checkpointing.store import MAX_METADATA_BYTES

logger = logging.getLogger(__name__)

_SHORTEST_WAIT, _LONGEST_WAIT = 0.002, 0.25  # seconds between looks at the folder
_PATIENCE = 10.0  # seconds for which a file system may fail to say what has become of a save


def publish(
    draft: Draft, contents: Contents, train_state: bytes, own: Manifest, timeout_seconds: float
) -> bool:
    """Rank 0's part of a save, once its own file and manifest are written.

    Args:
        train_state: the content of `train_state.json`.
        own: rank 0's manifest.
        timeout_seconds: how long to wait for the other ranks.

    Returns:
        Whether the tracker file names the checkpoint, too. If not, the one that it does name must
        stay.

    Raises:
        CheckpointError: naming the rank that could not write, or has not within this time, and why.
            Nothing has been published then.
        OSError: if the file system failed here.
    """
    plain = [SavedPlain(c.key, 0, c.blob_offset, c.blob_nbytes) for c in own.chunks if not c.dtype]
    metadata, expected = _compose(contents, plain)

    files = {}
    for name, content in ((METADATA_FILE, metadata), (TRAIN_STATE_FILE, train_state)):
        draft.store.write(draft.path(name), content)
        files[name] = FileRecord(len(content), digest(content))

    entries = contents.entries
    for rank, (content, manifest) in sorted(_await_manifests(draft, timeout_seconds).items()):
        _check(draft, entries, manifest, rank, expected[rank], plain if rank == 0 else [])
        files[manifest_file(rank)] = FileRecord(len(content), digest(content))
        files[data_file(rank)] = FileRecord(manifest.nbytes, None)

    draft.check()
    is_durable = _commit(draft, Marker(draft.save_id, draft.iteration, draft.world_size, files))

    # The checkpoint is published: from here on nothing may count as its failure. The tracker must
    # not name one that a crash may still take away.
    return is_durable and draft.is_tracked and track(draft.store, draft.iteration)


def _commit(draft: Draft, marker: Marker) -> bool:
    """Publishes the draft. Returns whether that is durable; raises only if it is not published."""
    try:
        draft.store.write(draft.path(MARKER_FILE), marker.to_bytes())
        return draft.store.publish(draft.name, draft.final)
    except FileNotFoundError:
        raise  # the draft, or a part of it, has been swept
    except Exception as error:  # remote stores have errors of their own
        # The upload of the marker, say, may have been carried out although the answer was an error.
        try:
            is_published = _patiently(draft, lambda: _is_published(draft))
        except Exception:
            is_published = False
        if not is_published:
            raise
        logger.warning(
            "%s/%s is published, but may not outlive a crash: %s",
            draft.store.root,
            draft.final,
            error,
        )
        return False


def abandon(draft: Draft, reason: str) -> None:
    """Tells the other ranks that a save has come to nothing."""
    release(draft, 0)
    give_up(draft, ABANDONED_FILE, reason)


def await_outcome(draft: Draft, rank: int, timeout_seconds: float) -> None:
    """What the other ranks do instead of `publish`: returns once the checkpoint is published.

    Whatever fails here, rank 0 may be publishing, so an error in looking is no outcome: the rank
    looks again.

    Raises:
        CheckpointError: with rank 0's reason for giving the save up; if it gives no sign within
            this time.
        OSError: if the file system does not answer for so long that nothing can be known.
    """

    def look() -> bool:
        is_there = draft.store.exists(draft.name)  # before looking for what it becomes
        if _is_published(draft):
            return True
        reason = read_reason(draft, ABANDONED_FILE)
        if reason is not None:
            release(draft, rank)
            raise CheckpointError(reason)
        if not is_there:
            reason = (
                f"Expected the draft {draft.store.root}/{draft.name}, got none: it has been swept."
            )
            give_up(
                draft, failure_file(rank), reason
            )  # rank 0 may still come to look for this rank's part
            raise CheckpointError(reason)
        return False

    def describe() -> str:
        return f"{draft.store.root}/{draft.final} to be published by rank 0"

    consequence = " Rank 0 may publish the checkpoint all the same."
    _poll(draft, lambda: _patiently(draft, look), timeout_seconds, describe, consequence)


def _is_published(draft: Draft) -> bool:
    # Of a draft that another run has swept from a remote store, the marker may be all that is left.
    if not draft.store.exists(f"{draft.final}/{METADATA_FILE}"):
        return False
    try:
        content = draft.store.read(f"{draft.final}/{MARKER_FILE}")
    except FileNotFoundError:
        return False
    return Marker.from_bytes(content, draft.final).save_id == draft.save_id


def _await_manifests(draft: Draft, timeout_seconds: float) -> dict[int, tuple[bytes, Manifest]]:
    """The manifests of all ranks, once they are there. CheckpointError, naming ranks, if one has
    failed or is late.
    """
    found: dict[int, tuple[bytes, Manifest]] = {}
    missing = set(range(draft.world_size))

    def look() -> bool:
        names = set(draft.store.files(draft.name))
        for rank in sorted(missing):
            if manifest_file(rank) in names:
                content = draft.store.read(draft.path(manifest_file(rank)))
                manifest = Manifest.from_bytes(content, draft.path(manifest_file(rank)))
                # Where drafts have no names of their own, it may be what an earlier save has left.
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
        return f"a manifest of every rank in {draft.store.root}/{draft.name}, got none of {_ranks(missing)}"

    _poll(draft, look, timeout_seconds, describe)
    return found


def _poll(
    draft: Draft,
    look: Callable[[], bool],
    timeout_seconds: float,
    describe: Callable[[], str],
    consequence: str = "",
) -> None:
    """Looks until there is what is looked for, less and less often.

    Raises:
        CheckpointError: after the timeout, or at the end of the run, with this consequence.
    """
    deadline, pause = time.monotonic() + timeout_seconds, _SHORTEST_WAIT
    # When the run ends, it looks once more: what has been published by then is no failure.
    while not look():
        draft.check(consequence)
        if time.monotonic() > deadline:
            raise CheckpointError(f"Expected {describe()} within {timeout_seconds:g} s.")
        draft.is_cancelled.wait(pause)
        pause = min(2 * pause, _LONGEST_WAIT)


def _patiently(draft: Draft, look: Callable[[], bool]) -> bool:
    """Calls `look` until the file system lets it answer. Raises its error after `_PATIENCE`."""
    deadline, pause = time.monotonic() + _PATIENCE, _SHORTEST_WAIT
    while True:
        try:
            return look()
        except CheckpointError:
            raise
        except Exception:  # remote stores have errors of their own
            if time.monotonic() > deadline or draft.is_cancelled.is_set():
                raise
        draft.is_cancelled.wait(pause)
        pause = min(2 * pause, _LONGEST_WAIT)


def _ranks(ranks: Iterable[int]) -> str:
    shown = sorted(ranks)
    return (
        "rank "
        + ", ".join(map(str, shown[:8]))
        + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
    )


def _compose(contents: Contents, plain: list[SavedPlain]) -> tuple[bytes, dict[int, list[Placed]]]:
    """The content of `.metadata`, and what each rank must have written."""
    entries = contents.entries
    expected: dict[int, list[Placed]] = defaultdict(list)
    chunks: list[list[SavedChunk]] = [[] for _ in entries]
    for placed in place([entry.saved_as for entry in entries]):
        expected[placed.rank].append(placed)
        chunks[placed.tensor].append(
            SavedChunk(
                placed.offsets, placed.sizes, placed.rank, placed.blob_offset, placed.blob.nbytes
            )
        )
    tensors = [
        SavedTensor(entry.key, entry.saved_as.dtype, entry.saved_as.shape, own)
        for entry, own in zip(entries, chunks, strict=True)
    ]
    metadata = compose_metadata(tensors, plain)
    # What is written must be what can be read: a checkpoint that nobody can load is no checkpoint.
    if len(metadata) > MAX_METADATA_BYTES:
        raise CheckpointError(
            f"Expected metadata of at most {MAX_METADATA_BYTES} bytes, got {len(metadata)} of "
            f"{sum(map(len, chunks))} chunks."
        )

    return metadata, expected


def _check(
    draft: Draft,
    entries: Sequence[Entry],
    manifest: Manifest,
    rank: int,
    expected: list[Placed],
    plain: list[SavedPlain],
) -> None:
    """Holds a rank's manifest, and the size of its file, against arithmetic. CheckpointError if
    they differ.
    """
    source = f"{draft.store.root}/{draft.path(manifest_file(rank))}"
    if manifest.rank != rank:
        raise CheckpointError(f"Expected rank {rank} in {source}, got {manifest.rank}.")
    wanted = [
        (entries[p.tensor].key, p.offsets, p.sizes, p.blob_offset, p.blob.nbytes) for p in expected
    ] + [(p.key, (), (), p.blob_offset, p.blob_nbytes) for p in plain]
    got = [(c.key, c.offsets, c.sizes, c.blob_offset, c.blob_nbytes) for c in manifest.chunks]
    for one, other in zip(wanted, got, strict=False):
        if one != other:
            raise CheckpointError(
                f"Expected rank {rank} to have written {one}, got {other} in {source}."
            )
    if len(wanted) != len(got):
        raise CheckpointError(
            f"Expected {len(wanted)} chunks of rank {rank}, got {len(got)} in {source}."
        )
    nbytes = draft.store.size(draft.path(data_file(rank)))
    if nbytes != manifest.nbytes:
        raise CheckpointError(
            f"Expected {manifest.nbytes} bytes in "
            f"{draft.store.root}/{draft.path(data_file(rank))}, got {nbytes}."
        )
