"""Notes and labels of the collectives of a parameter group; see `NoteHistory`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron.core.distributed.fsdp.collectives import Label, tag_of
from megatron.core.distributed.fsdp.note_history import NOTE_LENGTH

_GATHER, _REDUCE, _EXCHANGE = 1, 2, 3  # the first number of a note; the second is the group's
_MASK_BITS = 62  # parameters in one integer of a note


def gather_note(group: int) -> list[int]:
    """The weights of a group are gathered."""
    return [_GATHER, group]


def reduction_note(group: int, received: Collection[int]) -> list[int]:
    """The gradients of a group are reduced, and which of its parameters have one.

    Parameters beyond those that a note has room for share bits with earlier ones: a difference is
    still noticed, unless two cancel out, but the parameter is not named.
    """
    words = [0] * (NOTE_LENGTH - 2)
    for index in received:
        word, bit = _place(index, words)
        words[word] ^= 1 << bit
    return [_REDUCE, group, *words]


def exchange_note(group: int, is_backward: bool) -> list[int]:
    """Tokens travel to the ranks that compute with a group's weights."""
    return [_EXCHANGE, group, int(is_backward)]


def gather_label(group: int, module: str) -> Label:
    """The gathers of a group's weights."""
    return Label(tag_of(_GATHER, group), f"the weights of {module}")


def reduction_label(group: int, module: str) -> Label:
    """The reductions of a group's gradients."""
    return Label(tag_of(_REDUCE, group), f"the gradients of {module}")


def describe(note: Sequence[int], module: str, names: Sequence[str]) -> str:
    """The collective of a note in words: "gathered b".

    Args:
        module: the group's, as messages call it.
        names: of the group's parameters.
    """
    if note[0] == _GATHER:
        return f"gathered {module}"
    if note[0] == _EXCHANGE:
        return f"exchanged {'gradients of ' if note[2] else ''}tokens for {module}"

    without = [name for index, name in enumerate(names) if not _is_in_mask(note[2:], index)]
    lacking = f" without any for {', '.join(without)}" if without else ""
    return f"reduced the gradients of {module}{lacking}"


def _place(index: int, words: Sequence[int]) -> tuple[int, int]:
    return divmod(index % (_MASK_BITS * len(words)), _MASK_BITS)


def _is_in_mask(words: Sequence[int], index: int) -> bool:
    word, bit = _place(index, words)
    return bool(words[word] >> bit & 1)
