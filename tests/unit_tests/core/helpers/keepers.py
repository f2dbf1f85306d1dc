"""A process in place of the launcher of a job, and the keepers of such processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core import host_keeper


@contextmanager
def launcher(end: signal.Signals = signal.SIGKILL) -> Iterator[int]:
    """The process id of an idle process, which gets a signal at the end."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]

    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it

    with subprocess.Popen(command, preexec_fn=heed) as process:
        try:
            yield process.pid
        finally:
            process.send_signal(end)


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
