"""Processes that end when the one that started them does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# torchrun gives its ranks 30 s to end before it kills them.
_GRACE_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 35.0}


@contextmanager
def started(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a new session. After the block, the process and its children have ended.

    Args:
        folder: Its working directory.
        log: Receives its output.
    """
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it by SIGTERM first, so that temporary directories are removed, and torchrun ends its
    ranks.
    """
    # torchrun's ranks have separate sessions, and no parent once it is gone.
    others = descendants(process.pid)
    try:
        for sent, grace in _GRACE_SECONDS.items():
            if process.poll() is not None:
                break
            _signal_group(process.pid, sent)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
    finally:
        # Also once the process is gone: others of its session may still be there.
        for group in (process.pid, *others):
            _signal_group(group, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> list[int]:
    """All descendants of a process. Linux only."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread may have ended
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _signal_group(pid: int, number: signal.Signals) -> None:
    """To the session that this process leads, if it does and is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
