"""Edits of a script's text that leave everything around them as it is, and the script a script.

A word that is deleted takes its line along where nothing else stands there, and otherwise the
blanks in front of it. The backslash at the end of the line before goes where it would join that
line to one that does not belong to the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_GAP = re.compile(r"(?:[ \t\r\n]|\\\r?\n)*")
_BLANKS = " \t"
_OPENING = ("(", '"', "'")


@dataclass(frozen=True)
class Edit:
    """`text[start:end]` becomes `new`; empty: it is deleted."""

    start: int
    end: int
    new: str = ""


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text after edits that do not overlap."""
    pieces: list[str] = []
    place = 0
    for edit in _ranges(text, sorted(edits, key=lambda edit: edit.start)):
        start = max(edit.start, place)
        pieces += (text[place:start], edit.new)
        place = max(edit.end, place)
    return "".join((*pieces, text[place:]))


def _ranges(text: str, edits: list[Edit]) -> Iterable[Edit]:
    """The edits, deletions that follow each other as one, with what goes beside them."""
    waiting: Edit | None = None
    for edit in edits:
        if waiting is not None and not edit.new and _GAP.fullmatch(text, waiting.end, edit.start):
            waiting = Edit(waiting.start, edit.end)
            continue
        if waiting is not None:
            yield _deletion(text, waiting.start, waiting.end)
        waiting = None if edit.new else edit
        if edit.new:
            yield edit
    if waiting is not None:
        yield _deletion(text, waiting.start, waiting.end)


def _deletion(text: str, start: int, end: int) -> Edit:
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    before, after = text[line_start:start], text[end:line_end].strip()
    if before.strip():
        return _within_a_line(text, start, end)

    follows_backslash = _ends_in_backslash(text, line_start)
    is_last = after == "" or text.startswith(('"', "'"), end)
    if is_last and follows_backslash:
        # The line before is the command's last one now.
        return Edit(_before_backslash(text, line_start), end)
    if after in ("", "\\"):
        return Edit(line_start, min(line_end + 1, len(text)))
    return Edit(start, _past_blanks(text, end))


def _within_a_line(text: str, start: int, end: int) -> Edit:
    first = start
    while first > 0 and text[first - 1] in _BLANKS:
        first -= 1
    if text.startswith(("<", ">"), end):
        return Edit(start, end)  # without the blank, `2 >log` would be `2>log`
    if first == start or text[first - 1] in _OPENING:
        return Edit(start, _past_blanks(text, end))
    return Edit(first, end)


def _ends_in_backslash(text: str, line_start: int) -> bool:
    """Whether the line before this one goes on in it."""
    return text.endswith(("\\\n", "\\\r\n"), max(line_start - 3, 0), line_start)


def _before_backslash(text: str, line_start: int) -> int:
    place = text.rindex("\\", 0, line_start)
    while place > 0 and text[place - 1] in _BLANKS:
        place -= 1
    return place


def _past_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in _BLANKS:
        place += 1
    return place
