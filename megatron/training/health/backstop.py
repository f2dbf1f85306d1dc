"""The backstop: a timer that ends the process if the watchdog's thread no longer runs.

A thread that holds Python's lock and never returns it stops all others, also the watchdog's. The
other ranks name this one and end, but it would keep its device and port. `faulthandler` has a timer
in C, which needs no lock: it prints the stacks of all threads and exits with 1, unless it is armed
anew in time.

The timer is one of the process. It also counts time in which the process was stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time

# Each start makes a thread, so looks in between do not start the timer again.
_STARTS_PER_PERIOD = 8
_STDERR = 2  # sys.stderr may be anything


class Backstop:
    """Ends this process unless it is armed again in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: float | None = None  # None: off
        self._started_at = 0.0

    def arm(self, seconds: float) -> None:
        """Ends the process after so many seconds, or up to an eighth less, unless it is called
        again.
        """
        with self._lock:
            passed = time.monotonic() - self._started_at
            if seconds != self._seconds or passed >= seconds / _STARTS_PER_PERIOD:
                self._start(seconds)

    def cancel(self) -> None:
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
            self._seconds = None

    def before_fork(self) -> None:
        """Stops the timer: a child would wait for its thread, which it lacks, when it exits."""
        self._lock.acquire()
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()

    def after_fork(self, *, is_child: bool) -> None:
        """Starts the timer again in the parent alone."""
        if is_child:
            self._seconds = None
        elif self._seconds is not None:
            self._start(self._seconds)
        self._lock.release()

    def _start(self, seconds: float) -> None:
        # Without another thread, or beyond the range of a clock, training continues unguarded.
        with contextlib.suppress(RuntimeError, OverflowError):
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
        self._seconds, self._started_at = seconds, time.monotonic()


OF_THIS_PROCESS = Backstop()
os.register_at_fork(
    before=OF_THIS_PROCESS.before_fork,
    after_in_parent=lambda: OF_THIS_PROCESS.after_fork(is_child=False),
    after_in_child=lambda: OF_THIS_PROCESS.after_fork(is_child=True),
)
