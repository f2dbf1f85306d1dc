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
_DEEPEST = 50  # variables that hold each other
_LONGEST = 4096  # characters of a value: each variable may hold another one twice


class Variables:
    """The variables of a script.

    Args:
        tokens: of its text.
    """

    def __init__(self, text: str, tokens: Iterable[Token]) -> None:
        self._assigned: dict[str, set[str | None]] = {}  # raw words; None: something unknown
        self._found: dict[str, Values] = {}
        self._pending: set[str] = set()
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

    def forget(self, name: str) -> None:
        """What this variable holds is not known, whatever the script assigns."""
        self._set(name, None)

    def values_of(self, name: str) -> Values:
        """What a variable may hold. One that holds itself, or too many others, is unknown."""
        if name in self._pending or len(self._pending) > _DEEPEST:
            return None
        if name not in self._found:
            self._pending.add(name)
            self._found[name] = self._look_up(name)
            self._pending.remove(name)
        return self._found[name]

    def _look_up(self, name: str) -> Values:
        raws = self._assigned.get(name)
        if raws is None or len(raws) > _MOST_VALUES:
            return None
        found: set[str] = set()
        for raw in raws:
            values = None if raw is None else self.expanded(raw)
            if values is None:
                return None
            found |= values
        return frozenset(found) if len(found) <= _MOST_VALUES else None

    def expanded(self, raw: str) -> Values:
        """What a word, with its quotes, may be once it is expanded."""
        parts = _parts(raw)
        if parts is None:
            return None
        choices: list[frozenset[str]] = []
        for is_name, part in parts:
            values = self.values_of(part) if is_name else frozenset((part,))
            if values is None:
                return None
            choices.append(values)
        combinations = itertools.islice(itertools.product(*choices), _MOST_VALUES + 1)
        found = frozenset("".join(combination) for combination in combinations)
        is_short = all(len(value) <= _LONGEST for value in found)
        return found if is_short and len(found) <= _MOST_VALUES else None

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
