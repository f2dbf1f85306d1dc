"""Signals for a thread that is not the main one.

Python runs signal handlers in the main thread alone, and only once that has come back from what it calls: never, if it
sits in a collective whose peer is dead. But the bytes that `signal.set_wakeup_fd` has it write come at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

# What schedulers and launchers end processes with.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SignalSocket:
    """Tells the watchdog's thread of signals, also while the main thread is in a call that does not return."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self._previous_fd: int | None = None
        self._previous_handler: Any = None

    def install(self, is_watching: Callable[[], bool]) -> None:
        """Signals reach the socket from now on. Outside of the main thread nothing is installed."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._is_watching = is_watching
            # Without a handler of Python's the signal would not reach the socket.
            self._previous_handler = signal.signal(signal.SIGTERM, self._handle)
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))

    def uninstall(self) -> None:
        """Puts back what was there before."""
        if self._previous_fd is None:
            return
        signal.set_wakeup_fd(self._previous_fd)
        self._previous_fd = None
        if self._previous_handler is not None and self.is_own(signal.SIGTERM):
            signal.signal(signal.SIGTERM, self._previous_handler)
        self._previous_handler = None

    def is_own(self, number: signal.Signals) -> bool:
        """Whether nobody handles the signal but this."""
        return signal.getsignal(number) == self._handle

    def wake(self) -> None:
        """Ends a `wait`."""
        with contextlib.suppress(OSError):  # full: it wakes anyway
            self._writer.send(b"\0")

    def wait(self, seconds: float) -> list[signal.Signals]:
        """The signals of interest that have come; waits so long for the first one, or a `wake`."""
        self._poll.poll(1000 * seconds)
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [number for number in _SIGNALS if int(number) in numbers]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread: leaves it to the watchdog, or does what would have been done without one."""
        if not self._is_watching():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _forget(reference: weakref.ref[SignalSocket]) -> None:
    """In a forked process, a data worker say: its signals are none of the rank's."""
    signals = reference()
    if signals is not None:
        signals.uninstall()
