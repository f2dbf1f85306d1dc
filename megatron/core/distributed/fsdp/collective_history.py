"""`CollectiveHistory`: the collectives of a rank, compared between ranks before every step.

Ranks may disagree about the order of collectives, about which parameters have a gradient, or about
how often an optimizer steps. The host records each of these as an entry, a few integers. The ranks
of a process group compare a digest of their entries. Only if the digests differ do they exchange
the entries, to find the first difference.

By then, collectives that did not match have run, and gradients may be wrong; a gradient that only
some ranks have is NaN. But no weight was updated with them: the comparison precedes the optimizer's
step. `train_step` sends the digests in an all-reduce that every step needs anyway. In all other
loops the comparison is made by norms of gradients, by `GradScaler`, or by the hook on optimizers
(`optimizer_hooks.py`), whichever comes first. It costs an all-reduce of three integers for each
process group and, on an accelerator, a wait of the host for the backward. Process groups that no
optimizer's parameters use, as of a frozen model over another mesh, are compared by `train_step` and
`check_agreement` alone: in the hook, some of their ranks may not be about to step.

[Note: steps] Before a comparison, the hook on optimizers records which parameters are about to be
updated (READY), so that ranks which step other optimizers, or lack other gradients, are told before
the update. After it, a STEP is recorded. STEP entries alone do not cause a comparison, or each of
several optimizers would cost one; a second step of the same parameters does, before its update.

[Note: replicas] Ranks of a process group must do the same; other ranks need not. One replica of
HSDP may run one more forward. Each process group therefore has a separate history. A gradient that
is NaN on one replica reaches the others, so a disagreement must, too: each comparison passes on the
results of the ones before it, and then back.
"""

from __future__ import annotations

import enum
import hashlib
import weakref
import zlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.issued_collectives import issuing

_ENTRY_LENGTH = 16  # integers of 64 bits, padded with 0
_MASK_WORDS = 13  # of the parameters in the entry of a reduction
_MASK_BITS = 62  # parameters in one word
# A number of this size survives a sum in fp64, where the other ranks contribute zeros.
_DIGEST_BYTES = 6
# Entries must not fill the memory of a program that never compares. The digest covers the rest.
_MOST_ENTRIES = 65536


class Kind(enum.IntEnum):
    """The first number of an entry; the second is the number of the parameter group."""

    GATHER = 1  # weights
    REDUCE = 2  # gradients
    EXCHANGE = 3  # tokens travel to the ranks that compute with them
    READY = 4  # an optimizer is about to update the weights; without communication
    STEP = 5  # it has updated them


class RecordedGroup(Protocol):
    """The interface of parameter groups that a history needs.

    Attributes:
        display_name: name of the module in messages.
        names: names of the parameters.
    """

    names: list[str]

    @property
    def display_name(self) -> str: ...

    def recover(self) -> None:
        """Drops gradients and gathered weights, which collectives that did not match have made."""


class CollectiveHistory:
    """The entries of one rank since the last comparison, in the order of issue, for one process
    group. Made by `histories_over`.

    Attributes:
        device: device of the tensors that the process group sends.
        groups: parameter groups by number, which is the second integer of their entries.
        entries: at most the first 65536; none in a process group of one rank.
        is_pending: whether an entry other than STEP requires a comparison.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.groups: weakref.WeakValueDictionary[int, RecordedGroup] = weakref.WeakValueDictionary()
        self._ranks = dist.get_process_group_ranks(group)
        self.device = torch.device(device_type)
        self._group = weakref.ref(group)  # whose entry in `_histories` ends with it
        self.forget()

    def add(self, *entry: int) -> None:
        """Records a collective that is being issued."""
        if not self.is_shared:
            return
        # Padded to one length: otherwise the same numbers, divided into other entries, would have
        # the same digest.
        self._hash.update(array("q", _padded(entry)).tobytes())
        if entry[0] == Kind.STEP:
            self._stepped.add(entry[1])
        else:
            self.is_pending = True
        if len(self.entries) < _MOST_ENTRIES:
            self.entries.append(entry)
        _uncompared.add(self)

    def forget(self) -> None:
        """Starts a new history after a comparison, at the same point of all ranks' programs."""
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.entries: list[tuple[int, ...]] = []
        self._stepped = set[int]()
        self.is_pending = False
        _uncompared.discard(self)

    @property
    def is_shared(self) -> bool:
        """Whether the process group has other ranks."""
        return len(self._ranks) > 1

    def needs_comparison(self, number: int) -> bool:
        """Whether ranks must compare before parameter group `number` is updated."""
        return self.is_pending or number in self._stepped

    @property
    def digest(self) -> int:
        """A number below 2^48, the same for the same entries and most likely for no others."""
        return int.from_bytes(self._hash.digest(), "little")

    def exchange(self, is_bad: torch.Tensor) -> torch.Tensor:
        """[greatest digest, -least digest, whether `is_bad` on any rank], int64. All ranks call it
        together.

        Args:
            is_bad: whether earlier comparisons have found a difference: [1] bool.
        """
        found = torch.cat([torch.tensor([self.digest, -self.digest], device=self.device), is_bad])
        self._all_reduce(found, dist.ReduceOp.MAX, "the digests of collectives")
        return found

    def spread(self, is_bad: torch.Tensor) -> torch.Tensor:
        """Whether `is_bad`, [1] bool, on any rank. All ranks call it together."""
        found = is_bad.long()
        self._all_reduce(found, dist.ReduceOp.MAX, "whether ranks disagree")
        return found != 0

    def difference(self) -> str:
        """The first difference in words. All ranks call it together."""
        ranks = defaultdict[tuple[int, ...], list[int]](list)
        for rank, entry in zip(self._ranks, self.first_difference(), strict=True):
            ranks[entry].append(rank)
        if len(ranks) == 1:
            return f"a difference after the first {_MOST_ENTRIES} collectives, which were the same"
        return "; ".join(
            f"{'rank' if len(alike) == 1 else 'ranks'} {', '.join(map(str, alike))} "
            f"{self._describe(entry)}"
            for entry, alike in ranks.items()
        )

    def first_difference(self) -> list[tuple[int, ...]]:
        """By rank in the group, every rank's entry where they first differ. All ranks call it
        together.

        A rank without further entries has zeros. If the entries that are kept do not
        differ, the result is the same for all ranks.
        """
        length = torch.tensor(len(self.entries), dtype=torch.int64, device=self.device)
        self._all_reduce(length, dist.ReduceOp.MAX, "the number of recorded collectives")
        missing = [()] * max(1 - len(self.entries), int(length) - len(self.entries))
        entries = torch.tensor(
            [_padded(entry) for entry in [*self.entries, *missing]], device=self.device
        )

        # Where the least and the greatest differ, some ranks do. Costs the same on any number of
        # ranks, unlike gathering all entries.
        least, greatest = entries.clone(), entries.clone()
        self._all_reduce(least, dist.ReduceOp.MIN, "the least of all recorded collectives")
        self._all_reduce(greatest, dist.ReduceOp.MAX, "the greatest of all recorded collectives")
        index = int((least != greatest).any(dim=1).int().argmax())

        # Each rank writes to its row of zeros.
        by_rank = entries.new_zeros(len(self._ranks), _ENTRY_LENGTH)
        by_rank[self._ranks.index(dist.get_rank())] = entries[index]
        self._all_reduce(by_rank, dist.ReduceOp.SUM, "the recorded collectives that differ")
        return [tuple(entry) for entry in by_rank.tolist()]

    def _describe(self, entry: Sequence[int]) -> str:
        if not any(entry):
            return "did nothing more"
        kind, number, *details = entry
        group = self.groups.get(number)
        if group is None:
            return f"used a model that no longer exists, {entry}"

        module = group.display_name
        if kind == Kind.GATHER:
            return f"gathered {module}"
        if kind == Kind.EXCHANGE:
            return f"exchanged {'gradients of ' if details[0] else ''}tokens for {module}"
        if kind == Kind.STEP:
            return f"stepped an optimizer over {module}"
        shown = _describe_gradients(details, group.names)
        if kind == Kind.READY:
            return f"is about to update {module}{shown}"
        return f"reduced the gradients of {module}{shown}"

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, name: str) -> None:
        with issuing(f"all-reduce of {name}", tensor):
            dist.all_reduce(tensor, op, group=self._group())


# One for each process group, of all models: a comparison must not depend on when a
# rank's garbage collector frees a model.
_histories: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveHistory] = (
    weakref.WeakKeyDictionary()
)

# Histories with entries. Host lanes test whether it is empty while other threads make and compare
# histories: the length may be read at any time, unlike the values of `_histories`.
_uncompared: weakref.WeakSet[CollectiveHistory] = weakref.WeakSet()


def histories_over(mesh: DeviceMesh) -> list[CollectiveHistory]:
    """The history of each axis of a mesh."""
    histories = []
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        history = _histories.get(group)
        if history is None:
            history = _histories[group] = CollectiveHistory(group, mesh.device_type)
        histories.append(history)
    return histories


def is_any_uncompared() -> bool:
    """Whether this process has entries that ranks have not compared."""
    return len(_uncompared) > 0


def digest_of(histories: Iterable[CollectiveHistory]) -> int:
    """A number below 2^48, the same for histories of the same entries, in the same order, and most
    likely for no others.
    """
    digests = array("q", [history.digest for history in histories]).tobytes()
    return int.from_bytes(hashlib.blake2b(digests, digest_size=_DIGEST_BYTES).digest(), "little")


def compare(histories: Iterable[CollectiveHistory], *, of_all: bool = False) -> None:
    """Compares histories since the last comparison. All ranks call it together.

    Args:
        of_all: also compare histories that are not pending.

    Raises:
        RuntimeError: on all ranks of the process groups, if some differ, with the first difference.
            The gradients of all models over them are None then.
    """
    pending = [
        history
        for history in dict.fromkeys(histories)
        if history.is_pending or (of_all and history.is_shared)
    ]
    if not pending:
        return

    try:
        found = list[torch.Tensor]()
        is_bad = torch.zeros(1, dtype=torch.bool, device=pending[0].device)
        for history in pending:
            found.append(history.exchange(is_bad))
            is_bad = (found[-1][:1] != -found[-1][1:2]) | (found[-1][2:] != 0)
        for history in reversed(pending[:-1]):
            is_bad = history.spread(is_bad)

        *results, (is_any, _, _) = torch.stack([*found, is_bad.long().expand(3)]).tolist()
        differences = [
            history.difference()
            for history, (greatest, least, _) in zip(pending, results, strict=True)
            if greatest != -least
        ]
        if is_any:
            for history in pending:
                for group in list(history.groups.values()):
                    group.recover()
            raise RuntimeError(
                "Expected every rank to do the same in every step, and to have gradients of the "
                "same parameters, got: "
                f"{'; '.join(dict.fromkeys(differences)) or 'a difference between other ranks'}. "
                "The gradients of this step were dropped."
            )
    finally:
        for history in pending:
            history.forget()


def compare_over(tensors: Iterable[torch.Tensor]) -> None:
    """As `compare`, the histories over the meshes of the DTensors among `tensors`."""
    meshes = dict.fromkeys(each.device_mesh for each in tensors if isinstance(each, DTensor))
    compare(history for mesh in meshes for history in histories_over(mesh))


def gradient_details(received: Collection[int], kept: Collection[int] = ()) -> list[int]:
    """The rest of the entry of a reduction, or of an update, after its kind and group.

    Parameters beyond the number that an entry has room for share bits with earlier ones: a
    difference is still noticed, unless two cancel out, but the parameter is not named.

    Args:
        received: the parameters that have a gradient here.
        kept: the parameters whose gradients are added to earlier ones. The entry has their number
            and a checksum.
    """
    mask = 0
    for index in received:
        mask ^= 1 << index % (_MASK_BITS * _MASK_WORDS)
    words = [mask >> _MASK_BITS * word & (1 << _MASK_BITS) - 1 for word in range(_MASK_WORDS)]
    checksum = zlib.crc32(array("q", sorted(kept)).tobytes()) if kept else 0
    return [len(kept) << 32 | checksum, *words]


def _describe_gradients(details: Sequence[int], names: Sequence[str]) -> str:
    kept, *words = details
    num_kept = kept >> 32
    mask = sum(bits << _MASK_BITS * word for word, bits in enumerate(words))
    without = [
        name
        for index, name in enumerate(names)
        if not mask >> index % (_MASK_BITS * _MASK_WORDS) & 1
    ]

    lacking = f" without any for {', '.join(without)}" if without else ""
    return lacking + (f" and added {num_kept} of them to earlier ones" if num_kept else "")


def _padded(entry: Sequence[int]) -> tuple[int, ...]:
    return (*entry, *(0,) * (_ENTRY_LENGTH - len(entry)))
