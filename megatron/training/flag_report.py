"""What is said of a launch script's flags, grouped by what to do: for an error and for the program
that rewrites scripts.

    2 settings cannot be used:
      Not supported here (remove, or stay with Megatron-LM):
        --fp8-format hybrid  Compute in fp8 or fp4 is not offered; --bf16 is.
      Called otherwise here:
        --train-samples 160  use --train-iters 20. Runs count iterations of --global-batch-size
                             samples.
      No effect here (accepted; may be deleted):
        --use-mcore-models, --sequence-parallel
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.log import printable
from megatron.core.options import ConfigErrors
from megatron.training.flag_rows import SHOWN, Given, Ruling
from megatron.training.megatron_flags import Answer

WIDTH = 100
NOT_SUPPORTED = "Not supported here (remove, or stay with Megatron-LM)"
CALLED_OTHERWISE = "Called otherwise here"
NO_EFFECT = "No effect here (accepted; may be deleted)"
_WRONG = "Unknown, or wrong in itself"
_INDENT = "  "
_HELD = "\0"  # for a space at which no line ends
_WIDEST = 44  # of the first column: a longer entry has its line for itself
_MOST_CHARACTERS = 2000  # of an entry


@dataclass(frozen=True)
class FlagLine:
    """A line of a group.

    Attributes:
        given: the flag as it was given.
        use: what to write instead; empty: nothing.
        why: a sentence, which entries that follow each other may share: it is shown once.
    """

    given: str
    why: str = ""
    use: str = ""

    @classmethod
    def of(cls, found: Answer, given: str | None = None) -> FlagLine:
        """The entry for an answer.

        Args:
            given: the flag with its place; default: without.
        """
        use = printable(shlex.join(found.use), SHOWN)
        return cls(str(found.given) if given is None else given, found.why, use)


@dataclass(frozen=True)
class FlagGroup:
    """Entries under one title. Those that have nothing beside them run on, with commas.

    Attributes:
        verb: before what is written instead.
    """

    title: str
    entries: tuple[FlagLine, ...]
    verb: str = "use"


class RefusedSettings(ConfigErrors):
    """Settings that cannot be used, with flags of Megatron-LM's among them.

    Args:
        lines: all that is wrong, a line each.
        refused: the flags of Megatron-LM's among them, each with its place in front.
        wrong: the other lines.
        without_effect: flags that are accepted.
    """

    def __init__(
        self,
        lines: Sequence[str],
        refused: Sequence[tuple[str, Answer]],
        wrong: Sequence[str],
        without_effect: Sequence[Given],
    ) -> None:
        super().__init__(lines)
        entries = {
            ruling: tuple(
                FlagLine.of(found, where + str(found.given))
                for where, found in refused
                if found.ruling is ruling
            )
            for ruling in (Ruling.REMOVE, Ruling.REPLACE)
        }
        self._groups = (
            FlagGroup(NOT_SUPPORTED, entries[Ruling.REMOVE]),
            FlagGroup(CALLED_OTHERWISE, entries[Ruling.REPLACE]),
            FlagGroup(_WRONG, tuple(FlagLine("", line) for line in wrong)),
            FlagGroup(NO_EFFECT, tuple(FlagLine(str(given)) for given in without_effect)),
        )

    def report(self) -> str:
        """The message for a terminal: grouped by what to do."""
        return "\n".join((self.heading(), *laid_out(self._groups)))


def laid_out(groups: Iterable[FlagGroup]) -> list[str]:
    """The lines of those groups that have entries, in two columns that all of them share."""
    shown = [group for group in groups if group.entries]
    with_reasons = [entry for group in shown for entry in group.entries if entry.why]
    widths = [len(printable(entry.given, _MOST_CHARACTERS)) for entry in with_reasons]
    column = max((width for width in widths if width <= _WIDEST), default=0)
    lines: list[str] = []
    for group in shown:
        lines.append(f"{_INDENT}{group.title}:")
        lines += _lines_of(group, column)
    return lines


def _lines_of(group: FlagGroup, column: int) -> list[str]:
    if not any(entry.why for entry in group.entries):
        # A flag and its value stay on one line.
        held = (printable(entry.given, SHOWN).replace(" ", _HELD) for entry in group.entries)
        listed = _wrapped(", ".join(held), 2 * _INDENT, 2 * _INDENT)
        return [line.replace(_HELD, " ") for line in listed]

    lines: list[str] = []
    last_why = ""
    for entry in group.entries:
        beside = _beside(entry, group.verb, last_why)
        last_why = entry.why
        if not entry.given:
            lines += _wrapped(beside, 2 * _INDENT, 4 * _INDENT)
            continue
        given = printable(entry.given, _MOST_CHARACTERS)
        hanging = 2 * _INDENT + " " * (column + len(_INDENT))
        if len(given) > column:
            lines.append(2 * _INDENT + given)
            lines += _wrapped(beside, hanging, hanging)
        else:
            first = f"{2 * _INDENT}{given:<{column}}{_INDENT}"
            lines += _wrapped(beside, first, hanging)
    return lines


def _beside(entry: FlagLine, verb: str, last_why: str) -> str:
    """The second column. A reason is not said twice in a row."""
    why = printable(entry.why, _MOST_CHARACTERS)
    if entry.use:
        use = f"{verb} {entry.use}"
        return use if entry.why == last_why else f"{use}. {why}"
    return "the same" if entry.given and entry.why == last_why else why


def _wrapped(text: str, first: str, hanging: str) -> list[str]:
    """`text` in lines of `WIDTH`. Flags, which have hyphens, stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
