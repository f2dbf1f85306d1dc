"""`NoteHistory`: the notes of the collectives that a rank has issued, compared once a step.

On the CPU a note goes ahead of each collective, and ranks that disagree stop before anything is
sent; see collectives' [Note: notes]. On an accelerator the host would have to wait for every note.
But it knows what ranks may disagree about (the order of collectives, and which parameters have a
gradient) when it issues them. So each rank keeps its notes and a digest of them all. The digests
travel with the numbers that a step brings to the host anyway, and only if they differ do ranks
exchange notes, to find the first that is not the same.

By then, collectives that did not fit together have run, and gradients may be wrong. But the
optimizer's step comes later, so no weight has changed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.collectives import NOTE_LENGTH
from megatron.core.issued_collectives import issuing

# A number of this size survives a sum in fp64, where the other ranks contribute zeros.
_DIGEST_BYTES = 6
# If nobody ever compares, notes must not fill the memory. The digest still covers the rest.
_MOST_NOTES = 65536


class NoteHistory:
    """The notes since the last comparison, in the order in which collectives were issued."""

    def __init__(self) -> None:
        self.forget()

    def add(self, note: Sequence[int]) -> None:
        """Remembers the note of a collective that is being issued."""
        # Padded to one length: otherwise the same numbers, divided into other notes, would have the
        # same digest.
        self._hash.update(array("q", _padded(note)).tobytes())
        if len(self._notes) < _MOST_NOTES:
            self._notes.append(tuple(note))

    def forget(self) -> None:
        """Starts a new history after a comparison, at the same point of all ranks' programs."""
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._notes: list[tuple[int, ...]] = []

    @property
    def digest(self) -> int:
        """A number below 2^48, the same for the same notes and most likely for no others."""
        return int.from_bytes(self._hash.digest(), "little")

    def first_difference(
        self, group: dist.ProcessGroup | None, device: torch.device
    ) -> list[tuple[int, ...]]:
        """Every rank's note, by rank in the group, where they first differ. All ranks of the group
        call it together.

        A rank that had done everything by then has a note of zeros. If all notes that are kept are
        the same, so are those in the answer.

        Args:
            device: of the group's collectives.
        """
        length = torch.tensor(len(self._notes), dtype=torch.int64, device=device)
        with issuing("all-reduce of the number of notes", length):
            dist.all_reduce(length, dist.ReduceOp.MAX, group=group)
        missing = [()] * max(1 - len(self._notes), int(length) - len(self._notes))
        notes = torch.tensor([_padded(note) for note in [*self._notes, *missing]], device=device)

        # Where the least and the greatest differ, some ranks do. Costs the same on any number of
        # ranks, unlike gathering all notes.
        least, greatest = notes.clone(), notes.clone()
        with issuing("all-reduce of the least of all notes", least):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        with issuing("all-reduce of the greatest of all notes", greatest):
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
        place = int((least != greatest).any(dim=1).int().argmax())

        own = notes[place].contiguous()
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        with issuing("all-gather of the notes that differ", own):
            dist.all_gather(everyones, own, group=group)
        return [tuple(note.tolist()) for note in everyones]


def _padded(note: Sequence[int]) -> tuple[int, ...]:
    return (*note, *(0,) * (NOTE_LENGTH - len(note)))


def tell_apart(notes: Sequence[tuple[int, ...]], describe: Callable[[tuple[int, ...]], str]) -> str:
    """In words, what each rank was about to do; ranks that agree are named together."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, note in enumerate(notes):
        ranks.setdefault(note, []).append(rank)

    if len(ranks) == 1:
        return f"a difference after the first {_MOST_NOTES} collectives, which were the same"

    said = []
    for note, those in ranks.items():
        who = (
            f"rank {those[0]} was"
            if len(those) == 1
            else f"ranks {', '.join(map(str, those))} were"
        )
        said.append(f"{who} about to {describe(note) if any(note) else 'do nothing more'}")
    return "; ".join(said)
