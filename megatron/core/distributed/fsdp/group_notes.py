"""What ranks tell each other about the collectives of a parameter group.

For how notes travel, see collectives' [Note: notes].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron.core.distributed.fsdp.collectives import NOTE_LENGTH

_GATHER, _REDUCE = 1, 2  # the first number of a note; the second is the group's
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


def describe(note: Sequence[int], module: str, names: Sequence[str]) -> str:
    """In words, what a rank with this note is about to do.

    Args:
        module: the group's, as messages call it.
        names: of the group's parameters.
    """
    if note[0] == _GATHER:
        return f"gather {module}"

    without = [name for index, name in enumerate(names) if not _is_in_mask(note[2:], index)]
    lacking = f", which has none for {', '.join(without)}" if without else ""
    return f"reduce the gradients of {module}{lacking}"


def _place(index: int, words: Sequence[int]) -> tuple[int, int]:
    return divmod(index % (_MASK_BITS * len(words)), _MASK_BITS)


def _is_in_mask(words: Sequence[int], index: int) -> bool:
    word, bit = _place(index, words)
    return bool(words[word] >> bit & 1)
