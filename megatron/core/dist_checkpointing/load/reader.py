"""Loading: from a published checkpoint straight into the memory where model and optimizer have
their states.

First everything is compared: a checkpoint of another model is refused before a byte has been
written. Then `check_data` reads all that this rank needs and holds it against the digests, and
keeps nothing; then `load_entries` reads it again, from the page cache where that is large enough,
and puts it into place. It holds the bytes against the digests once more: what they were a moment
ago is no proof.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.errors import CheckpointError, few, other_model
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.plan.boxes import Box, ranges
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, ScaledValues

logger = logging.getLogger(__name__)

_NUM_THREADS = 2  # that read: while one copies and hashes, another waits for the disk
_CHECKED_BYTES = 16 << 20  # at a time, by each of them


def check_contents(
    checkpoint: PublishedCheckpoint,
    contents: Contents,
    skip: Sequence[str] = (),
    strictness: str = "raise_all",
) -> list[Entry]:
    """Compares a checkpoint with what is to be loaded from it. Touches nothing.

    Args:
        skip: patterns of keys, as in a shell, that are not loaded, nor missed on either side.
        strictness: `raise_all`: both must have the same keys; `raise_unexpected`: the checkpoint
            may have more. The names are Megatron's, for which a key is unexpected that the
            checkpoint does not have.

    Returns:
        The entries to load.

    Raises:
        CheckpointError: listing missing and unexpected keys, and other shapes and dtypes.
    """
    wanted = {entry.key: entry for entry in contents.entries if not is_skipped(entry.key, skip)}
    saved = {
        key: value
        for key, value in checkpoint.metadata.state_dict_metadata.items()
        if not is_skipped(key, skip)
    }
    problems = []
    plain = [key for key in contents.plain if not is_skipped(key, skip)]
    if missing := [key for key in [*plain, *wanted] if key not in saved]:
        problems.append(f"it lacks {few(missing)}")
    if strictness == "raise_all":
        extra = [key for key in saved if key not in wanted and key not in plain]
        if extra:
            problems.append(f"nothing here takes {few(extra)}")
    for key, entry in wanted.items():
        if key in saved:
            problems += _differences(entry, saved[key])
    if problems:
        raise other_model(checkpoint.path, problems)
    return [entry for entry in wanted.values() if entry.is_own]


def check_data(checkpoint: PublishedCheckpoint, entries: Sequence[Entry]) -> int:
    """Reads this rank's part of the entries, holds it against the digests, and touches nothing.

    Args:
        entries: what `check_contents` has found.

    Returns:
        The bytes read from the checkpoint's files.

    Raises:
        CheckpointDamagedError: for bytes that are not those that were written.
        CheckpointError: for counters of one fused weight's sections that differ.
    """

    own = threading.local()  # memory that is new costs more to touch than to read into

    def check(shared: list[Entry]) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(_CHECKED_BYTES, dtype=torch.uint8)
        return sum(_check(checkpoint, entry, shared[0], own.buffer) for entry in shared)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint reader") as pool:
        return sum(pool.map(check, _by_values(entries)))


def load_entries(
    checkpoint: PublishedCheckpoint, contents: Contents, entries: Sequence[Entry]
) -> int:
    """Reads this rank's part of the entries, in place.

    Args:
        contents: of live objects, with no save of them under way.
        entries: what `check_contents` has found.

    Returns:
        The bytes read from the checkpoint's files.

    Raises:
        CheckpointDamagedError: for bytes that are not those that were written. The state is then
            neither what it was nor what was saved.
    """
    chosen = {id(entry) for entry in entries}

    def load(shared: list[Entry]) -> int:
        return _load(checkpoint, shared)

    num_bytes = 0
    follow = _following_this_thread(contents)
    with ThreadPoolExecutor(
        _NUM_THREADS, thread_name_prefix="checkpoint reader", initializer=follow
    ) as pool:
        # Group by group, so that what some states are put together from is not there for all of
        # them at once.
        for group in contents.groups:
            if group.unit is not None and group.unit.updated is not None:
                group.unit.updated.synchronize()
            alike = _by_values(entry for entry in group.entries if id(entry) in chosen)
            num_bytes += sum(pool.map(load, [shared for shared in alike if not _is_scaled(shared)]))
            # What these are put together from must not be there twice.
            num_bytes += sum(map(load, [shared for shared in alike if _is_scaled(shared)]))
    # The bytes were put into place behind autograd's back; compute weights follow what it sees.
    torch.autograd.graph.increment_version(list(contents.names))
    return num_bytes


def _following_this_thread(contents: Contents) -> Callable[[], None]:
    """What makes another thread issue its copies to a device where this one issues its own work
    there.

    A thread begins with the default stream of the first device, which need not be that of this
    thread. A copy would then write to weights that are still in use, and what this thread does next
    would not wait for it.
    """
    devices = {entry.values.stored.device for entry in contents.entries}
    streams = [
        torch.accelerator.current_stream(device) for device in devices if device.type != "cpu"
    ]

    def follow() -> None:
        for stream in streams:
            torch.accelerator.set_stream(stream)

    return follow


def _by_values(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Entries by the memory that they share: the sections of one weight, or of one state."""
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        found.setdefault(id(entry.values), []).append(entry)
    return list(found.values())


def _is_scaled(shared: Sequence[Entry]) -> bool:
    return isinstance(shared[0].values, ScaledValues)


def _load(checkpoint: PublishedCheckpoint, shared: Sequence[Entry]) -> int:
    num_bytes = 0
    target = shared[0].values.target()
    for number, entry in enumerate(shared):
        if entry.num_rows is None and number:
            num_bytes += _expect_equal(checkpoint, entry, shared[0], target)
            continue
        part = entry.part_of(target)
        if part.numel():
            num_bytes += checkpoint.read(entry.key, entry.offsets, part)
    shared[0].values.install()
    return num_bytes


def _check(
    checkpoint: PublishedCheckpoint, entry: Entry, first: Entry, buffer: torch.Tensor
) -> int:
    """One entry, or the counter of a section against the first section's, in pieces that are soon
    forgotten.
    """
    if entry.num_rows is None and entry is not first:
        target = torch.empty(entry.values.shape, dtype=entry.values.dtype)
        return checkpoint.read(first.key, first.offsets, target) + _expect_equal(
            checkpoint, entry, first, target
        )
    rest = tuple(entry.values.shape)
    shape = rest if entry.num_rows is None else (entry.num_rows, *rest[1:])
    if not math.prod(shape):
        return 0
    itemsize, num_bytes = entry.values.dtype.itemsize, 0
    whole = Box((0,) * len(shape), shape)
    for part in ranges(whole, shape, max_span=_CHECKED_BYTES // itemsize, max_gap=0):
        piece = buffer[: part.box.numel * itemsize].view(entry.values.dtype).view(part.box.sizes)
        offsets = [
            mine + inner for mine, inner in zip(entry.offsets, part.box.offsets, strict=True)
        ]
        num_bytes += checkpoint.read(entry.key, offsets, piece)
    return num_bytes


def _expect_equal(
    checkpoint: PublishedCheckpoint, entry: Entry, first: Entry, target: torch.Tensor
) -> int:
    """The sections of a fused weight have one counter. CheckpointError if those that were saved
    differ.
    """
    other = torch.empty_like(target)
    num_bytes = checkpoint.read(entry.key, entry.offsets, other)
    if not torch.equal(other, target):
        raise CheckpointError(
            f"Expected {entry.key} to be {target.tolist()} in {checkpoint.path}, as {first.key} "
            "is, whose weight is "
            f"fused with its own here, got {other.tolist()}."
        )
    return num_bytes


def _differences(entry: Entry, saved: TensorStorageMetadata | BytesStorageMetadata) -> list[str]:
    if not isinstance(saved, TensorStorageMetadata):
        return [f"{entry.key} is plain data where a tensor is wanted"]
    found = []
    own = entry.saved_as
    if tuple(saved.size) != own.shape:
        found.append(f"{entry.key} has shape {tuple(saved.size)} where the model has {own.shape}")
    if saved.properties.dtype != own.dtype:
        found.append(f"{entry.key} is {saved.properties.dtype} where the model has {own.dtype}")
    return found


def is_skipped(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key is one of those that are to be left out. Patterns are as in a shell."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
