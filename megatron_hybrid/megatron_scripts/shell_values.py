"""What the variables of a bash script may hold, as far as its text says: they are not evaluated.

TP=1                    {"1"}
if ...; then TP=2; fi   {"1", "2"}
PP=${PP:-1}  N=$1       None: the script's caller decides
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from megatron_hybrid.megatron_scripts.shell_words import Kind, Token

Values = frozenset[str] | None  # None: unknown

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
# Commands that set the variables which they name.
_SETTERS = frozenset(("for", "read", "select", "mapfile", "readarray", "getopts", "printf", "let"))
_MOST_VALUES = 16


class Variables:
    """The variables of a script.

    Args:
        tokens: of its text.
    """

    def __init__(self, text: str, tokens: Iterable[Token]) -> None:
        self._assigned: dict[str, set[str | None]] = {}  # raw words; None: something unknown
        is_setter = False
        for token in tokens:
            raw = text[token.start : token.end]
            if token.kind is Kind.OPERATOR and raw.startswith("(("):
                for name in _NAME.findall(raw):
                    self._set(name, None)
            if token.kind is Kind.ARRAY_OPEN:
                self._set(raw.rstrip("(").rstrip("=").rstrip("+"), None)
            if token.kind is not Kind.WORD:
                is_setter = False
                continue

            is_setter = is_setter or raw in _SETTERS
            if is_setter and _NAME.fullmatch(raw):
                self._set(raw, None)
            if found := _ASSIGNMENT.fullmatch(raw):
                self._set(found[1], None if found[2] else found[3])

    def _set(self, name: str, raw: str | None) -> None:
        self._assigned.setdefault(name, set()).add(raw)

    def values_of(self, name: str, around: frozenset[str] = frozenset()) -> Values:
        """What a variable may hold.

        Args:
            around: variables that are being looked up: one that holds itself is unknown.
        """
        raws = self._assigned.get(name)
        if raws is None or name in around or len(raws) > _MOST_VALUES:
            return None
        found: set[str] = set()
        for raw in raws:
            values = None if raw is None else self.expanded(raw, around | {name})
            if values is None:
                return None
            found |= values
        return frozenset(found) if len(found) <= _MOST_VALUES else None

    def expanded(self, raw: str, around: frozenset[str] = frozenset()) -> Values:
        """What a word may be once it is expanded.

        Args:
            raw: with its quotes.
            around: see `values_of`.
        """
        parts = _parts(raw)
        if parts is None:
            return None
        choices: list[frozenset[str]] = []
        for is_name, part in parts:
            values = self.values_of(part, around) if is_name else frozenset((part,))
            if values is None:
                return None
            choices.append(values)
        combinations = itertools.islice(itertools.product(*choices), _MOST_VALUES + 1)
        found = frozenset("".join(combination) for combination in combinations)
        return found if len(found) <= _MOST_VALUES else None

    def names_in(self, raw: str) -> list[str]:
        """The variables that a word has in it."""
        return [one or two for one, two in _PLAIN.findall(raw)]

    def shown(self, names: Iterable[str]) -> Mapping[str, Values]:
        """What each of them may hold."""
        return {name: self.values_of(name) for name in names}


def _parts(raw: str) -> list[tuple[bool, str]] | None:
    """A word as literal texts and names of variables; None if anything else is in it."""
    parts: list[tuple[bool, str]] = []
    place, quote = 0, ""
    while place < len(raw):
        char = raw[place]
        if char == "'" and quote != '"':
            quote = "" if quote else "'"
        elif quote == "'":
            parts.append((False, char))
        elif char == '"':
            quote = "" if quote else '"'
        elif char == "\\":
            place += 1
            parts.append((False, raw[place : place + 1]))
        elif char == "$":
            found = _PLAIN.match(raw, place)
            if found is None:
                return None
            parts.append((True, found[1] or found[2]))
            place = found.end() - 1
        elif char == "`":
            return None
        else:
            parts.append((False, char))
        place += 1
    return parts
