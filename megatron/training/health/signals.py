"""Signals for a thread other than the main thread.

Python runs signal handlers only in the main thread, and only between bytecodes: never, if it is
blocked in a collective whose peer is dead. But the bytes of `signal.set_wakeup_fd` are written at
once. (`signal.sigtimedwait` needs all threads of the process to block the signals, and gloo's and
OpenMP's threads do not.)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

# Schedulers, launchers and terminals end processes with these.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender


class SignalSocket:
    """Delivers the signals of this process to a thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Forked processes, such as data workers, report their own signals to the same socket.
        self._tells_sender = hasattr(socket, "SO_PASSCRED")
        if self._tells_sender:
            self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self._previous_fd: int | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def install(self, is_watching: Callable[[], bool]) -> None:
        """Delivers signals to the socket from now on. Has no effect outside of the main thread.

        Args:
            is_watching: returns whether a thread waits for signals, unlike in a forked process.
        """
        if threading.current_thread() is not threading.main_thread():
            return

        self._is_watching = is_watching
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Python writes to the socket only for signals with a Python handler.
        self._previous_handlers = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
            if _is_unhandled(number)
        }
        _installed.add(self)

    def uninstall(self) -> None:
        """Restores the earlier handlers and descriptor."""
        _installed.discard(self)
        if self._previous_fd is None:
            return

        signal.set_wakeup_fd(self._previous_fd)
        self._previous_fd = None
        for number, handler in self._previous_handlers.items():
            if self.is_own(number):
                signal.signal(number, handler)

    def close(self) -> None:
        """Closes the socket, once no thread waits for it."""
        self._reader.close()
        self._writer.close()

    def is_own(self, number: signal.Signals) -> bool:
        """Returns whether this object handles the signal."""
        return signal.getsignal(number) == self._handle

    def wake(self) -> None:
        """Ends a `wait`."""
        with contextlib.suppress(OSError):  # full: it ends anyway
            self._writer.send(b"\0")

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Waits for a signal or a `wake`. Returns the received signals in order."""
        self._poll.poll(1000 * seconds)
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, extra, *_ = self._reader.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                senders = [_CREDENTIALS.unpack(item)[0] for *_, item in extra]
                if not self._tells_sender or os.getpid() in senders:
                    numbers.extend(data)
        return [signal.Signals(number) for number in numbers if number in _SIGNALS]

    def forget(self) -> None:
        """Restores the default handlers in a forked process."""
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(-1)
            for number in self._previous_handlers:
                if self.is_own(number):
                    signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Runs in the main thread: leaves the signal to the watching thread, if one runs."""
        if not self._is_watching():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_unhandled(number: signal.Signals) -> bool:
    """Returns whether a signal has the default handler of Python or the system.

    At a Python prompt and in notebooks, Ctrl-C must stay KeyboardInterrupt.
    """
    handler = signal.getsignal(number)
    if handler is signal.default_int_handler:
        return not hasattr(sys, "ps1")
    return handler is signal.SIG_DFL


_installed: weakref.WeakSet[SignalSocket] = weakref.WeakSet()


# A signal that reaches a forked process before its `forget` would be lost: Python drops pending
# signals, and the handler would leave it to a missing thread. So signals are blocked until then.
class _Fork(threading.local):
    """The signals that a thread had blocked before it forked; None without a change."""

    mask: set[signal.Signals | int] | None = None


_fork = _Fork()


def _hold_signals() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if _installed else None


def _release_signals() -> None:
    mask, _fork.mask = _fork.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_all() -> None:
    for one in list(_installed):
        one.forget()
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_all
)
