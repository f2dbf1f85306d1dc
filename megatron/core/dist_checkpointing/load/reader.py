"""Loading: from a published checkpoint straight into the memory of model and optimizer.

First everything is compared: a checkpoint of another model is rejected before a byte is changed.
Then `load_entries` reads each byte once, into its final memory, and compares every block with its
digest as soon as it is there. If one differs, the state is inconsistent: another load must follow,
or the run must end.

Where that must not be, as in an engine that is training, `check_data` goes first: it reads and
checks the same blocks. The page cache then has them for `load_entries`, if it is large enough. That
needs no more memory than the other way to keep a state, which is to read into a second one.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError, expect_same_model
from megatron.core.dist_checkpointing.formats import ReadableTensors
from megatron.core.dist_checkpointing.layout.saved import (
    FrozenChanges,
    SavedTensor,
    differences,
    is_rounded,
)
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, ScaledValues, Values
from megatron.core.low_precision.amax_history import is_history
from megatron.core.optimizer.torch_optimizer import reset_states

_MOST_THREADS = 4  # that read, on each rank


class Wanted(NamedTuple):
    """The entries that a rank loads from a checkpoint, after they were checked.

    Attributes:
        entries: in the order in which they are written.
        counters: the counters of fused weights, which are read first: their sections must be known
            to agree before anything is changed.
        changes: how the set of frozen parameters differs.
        fresh: the parameters whose optimizer states start fresh.
    """

    entries: list[Entry]
    counters: dict[Values, torch.Tensor]
    changes: FrozenChanges
    fresh: list[torch.Tensor]


def check_contents(
    checkpoint: ReadableTensors,
    contents: Contents,
    skip: Sequence[str] = (),
    strictness: str = "raise_all",
) -> Wanted:
    """Compares a checkpoint with the wanted contents, without changes.

    Values are widened to the dtype of the tensor here, and frozen weights are rounded to it. The
    set of frozen parameters may differ: see `FrozenChanges`. Delayed scaling's histories that are
    on one side only, or of another length, are left out.

    Args:
        skip: patterns of keys, as in a shell, that are not loaded and not missed on either side.
        strictness: `raise_all`: both must have the same keys; `raise_unexpected`: the checkpoint
            may have more. The names are Megatron's, which calls keys unexpected that the model
            expects but the checkpoint lacks.

    Returns:
        What to load.

    Raises:
        CheckpointError: listing missing and unexpected keys, and other shapes and dtypes; or for
            counters of one fused weight's sections that differ.
        CheckpointDamagedError: for a damaged counter.
    """
    wanted = {entry.key: entry for entry in contents.entries if not is_skipped(entry.key, skip)}
    tensors = checkpoint.tensors
    saved = {key: None for key in [*tensors, *checkpoint.plain] if not is_skipped(key, skip)}
    plain = [key for key in contents.plain if not is_skipped(key, skip)]
    for key in [key for key in wanted.keys() | saved.keys() if is_history(key)]:
        is_on_both = key in wanted and key in tensors
        if not is_on_both or wanted[key].saved_as.shape != tensors[key].shape:
            wanted.pop(key, None)
            saved.pop(key, None)

    changes, fresh = _frozen_changes(contents, wanted, checkpoint.tensors, saved)
    started = changes.fresh_keys

    missing = [key for key in [*plain, *wanted] if key not in saved and key not in started]
    own = wanted.keys() | plain | changes.left_out_keys
    extra = [key for key in saved if key not in own] if strictness == "raise_all" else []
    problems = []
    for key, entry in wanted.items():
        if key in tensors:
            shape, dtype = entry.saved_as.shape, entry.saved_as.dtype
            may_round = key in changes.rounded
            problems += differences(tensors[key], shape, dtype, may_round=may_round)
        elif key in checkpoint.plain:
            problems.append(f"{key} is plain data where a tensor is wanted")
    expect_same_model(checkpoint.path, problems, missing=missing, extra=extra)

    # On rank 0, entries of other ranks have been compared, too.
    entries = [entry for key, entry in wanted.items() if entry.is_own and key not in started]
    return Wanted(entries, _fused_counters(checkpoint, entries), changes, fresh)


def _frozen_changes(
    contents: Contents,
    wanted: Mapping[str, Entry],
    tensors: Mapping[str, SavedTensor],
    saved: Collection[str],
) -> tuple[FrozenChanges, list[torch.Tensor]]:
    """The changes, and the parameters whose states start fresh."""
    names = [
        name
        for own in contents.names.values()
        for name in own
        if (key := f"model.{name}") in wanted and key in tensors
    ]
    found = FrozenChanges.of(wanted.keys(), saved, names)
    # States start fresh for all sections of a fused weight, or for none.
    fresh = [
        parameter
        for parameter, own in contents.names.items()
        if own and all(name in found.fresh for name in own)
    ]
    started = {name: found.fresh[name] for parameter in fresh for name in contents.names[parameter]}

    frozen = (own for parameter, own in contents.names.items() if not parameter.requires_grad)
    keys = (f"model.{name}" for own in frozen for name in own)
    rounded = [
        key
        for key in keys
        if key in wanted
        and key in tensors
        and is_rounded(tensors[key].dtype, wanted[key].saved_as.dtype)
    ]
    return found._replace(fresh=started, rounded=rounded), fresh


def check_data(checkpoint: PublishedCheckpoint, wanted: Wanted) -> int:
    """Reads this rank's part of the entries and compares it with the digests, without changes.

    Args:
        wanted: from `check_contents`.

    Returns:
        The bytes read from the checkpoint's files.

    Raises:
        CheckpointDamagedError: for other bytes than were written.
    """

    def check(entry: Entry) -> int:
        shape = entry.part_of(entry.values.stored).shape
        nothing = torch.empty(shape, dtype=entry.saved_as.dtype, device="meta")
        return checkpoint.read(entry.key, entry.offsets, nothing) if nothing.numel() else 0

    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="checkpoint reader") as pool:
        return sum(pool.map(check, wanted.entries))


def load_entries(checkpoint: ReadableTensors, contents: Contents, wanted: Wanted) -> int:
    """Reads this rank's part of the entries, in place. Each byte is read once, and compared with
    its digest before the next ones are read.

    Args:
        contents: of live objects, without a save in flight.
        wanted: from `check_contents`.

    Returns:
        The bytes read from the checkpoint's files.

    Raises:
        CheckpointDamagedError: for other bytes than were written. The state is inconsistent then.
    """
    # An update in flight would overwrite the loaded states.
    for group in contents.groups:
        if group.unit is not None and group.unit.updated is not None:
            group.unit.updated.synchronize()

    def load(shared: list[Entry]) -> int:
        return _load(checkpoint, shared, wanted.counters)

    alike = _by_values(wanted.entries)
    with ThreadPoolExecutor(
        _num_threads(),
        thread_name_prefix="checkpoint reader",
        initializer=_following_this_thread(contents),
    ) as pool:
        num_bytes = sum(pool.map(load, [shared for shared in alike if not _is_scaled(shared)]))
    # A scaled state is loaded into fp32 memory first: one at a time, or there would be such memory
    # for many of them at once.
    num_bytes += sum(map(load, [shared for shared in alike if _is_scaled(shared)]))

    # Autograd has not seen these writes. Its version counters show that compute weights are stale,
    # and show `FusedAdam` which half of a weight with a remainder was loaded.
    written = [entry.values.stored for entry in wanted.entries]
    torch.autograd.graph.increment_version([*contents.names, *written])
    _start_fresh(contents, wanted.fresh)
    wanted.changes.log()
    return num_bytes


def _start_fresh(contents: Contents, parameters: Iterable[torch.Tensor]) -> None:
    """Resets the states of parameters, as if they had never been stepped."""
    # Once the weights are loaded: main weights among the states are made of them.
    fresh = {id(parameter) for parameter in parameters}
    by_optimizer: dict[torch.optim.Optimizer, list[torch.Tensor]] = {}
    for group in contents.groups:
        for parameter in () if group.unit is None else group.unit.parameters:
            if group.unit is not None and id(parameter) in fresh:
                by_optimizer.setdefault(group.unit.optimizer, []).append(parameter)
    for optimizer, own in by_optimizer.items():
        reset_states(optimizer, own)


def _num_threads() -> int:
    """One for each core that this rank has to itself. More would only take turns: the system reads
    ahead while a thread copies and hashes.
    """
    num_cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(num_cores, 1), _MOST_THREADS)


def _following_this_thread(contents: Contents) -> Callable[[], None]:
    """A function that makes another thread use the current streams of this one.

    A thread starts with the default stream of the first device, which need not be this thread's
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


def _load(
    checkpoint: ReadableTensors, shared: Sequence[Entry], counters: Mapping[Values, torch.Tensor]
) -> int:
    values, num_bytes = shared[0].values, 0
    if values in counters:
        values.target().copy_(counters[values])
        return 0

    for entry in shared:
        part = entry.part_of(values.target())
        if part.numel():
            num_bytes += checkpoint.read(entry.key, entry.offsets, part)
    values.install()
    return num_bytes


def _fused_counters(
    checkpoint: ReadableTensors, entries: Sequence[Entry]
) -> dict[Values, torch.Tensor]:
    """The counters of fused weights: one number here, and one for each section there.

    Raises:
        CheckpointError: if counters of one weight differ.
    """
    found: dict[Values, torch.Tensor] = {}
    for first, *others in _by_values(entry for entry in entries if entry.num_rows is None):
        if others:
            found[first.values] = counter = _read_counter(checkpoint, first)
        for entry in others:
            other = _read_counter(checkpoint, entry)
            if not torch.equal(other, counter):
                raise CheckpointError(
                    f"Expected {entry.key} to be {counter.tolist()} in {checkpoint.path} like "
                    f"{first.key}, since this model fuses their weights, got {other.tolist()}."
                )
    return found


def _read_counter(checkpoint: ReadableTensors, entry: Entry) -> torch.Tensor:
    counter = torch.empty(entry.values.shape, dtype=entry.values.dtype)
    checkpoint.read(entry.key, entry.offsets, counter)
    return counter


def is_skipped(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key matches one of the patterns, as in a shell."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
