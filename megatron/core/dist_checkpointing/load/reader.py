"""Loading: from a published checkpoint straight into the memory of model and optimizer.

First everything is compared: a checkpoint of another model is refused before a byte is changed.
Then `check_data` reads all that this rank needs, compares it with the digests, and keeps nothing.
Then `load_entries` reads it again, from the page cache where that is large enough, and puts it into
place. It checks the digests once more, because the files may have changed in between.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError, few, other_model
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint
from megatron.core.dist_checkpointing.plan.boxes import pieces
from megatron.core.dist_checkpointing.plan.saved import differences
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, ScaledValues

_NUM_THREADS = 2  # that read: while one copies and hashes, the other waits for the disk
_CHECKED_BYTES = 16 << 20  # at a time, by each of them


def check_contents(
    checkpoint: ReadableCheckpoint,
    contents: Contents,
    skip: Sequence[str] = (),
    strictness: str = "raise_all",
) -> list[Entry]:
    """Compares a checkpoint with what is to be loaded from it. Changes nothing.

    Args:
        skip: patterns of keys, as in a shell, that are not loaded and not missed on either side.
        strictness: `raise_all`: both must have the same keys; `raise_unexpected`: the checkpoint
            may have more. The names are Megatron's, which calls keys unexpected that the model
            expects but the checkpoint lacks.

    Returns:
        The entries to load.

    Raises:
        CheckpointError: listing missing and unexpected keys, and other shapes and dtypes.
    """
    wanted = {entry.key: entry for entry in contents.entries if not is_skipped(entry.key, skip)}
    tensors = checkpoint.tensors
    saved = [key for key in [*tensors, *checkpoint.plain] if not is_skipped(key, skip)]
    plain = [key for key in contents.plain if not is_skipped(key, skip)]

    problems = []
    if missing := [key for key in [*plain, *wanted] if key not in saved]:
        problems.append(f"it lacks {few(missing)}")
    if strictness == "raise_all":
        extra = [key for key in saved if key not in wanted and key not in plain]
        if extra:
            problems.append(f"nothing here takes {few(extra)}")
    for key, entry in wanted.items():
        if key in tensors:
            problems += differences(tensors[key], entry.saved_as.shape, entry.saved_as.dtype)
        elif key in checkpoint.plain:
            problems.append(f"{key} is plain data where a tensor is wanted")
    if problems:
        raise other_model(checkpoint.path, problems)

    # Entries of other ranks have been compared too: all ranks refuse the same checkpoints.
    return [entry for entry in wanted.values() if entry.is_own]


def check_data(checkpoint: ReadableCheckpoint, entries: Sequence[Entry]) -> int:
    """Reads this rank's part of the entries and compares it with the digests. Changes nothing.

    Args:
        entries: from `check_contents`.

    Returns:
        The bytes read from the checkpoint's files.

    Raises:
        CheckpointDamagedError: for bytes that are not those that were written.
        CheckpointError: for counters of one fused weight's sections that differ.
    """
    # A buffer per thread, used again and again: touching new memory costs more than reading.
    own = threading.local()

    def check(shared: list[Entry]) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(_CHECKED_BYTES, dtype=torch.uint8)
        return sum(_check(checkpoint, entry, shared[0], own.buffer) for entry in shared)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint reader") as pool:
        return sum(pool.map(check, _by_values(entries)))


def load_entries(
    checkpoint: ReadableCheckpoint, contents: Contents, entries: Sequence[Entry]
) -> int:
    """Reads this rank's part of the entries, in place.

    Args:
        contents: of live objects, with no save of them under way.
        entries: from `check_contents`.

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
    with ThreadPoolExecutor(
        _NUM_THREADS,
        thread_name_prefix="checkpoint reader",
        initializer=_following_this_thread(contents),
    ) as pool:
        for group in contents.groups:
            # An update still under way would overwrite the loaded states.
            if group.unit is not None and group.unit.updated is not None:
                group.unit.updated.synchronize()

            alike = _by_values(entry for entry in group.entries if id(entry) in chosen)
            num_bytes += sum(pool.map(load, [shared for shared in alike if not _is_scaled(shared)]))
            # A scaled state is loaded into fp32 memory first: one at a time, or there would be
            # such memory for many of them at once.
            num_bytes += sum(map(load, [shared for shared in alike if _is_scaled(shared)]))

    # Autograd has not seen these writes, and compute weights are made anew by its version counters.
    torch.autograd.graph.increment_version(list(contents.names))
    return num_bytes


def _following_this_thread(contents: Contents) -> Callable[[], None]:
    """A function that makes another thread use the current streams of this one.

    A thread begins with the default stream of the first device, which need not be this thread's
    stream. Its copies would then overwrite weights that are still in use, and this thread's next
    work would not wait for them.
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


def _load(checkpoint: ReadableCheckpoint, shared: Sequence[Entry]) -> int:
    num_bytes = 0
    target = shared[0].values.target()
    for number, entry in enumerate(shared):
        # The counters of a fused weight's sections are one number here, and must be one there.
        if entry.num_rows is None and number:
            num_bytes += _expect_equal(checkpoint, entry, shared[0], target)
            continue

        part = entry.part_of(target)
        if part.numel():
            num_bytes += checkpoint.read(entry.key, entry.offsets, part)
    shared[0].values.install()
    return num_bytes


def _check(checkpoint: ReadableCheckpoint, entry: Entry, first: Entry, buffer: torch.Tensor) -> int:
    """Reads one entry in pieces; compares the counter of a section with the first section's."""
    dtype = entry.values.dtype
    if entry.num_rows is None and entry is not first:
        target = torch.empty(entry.values.shape, dtype=dtype)
        num_bytes = checkpoint.read(first.key, first.offsets, target)
        return num_bytes + _expect_equal(checkpoint, entry, first, target)

    num_bytes, shape = 0, tuple(entry.values.shape)
    if entry.num_rows is not None:
        shape = (entry.num_rows, *shape[1:])
    for box in pieces(shape, _CHECKED_BYTES // dtype.itemsize):
        piece = buffer[: box.numel * dtype.itemsize].view(dtype).view(box.sizes)
        offsets = [mine + inner for mine, inner in zip(entry.offsets, box.offsets, strict=True)]
        num_bytes += checkpoint.read(entry.key, offsets, piece)
    return num_bytes


def _expect_equal(
    checkpoint: ReadableCheckpoint, entry: Entry, first: Entry, target: torch.Tensor
) -> int:
    """CheckpointError if a section's saved counter differs from that of the first section."""
    other = torch.empty_like(target)
    num_bytes = checkpoint.read(entry.key, entry.offsets, other)
    if not torch.equal(other, target):
        raise CheckpointError(
            f"Expected {entry.key} to be {target.tolist()} in {checkpoint.path}, as {first.key} "
            f"is, whose weight is fused with its own here, got {other.tolist()}."
        )
    return num_bytes


def is_skipped(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key matches one of the patterns, as in a shell."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
