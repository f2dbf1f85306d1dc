"""Signals for a thread other than the main thread, and the effect of Ctrl-C on a run.

Python runs signal handlers only in the main thread, and only between bytecodes: never, if it is
blocked in a collective whose peer is dead. But the bytes of `signal.set_wakeup_fd` are written at
once. (`signal.sigtimedwait` needs all threads of the process to block the signals, and gloo's and
OpenMP's threads do not.)

With `--exit-signal-handler`, the run saves and exits at the first SIGINT, and exits at once at the
second one. Without the flag, it exits at once at the first one. KeyboardInterrupt is raised in
neither case: it would not reach a main thread that waits in a collective, and the other ranks would
report a failed connection. Instead `StopConditions` records the first SIGINT, and the watchdog's
thread ends the process at any place of the main thread.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

# Schedulers, launchers and terminals end processes with these.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender
# Some programs forward a SIGINT to a child that also gets it from the terminal: one Ctrl-C arrives
# twice within milliseconds.
_SAME_PRESS_SECONDS = 0.5


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


class Press(enum.Enum):
    """The meaning of a SIGINT."""

    FIRST = enum.auto()
    ECHO = enum.auto()  # the first one, received again
    SECOND = enum.auto()  # exit at once


class Presses:
    """Distinguishes a second Ctrl-C from the first one that arrives twice.

    SIGTERM does not count: torchrun's agent sends it if Ctrl-C is pressed while its ranks save.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None

    def add(self) -> Press:
        """Counts a SIGINT that was just received."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return Press.FIRST
        return Press.ECHO if now - self._first < _SAME_PRESS_SECONDS else Press.SECOND


@dataclass(frozen=True)
class OnInterrupt:
    """The log lines for a SIGINT.

    In each line, `when` is the rank's progress, such as "in iteration 17, forward".

    Attributes:
        is_handled: whether `--exit-signal-handler` is set.
        saves: whether `--save` is set.
        is_elastic: whether torchrun started this rank.
    """

    is_handled: bool = False
    saves: bool = False
    is_elastic: bool = False

    def first(self, when: str, is_saved: bool) -> str:
        """Returns the line for the first SIGINT with `--exit-signal-handler`.

        Args:
            is_saved: whether the present state is saved.
        """
        next_step = "the run will finish its step, save and end."
        if is_saved:
            next_step = "its state is saved, and the run ends after the present step."
        elif not self.saves:
            next_step = "the run will finish its step and end without saving, as --save is not set."
        if self.is_elastic:
            limit = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
            more = f"torchrun kills it after {limit} s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)."
        else:
            more = "A second Ctrl-C ends it at once."
        return f"SIGINT {when}: {next_step} {more}"

    def unhandled(self, when: str, has_trained: bool, is_saved: bool) -> str:
        """Returns the line for a SIGINT that ends the run at once.

        Args:
            has_trained: whether this start of the run has completed a step.
            is_saved: whether the present state is saved.
        """
        if not has_trained:
            return f"SIGINT ends the run {when}, before its first step."
        if not self.saves:
            return f"SIGINT ends the run {when}. It is not saved, as --save is not set."
        if is_saved:
            return f"SIGINT ends the run {when}. Its state is saved."
        return (
            f"SIGINT ends the run {when}. Its steps since the last checkpoint are lost; "
            "--exit-signal-handler saves first."
        )
