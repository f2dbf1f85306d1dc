"""The flag that a misspelt one means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_IS_NUMBER = re.compile(r"\d+")
_ALIKE = 0.7  # of a misspelt word's letters, that it has in common with the word that is meant
_FEWEST_SHARED = 3  # words of two names of which one has a word more
_OPPOSITES = frozenset(("no", "disable", "not"))


def meant_by(flag: str, names: Iterable[str]) -> str | None:
    """The name of which this flag is a misspelling; None rather than one that means something else.

    The nearest name may mean something else (`--lr-decay-samples`, `--no-load-optim`). A
    misspelling has the same words, each with few other letters, and the same numbers. Where there
    is none, a name is meant that begins with the same word and has one more or one less further on,
    if it is the only one.
    """
    words = _words(flag)
    with_a_word_more: set[str] = set()
    for name in names:
        others = _words(name)
        if "".join(words) == "".join(others):
            return name
        if _IS_NUMBER.findall(flag) != _IS_NUMBER.findall(name):
            continue
        if len(words) == len(others):
            if all(_are_alike(word, other) for word, other in zip(words, others, strict=True)):
                return name
        elif _differ_by_a_word(words, others):
            with_a_word_more.add(name)
    return with_a_word_more.pop() if len(with_a_word_more) == 1 else None


def _words(name: str) -> list[str]:
    return name.replace("_", "-").strip("-").split("-")


def _are_alike(word: str, other: str) -> bool:
    if word == other:
        return True
    # A word that is short has nothing in common with another one, or is another one.
    return min(len(word), len(other)) > 2 and (
        difflib.SequenceMatcher(None, word, other).ratio() >= _ALIKE
    )


def _differ_by_a_word(words: list[str], others: list[str]) -> bool:
    """Whether one has the other's words, in their order, and one more in between."""
    short, long = sorted((words, others), key=len)
    if len(long) - len(short) != 1 or len(short) < _FEWEST_SHARED:
        return False
    return any(
        long[:place] + long[place + 1 :] == short and long[place] not in _OPPOSITES
        for place in range(1, len(long))
    )
