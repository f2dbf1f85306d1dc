"""Threads of tests that may be held up."""

from __future__ import annotations

import threading
from collections.abc import Callable

A_MOMENT = 0.05  # seconds in which what is not held back would have happened
_LONG = 10.0  # longer than anything takes that does not hang


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread, seconds: float = _LONG) -> bool:
    """Whether a thread ends within so many seconds."""
    thread.join(seconds)
    return not thread.is_alive()
