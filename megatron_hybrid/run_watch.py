"""Looks at a run again and again until it has ended, and shows what it sees in place."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

_UP_AND_CLEAR = "\x1b[{}F\x1b[J"  # to the beginning of the line so many above; all below is erased
_FEWEST_COLUMNS = 20


class View(NamedTuple):
    """What there is to see of a run at a moment."""

    lines: Sequence[str]
    is_live: bool
    exit_code: int


def watch(
    look: Callable[[], View],
    stream: TextIO,
    seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
) -> int:
    """Shows views until one is of a run that has ended; returns that one's exit code.

    On a terminal each view takes the place of the one before. A look that fails is shown too, and
    the next one may go well: a file system may be away for a moment, or a disk full.

    Args:
        look: OSError if it could not be done. The first look must succeed.
        seconds: between two looks.
    """
    is_terminal = stream.isatty()
    num_shown = 0
    view = look()
    while True:
        num_shown = _show(view.lines, stream, num_shown, columns() if is_terminal else None)
        if not view.is_live:
            return view.exit_code
        sleep(seconds)
        try:
            view = look()
        except OSError as error:
            view = view._replace(lines=[*view.lines[: _num_lines(view)], f"not seen: {error}"])


def _num_lines(view: View) -> int:
    """Without the line that says that a look has failed."""
    return len(view.lines) - view.lines[-1].startswith("not seen: ")


def _show(lines: Sequence[str], stream: TextIO, num_before: int, columns: int | None) -> int:
    """Prints the lines in the place of the last ones; returns how many lines of the terminal they
    take.
    """
    if columns is None:
        print("\n".join(lines), end="\n\n", file=stream, flush=True)
        return 0

    # Wrapped here, since lines that the terminal wraps cannot be counted.
    width = max(columns - 1, _FEWEST_COLUMNS)
    shown = [part for line in lines for part in textwrap.wrap(line, width) or [""]]
    clear = _UP_AND_CLEAR.format(num_before) if num_before else ""
    print(clear + "\n".join(shown), file=stream, flush=True)
    return len(shown)
