"""Signals for a thread that is not the main one.

Python runs signal handlers in the main thread alone, and only once that returns from what it calls:
never, if it sits in a collective whose peer is dead. But the bytes that `signal.set_wakeup_fd` has
it write come at once. (`signal.sigtimedwait` gets only signals that every thread of the process
blocks; gloo's and OpenMP's threads were there before, and do not.)
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
    """Tells a thread of the signals that this process gets."""

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
        """Signals reach the socket from now on. Outside of the main thread nothing is installed.

        Args:
            is_watching: whether a thread waits for them. In a process forked later, there is none.
        """
        if threading.current_thread() is not threading.main_thread():
            return

        self._is_watching = is_watching
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Without a handler of Python's a signal would not reach the socket.
        self._previous_handlers = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
            if _is_unhandled(number)
        }
        _installed.add(self)

    def uninstall(self) -> None:
        """Puts back what was there before."""
        _installed.discard(self)
        if self._previous_fd is None:
            return

        signal.set_wakeup_fd(self._previous_fd)
        self._previous_fd = None
        for number, handler in self._previous_handlers.items():
            if self.is_own(number):
                signal.signal(number, handler)

    def close(self) -> None:
        """For when nobody waits any more."""
        self._reader.close()
        self._writer.close()

    def is_own(self, number: signal.Signals) -> bool:
        """Whether nobody handles the signal but this."""
        return signal.getsignal(number) == self._handle

    def wake(self) -> None:
        """Ends a `wait`."""
        with contextlib.suppress(OSError):  # full: it ends anyway
            self._writer.send(b"\0")

    def wait(self, seconds: float) -> list[signal.Signals]:
        """The signals that have come, in order. Waits for the first one, or for a `wake`."""
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
        """For a forked process: its signals are not ours, and end it as they would any other."""
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(-1)
            for number in self._previous_handlers:
                if self.is_own(number):
                    signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread: leaves the signal to the watching thread, if there is one."""
        if not self._is_watching():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_unhandled(number: signal.Signals) -> bool:
    """Whether the program leaves a signal to Python or the system.

    At a Python prompt, a notebook's too, Ctrl-C must stay KeyboardInterrupt: whoever types it wants
    the prompt back.
    """
    handler = signal.getsignal(number)
    if handler is signal.default_int_handler:
        return not hasattr(sys, "ps1")
    return handler is signal.SIG_DFL


_installed: weakref.WeakSet[SignalSocket] = weakref.WeakSet()


# A signal that reached a forked process before its `forget` would be lost: Python drops what it has
# noted by then, and the handler would leave it to a thread that is not there. So signals are held
# back until then.
class _Fork(threading.local):
    """The signals that a thread had blocked before it forked; None: nothing was changed."""

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
