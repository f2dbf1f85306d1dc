"""A row of the table of Megatron-LM's flags (megatron_flags.py), and a flag that it may answer."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.log import printable

SHOWN = 200  # characters of a given flag in a message


class Given(NamedTuple):
    """A flag with its values, as a command line or a YAML file gives it."""

    flag: str  # with its dashes
    values: tuple[str, ...]

    def __str__(self) -> str:
        return printable(" ".join((self.flag, *self.values)), SHOWN)


class Ruling(enum.Enum):
    """What becomes of a flag of Megatron-LM's."""

    NO_EFFECT = "changes nothing here, and is accepted"
    REMOVE = "asks for what is not offered, or would be misread"
    REPLACE = "is called otherwise here"


@dataclass(frozen=True)
class MegatronFlags:
    """Flags of Megatron-LM's that have one answer.

    Attributes:
        names: the flags; `*` stands for any characters.
        why: one sentence.
        values: the answer is for these alone; empty: for all.
        use: what to write instead. {value} is the flag's own, {iterations} what its number of
            samples makes. Words in capitals are for the user to fill in.
        unless: the answer does not hold where this option, a field's name, is on.
    """

    names: tuple[str, ...]
    ruling: Ruling
    why: str
    values: tuple[str, ...] = ()
    use: str = ""
    unless: str | None = None

    def covers(self, given: Given, settings: Mapping[str, Any]) -> bool:
        """Whether this answers `given`, beside the run's other settings by field name."""
        if self.values and " ".join(given.values) not in self.values:
            return False
        if self.unless is not None and settings.get(self.unless):
            return False
        # What is ignored is not looked at: two words after it are one too many.
        if self.ruling is Ruling.NO_EFFECT and not self.values and len(given.values) > 1:
            return False
        return self.answers(given.flag)

    def answers(self, flag: str) -> bool:
        """Whether this answers a flag with some value."""
        return any(fnmatch.fnmatchcase(flag, name) for name in self.names)


def no_effect(names: str, why: str, *values: str, unless: str | None = None) -> MegatronFlags:
    """A row of flags that change nothing here."""
    return MegatronFlags(tuple(names.split()), Ruling.NO_EFFECT, why, values, unless=unless)


def remove(names: str, why: str, *values: str) -> MegatronFlags:
    """A row of flags that are not supported."""
    return MegatronFlags(tuple(names.split()), Ruling.REMOVE, why, values)


def replace(
    names: str, use: str, why: str, *values: str, unless: str | None = None
) -> MegatronFlags:
    """A row of flags that are called otherwise."""
    return MegatronFlags(tuple(names.split()), Ruling.REPLACE, why, values, use, unless)
