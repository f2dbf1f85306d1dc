"""A process that stands for the launcher of a job, and the keepers of such processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core import host_keeper


@contextmanager
def launcher() -> Iterator[int]:
    """A process that does nothing, by its id; it is killed at the end."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def keepers_of(launcher: int) -> list[int]:
    """The process ids of a launcher's keepers."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # another kind of entry, or a process that has just ended
            continue
        if words[-3:-1] == [host_keeper.__file__.encode(), str(launcher).encode()]:
            found.append(int(folder.name))
    return found
