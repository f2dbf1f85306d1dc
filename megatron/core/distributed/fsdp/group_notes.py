"""What ranks tell each other about the collectives of a parameter group.

For how notes travel, see collectives' [Note: notes].

[Note: notes of other meshes] Ranks that disagree notice only if their notes meet. Suppose one rank
leaves out its experts, and goes on to gather the next layer: its note goes to all ranks, while a
rank that does gather its experts waits for a note among the few ranks that have the same ones. Both
would wait for ever. So groups with kept axes compare their notes over the mesh that the other
groups of the model have, axis by axis, and only then communicate over their own. So does the
exchange of tokens that goes with such a group: its note takes its turn on the lane of the gathers,
and the thread that computes waits for it. It would otherwise block in the exchange, which carries
no note that others could compare with theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collectives import NOTE_LENGTH

_GATHER, _REDUCE, _EXCHANGE = 1, 2, 3  # the first number of a note; the second is the group's
_MASK_BITS = 62  # parameters in one integer of a note


def gather_note(group: int) -> list[int]:
    """The weights of a group are about to be gathered."""
    return [_GATHER, group]


def reduction_note(group: int, received: Collection[int]) -> list[int]:
    """The gradients of a group are about to be reduced, and which of its parameters have one.

    Parameters beyond those that a note has room for share bits with earlier ones: a difference is
    still noticed, unless two cancel out, but the parameter is not named.
    """
    words = [0] * (NOTE_LENGTH - 2)
    for index in received:
        word, bit = _place(index, words)
        words[word] ^= 1 << bit
    return [_REDUCE, group, *words]


def exchange_note(group: int, is_backward: bool) -> list[int]:
    """Tokens are about to travel to the ranks that compute with a group's weights."""
    return [_EXCHANGE, group, int(is_backward)]


def describe(note: Sequence[int], module: str, names: Sequence[str]) -> str:
    """In words, what a rank with this note is about to do.

    Args:
        module: the group's, as messages call it.
        names: of the group's parameters.
    """
    if note[0] == _GATHER:
        return f"gather {module}"
    if note[0] == _EXCHANGE:
        return f"exchange {'gradients of ' if note[2] else ''}tokens for {module}"

    without = [name for index, name in enumerate(names) if not _is_in_mask(note[2:], index)]
    lacking = f", which has none for {', '.join(without)}" if without else ""
    return f"reduce the gradients of {module}{lacking}"


def _place(index: int, words: Sequence[int]) -> tuple[int, int]:
    return divmod(index % (_MASK_BITS * len(words)), _MASK_BITS)


def _is_in_mask(words: Sequence[int], index: int) -> bool:
    word, bit = _place(index, words)
    return bool(words[word] >> bit & 1)


class NoteExchange:
    """Over which ranks the notes of a parameter group are compared.

    Attributes:
        is_used: whether ranks exchange notes at all.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """
        Args:
            mesh: of the group's collectives.
            device: of what they send.
        """
        self.is_used = collectives.exchanges_notes(device)
        self._mesh = mesh
        self._is_over_own_mesh = True

    def compare_over(self, mesh: DeviceMesh) -> None:
        """Compares over the axes of another mesh from now on, whose numbers are those of the own
        one. See [Note: notes of other meshes].
        """
        self._mesh, self._is_over_own_mesh = mesh, False

    def ahead(self, note: Sequence[int], axes: Iterable[int]) -> Sequence[int] | None:
        """The note for collectives over these axes to carry; None if it has been compared."""
        if self._is_over_own_mesh:
            return note
        self.tell(note, axes)
        return None

    def tell(self, note: Sequence[int], axes: Iterable[int]) -> None:
        """Compares the note over these axes, if ranks exchange notes.

        Raises:
            MismatchError: another rank has another note.
        """
        for axis in axes if self.is_used else ():
            collectives.compare_notes(note, self._mesh.get_group(axis))
