"""Looks up flags of Megatron-LM that this program lacks, in the table flag_answers.yaml.

Launch scripts for Megatron-LM pass many flags for behaviour that is fixed here (a distributed
optimizer), for kernels, or for dimensions of parallelism of size 1. These flags are accepted. Flags
that request an unsupported feature are an error with a suggestion, and so are values of shared
flags that only Megatron-LM supports.
"""

from __future__ import annotations

import difflib
import enum
import fnmatch
import functools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron.core.log import printable

SHOWN = 200  # characters of a given flag in a message
_MOST_DIGITS = 20  # of a number of samples
# Placeholders in `AnswerRow.use` for a path or a number that the user fills in.
_BLANKS = frozenset(("FILE", "N", "FRACTION", "MINUTES"))
_ALIKE = 0.9  # least similarity of a misspelt flag and its correction
# Parts that must be equal in a misspelt flag and its correction.
_MEANING = re.compile(r"^--no-|^--disable-|\d+")


class Given(NamedTuple):
    """A flag with its values, as a command line or a YAML file gives it."""

    flag: str  # with its dashes
    values: tuple[str, ...]

    def __str__(self) -> str:
        return printable(" ".join((self.flag, *self.values)), SHOWN)


class Ruling(enum.Enum):
    """How this program treats a flag of Megatron-LM."""

    NO_EFFECT = "no effect"
    REMOVE = "remove"
    REPLACE = "replace"


@dataclass(frozen=True)
class AnswerRow:
    """A row of the table: flags with the same ruling. The file's comment describes the fields."""

    flags: Sequence[str]
    ruling: Ruling
    why: str
    values: Sequence[str] = ()
    use: str = ""
    unless: str = ""

    def covers(self, given: Given, settings: Mapping[str, Any]) -> bool:
        """Whether the row applies to `given` in a run with other settings, by field name."""
        if self.values and " ".join(given.values) not in self.values:
            return False
        if self.unless and settings.get(self.unless.lstrip("-").replace("-", "_")):
            return False
        # Values of an ignored flag are not checked, but two words after it are one too many.
        return self.ruling is not Ruling.NO_EFFECT or len(given.values) <= 1


@dataclass(frozen=True)
class Answer:
    """How this program treats a given flag. Instances for different values may be equal."""

    given: Given = field(compare=False)
    ruling: Ruling
    why: str
    use: tuple[str, ...] = ()  # words to write instead; empty: remove the flag

    @property
    def is_complete(self) -> bool:
        """Whether `use` can be written as it is: no word is left for the user to fill in."""
        return _BLANKS.isdisjoint(self.use)

    def __str__(self) -> str:
        written = printable(shlex.join(self.use), SHOWN)
        action = f"use {written} instead" if self.use else "remove it"
        return f"{self.given}: {action}. {self.why}"


def answer(given: Given, settings: Mapping[str, Any], samples_per_iteration: int) -> Answer | None:
    """Returns how a given flag is treated; None if the table does not have it.

    Args:
        settings: the run's settings, by field name.
        samples_per_iteration: the global batch size; 0: it is not known.
    """
    for row in _rows_for(given.flag):
        if row.covers(given, settings):
            iterations = _iterations(given.values, samples_per_iteration)
            value = " ".join(given.values)
            use = (word.format(value=value, iterations=iterations) for word in row.use.split())
            return Answer(given, row.ruling, row.why, tuple(use))
    return None


def _iterations(values: tuple[str, ...], samples_per_iteration: int) -> str:
    """A number of samples in iterations. Like Megatron-LM, this drops the remainder."""
    text = "".join(values)
    is_number = text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
    if not is_number or (samples_per_iteration == 0 and int(text) > 0):
        return "N"
    # Zero samples stay zero; any other number is at least one iteration.
    return str(max(int(text) // max(samples_per_iteration, 1), min(int(text), 1)))


@functools.cache
def answer_rows() -> tuple[AnswerRow, ...]:
    """Returns the table. The first row that covers a flag applies."""
    # Every scalar is text. libyaml's parser is eight times faster, where PyYAML has it.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    table = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), loader)
    rows = ({**row, "ruling": Ruling(row["ruling"])} for row in table["answers"])
    return tuple(AnswerRow(**row) for row in rows)


@functools.lru_cache(maxsize=4096)
def _rows_for(flag: str) -> tuple[AnswerRow, ...]:
    """Returns the rows that name a flag, in the order of the table."""
    return tuple(
        row for row in answer_rows() if any(fnmatch.fnmatchcase(flag, name) for name in row.flags)
    )


def meant_by(flag: str, ours: Iterable[str]) -> str | None:
    """Returns the known flag that `flag` misspells, or None. A negation of the flag, or a name with
    another number, is a different flag and not a correction.
    """
    flag, meaning = flag.replace("_", "-"), _MEANING.findall(flag)
    theirs = (name for row in answer_rows() for name in row.flags if "*" not in name)
    names = [name for name in (*ours, *theirs) if _MEANING.findall(name) == meaning]
    closest = difflib.get_close_matches(flag, names, n=1, cutoff=_ALIKE)
    return closest[0] if closest else None
