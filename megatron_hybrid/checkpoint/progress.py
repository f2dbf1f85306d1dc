"""Progress bars of programs that read or write checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Shows a bar on stderr if that is a terminal. Yields a function to call with bytes done.

    Args:
        what: a label.
        total: bytes; None: unknown.
    """
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar:
        yield bar.update
