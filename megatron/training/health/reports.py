"""The watchdog's lines in the log, its events, and the heartbeat.

A disk may hang, and a stuck thread may hold the log's lock. So each is written by a thread of its
own, which is waited for only so long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from megatron.training.health.events import EventKind, EventLog

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
_BEAT_SECONDS = 5.0


class Reports:
    """The log and a run's event log, for a thread that must not be held up."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._has_warned = False

    def error(self, *texts: str) -> None:
        def tell() -> None:
            for text in texts:
                logger.error("%s", text)

        _within(tell)

    def warn(self, text: str) -> None:
        _within(lambda: logger.warning("%s", text))

    def warn_once(self, text: str) -> None:
        """The first text that it is given. What follows has most likely the same reason."""
        if not self._has_warned:
            self._has_warned = True
            self.warn(text)

    def event(self, kind: EventKind, **fields: object) -> None:
        _within(lambda: self._events.write(kind, **fields))


class Heartbeat:
    """A run's sign of life, every few seconds.

    Args:
        events: whose heartbeat it is.
        describe: what it says.
    """

    def __init__(self, events: EventLog, describe: Callable[[], Mapping[str, object]]) -> None:
        self._events = events
        self._describe = describe
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="watchdog heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Writes a last one, if it was started."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(REPORT_SECONDS)

    def _beat(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            self._events.beat(**self._describe())
            self._is_over.wait(_BEAT_SECONDS)


def _within(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="watchdog report", daemon=True)
    thread.start()
    thread.join(REPORT_SECONDS)
