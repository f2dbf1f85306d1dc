"""The generated blocks of a Markdown page, each between two markers on separate lines:

<!-- benchmarks:results begin -->
... written anew by `python -m benchmarks report` ...
<!-- benchmarks:results end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_MARKER = re.compile(r"<!-- benchmarks:(?P<name>[\w-]+) (?P<edge>begin|end) -->")


class Block(NamedTuple):
    """The lines between two markers: `lines[first:last]` of the page."""

    name: str
    first: int
    last: int


class MarkerError(ValueError):
    """The markers of a page do not pair up."""


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page, which is named in errors. A marker inside a line is not one."""
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    for index, line in enumerate(text.splitlines()):
        marker = _MARKER.fullmatch(line.strip())
        if marker is None:
            continue

        name = marker["name"]
        place = f"{page}:{index + 1}"
        if marker["edge"] == "begin":
            if opened is not None:
                raise MarkerError(
                    f"{place}: the block {opened[0]} must end before the block {name} begins."
                )
            opened = (name, index + 1)
        elif opened is None or opened[0] != name:
            raise MarkerError(f"{place}: the end of the block {name}, which has no start.")
        else:
            found.append(Block(name, opened[1], index))
            opened = None

    if opened is not None:
        raise MarkerError(f"{page}:{opened[1]}: the block {opened[0]} has no end.")
    return found


def content_of(text: str, block: Block) -> str:
    """The text between the markers, without the blank lines around it."""
    return "\n".join(text.splitlines()[block.first : block.last]).strip("\n")


def with_contents(page: str, text: str, render: Callable[[str], str]) -> str:
    """The page with every block's content replaced by `render(name)`."""
    lines = text.splitlines()
    # From the last, so that earlier blocks keep their line numbers.
    for block in reversed(blocks_of(page, text)):
        lines[block.first : block.last] = ["", *render(block.name).splitlines(), ""]
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")
