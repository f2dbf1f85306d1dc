"""`NoteHistory`: a record of the collectives of a rank, compared between ranks before every step.

Ranks may disagree about the order of collectives, and about which parameters have a gradient. For
each collective, the host adds a note: a few integers that describe it. The ranks compare a digest
of their notes. Only if the digests differ do they exchange the notes, to find the first difference.

By then, collectives that did not fit together have run, and gradients may be wrong; a gradient that
only some ranks have is NaN. But no weight has changed: the comparison precedes the optimizer's
step. `train_step` sends the digests along with numbers that a step brings to the host anyway; in
all other loops, the hook on optimizers (`optimizer_hooks.py`) makes the comparison, which costs an
all-reduce of two integers and, on an accelerator, a wait of the host for the backward.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections import defaultdict
from collections.abc import Sequence
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

    number: int  # the second integer of the group's notes

    def describe(self, note: Sequence[int]) -> str:
        """The collective of a note in words: "gathered b"."""


class NoteHistory:
    """The notes of one rank since the last comparison, in the order of issue, of collectives over
    one set of ranks.

    Attributes:
        ranks: in ascending order.
        notes: at most the first 65536.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """
        Args:
            mesh: over all the ranks, in any arrangement.
            device: of what its process groups send.
        """
        self.ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        self._mesh = mesh
        self._device = device
        self._groups: weakref.WeakValueDictionary[int, NotedGroup] = weakref.WeakValueDictionary()
        self.forget()

    def join(self, group: NotedGroup) -> None:
        """Takes a group that adds notes from now on."""
        self._groups[group.number] = group

    def add(self, note: Sequence[int]) -> None:
        """Remembers the note of a collective that is being issued."""
        # Padded to one length: otherwise the same numbers, divided into other notes, would have the
        # same digest.
        self._hash.update(array("q", _padded(note)).tobytes())
        _uncompared.setdefault(id(self), self)
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(tuple(note))

    def forget(self) -> None:
        """Starts a new history after a comparison, at the same point of all ranks' programs."""
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.notes: list[tuple[int, ...]] = []
        _uncompared.pop(id(self), None)

    @property
    def digest(self) -> int:
        """A number below 2^48, the same for the same notes and most likely for no others."""
        return int.from_bytes(self._hash.digest(), "little")

    def check(self) -> None:
        """Compares the notes since the last comparison, if there are any. All ranks call it
        together.

        Raises:
            RuntimeError: on all ranks, if they differ, with the first difference.
        """
        is_alone = self._mesh.size() == 1 or self._mesh.get_coordinate() is None
        if id(self) not in _uncompared or is_alone:
            self.forget()
            return
        try:
            digest = torch.tensor([self.digest, -self.digest], device=self._device)
            self._all_reduce(digest, dist.ReduceOp.MAX, "what ranks have done")
            greatest, least = digest.tolist()
            if greatest != -least:
                raise RuntimeError(
                    "Expected every rank to do the same in every step, and to have gradients of "
                    f"the same parameters, got: {self._difference()}. The gradients of this step "
                    "are not to be used."
                )
        finally:
            self.forget()

    def _difference(self) -> str:
        """The first difference in words. All ranks call it together."""
        ranks = defaultdict[tuple[int, ...], list[int]](list)
        for rank, note in self.first_difference().items():
            ranks[note].append(rank)
        if len(ranks) == 1:
            return f"a difference after the first {_MOST_NOTES} collectives, which were the same"
        return "; ".join(
            f"{'rank' if len(alike) == 1 else 'ranks'} {', '.join(map(str, alike))} "
            f"{self._describe(note)}"
            for note, alike in ranks.items()
        )

    def _describe(self, note: tuple[int, ...]) -> str:
        if not any(note):
            return "did nothing more"
        group = self._groups.get(note[1])
        return f"did something unknown, {note}" if group is None else group.describe(note)

    def first_difference(self) -> dict[int, tuple[int, ...]]:
        """By global rank, every rank's note where they first differ. All ranks call it together.

        The note of a rank that did nothing more is zeros. If the notes that are kept do not differ,
        the result is the same for all ranks.
        """
        length = torch.tensor(len(self.notes), dtype=torch.int64, device=self._device)
        self._all_reduce(length, dist.ReduceOp.MAX, "the number of notes")
        missing = [()] * max(1 - len(self.notes), int(length) - len(self.notes))
        notes = torch.tensor(
            [_padded(note) for note in [*self.notes, *missing]], device=self._device
        )

        # Where the least and the greatest differ, some ranks do. Costs the same on any number of
        # ranks, unlike gathering all notes.
        least, greatest = notes.clone(), notes.clone()
        self._all_reduce(least, dist.ReduceOp.MIN, "the least of all notes")
        self._all_reduce(greatest, dist.ReduceOp.MAX, "the greatest of all notes")
        place = int((least != greatest).any(dim=1).int().argmax())

        # Each rank writes to its own row of zeros.
        everyones = notes.new_zeros(len(self.ranks), NOTE_LENGTH)
        everyones[self.ranks.index(dist.get_rank())] = notes[place]
        self._all_reduce(everyones, dist.ReduceOp.SUM, "the notes that differ")
        return {
            rank: tuple(note) for rank, note in zip(self.ranks, everyones.tolist(), strict=True)
        }

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, name: str) -> None:
        for axis in range(self._mesh.ndim):
            with issuing(f"all-reduce of {name}", tensor):
                dist.all_reduce(tensor, op, group=self._mesh.get_group(axis))


# By id, the histories with notes that ranks have not compared, in the order of the first such note.
_uncompared: weakref.WeakValueDictionary[int, NoteHistory] = weakref.WeakValueDictionary()


def is_any_uncompared() -> bool:
    """Whether any history of this process has notes that ranks have not compared."""
    return bool(_uncompared)


def check_all(mesh: DeviceMesh) -> None:
    """Compares all histories over the ranks of a mesh; see `NoteHistory.check`."""
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    for history in [history for history in _uncompared.values() if history.ranks == ranks]:
        history.check()


def _padded(note: Sequence[int]) -> tuple[int, ...]:
    return (*note, *(0,) * (NOTE_LENGTH - len(note)))
