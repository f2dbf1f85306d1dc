"""A pseudo-terminal, for programs that behave differently at one, and to type Ctrl-C as a user
does: the byte goes to the terminal, whose driver signals every process in the foreground.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.functional_tests.helpers.recovery_scenes import ROOT, TIMEOUT, environment

CTRL_C = b"\x03"


class Process(Protocol):
    """What multiprocessing's and subprocess's processes have in common."""

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None: ...


class Terminal:
    """A pseudo-terminal. What is printed to it is read as it comes, since its buffer is small."""

    def __init__(self) -> None:
        self._master, self.slave = os.openpty()
        self.name = os.ttyname(self.slave)
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def wait_for(self, text: str, since: int = 0, timeout: float = TIMEOUT) -> None:
        """Waits until a text is printed.

        Args:
            since: the position in `text` behind which it must be.
            timeout: in seconds.
        """
        deadline = time.monotonic() + timeout
        while text not in self.text[since:]:
            assert time.monotonic() < deadline, f"expected {text!r}, got\n{self.text}"
            time.sleep(0.01)

    def read_to_the_end(self) -> str:
        """All that was printed, once no process has the terminal open."""
        os.close(self.slave)
        self._reader.join(TIMEOUT)
        assert not self._reader.is_alive(), f"a process still holds the terminal:\n{self.text}"
        os.close(self._master)
        return self.text

    @property
    def text(self) -> str:
        return bytes(self._output).decode(errors="replace").replace("\r\n", "\n")

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._output += data
        except OSError:  # on Linux, the end
            pass


@contextmanager
def killed_at_the_end(process: Process) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


@contextmanager
def typed_at(
    command: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Terminal, Any]]:
    """A command in the foreground of a terminal of its own.

    Args:
        env: its environment; default: this process's, without the ranks of a torchrun.
    """
    terminal = Terminal()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what started the tests may ignore it

    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment() if env is None else env,
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    with killed_at_the_end(process):
        yield terminal, process
