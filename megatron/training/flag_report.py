"""Formats an error about the flags of a launch script, grouped by required action. For example:

    1 setting cannot be used:
      Called otherwise here:
        --train-samples 160  use --train-iters 20. Runs count iterations of --global-batch-size
                             samples.
      No effect here (accepted; may be deleted):
        --use-mcore-models, --sequence-parallel

Groups without entries are omitted.
"""

from __future__ import annotations

import functools
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron.core.log import printable
from megatron.core.options import ConfigErrors
from megatron.training.flag_answers import SHOWN, Answer, Given, Ruling

_NOT_SUPPORTED = "Not supported here (remove, or stay with Megatron-LM)"
_CALLED_OTHERWISE = "Called otherwise here"
_WRONG = "Unknown, or wrong in itself"
_NO_EFFECT = "No effect here (accepted; may be deleted)"
_HELD = "\0"  # for a space at which no line ends
_WIDEST = 44  # of the first column: a longer entry has its line for itself
_MOST_CHARACTERS = 2000  # of an entry
# Flags, which have hyphens, stay whole.
_wrapped = functools.partial(
    textwrap.wrap, width=100, break_long_words=False, break_on_hyphens=False
)


class _FlagLine(NamedTuple):
    """A line of a group."""

    given: str  # the flag
    why: str = ""  # a sentence; shown once for consecutive entries that share it
    use: str = ""  # the replacement, with a verb; empty: none


class RefusedSettings(ConfigErrors):
    """Invalid settings, some of which are flags of Megatron-LM.

    Args:
        lines: one line for each error.
        refused: rejected flags of Megatron-LM, each with its file as a prefix.
        without_effect: accepted flags without effect.
    """

    def __init__(
        self,
        lines: Sequence[str],
        refused: Sequence[tuple[str, Answer]],
        without_effect: Sequence[Given],
    ) -> None:
        super().__init__(lines)
        others = dict.fromkeys(lines)
        self._groups: dict[str, list[_FlagLine]] = {_NOT_SUPPORTED: [], _CALLED_OTHERWISE: []}
        for where, found in refused:
            others.pop(where + str(found), None)
            title = _CALLED_OTHERWISE if found.ruling is Ruling.REPLACE else _NOT_SUPPORTED
            use = f"use {printable(shlex.join(found.use), SHOWN)}" if found.use else ""
            self._groups[title].append(_FlagLine(where + str(found.given), found.why, use))
        self._groups[_WRONG] = [_FlagLine("", line) for line in others]
        self._groups[_NO_EFFECT] = [_FlagLine(str(given)) for given in without_effect]

    def report(self) -> str:
        """Returns the message for a terminal, grouped by required action."""
        return "\n".join((self.heading(), *_laid_out(self._groups)))


def _laid_out(groups: Mapping[str, Iterable[_FlagLine]]) -> list[str]:
    """Returns the lines of all non-empty groups, by title, in two common columns."""
    shown = {title: found for title, entries in groups.items() if (found := list(entries))}
    with_reasons = [entry for entries in shown.values() for entry in entries if entry.why]
    widths = [len(printable(entry.given, _MOST_CHARACTERS)) for entry in with_reasons]
    column = max((width for width in widths if width <= _WIDEST), default=0)
    lines: list[str] = []
    for title, entries in shown.items():
        has_reasons = any(entry.why for entry in entries)
        lines.append(f"  {title}:")
        lines += _columns(entries, column) if has_reasons else _run_on(entries)
    return lines


def _run_on(entries: Sequence[_FlagLine]) -> list[str]:
    """Returns entries without reasons as a list. A flag and its value stay on one line."""
    held = (printable(entry.given, SHOWN).replace(" ", _HELD) for entry in entries)
    listed = _wrapped(", ".join(held), initial_indent="    ", subsequent_indent="    ")
    return [line.replace(_HELD, " ") for line in listed]


def _columns(entries: Sequence[_FlagLine], column: int) -> list[str]:
    lines: list[str] = []
    last_why = ""
    for entry in entries:
        given = printable(entry.given, _MOST_CHARACTERS)
        text = printable(entry.why, _MOST_CHARACTERS)
        if given and entry.why == last_why:
            text = entry.use or "the same"
        elif entry.use:
            text = f"{entry.use}. {text}"
        last_why = entry.why

        hanging = " " * (column + 6) if given else " " * 8
        first = f"    {given:<{column}}  " if given else "    "
        if len(given) > column:
            lines.append(f"    {given}")
            first = hanging
        lines += _wrapped(text, initial_indent=first, subsequent_indent=hanging)
    return lines
