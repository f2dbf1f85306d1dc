"""Rewrites a launch script of Megatron-LM for this program, flag by flag.

A script may collect the flags of a training command in arrays, strings and here-documents. Only
flags and their values are edited. The value of a variable is known where the script assigns a
literal to it; a flag whose meaning depends on an unknown value is left unchanged.

Training flags follow a word that ends in `.py`, or are in arrays and strings used there; torchrun,
srun and profilers have flags of other kinds. In a file of arrays for other scripts, an array counts
if most of its flags are known.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from megatron.core.log import printable
from megatron.training import flag_answers
from megatron.training.arguments import known_flags
from megatron.training.flag_answers import SHOWN, Answer, Ruling, megatron_switches, rows_for
from megatron_hybrid.shell_words import ShellSyntaxError, Token, Variables, tokens_of

_PROGRAMS = ("pretrain_gpt.py", "pretrain_vlm.py")
_POSITIONS = {"--position-embedding-type", "--use-rotary-position-embeddings"}
_CONTEXT = 200  # characters before a line, in which the statement before it ends
_MOST_COMBINATIONS = 64  # of the values that a flag's variables may have
_NO_BATCH = "N is its samples by --global-batch-size, which the script does not set."
_UNKNOWN = "\0"  # placeholder for an unknown value
_FLAG = re.compile(r"(['\"]?)(--[A-Za-z][\w-]*)(?:=(.*))?\1", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|([A-Za-z_]\w*))")
# Words that are flags, or may expand to several, rather than values.
_MORE_FLAGS = re.compile(r"['\"]?--|\"?\$(?:\{[A-Za-z_]\w*\[[@*]\]\}|\{?[@*]\}?)\"?$")
# A quoted text or an assignment that contains flags or a program.
_TEXT = re.compile(r"(?:([A-Za-z_]\w*)\+?=)?(['\"]?)(.*(?:--[A-Za-z]|\.py\s).*)\2", re.DOTALL)
_COMMAND = re.compile(r"\.py\s")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_ONE_QUEUE = re.compile(rf"(['\"]?){_QUEUES}=(['\"]?)(?:1|\$\{{{_QUEUES}:?-1\}})\2\1")
_EXPORT_LINE = re.compile(r"export[ \t]+[^ \t\r\n]+[ \t\r]*(?:#.*)?$", re.MULTILINE)
# What a statement must follow: without its only one, a body would be a syntax error.
_OPENING = re.compile(r"(?:\b(?:then|else|do)|[{(|&\\])\s*$")
_WHY_QUEUES = (
    "With one hardware queue, collectives and copies would not overlap with computation; if it is "
    "not set, there are 32."
)
_PLAIN_WORD = re.compile(r"(?:[^ \t\r\n\\]|\\(?!\r?\n))+")


class Handling(enum.Enum):
    """The result for a flag, as a title in the report."""

    REPLACED = "Called otherwise here (rewritten)"
    DELETED = "No effect here (deleted)"
    REMOVED = "Not supported here (deleted, as told)"
    UNSUPPORTED = "Not supported here (left: remove, or stay with Megatron-LM)"
    UNDECIDED = "Could not be decided (left)"
    UNKNOWN = "Unknown to both programs (left)"
    DEFAULT = "Not given, with another default here"


CHANGES = (Handling.REPLACED, Handling.DELETED, Handling.REMOVED)
LEFT = (Handling.UNSUPPORTED, Handling.UNDECIDED, Handling.UNKNOWN)  # for the user to decide


class Finding(NamedTuple):
    """A flag of the script that needs a change or a decision."""

    handling: Handling
    line: int  # from 1
    given: str  # as the script has it
    why: str
    use: tuple[str, ...] = ()  # its replacement


class Rewritten(NamedTuple):
    """A rewritten script with its findings."""

    text: str
    findings: list[Finding]
    num_flags: int


class _Piece(NamedTuple):
    """Words that belong together."""

    words: list[Token]
    name: str | None = None  # name of the array or string; None: a command

    @property
    def flags(self) -> list[str]:
        found = (_FLAG.fullmatch(word.raw) for word in self.words)
        return [flag[2] for flag in found if flag]


class _ScriptFlag(NamedTuple):
    """A flag of the script."""

    flag: str
    words: list[Token]  # the flag and its values
    values: list[str]  # with quotes; the value in `--flag=value` is not a word

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


class _Script:
    """The training commands of a script: programs and their flags."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ours = known_flags()
        switches = {flag for flag, field in self.ours.items() if field.scalar is bool}
        self._switches = megatron_switches() | switches
        self._tokens: list[Token] = []
        self._pieces = list(self._pieces_of(tokens_of(text)))
        self.variables = Variables(self._tokens)
        # Arrays and strings that hold flags: where they are expanded, more flags follow.
        self._names = {piece.name for piece in self._pieces if piece.name and piece.flags}
        self.given: list[_ScriptFlag] = []
        self.programs: list[Token] = []
        self._find_flags()
        self.given.sort(key=lambda given: given.start)
        self.programs.sort()

    def _pieces_of(self, tokens: Sequence[Token], name: str | None = None) -> Iterator[_Piece]:
        """Yields the pieces of a script, or of the string assigned to `name`."""
        self._tokens += tokens
        command, array = _Piece([], name), None
        for word in tokens:
            if word.kind == "array":
                array = _Piece([], word.raw.rstrip("+=("))
                yield array
            elif word.kind == "close":
                array = None
            elif word.kind == "body":
                yield from self._pieces_of(self._tokens_in(word.start, word.end))
            elif word.kind == "word":
                assigned, inner = self._inner(word)
                if array is not None:
                    words = [one for one in inner if one.kind == "word"]
                    array.words.extend(words or [word])
                    continue
                if inner:
                    yield from self._pieces_of(inner, assigned)
                if not assigned:
                    command.words.append(word)
            elif word.kind == "newline" and name is not None:
                pass  # bash splits an unquoted variable at its newlines
            elif array is None and word.kind != "redirection":
                yield command
                command = _Piece([], name)
        yield command

    def _inner(self, word: Token) -> tuple[str | None, list[Token]]:
        """Returns the variable that a word assigns, and the tokens in its quotes if they contain
        flags or a program. A single flag in quotes has no inner tokens.
        """
        found = _TEXT.fullmatch(word.raw)
        if found is None or not (found[1] or found[2]):
            return None, []
        is_command = _COMMAND.search(found[3]) is not None
        start, end = found.span(3)
        tokens = self._tokens_in(word.start + start, word.start + end, is_command=is_command)
        return found[1], tokens if found[1] or len(tokens) > 1 else []

    def _tokens_in(self, start: int, end: int, *, is_command: bool = True) -> list[Token]:
        """Returns the tokens of a script in a string or here-document, if it is one. In a string of
        arguments, quotes and operators are letters.
        """
        if not is_command:
            words = _PLAIN_WORD.finditer(self.text, start, end)
            return [Token("word", *word.span(), word[0]) for word in words]
        try:
            return tokens_of(self.text, start, end)
        except ShellSyntaxError:
            return []

    def _find_flags(self) -> None:
        used: set[str] = set()  # arrays and strings used by training, directly or through others
        elsewhere: set[str] = set()  # arrays and strings used by other commands
        programs = [self._program_in(piece) for piece in self._pieces]
        # A script uses an array after it has set it.
        for piece, program in reversed([*zip(self._pieces, programs, strict=True)]):
            before = self._references(piece.words[:program])
            if program is not None:
                used |= self._references(piece.words[program:])
            if piece.name is None or program is not None:
                elsewhere |= before
            elif piece.name in used:
                used |= before

        for piece, program in zip(self._pieces, programs, strict=True):
            if program is not None:
                self.programs.append(piece.words[program])
                self._add_flags(piece.words[program + 1 :])
            elif piece.name in used or (piece.name not in elsewhere and self._is_training(piece)):
                self._add_flags(piece.words)

    def _references(self, words: Iterable[Token]) -> set[str]:
        found = (one or two for word in words for one, two in _REFERENCE.findall(word.raw))
        return self._names.intersection(found)

    def files_of(self, word: Token) -> set[str]:
        """Returns the possible file names in a word."""
        paths = self.variables.expanded(word.raw) or (word.raw.strip("'\""),)
        return {PurePosixPath(path).name for path in paths}

    def single_queues(self) -> Iterator[Finding]:
        """Yields a finding for each place that leaves CUDA a single hardware queue. `line` is an
        offset, and `given` the text there that is deleted or replaced.
        """
        for word in self._tokens:
            found = _ONE_QUEUE.fullmatch(word.raw) if word.kind == "word" else None
            if found is None:
                continue
            start = self.text.rfind("\n", 0, word.start) + 1
            before = self.text[max(start - _CONTEXT, 0) : start]
            if _EXPORT_LINE.match(self.text, start) and not _OPENING.search(before):
                given = self.text[start : word.end]
                yield Finding(Handling.DELETED, start, given, _WHY_QUEUES)
            else:
                use = f"{found[1]}{_QUEUES}=32{found[1]}"
                yield Finding(Handling.REPLACED, word.start, word.raw, _WHY_QUEUES, (use,))

    def _program_in(self, piece: _Piece) -> int | None:
        """Returns the index of the training program in a command."""
        for index, word in enumerate(piece.words):
            begin = ("pretrain", "train", "finetune")
            if all(one.endswith(".py") and one.startswith(begin) for one in self.files_of(word)):
                return index
        return None

    def _is_training(self, piece: _Piece) -> bool:
        """Whether the words look like training flags although no program is known."""
        files = itertools.chain(*(self.files_of(word) for word in piece.words))
        if piece.name is None and any(name.endswith(".py") for name in files):
            return False
        known = [flag for flag in piece.flags if flag in self.ours or rows_for(flag)]
        # A command that names no Python program needs stronger evidence.
        fewest = 1 if piece.name else 4
        return len(known) >= fewest and 2 * len(known) > len(piece.flags)

    def _add_flags(self, words: Iterable[Token]) -> None:
        is_open = False  # whether words are values of the last flag
        for word in words:
            found = _FLAG.fullmatch(word.raw)
            is_array = _REFERENCE.fullmatch(word.raw) and self._references([word])
            if found is not None:
                values = [] if found[3] is None else [found[3]]
                self.given.append(_ScriptFlag(found[2], [word], values))
                is_open = found[3] is None and found[2] not in self._switches
            elif is_array or _MORE_FLAGS.match(word.raw):
                is_open = False
            elif is_open:
                self.given[-1].words.append(word)
                self.given[-1].values.append(word.raw)


class _Findings:
    """Decides about each flag of a script. `line` in its findings is an offset in the text."""

    def __init__(self, script: _Script, removes_unsupported: bool) -> None:
        self._script = script
        self._handlings = {
            Ruling.NO_EFFECT: Handling.DELETED,
            Ruling.REPLACE: Handling.REPLACED,
            Ruling.REMOVE: Handling.REMOVED if removes_unsupported else Handling.UNSUPPORTED,
        }
        self._settings: dict[str, Any] = {}  # known settings of the script, by field name
        batches: set[str] = set()
        for given in script.given:
            if field := script.ours.get(given.flag):
                is_on = given.flag != field.off_flag or field.scalar is not bool
                self._settings[field.name] = is_on
            if given.flag == "--global-batch-size":
                batches |= {" ".join(values) for values in self._values(given)}
        batch = batches.pop() if len(batches) == 1 else ""
        self._samples = int(batch) if re.fullmatch("[0-9]{1,19}", batch) else 0  # 0: not known

    def about_programs(self) -> Iterator[Finding]:
        """Yields findings about unsupported programs, and about the one different default that
        changes the model: the type of position embeddings.
        """
        for word in self._script.programs:
            if not self._script.files_of(word) <= {*_PROGRAMS}:
                why = f"The programs here are {' and '.join(_PROGRAMS)}."
                yield Finding(Handling.UNSUPPORTED, word.start, word.raw, why)
        flags = {given.flag for given in self._script.given}
        if self._script.programs and "--hidden-size" in flags and not flags & _POSITIONS:
            why = "Megatron-LM's default, learned_absolute, is not offered; here it is rope."
            start = self._script.programs[0].start
            yield Finding(Handling.DEFAULT, start, "--position-embedding-type", why)

    def about_flag(self, given: _ScriptFlag) -> Finding | None:
        """Returns the finding about a flag; None if this program accepts the flag as it is."""
        start, shown = given.start, " ".join(self._script.text[given.start : given.end].split())
        rows, is_ours = rows_for(given.flag), given.flag in self._script.ours
        if not is_ours and not rows:
            meant = flag_answers.meant_by(given.flag, self._script.ours)
            why = "Neither program has this flag." + (f" Did you mean {meant}?" if meant else "")
            return Finding(Handling.UNKNOWN, start, shown, why)

        values = self._values(given)
        answers = {self._answer(given.flag, one) for one in values}
        is_told = all(_UNKNOWN not in value for one in values for value in one)
        is_decided = is_told or not any(row.values for row in rows)
        if answers == {None} and is_ours and is_decided:
            return None
        (found, *others) = answers
        if found is None or others or not is_decided:
            why = self._why_undecided(given)
            return Finding(Handling.UNDECIDED, start, shown, why)
        found = self._in_the_scripts_words(given, found)
        if not found.is_complete:
            why = _NO_BATCH if "N" in found.use and self._samples == 0 else found.why
            return Finding(Handling.UNDECIDED, start, shown, why, found.use)
        return Finding(self._handlings[found.ruling], start, shown, found.why, found.use)

    def _answer(self, flag: str, values: tuple[str, ...]) -> Answer | None:
        given = flag_answers.Given(flag, values)
        found = flag_answers.answer(given, self._settings, self._samples)
        # A word after a switch need not be its value.
        return found if found is not None or not values else self._answer(flag, ())

    def _in_the_scripts_words(self, given: _ScriptFlag, found: Answer) -> Answer:
        """Keeps variables in the replacement rather than their values."""
        raw = " ".join(given.values)
        quote = given.words[0].raw[0]
        if quote in "'\"" and given.values and not given.words[1:]:
            raw = quote + raw + quote  # the quotes enclosed the flag, too
        by_raw = self._answer(given.flag, (raw,) if raw else ())
        is_same = by_raw is not None and by_raw.why == found.why and by_raw.is_complete
        return by_raw if by_raw is not None and is_same else found

    def _why_undecided(self, given: _ScriptFlag) -> str:
        values = sorted({value for row in rows_for(given.flag) for value in row.values})
        found = (names for raw in given.values for names in _REFERENCE.findall(raw))
        known_values = [
            f"${name} may be {' or '.join(sorted(known))}"
            for name in dict.fromkeys(one or two for one, two in found)
            if (known := self._script.variables.values.get(name))
        ]
        meaning = f"Its meaning here depends on its value ({', '.join(values)}, or another)"
        return f"{meaning}: {', '.join(known_values) or 'the script does not set it'}."

    def _values(self, given: _ScriptFlag) -> list[tuple[str, ...]]:
        """Returns all possible lists of values; `_UNKNOWN` replaces an unknown value."""
        choices: list[list[tuple[str, ...]]] = []
        for raw in given.values:
            is_split = "$" in raw and '"' not in raw
            known = self._script.variables.expanded(raw) or (_UNKNOWN,)
            choices.append([tuple(one.split()) if is_split else (one,) for one in known])
        combinations = itertools.islice(itertools.product(*choices), _MOST_COMBINATIONS)
        return [tuple(itertools.chain(*one)) for one in combinations]


def rewrite(text: str, *, removes_unsupported: bool = False) -> Rewritten:
    """Returns the script with flags of this program.

    Args:
        text: a bash script.
        removes_unsupported: flags that are not supported are deleted rather than left.

    Raises:
        ShellSyntaxError: the text is not a bash script.
    """
    if DELETED in text:
        raise ShellSyntaxError(text, text.index(DELETED), "a binary file")
    script = _Script(text)
    about = _Findings(script, removes_unsupported)
    findings = list(about.about_programs())
    edits: list[tuple[int, int, str]] = []
    for given in script.given:
        finding = about.about_flag(given)
        if finding is None:
            continue
        findings.append(finding)
        if finding.handling is Handling.REPLACED:
            edits.append((given.start, given.end, _written(text, given, finding.use)))
        elif finding.handling in CHANGES:
            edits += [(word.start, word.end, DELETED) for word in given.words]
    for finding in script.single_queues():
        findings.append(finding)
        end = finding.line + len(finding.given)
        edits.append((finding.line, end, "".join(finding.use) or DELETED))

    pieces: list[str] = []
    place = 0
    for start, end, new in sorted(edits):
        pieces += (text[place : max(start, place)], new)
        place = max(end, place)

    # Counting lines for each flag would be quadratic.
    line_ends = [found.start() for found in re.finditer("\n", text)]
    shown = [
        one._replace(line=bisect.bisect(line_ends, one.line) + 1, given=printable(one.given, SHOWN))
        for one in findings
    ]
    return Rewritten(without_deleted("".join((*pieces, text[place:]))), shown, len(script.given))


def _written(text: str, given: _ScriptFlag, use: Sequence[str]) -> str:
    """Returns the text of a replacement. It has no quotes of the old flag, which would join several
    words into one.
    """
    words = " ".join(use)
    if text.startswith(("<", ">"), given.end):
        words += " "  # otherwise a number would become part of the redirection
    is_assigned = text[max(given.start - 1, 0)] == "="  # NAME=--flag
    return f'"{words}"' if is_assigned and use[1:] else words


DELETED = "\0"  # mark of a deleted word
# Text to delete together with a mark, and its replacement, in order. Patterns for leading blanks
# start at the first blank, since a search from each of many blanks would be quadratic.
_DELETIONS = [
    # Consecutive deleted words, and quotes that are empty now.
    (r"\0(?:(?:[ \t\r\n]|\\\r?\n)*\0)+", "\0"),
    (r"(?<!=)(['\"])\0\1", "\0"),
    # The last line of a command, with the backslash before it that would join the next command.
    (r"(?<![ \t])[ \t]*\\\r?\n[ \t]*\0(?=[ \t\r]*$|['\"])", ""),
    (r"^[ \t]*\0[ \t]*\\?[ \t\r]*(?:\n|\Z)", ""),
    (r"^([ \t]*)\0[ \t]*", r"\1"),
    # Without the blank, `2 >log` would be `2>log`.
    (r"\0(?=[<>])", ""),
    # The blanks before the word, or after the first word.
    (r"(?<=[('\"])([ \t]*)\0[ \t]*", r"\1"),
    (r"(?<![ \t])[ \t]+\0", ""),
    (r"\0[ \t]*", ""),
]


def without_deleted(text: str) -> str:
    """Removes the marks of deleted words, and the blanks, lines and backslashes around them."""
    for pattern, kept in _DELETIONS:
        text = re.sub(pattern, kept, text, flags=re.MULTILINE)
    return text
