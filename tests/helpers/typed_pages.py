"""Pages whose commands a test types, and the titles that control the typing.

A block of bash is typed into the first terminal and must succeed, unless its title differs:

    ```bash
    ```bash title="Press Ctrl-C when it prints 75/500"
    ```bash title="Leave it running, and go on here when it prints 175/500"
    ```bash title="In a second terminal"

The next block of the first terminal waits for the command that was left running. A block of text
has some of the lines that the block above it prints; the second form has lines that the first
terminal prints meanwhile, the third differs from machine to machine:

    ```text
    ```text title="In the first terminal"
    ```text title="Something like"

Code hosts do not show titles, so the prose of a page repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?$')
_CTRL_C = "Press Ctrl-C when it prints "
_LEAVE = "Leave it running, and go on here when it prints "
_SECOND = "In a second terminal"
_FIRST = "In the first terminal"
_VARIES = "Something like"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNITS = re.compile(r"# (?:B|KiB|MiB|GiB|ms|s|min|h)(?=\W|$)")


class Printed(NamedTuple):
    """A block of output."""

    line: int  # of its fence
    text: str
    is_of_first: bool  # printed in the first terminal, whatever was typed last


class Typed(NamedTuple):
    """A block of commands, and the output that the page shows below it."""

    line: int  # of its fence
    commands: str
    is_second: bool  # typed into the second terminal
    interrupt_at: str | None  # Ctrl-C is typed once this is printed
    leave_at: str | None  # it keeps running; the page continues once this is printed
    printed: tuple[Printed, ...]


def typed_blocks(markdown: str) -> list[Typed]:
    """A page's blocks of bash, in order.

    Raises:
        ValueError: for a title of another form, and for output without a command.
    """
    blocks: list[Typed] = []
    for line, language, title, text in _fences(markdown):
        if language == "bash":
            blocks.append(_typed(line, title, text))
        elif language == "text" and title != _VARIES:
            if title not in ("", _FIRST) or not blocks:
                raise ValueError(
                    f"Expected output below a command, titled {_FIRST!r}, {_VARIES!r} or not at "
                    f"all, got a block titled {title!r} in line {line}."
                )
            printed = Printed(line, text, title == _FIRST)
            blocks[-1] = blocks[-1]._replace(printed=(*blocks[-1].printed, printed))
    return blocks


def _fences(markdown: str) -> Iterable[tuple[int, str, str, str]]:
    """(line, language, title, text) of each fenced block that names a language."""
    lines = markdown.splitlines()
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, start=1):
        if opened is not None and line.startswith("```"):
            yield *opened, "\n".join(lines[opened[0] : number - 1])
            opened = None
        elif line.startswith("```"):
            fence = _FENCE.match(line)
            language, title = (fence["language"], fence["title"] or "") if fence else ("", "")
            opened = (number, language, title)


def _typed(line: int, title: str, text: str) -> Typed:
    interrupt_at = title.removeprefix(_CTRL_C) if title.startswith(_CTRL_C) else None
    leave_at = title.removeprefix(_LEAVE) if title.startswith(_LEAVE) else None
    if title not in ("", _SECOND) and interrupt_at is None and leave_at is None:
        raise ValueError(
            f"Expected a title {_CTRL_C + '...'!r}, {_LEAVE + '...'!r}, {_SECOND!r} or none, got "
            f"{title!r} in line {line}."
        )
    return Typed(line, text, title == _SECOND, interrupt_at, leave_at, ())


def missing_lines(shown: str, output: str) -> list[str]:
    """The lines of a block of output that a command has not printed, in the order shown.

    Figures, and words that contain one, differ from run to run: any figure matches any other. Lines
    may be missing between the shown lines. `...` in a line matches any text.
    """
    printed = [_without_figures(line) for line in re.split(r"[\r\n]+", _ESCAPES.sub("", output))]
    missing, position = [], 0
    for line in shown.splitlines():
        parts = [_without_figures(part) for part in line.split("...")]
        wanted = re.compile(".*".join(re.escape(part) for part in parts))
        found = next((i for i in range(position, len(printed)) if wanted.search(printed[i])), None)
        if found is None:
            missing.append(line)
        else:
            position = found + 1
    return missing


def _without_figures(line: str) -> str:
    words = " ".join("#" if re.search(r"\d", word) else word for word in line.split())
    words = _UNITS.sub("#", words)
    return re.sub(r"#(?: #)+", "#", words)
