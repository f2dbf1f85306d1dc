"""Where the words of a bash script begin and end. Nothing is expanded, and nothing is executed.

A rewriter needs words and their limits, and not what a script means: which `if` a `fi` closes is
all the same to it. So this scanner knows quotes, expansions, comments, here-documents and the
parentheses of arrays, and no grammar.

    ARGS=(                    ARRAY_OPEN "ARGS=("  NEWLINE
        --num-layers ${N}     WORD "--num-layers"  WORD "${N}"
        # deep                COMMENT "# deep"
    )                         ARRAY_CLOSE ")"
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

_BLANKS = " \t\r"
_METACHARACTERS = frozenset(" \t\r\n;&|()<>")
_CONTINUATION = re.compile(r"\\\r?\n")  # bash wants no "\r", but a script of Windows's has it
# `2>&1`, `&>log`; a process substitution is none. The number belongs to it, and is no argument.
_REDIRECTION = re.compile(r"\d*(?:<<<|<>|>>|>\||[<>]&|[<>](?![<(]))|&>>?")
_SUBSTITUTIONS = ("<(", ">(")  # of a process, whose name in the file system is a word
_ARRAY_NAME = re.compile(r"[A-Za-z_]\w*\+?=")
_DEEPEST = 40  # expansions within expansions


class ShellSyntaxError(ValueError):
    """A text that is no bash script. The message names the line."""


class Kind(enum.Enum):
    """What a token is."""

    WORD = "word"
    ARRAY_OPEN = "name and parenthesis of an array"
    ARRAY_CLOSE = "parenthesis of an array"
    OPERATOR = "operator"
    REDIRECTION = "redirection, with the word behind it"
    NEWLINE = "newline"
    COMMENT = "comment"
    HEREDOC = "body of a here-document"


class Token(NamedTuple):
    """A piece of the text: `text[start:end]`."""

    kind: Kind
    start: int
    end: int


class _Heredoc(NamedTuple):
    delimiter: str
    strips_tabs: bool


def tokens_of(text: str, start: int = 0, end: int | None = None) -> list[Token]:
    """The tokens of a script, or of a part of one.

    Raises:
        ShellSyntaxError: a quote or an expansion has no end.
    """
    scanner = _Scanner(text, len(text) if end is None else end)
    scanner.scan(start)
    return scanner.tokens


def words_in_quotes(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """The words into which bash splits the text between two quotes, when it expands the
    variable that holds it: quotes in there are letters.

    Args:
        start: behind the opening quote.
        end: of the closing quote.
    """
    scanner = _Scanner(text, end)
    words = []
    place = start
    while place < end:
        if continuation := _CONTINUATION.match(text, place):
            place = continuation.end()
            continue
        if text[place] in " \t\r\n":
            place += 1
            continue
        first = place
        while place < end and text[place] not in " \t\r\n":
            if _CONTINUATION.match(text, place):
                break
            is_plain = text[place] not in "$`\\"
            place = place + 1 if is_plain else scanner.past_expansion(place, is_quoted=True)
        words.append((first, min(place, end)))
    return words


class _Scanner:
    def __init__(self, text: str, end: int) -> None:
        self.text = text[:end]
        self.end = end
        self.tokens: list[Token] = []
        self._depth = 0

    def scan(self, place: int, *, closes: bool = False) -> int:
        """Collects the tokens from a place on.

        Args:
            closes: a command substitution, which ends with its parenthesis.

        Returns:
            The place behind.
        """
        opened_at, parentheses, is_array = place, 0, False
        heredocs: list[_Heredoc] = []
        while place < self.end:
            char = self.text[place]
            first = place
            if char in _BLANKS:
                place += 1
            elif continuation := _CONTINUATION.match(self.text, place):
                place = continuation.end()
            elif char == "\n":
                place += 1
                self._add(Kind.NEWLINE, first, place)
                place = self._past_bodies(place, heredocs)
                heredocs = []
            elif char == "#":
                place = self._line_end(place)
                self._add(Kind.COMMENT, first, place)
            elif char == ")" and is_array:
                place, is_array = place + 1, False
                self._add(Kind.ARRAY_CLOSE, first, place)
            elif char == ")" and closes and parentheses == 0:
                return place + 1
            elif self.text.startswith("((", place):
                place = self._past_arithmetic(place)
                self._add(Kind.OPERATOR, first, place)
            elif char in "()":
                parentheses = max(parentheses + (1 if char == "(" else -1), 0)
                place += 1
                self._add(Kind.OPERATOR, first, place)
            elif self._is_heredoc(place):
                place, heredoc = self._heredoc(place)
                heredocs += heredoc
                self._add(Kind.OPERATOR, first, place)
            elif self.text.startswith(_SUBSTITUTIONS, place):
                place = self._past_command(place + 2)
                self._add(Kind.WORD, first, place)
            elif redirection := _REDIRECTION.match(self.text, place):
                place = self._past_target(redirection.end())
                self._add(Kind.REDIRECTION, first, place)
            elif char in ";&|<>":
                place += 1
                self._add(Kind.OPERATOR, first, place)
            else:
                place = self._past_word(place)
                word = self.text[first:place]
                if self.text.startswith("(", place) and _ARRAY_NAME.fullmatch(word):
                    place, is_array = place + 1, True
                    self._add(Kind.ARRAY_OPEN, first, place)
                else:
                    self._add(Kind.WORD, first, place)
        if closes or is_array:
            raise self._error(opened_at, "a parenthesis without an end")
        return place

    def past_expansion(self, place: int, *, is_quoted: bool = False) -> int:
        """The place behind what a dollar, a backquote or a backslash begins."""
        char = self.text[place]
        if char == "\\":
            return min(place + 2, self.end)
        if char == "`":
            return self._past_quoted(place, "`")
        following = self.text[place + 1 : place + 3]
        if following == "((":
            return self._past_arithmetic(place + 1)
        if following[:1] == "(":
            return self._past_command(place + 2)
        if following[:1] == "{":
            return self._past_braces(place + 2, is_quoted)
        return place + 1

    def _add(self, kind: Kind, start: int, end: int) -> None:
        if self._depth == 0:
            self.tokens.append(Token(kind, start, end))

    def _error(self, place: int, what: str) -> ShellSyntaxError:
        line = self.text.count("\n", 0, place) + 1
        return ShellSyntaxError(f"line {line}: expected a bash script, got {what}.")

    def _line_end(self, place: int) -> int:
        found = self.text.find("\n", place)
        return self.end if found < 0 else found

    def _past_word(self, place: int) -> int:
        while place < self.end and self.text[place] not in _METACHARACTERS:
            if _CONTINUATION.match(self.text, place):
                return place
            place = self._past_piece(place)
        return place

    def _past_target(self, place: int) -> int:
        """The place behind the word that a redirection names; the same, if there is none."""
        start = place
        while start < self.end and self.text[start] in _BLANKS:
            start += 1
        if self.text.startswith(_SUBSTITUTIONS, start):
            return self._past_command(start + 2)
        end = self._past_word(start)
        return end if end > start else place

    def _past_piece(self, place: int) -> int:
        """The place behind a letter, a quoted text or an expansion."""
        char = self.text[place]
        if char == "'":
            return self._past_single(place)
        if char == '"':
            return self._past_quoted(place, '"')
        if self.text.startswith("$'", place):
            return self._past_quoted(place + 1, "'")
        return self.past_expansion(place) if char in "$`\\" else place + 1

    def _past_single(self, place: int) -> int:
        found = self.text.find("'", place + 1)
        if found < 0:
            raise self._error(place, "a quote without an end")
        return found + 1

    def _past_quoted(self, place: int, quote: str) -> int:
        """The place behind a text in double quotes or backquotes."""
        opened_at, place = place, place + 1
        while place < self.end:
            char = self.text[place]
            if char == quote:
                return place + 1
            if char == "\\" or (quote == '"' and char in "$`"):
                place = self.past_expansion(place, is_quoted=True)
            else:
                place += 1
        raise self._error(opened_at, "a quote without an end")

    def _past_command(self, place: int) -> int:
        self._deeper(place)
        place = self.scan(place, closes=True)
        self._depth -= 1
        return place

    def _past_braces(self, place: int, is_quoted: bool) -> int:
        """The place behind the brace that closes `${`, in which a single quote is a letter if
        double ones stand around it.
        """
        self._deeper(place)
        opened_at = place
        while place < self.end and self.text[place] != "}":
            is_letter = is_quoted and self.text[place] == "'"
            place = place + 1 if is_letter else self._past_piece(place)
        if place >= self.end:
            raise self._error(opened_at, "${ without an end")
        self._depth -= 1
        return place + 1

    def _past_arithmetic(self, place: int) -> int:
        """The place behind `((...))`."""
        opened_at, depth = place, 0
        while place < self.end:
            depth += {"(": 1, ")": -1}.get(self.text[place], 0)
            place += 1
            if depth == 0:
                return place
        raise self._error(opened_at, "a parenthesis without an end")

    def _deeper(self, place: int) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(place, f"more than {_DEEPEST} expansions in each other")

    def _is_heredoc(self, place: int) -> bool:
        return self.text.startswith("<<", place) and not self.text.startswith("<<<", place)

    def _heredoc(self, place: int) -> tuple[int, list[_Heredoc]]:
        """The place behind `<<WORD`, and what it announces."""
        place += 2
        strips_tabs = self.text.startswith("-", place)
        place += strips_tabs
        while place < self.end and self.text[place] in _BLANKS:
            place += 1
        first, place = place, self._past_word(place)
        delimiter = re.sub(r"[\\'\"]", "", self.text[first:place])
        return place, [_Heredoc(delimiter, strips_tabs)] if delimiter else []

    def _past_bodies(self, place: int, heredocs: list[_Heredoc]) -> int:
        for heredoc in heredocs:
            first = place
            while place < self.end:
                line_end = self._line_end(place)
                line = self.text[place:line_end].rstrip("\r")
                if (line.lstrip("\t") if heredoc.strips_tabs else line) == heredoc.delimiter:
                    break
                place = min(line_end + 1, self.end)
            self._add(Kind.HEREDOC, first, place)
            place = min(self._line_end(place) + 1, self.end)
        return place
