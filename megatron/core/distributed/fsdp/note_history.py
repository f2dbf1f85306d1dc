"""`NoteHistory`: a record of the collectives of a rank, compared between ranks before every step.

Ranks may disagree about the order of collectives, and about which parameters have a gradient. For
each collective, the host adds a note: a few integers that describe it. The ranks of a process group
compare a digest of their notes. Only if the digests differ do they exchange the notes, to find the
first difference.

By then, collectives that did not fit together have run, and gradients may be wrong; a gradient that
only some ranks have is NaN. But no weight has changed: the comparison precedes the optimizer's
step. `train_step` sends the digests along with numbers that a step brings to the host anyway. In
all other loops it is made by norms of gradients, by `GradScaler`, and by the hook on optimizers
(`optimizer_hooks.py`), whichever comes first. It costs an all-reduce of three integers for each
process group and, on an accelerator, a wait of the host for the backward.

[Note: replicas] Ranks of a process group must do the same; other ranks need not. One replica of
HSDP may run one more forward. Each process group therefore has its own history. A gradient that is
NaN on one replica reaches the others, so a disagreement must, too: each comparison passes on the
results of the ones before it, and then back.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.issued_collectives import issuing

NOTE_LENGTH = 16  # integers of 64 bits at most; 0 stands for those left out
# A number of this size survives a sum in fp64, where the other ranks contribute zeros.
_DIGEST_BYTES = 6
# Notes must not fill the memory of a program that never compares. The digest covers the rest.
_MOST_NOTES = 65536


class NotedGroup(Protocol):
    """The interface of parameter groups that a history needs."""

    def describe(self, note: Sequence[int]) -> str:
        """The collective of a note in words: "gathered b"."""

    def drop_gradients(self) -> None:
        """Sets the gradients of the parameters to None."""


class NoteHistory:
    """The notes of one rank since the last comparison, in the order of issue, of collectives over
    one process group. Made by `histories_over`.

    Attributes:
        device: of the tensors that the process group sends.
        groups: the groups that add notes, by the second integer of their notes.
        notes: at most the first 65536.
        has_notes: whether there are any; never in a process group of one rank.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.groups: weakref.WeakValueDictionary[int, NotedGroup] = weakref.WeakValueDictionary()
        self._ranks = dist.get_process_group_ranks(group)
        self.device = torch.device(device_type)
        self._group = weakref.ref(group)  # whose entry in `_histories` ends with it
        self.forget()

    def add(self, note: Sequence[int]) -> None:
        """Remembers the note of a collective that is being issued."""
        if len(self._ranks) == 1:
            return
        # Padded to one length: otherwise the same numbers, divided into other notes, would have the
        # same digest.
        self._hash.update(array("q", _padded(note)).tobytes())
        self.has_notes = True
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(tuple(note))

    def forget(self) -> None:
        """Starts a new history after a comparison, at the same point of all ranks' programs."""
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.notes: list[tuple[int, ...]] = []
        self.has_notes = False

    @property
    def digest(self) -> int:
        """A number below 2^48, the same for the same notes and most likely for no others."""
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
        for rank, note in zip(self._ranks, self.first_difference(), strict=True):
            ranks[note].append(rank)
        if len(ranks) == 1:
            return f"a difference after the first {_MOST_NOTES} collectives, which were the same"
        return "; ".join(
            f"{'rank' if len(alike) == 1 else 'ranks'} {', '.join(map(str, alike))} "
            f"{self._describe(note)}"
            for note, alike in ranks.items()
        )

    def first_difference(self) -> list[tuple[int, ...]]:
        """By rank in the group, every rank's note where they first differ. All ranks call it
        together.

        The note of a rank that did nothing more is zeros. If the notes that are kept do not differ,
        the result is the same for all ranks.
        """
        length = torch.tensor(len(self.notes), dtype=torch.int64, device=self.device)
        self._all_reduce(length, dist.ReduceOp.MAX, "the number of notes")
        missing = [()] * max(1 - len(self.notes), int(length) - len(self.notes))
        notes = torch.tensor(
            [_padded(note) for note in [*self.notes, *missing]], device=self.device
        )

        # Where the least and the greatest differ, some ranks do. Costs the same on any number of
        # ranks, unlike gathering all notes.
        least, greatest = notes.clone(), notes.clone()
        self._all_reduce(least, dist.ReduceOp.MIN, "the least of all notes")
        self._all_reduce(greatest, dist.ReduceOp.MAX, "the greatest of all notes")
        place = int((least != greatest).any(dim=1).int().argmax())

        # Each rank writes to its own row of zeros.
        everyones = notes.new_zeros(len(self._ranks), NOTE_LENGTH)
        everyones[self._ranks.index(dist.get_rank())] = notes[place]
        self._all_reduce(everyones, dist.ReduceOp.SUM, "the notes that differ")
        return [tuple(note) for note in everyones.tolist()]

    def _describe(self, note: tuple[int, ...]) -> str:
        if not any(note):
            return "did nothing more"
        group = self.groups.get(note[1])
        return f"used a model that is gone, {note}" if group is None else group.describe(note)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, name: str) -> None:
        with issuing(f"all-reduce of {name}", tensor):
            dist.all_reduce(tensor, op, group=self._group())


# One for each process group, of all models: what a comparison includes must not depend on when a
# rank's garbage collector frees a model.
_histories: weakref.WeakKeyDictionary[dist.ProcessGroup, NoteHistory] = weakref.WeakKeyDictionary()


def histories_over(mesh: DeviceMesh) -> list[NoteHistory]:
    """The history of each axis of a mesh."""
    histories = []
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        history = _histories.get(group)
        if history is None:
            history = _histories[group] = NoteHistory(group, mesh.device_type)
        histories.append(history)
    return histories


def is_any_uncompared() -> bool:
    """Whether this process has notes that ranks have not compared."""
    return any(history.has_notes for history in _histories.values())


def compare(meshes: Iterable[DeviceMesh]) -> None:
    """Compares the notes of collectives over the axes of some meshes since the last comparison, if
    there are any. All ranks call it together.

    Raises:
        RuntimeError: on all ranks of the meshes, if some differ, with the first difference. The
            gradients of all models over them are None then.
    """
    histories = dict.fromkeys(
        history for mesh in dict.fromkeys(meshes) for history in histories_over(mesh)
    )
    pending = [history for history in histories if history.has_notes]
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
                    group.drop_gradients()
            raise RuntimeError(
                "Expected every rank to do the same in every step, and to have gradients of the "
                "same parameters, got: "
                f"{'; '.join(dict.fromkeys(differences)) or 'a difference between other ranks'}. "
                "The gradients of this step were dropped."
            )
    finally:
        for history in pending:
            history.forget()


def _padded(note: Sequence[int]) -> tuple[int, ...]:
    return (*note, *(0,) * (NOTE_LENGTH - len(note)))
