"""The publication of all ranks' files: rank 0 composes the metadata, awaits manifests, publishes.

Arithmetic tells what each rank must have written, so every manifest is compared with it, key by key
and offset by offset.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron.core.dist_checkpointing.errors import CheckpointError, few
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
from megatron.core.dist_checkpointing.format.names import path_of, track
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
_PATIENCE = 10.0  # seconds for which a file system may fail to tell the outcome of a save


def publish(
    draft: Draft, contents: Contents, train_state: bytes, own: Manifest, timeout_seconds: float
) -> bool:
    """Rank 0's part of a save, once its own file and manifest are written.

    Args:
        train_state: the content of `train_state.json`.
        own: rank 0's manifest.
        timeout_seconds: how long to wait for the other ranks.

    Returns:
        Whether the tracker file now names the checkpoint. If not, the one it names must stay.

    Raises:
        CheckpointError: naming the rank that could not write or was too late, and the reason.
            Nothing has been published then.
        OSError: if the file system failed here.
    """
    # Before waiting: rank 0 composes the metadata while the other ranks still write.
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

    # The checkpoint is published: nothing counts as its failure from here on. The tracker must not
    # name a checkpoint that a crash may still undo.
    return is_durable and draft.is_tracked and track(draft.store, draft.iteration)


def _commit(draft: Draft, marker: Marker) -> bool:
    """Publishes the draft. Returns whether that is durable; raises only if it is not published."""
    try:
        draft.store.write(draft.path(MARKER_FILE), marker.to_bytes())
        return draft.store.publish(draft.name, draft.final)
    except FileNotFoundError:
        raise  # the draft, or a part of it, has been swept
    except Exception as error:  # remote stores have errors of their own
        # The upload of the marker, say, may have succeeded although the answer was an error.
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
    """Tells the other ranks that a save has failed."""
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
    # A sweep by another run may leave nothing but the marker of a draft in a remote store.
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
                content = draft.store.read(path)
                manifest = Manifest.from_bytes(content, path)
                # Where drafts have no names of their own, an earlier save may have left it.
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
        return f"a manifest of every rank in {folder}, got none of {_ranks(missing)}"

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
    """Calls `look` until the file system lets it answer. Raises its error after `_PATIENCE`."""
    deadline = time.monotonic() + _PATIENCE
    for _ in _pauses(draft):
        try:
            return look()
        except CheckpointError:
            raise
        except Exception:  # remote stores have errors of their own
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


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank {few([str(rank) for rank in sorted(ranks)])}"


def _compose(contents: Contents, plain: list[SavedPlain]) -> tuple[bytes, dict[int, list[Placed]]]:
    """The content of `.metadata`, and the blobs that each rank must have written."""
    saved = [entry.saved_as for entry in contents.entries]
    expected: dict[int, list[Placed]] = defaultdict(list)
    chunks: list[list[SavedChunk]] = [[] for _ in saved]
    for placed in place(saved):
        expected[placed.rank].append(placed)
        where = (placed.rank, placed.blob_offset, placed.blob.nbytes)
        chunks[placed.tensor].append(SavedChunk(placed.offsets, placed.sizes, *where))

    tensors = [
        SavedTensor(each.key, each.dtype, each.shape, own)
        for each, own in zip(saved, chunks, strict=True)
    ]
    metadata = compose_metadata(tensors, plain)
    # A reader refuses more, and a checkpoint that cannot be loaded must not be published.
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
    """CheckpointError if a rank's manifest, or the size of its file, differs from the plan."""
    source = draft.shown(manifest_file(rank))
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
        file = draft.shown(data_file(rank))
        raise CheckpointError(f"Expected {manifest.nbytes} bytes in {file}, got {nbytes}.")
