"""Progress bars of programs that go through a checkpoint's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, if that is a terminal.

    Args:
        what: is being done, in a word.
        total: bytes; None: unknown.

    Returns:
        A function that is called with each number of bytes done.
    """
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar:
        yield bar.update
