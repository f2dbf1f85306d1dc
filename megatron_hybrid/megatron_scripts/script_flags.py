"""The flags of a training command in a bash script, wherever the script gathers them: on the
command itself, in arrays, in strings, in the body of a here-document.

Not every flag in a script is the training's: torchrun, srun and profilers have theirs. Those behind
the word that ends in `.py` are, and those of arrays and strings that are used there. Of arrays and
strings that no command of the script uses (a file that others read), those are of which most flags
are known.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from megatron_hybrid.megatron_scripts.shell_values import Variables
from megatron_hybrid.megatron_scripts.shell_words import (
    Kind,
    ShellSyntaxError,
    Token,
    tokens_of,
    words_in_quotes,
)

_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|([A-Za-z_]\w*))")
_ALL_WORDS = re.compile(r"\"?\$(?:\{[A-Za-z_]\w*\[[@*]\]\}|\{?[@*]\}?)\"?")
_QUOTED = re.compile(r"(?s)(?:[A-Za-z_]\w*\+?=)?(['\"])(.*)\1")
_HAS_FLAGS = re.compile(r"(?:^|\s)--[A-Za-z]|\.py\s")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=")
_ASSIGNED_FLAG = re.compile(r"[A-Za-z_]\w*\+?=(--[A-Za-z][^'\"]*)")
_ENDS_COMMAND = re.compile(r"[;|&<>]|\d+[<>]")
# `8;` or `8>log`, without quotes, in which such letters are no operators.
_BEFORE_OPERATOR = re.compile(r"(?:[^;|&<>$`'\"\\]|\$\w+|\$\{[^}]*\})+(?=[;|&<>])")


@dataclass(frozen=True)
class Word:
    """A word of the text, with its quotes unless it stands in a quoted word with others.

    Attributes:
        container: start and end of the quoted word that it stands in, with the quotes.
        is_inner: it stands in quotes, so that quotes of its own are letters.
        is_assigned: it is what a variable holds, without quotes around it.
    """

    start: int
    end: int
    container: tuple[int, int] | None = None
    is_inner: bool = False
    is_assigned: bool = False


@dataclass(frozen=True)
class Given:
    """A flag in the text with the words that are its values."""

    flag: str
    word: Word
    values: tuple[Word, ...]
    value_behind_equals: tuple[int, int] | None = None  # of `--flag=value`

    @property
    def start(self) -> int:
        return self.word.start

    @property
    def end(self) -> int:
        return self.values[-1].end if self.values else self.word.end


@dataclass
class _Piece:
    """Words that belong together."""

    words: list[Word] = dataclasses.field(default_factory=list)
    name: str | None = None  # of the array or string; None: a command


@dataclass(frozen=True)
class ScriptFlags:
    """What a script says about its training.

    Attributes:
        given: in the order of the text.
        programs: the words that end in `.py` behind which training's flags stand.
    """

    given: tuple[Given, ...]
    programs: tuple[Word, ...]
    variables: Variables


class ScriptReader:
    """Finds the flags of a script.

    Args:
        takes_no_value: whether a flag is a switch.
        is_known: whether a flag is one of ours or of Megatron-LM's.
    """

    def __init__(
        self, text: str, takes_no_value: Callable[[str], bool], is_known: Callable[[str], bool]
    ) -> None:
        self._text = text
        self._takes_no_value = takes_no_value
        self._is_known = is_known
        tokens = tokens_of(text)
        bodies = [list(_tokens_in(text, token)) for token in tokens if token.kind is Kind.HEREDOC]
        self._variables = Variables(text, (*tokens, *itertools.chain(*bodies)))
        self._pieces = [*self._pieces_of(tokens)]
        for body in bodies:
            self._pieces += self._pieces_of(body)
        self._forget_inner_assignments()
        # Strings and arrays that hold flags: where they are expanded, more flags follow.
        self._names = {piece.name for piece in self._pieces if piece.name and self._flags(piece)}

    def read(self) -> ScriptFlags:
        """The flags of its training commands."""
        given: list[Given] = []
        programs: list[Word] = []
        used, used_elsewhere = self._uses()
        for piece in self._pieces:
            program = self._program_in(piece)
            if program is not None:
                programs.append(piece.words[program])
                given += self._given(self._until_end(piece.words[program + 1 :]))
            elif piece.name in used or (
                piece.name not in used_elsewhere and self._is_training(piece)
            ):
                given += self._given(piece.words)
        return ScriptFlags(
            tuple(sorted(given, key=lambda one: one.start)), tuple(programs), self._variables
        )

    def _pieces_of(self, tokens: Iterable[Token]) -> list[_Piece]:
        pieces: list[_Piece] = []
        command, array = _Piece(), None
        for token in tokens:
            raw = self._text[token.start : token.end]
            if token.kind is Kind.ARRAY_OPEN:
                array = _Piece(name=raw.rstrip("(").rstrip("=").rstrip("+"))
                pieces.append(array)
            elif token.kind is Kind.ARRAY_CLOSE:
                array = None
            elif token.kind is Kind.WORD:
                assigned = _ASSIGNED.match(raw)
                inner = self._inner(token)
                if array is not None:
                    array.words += inner or [Word(token.start, token.end)]
                elif inner and assigned:
                    words = [dataclasses.replace(word, container=None) for word in inner]
                    pieces.append(_Piece(words, assigned[1]))
                elif inner and len(inner) > 1:
                    pieces.append(_Piece([dataclasses.replace(w, container=None) for w in inner]))
                    command.words.append(Word(token.start, token.end))
                else:
                    command.words += inner or [Word(token.start, token.end)]
            elif array is None and token.kind is not Kind.REDIRECTION:
                pieces.append(command)
                command = _Piece()
        pieces.append(command)
        return pieces

    def _inner(self, token: Token) -> list[Word]:
        """The words of a quoted word that has flags or a program in it; empty: it has none.

        `NAME=--flag` needs no quotes.
        """
        raw = self._text[token.start : token.end]
        if assigned := _ASSIGNED_FLAG.fullmatch(raw):
            return [Word(token.start + assigned.start(1), token.end, is_assigned=True)]
        found = _QUOTED.fullmatch(raw)
        if found is None or not _HAS_FLAGS.search(found[2]):
            return []
        start, end = (token.start + place for place in found.span(2))
        container = (token.start, token.end)
        try:
            spans = words_in_quotes(self._text, start, end)
        except ShellSyntaxError:
            return []  # two quoted texts in one word, whose quotes do not pair
        if len(spans) == 1 and not _ASSIGNED.match(raw):
            return []  # a flag in quotes, which are its own
        return [Word(*span, container, True) for span in spans]

    def _forget_inner_assignments(self) -> None:
        """A string that another shell executes may set a variable that has a value out here, too:
        which of the two a flag in there has is not known.
        """
        for piece in self._pieces:
            for word in piece.words:
                assigned = _ASSIGNED.match(self._raw(word)) if word.is_inner else None
                if assigned:
                    self._variables.forget(assigned[1])

    def _raw(self, word: Word) -> str:
        return self._text[word.start : word.end]

    def _flags(self, piece: _Piece) -> list[str]:
        found = (_FLAG.match(self._raw(word).strip("'\"")) for word in piece.words)
        return [flag[0] for flag in found if flag]

    def _program_in(self, piece: _Piece) -> int | None:
        """The place of the word behind which training's flags stand."""
        for place, word in enumerate(piece.words):
            raw = self._raw(word)
            values = self._variables.expanded(raw) or frozenset((raw.strip("'\""),))
            if all(is_training_program(value) for value in values):
                return place
        return None

    def _is_program(self, word: Word) -> bool:
        """Whether a word names some program of Python's."""
        values = self._variables.expanded(self._raw(word)) or (self._raw(word).strip("'\""),)
        return any(value.endswith(".py") for value in values)

    def _until_end(self, words: Sequence[Word]) -> list[Word]:
        """Those before a redirection or another command, in a string."""
        found = []
        for word in words:
            if word.is_inner and _ENDS_COMMAND.match(self._raw(word)):
                break
            before = _BEFORE_OPERATOR.match(self._raw(word)) if word.is_inner else None
            if before:
                found.append(dataclasses.replace(word, end=word.start + before.end()))
                break
            found.append(word)
        return found

    def _uses(self) -> tuple[set[str], set[str]]:
        """The names of arrays and strings that training uses, itself or by others, and of those
        that only other commands use.
        """
        used: set[str] = set()
        elsewhere: set[str] = set()
        by_name: dict[str, set[str]] = {}
        for piece in self._pieces:
            program = self._program_in(piece)
            before = piece.words if program is None else piece.words[:program]
            after = [] if program is None else piece.words[program + 1 :]
            used |= self._references(after)
            if piece.name is not None and program is None:
                by_name.setdefault(piece.name, set()).update(self._references(before))
            else:
                elsewhere |= self._references(before)

        waiting = list(used)
        while waiting:
            more = by_name.get(waiting.pop(), set()) - used
            used |= more
            waiting += more
        return used, elsewhere - used

    def _references(self, words: Iterable[Word]) -> set[str]:
        found: set[str] = set()
        for word in words:
            found.update(one or two for one, two in _REFERENCE.findall(self._raw(word)))
        return found & self._names

    def _is_training(self, piece: _Piece) -> bool:
        if piece.name is None and any(self._is_program(word) for word in piece.words):
            return False
        flags = self._flags(piece)
        known = [flag for flag in flags if self._is_known(flag)]
        # A command without a program of Python's has to look very much like one.
        fewest = 1 if piece.name else 4
        return len(known) >= fewest and 2 * len(known) > len(flags)

    def _given(self, words: Sequence[Word]) -> list[Given]:
        found: list[Given] = []
        is_open = False  # whether words are values of the last flag
        for word in words:
            raw = self._raw(word)
            bare = raw.strip("'\"")
            match = _FLAG.match(bare)
            if match is not None:
                flag, rest = match[0], bare[match.end() :]
                begin = word.start + raw.index("--") + len(flag) + 1
                behind = self._behind_equals(word, begin) if rest.startswith("=") else None
                is_open = not rest and not self._takes_no_value(flag)
                if not rest or behind is not None:
                    found.append(Given(flag, word, (), behind))
            elif self._has_more_flags(raw):
                is_open = False
            elif is_open and found:
                last = found[-1]
                found[-1] = dataclasses.replace(last, values=(*last.values, word))
        return found

    def _behind_equals(self, word: Word, begin: int) -> tuple[int, int] | None:
        """Start and end of the value in `--flag=value`, with the value's own quotes; None, if the
        quotes around flag and value do not go around all of it.
        """
        raw = self._raw(word)
        quote = raw[0]
        if word.is_inner or quote not in "'\"":
            return begin, word.end
        return (begin, word.end - 1) if raw.find(quote, 1) == len(raw) - 1 else None

    def _has_more_flags(self, raw: str) -> bool:
        """Whether a word may expand to flags."""
        if _ALL_WORDS.fullmatch(raw):
            return True
        reference = _REFERENCE.fullmatch(raw)
        return reference is not None and (reference[1] or reference[2]) in self._names


def is_training_program(word: str) -> bool:
    """Whether a word names a program that trains."""
    name = PurePosixPath(word).name
    return name.endswith(".py") and name.startswith(("pretrain", "train", "finetune"))


def _tokens_in(text: str, heredoc: Token) -> list[Token]:
    """The tokens of a here-document, which may be a script; none, if it is not."""
    try:
        return tokens_of(text, heredoc.start, heredoc.end)
    except ShellSyntaxError:
        return []
