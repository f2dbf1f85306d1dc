"""Rewrites a launch script of Megatron-LM's for this program, flag by flag.

Only flags and their values change; all else stays as it is. What a variable holds is taken from
the script where it assigns a literal. Where it does not, a flag whose answer depends on it is left.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatron.core.log import printable
from megatron.training.arguments import known_flags
from megatron.training.flag_rows import SHOWN, Ruling
from megatron.training.flag_rows import Given as Flag
from megatron.training.megatron_flags import Answer, answer, megatrons_names, rows_for
from megatron.training.megatron_switches import MEGATRON_SWITCHES
from megatron.training.near_names import meant_by
from megatron_hybrid.megatron_scripts.edits import Edit, edited
from megatron_hybrid.megatron_scripts.script_flags import Given, ScriptFlags, ScriptReader, Word

_PROGRAMS = ("pretrain_gpt.py", "pretrain_vlm.py")
_POSITIONS = {"--position-embedding-type", "--use-rotary-position-embeddings"}
_MOST_COMBINATIONS = 64  # of the values that a flag's variables may have
_NO_BATCH = "N is its samples by --global-batch-size, which the script does not tell."
_UNKNOWN = "\0"  # stands for a value that the script does not tell


class Outcome(enum.Enum):
    """What became of a flag."""

    REPLACED = "called otherwise here"
    DELETED = "no effect here"
    REMOVED = "not supported here, deleted as told"
    UNSUPPORTED = "not supported here"
    UNDECIDED = "could not be decided"
    UNKNOWN = "unknown to both programs"
    DEFAULT = "not given, with another default here"

    @property
    def is_left(self) -> bool:
        """Whether it still stands in the script, for its user to decide."""
        return self in (Outcome.UNSUPPORTED, Outcome.UNDECIDED, Outcome.UNKNOWN)

    @property
    def is_change(self) -> bool:
        """Whether the script has changed."""
        return self in (Outcome.REPLACED, Outcome.DELETED, Outcome.REMOVED)


@dataclass(frozen=True)
class Finding:
    """A flag of the script that is not simply one of ours.

    Attributes:
        line: of the script, from 1.
        given: as the script has it.
        use: what has been written instead, or is to be.
    """

    outcome: Outcome
    line: int
    given: str
    why: str
    use: str = ""


@dataclass(frozen=True)
class Rewritten:
    """A rewritten script, and what has been found in it."""

    text: str
    findings: tuple[Finding, ...]
    num_flags: int


@dataclass(frozen=True)
class _Verdict:
    outcome: Outcome
    why: str
    use: tuple[str, ...] = ()


def rewrite(text: str, *, removes_unsupported: bool = False) -> Rewritten:
    """The script for this program.

    Args:
        text: of a bash script.
        removes_unsupported: flags that are not supported are deleted, and not left.

    Raises:
        ShellSyntaxError: the text is none.
    """
    flags = known_flags()
    switches = {flag for flag, field in flags.items() if field.scalar is bool}

    def takes_no_value(flag: str) -> bool:
        return flag in switches or flag in MEGATRON_SWITCHES

    def is_known(flag: str) -> bool:
        return flag in flags or bool(rows_for(flag))

    script = ScriptReader(text, takes_no_value, is_known).read()
    return _Rewriting(text, script, removes_unsupported).run()


class _Rewriting:
    def __init__(self, text: str, script: ScriptFlags, removes_unsupported: bool) -> None:
        self._text = text
        # Counting them for each of a hundred thousand flags would take minutes.
        self._line_ends = [found.start() for found in re.finditer("\n", text)]
        self._script = script
        self._removes_unsupported = removes_unsupported
        self._flags = known_flags()
        self._settings = self._ours()
        self._samples = self._global_batch_size()

    def run(self) -> Rewritten:
        findings = [self._program(word) for word in self._script.programs]
        findings.append(self._positions())
        edits: list[Edit] = []
        deleted: list[Given] = []
        for given in self._script.given:
            verdict = self._verdict(given)
            if verdict is None:
                continue
            outcome = verdict.outcome
            if outcome is Outcome.UNSUPPORTED and self._removes_unsupported:
                outcome = Outcome.REMOVED
            if outcome is Outcome.REPLACED:
                edits.append(self._replacement(given, verdict.use))
            elif not outcome.is_left:
                deleted.append(given)
            use = " ".join(verdict.use)
            findings.append(
                Finding(outcome, self._line(given.start), self._shown(given), verdict.why, use)
            )
        edits += self._deletions(deleted)
        shown = [finding for finding in findings if finding is not None]
        return Rewritten(edited(self._text, edits), tuple(shown), len(self._script.given))

    def _verdict(self, given: Given) -> _Verdict | None:
        """What becomes of a flag; None: it is one of ours, and stays."""
        is_ours = given.flag in self._flags
        if not is_ours and not rows_for(given.flag):
            meant = meant_by(given.flag, (*self._flags, *megatrons_names()))
            hint = "" if meant is None else f" Did you mean {meant}?"
            return _Verdict(Outcome.UNKNOWN, f"Neither program has this flag.{hint}")

        answers = {self._answer(given.flag, values) for values in self._values(given)}
        if answers == {None} and is_ours and not self._depends_on_unknown(given):
            return None
        verdicts = {_verdict_of(found) for found in answers}
        if len(verdicts) > 1 or self._depends_on_unknown(given):
            names = self._names_in(given)
            return _Verdict(Outcome.UNDECIDED, self._why_undecided(given, names))
        (verdict,) = verdicts
        if verdict is None and not is_ours:
            return _Verdict(Outcome.UNDECIDED, self._why_undecided(given, ()))
        return self._with_the_scripts_words(given, verdict)

    def _answer(self, flag: str, values: tuple[str, ...]) -> Answer | None:
        found = answer(Flag(flag, values), self._settings, self._samples)
        # Whether a switch is followed by a word is not for the table to say.
        return found if found is not None else answer(Flag(flag, ()), self._settings, 1)

    def _with_the_scripts_words(self, given: Given, verdict: _Verdict | None) -> _Verdict | None:
        """The verdict with values as the script has them: variables stay."""
        if verdict is None or verdict.outcome is not Outcome.REPLACED:
            return verdict
        raw = " ".join(self._text[slice(*span)] for span in self._value_spans(given))
        if given.value_behind_equals is not None and not given.word.is_inner:
            raw = self._quote_around(given) + raw + self._quote_around(given)
        by_raw = answer(Flag(given.flag, (raw,) if raw else ()), self._settings, self._samples)
        found = verdict
        if by_raw is not None and by_raw.why == verdict.why and by_raw.is_complete:
            found = _Verdict(Outcome.REPLACED, verdict.why, by_raw.use)
        blanks = Answer(Flag("", ()), Ruling.REPLACE, "", found.use)
        if not blanks.is_complete:
            why = _NO_BATCH if "N" in found.use and self._samples == 0 else verdict.why
            return _Verdict(Outcome.UNDECIDED, why, found.use)
        return found

    def _depends_on_unknown(self, given: Given) -> bool:
        """Whether other answers hold for other values, and the script does not tell the value."""
        is_told = all(_UNKNOWN not in value for one in self._values(given) for value in one)
        return not is_told and any(row.values for row in rows_for(given.flag))

    def _why_undecided(self, given: Given, names: Sequence[str]) -> str:
        values = sorted({value for row in rows_for(given.flag) for value in row.values})
        told = [
            f"${name} may be {' or '.join(sorted(known))}"
            for name, known in self._script.variables.shown(names).items()
            if known
        ]
        what = f"What it means here depends on its value ({', '.join(values)}, or another)"
        got = ", ".join(told) or "the script does not tell it"
        return f"{what}: {got}."

    def _values(self, given: Given) -> list[tuple[str, ...]]:
        """What the values may be, as far as the script tells; `_UNKNOWN` stands for others."""
        choices: list[list[tuple[str, ...]]] = []
        in_string = given.word.is_inner
        for start, end in self._value_spans(given):
            raw = self._text[start:end]
            known = self._script.variables.expanded(f'"{raw}"' if in_string else raw)
            is_split = in_string or '"' not in raw
            if known is None:
                choices.append([(_UNKNOWN,)])
            else:
                choices.append(
                    [tuple(one.split()) if is_split and "$" in raw else (one,) for one in known]
                )
        combinations = itertools.product(*choices)
        return [
            tuple(itertools.chain(*one))
            for one in itertools.islice(combinations, _MOST_COMBINATIONS)
        ]

    def _value_spans(self, given: Given) -> list[tuple[int, int]]:
        if given.value_behind_equals is not None:
            return [given.value_behind_equals]
        return [(word.start, word.end) for word in given.values]

    def _names_in(self, given: Given) -> list[str]:
        raws = (self._text[slice(*span)] for span in self._value_spans(given))
        return [name for raw in raws for name in self._script.variables.names_in(raw)]

    def _ours(self) -> dict[str, Any]:
        """The script's settings of ours, by field name, as far as it tells them."""
        settings: dict[str, Any] = {}
        for given in self._script.given:
            field = self._flags.get(given.flag)
            if field is not None:
                settings[field.name] = given.flag != field.off_flag or field.scalar is not bool
        return settings

    def _global_batch_size(self) -> int:
        """0: the script does not tell, or tells several."""
        found: set[str] = set()
        for given in self._script.given:
            if given.flag == "--global-batch-size":
                found |= {" ".join(values) for values in self._values(given)}
        text = found.pop() if len(found) == 1 else ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

    def _replacement(self, given: Given, use: Sequence[str]) -> Edit:
        """The edit that writes other words. Quotes around a flag go: several words may take its
        place, which one pair of quotes would make one.
        """
        words = " ".join(use)
        if self._text.startswith(("<", ">"), given.end):
            words += " "  # a number would be that of the redirection
        needs_quotes = given.word.is_assigned and len(use) > 1
        return Edit(given.start, given.end, f'"{words}"' if needs_quotes else words)

    def _quote_around(self, given: Given) -> str:
        """The quote in front of a flag, which goes around its value behind an equals sign, too."""
        first = self._text[given.start]
        return first if first in "'\"" else ""

    def _deletions(self, deleted: Sequence[Given]) -> list[Edit]:
        """Edits that delete these flags; a quoted word of which nothing is left goes as a whole."""
        words = [word for given in deleted for word in (given.word, *given.values)]
        gone = {given.start for given in deleted}
        remaining = {
            word.container
            for given in self._script.given
            if given.start not in gone
            for word in (given.word, *given.values)
        }
        edits: dict[tuple[int, int], Edit] = {}
        for word in words:
            start, end = word.start, word.end
            if word.container is not None and word.container not in remaining:
                start, end = word.container
            edits[start, end] = Edit(start, end)
        return list(edits.values())

    def _program(self, word: Word) -> Finding | None:
        """What is to be said of the program that a script starts."""
        raw = self._text[word.start : word.end]
        line = self._line(word.start)
        shown = printable(raw, SHOWN)
        paths = self._script.variables.expanded(raw)
        names = {PurePosixPath(path).name for path in paths or (raw.strip("'\""),)}
        if not names <= {*_PROGRAMS}:
            why = f"The programs here are {' and '.join(_PROGRAMS)}."
            return Finding(Outcome.UNSUPPORTED, line, shown, why)
        return None

    def _positions(self) -> Finding | None:
        """The one default whose difference changes the model: positions are not given."""
        flags = {given.flag for given in self._script.given}
        if not self._script.programs or "--hidden-size" not in flags or flags & _POSITIONS:
            return None
        why = "Megatron-LM's default, learned_absolute, is not offered; here it is rope."
        line = self._line(self._script.programs[0].start)
        return Finding(Outcome.DEFAULT, line, "--position-embedding-type", why)

    def _line(self, place: int) -> int:
        return bisect.bisect_left(self._line_ends, place) + 1

    def _shown(self, given: Given) -> str:
        return printable(" ".join(self._text[given.start : given.end].split()), SHOWN)


def _verdict_of(found: Answer | None) -> _Verdict | None:
    if found is None:
        return None
    outcome = {
        Ruling.NO_EFFECT: Outcome.DELETED,
        Ruling.REPLACE: Outcome.REPLACED,
        Ruling.REMOVE: Outcome.UNSUPPORTED,
    }[found.ruling]
    return _Verdict(outcome, found.why, found.use)


def left_over(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stand in the script still, for its user to decide."""
    return [finding for finding in findings if finding.outcome.is_left]
