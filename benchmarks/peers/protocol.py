"""Messages between a benchmark and the ranks of its jobs: one JSON object a line, over dedicated
pipes. The output of a rank goes to its log. Waiting processes sleep in the kernel: no side spends
time on a processor while another is measured.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Collection
from typing import Any


class ClosedError(Exception):
    """The other end is closed."""


class Channel:
    """Both directions to one process."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """
        Args:
            incoming, outgoing: File descriptors, which the channel closes.
        """
        self._incoming = incoming
        self._outgoing = outgoing
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. ClosedError if the other end is closed."""
        left = (json.dumps(message) + "\n").encode()
        try:
            while left:
                left = left[os.write(self._outgoing, left) :]
        except BrokenPipeError:
            raise ClosedError from None

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The next message.

        Args:
            timeout_seconds: None: as long as it takes.

        Raises:
            ClosedError: If the other end was closed instead.
            TimeoutError: If none came in time.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.has_message:
            self._wait(deadline)
            read = os.read(self._incoming, 1 << 16)
            if not read:
                raise ClosedError
            self._received += read

        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _wait(self, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._incoming], [], [], left)
        if not ready:
            raise TimeoutError

    @property
    def has_message(self) -> bool:
        """Whether one has come already."""
        return b"\n" in self._received

    def fileno(self) -> int:
        """For `select`."""
        return self._incoming

    def close(self) -> None:
        os.close(self._incoming)
        os.close(self._outgoing)


def first_ready(channels: Collection[Channel], timeout_seconds: float) -> list[Channel]:
    """Channels with a message, or whose other end was closed; empty after the timeout."""
    waiting = [channel for channel in channels if channel.has_message]
    if waiting:
        return waiting
    ready, _, _ = select.select(channels, [], [], timeout_seconds)
    return ready
