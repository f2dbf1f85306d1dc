"""Finds words and variables in a bash script, without executing it.

Rewriting flags requires the position of each word but no grammar: it does not matter which `if` a
`fi` closes. The scanner handles quotes, expansions, comments, here-documents and the parentheses of
arrays. shlex of the standard library does not return positions, and splits at the blanks inside
`$(...)` and `${X:-...}`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Tokens other than words. The number in front of a redirection is part of it, not an argument.
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|\\\r?\n)
    | (?P<newline>\n)
    | (?P<comment>\#[^\n]*)
    | (?P<heredoc>\d*<<-?[ \t]*(?=[\w'"\\]))
    | (?P<redirection>\d*(?:<<<|<>|>>|>\||[<>]&|[<>](?!\())[ \t]*|&>>?[ \t]*)
    | (?P<operator>\(\(|[;&|()])""",
    re.VERBOSE,
)
_WORD_END = re.compile(r"[ \t\r\n;&|()]|[<>](?!\()|\\\r?\n|\Z")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_OPENING = re.compile(r"[$<>]\(|\$\{|\$'|['\"`]")
_LETTERS = ("'", "$'", '"', "<(", ">(")  # without a meaning in double quotes


class ShellSyntaxError(ValueError):
    """A text that is not a bash script. The message names the line."""

    def __init__(self, text: str, place: int, got: str) -> None:
        line = text.count("\n", 0, place) + 1
        super().__init__(f"line {line}: expected a bash script, got {got}.")


class Token(NamedTuple):
    """A piece of the script, `raw = text[start:end]`."""

    kind: str  # a group of `_TOKEN`, "word", "array" (`A=(`), "close", "body" (here-document)
    start: int
    end: int
    raw: str


def tokens_of(text: str, start: int = 0, end: int | None = None) -> list[Token]:
    """Returns the tokens of a script, or of a part of it.

    Raises:
        ShellSyntaxError: a quote or an expansion has no end.
    """
    try:
        return list(_tokens(text[:end], start))
    except RecursionError:
        raise ShellSyntaxError(text, start, "too many expansions in each other") from None


def _tokens(text: str, place: int, *, is_nested: bool = False) -> Iterator[Token]:
    """Yields the tokens from a place on; nested ones end with the closing parenthesis."""
    opened, parentheses = place, 0
    endings: list[str] = []  # patterns of the lines that end here-documents
    while place < len(text):
        if array := _ARRAY.match(text, place):
            yield Token("array", place, array.end(), array[0])
            for token in _tokens(text, array.end(), is_nested=True):
                yield token
                place = token.end
            continue

        first, found = place, _TOKEN.match(text, place)
        kind = str(found.lastgroup) if found else "word"
        place = found.end() if found else _past_word(text, place)
        if found and kind in ("heredoc", "redirection"):
            place = _past_word(text, place)
        if found and kind == "heredoc":
            delimiter = re.sub(r"[\\'\"]", "", text[found.end() : place])
            tabs = r"\t*" if "-" in found[0] else ""
            endings.append(rf"^{tabs}{re.escape(delimiter)}\r?$")
        if text[first] == ")" and is_nested and parentheses == 0:
            yield Token("close", first, place, ")")
            return
        raw = text[first:place]
        parentheses = max(parentheses + {"((": 2, "(": 1, ")": -1}.get(raw, 0), 0)
        if kind != "blank":
            yield Token(kind, first, place, raw)
        if kind == "newline":
            for pattern in endings:
                ending = re.compile(pattern, re.MULTILINE).search(text, place)
                end = ending.start() if ending else len(text)
                yield Token("body", place, end, text[place:end])
                place = min(ending.end() + 1, len(text)) if ending else len(text)
            endings = []
    if is_nested:
        raise ShellSyntaxError(text, opened, "a parenthesis without an end")


def _past_word(text: str, place: int) -> int:
    while not _WORD_END.match(text, place):
        place = _past_piece(text, place)
    return place


def _past_piece(text: str, place: int, is_quoted: bool = False) -> int:
    """Returns the end of a letter, a quoted text or an expansion."""
    if text[place] == "\\":
        return min(place + 2, len(text))
    opening = _OPENING.match(text, place)
    if opening is None or (is_quoted and opening[0] in _LETTERS):
        return place + 1
    if opening[0] in ("$(", "<(", ">("):
        *_, last = _tokens(text, opening.end(), is_nested=True)
        return last.end
    return _past(text, opening.end(), opening[0], is_quoted)


def _past(text: str, place: int, opening: str, is_quoted: bool) -> int:
    """Returns the end of a quoted text or of braces."""
    opened, closing = place, "}" if opening == "${" else opening[-1]
    while place < len(text):
        if text[place] == closing:
            return place + 1
        if opening in ('"', "${") or (text[place] == "\\" and opening != "'"):
            place = _past_piece(text, place, is_quoted or opening == '"')
        else:
            place += 1
    what = "${" if opening == "${" else "a quote"
    raise ShellSyntaxError(text, opened - 1, f"{what} without an end")


Values = frozenset[str] | None  # None: unknown

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
# The parts of a word: in single quotes, in double quotes, and unquoted.
_QUOTED = re.compile(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|((?:\\.|[^'\"\\])+)", re.DOTALL)
_PART = re.compile(rf"\\(.)|{_VARIABLE.pattern}|([$`])|([^\\$`]+)", re.DOTALL)
# Commands that assign to the variables in their arguments, as `((` does.
_SETTERS = frozenset(("for", "read", "select", "mapfile", "readarray", "getopts", "printf", "let"))
_MOST_VALUES = 16
_LONGEST = 4096  # characters of a value: a chain of variables may double it at each step


class Variables:
    """The possible values of a script's variables.

        TP=1                    {"1"}
        if ...; then TP=2; fi   {"1", "2"}
        PP=${PP:-1}  N=$1       None: unknown, since the caller of the script sets them

    Assignments are evaluated once, in the order of the text.
    """

    def __init__(self, tokens: Iterable[Token]) -> None:
        self.values: dict[str, Values] = {}
        is_setter = False
        for kind, _, _, raw in tokens:
            is_setter = raw == "((" or (kind == "word" and (is_setter or raw in _SETTERS))
            found = _ASSIGNMENT.fullmatch(raw) if kind == "word" else None
            name = _NAME.match(raw)
            if name and (kind == "array" or (is_setter and not found)):
                self.values[name[0]] = None
            elif found:
                old = self.values.get(found[1], frozenset())
                new = None if found[2] else self.expanded(found[3])
                self.values[found[1]] = None if old is None or new is None else _bounded(old | new)

    def expanded(self, raw: str) -> Values:
        """Returns the possible expansions of a word with quotes."""
        choices: list[Iterable[str]] = []
        for single, double, bare in _QUOTED.findall(raw):
            choices.append((single,))
            for escaped, one, two, other, plain in _PART.findall(double or bare):
                values = self.values.get(one or two) if one or two else {escaped + plain}
                if values is None or other:
                    return None
                choices.append(values)
        combinations = itertools.islice(itertools.product(*choices), _MOST_VALUES + 1)
        return _bounded(frozenset(map("".join, combinations)))


def _bounded(values: frozenset[str]) -> Values:
    """Returns the values, or None if they are too many or too long."""
    is_short = all(len(value) <= _LONGEST for value in values)
    return values if is_short and len(values) <= _MOST_VALUES else None
