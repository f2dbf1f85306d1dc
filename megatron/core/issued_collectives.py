"""The collectives that this process has issued to its device and that are not over.

On an accelerator a collective returns at once, and the host continues until something stops it: a
full launch queue, autograd's thread that launches no more kernels, the transfer of a result. The
stack of the host then does not show whether it waits for other ranks. So every collective leaves a
record with two events, one just before it and one behind it: `with issuing(name, tensor)`.

[Note: who waits] A collective starts on each rank as soon as that rank's device reaches it, and is
over when all have. The oldest one that is not over shows the state of its rank:

    has started       the rank waits for another that has not reached it yet
    has not started   something else holds up the device, since no older collective is left; no
                      other rank is to blame
    none              the device waits for no other rank; the host's statement decides
                      (`rank_waits.py`)

Ranks issue their collectives in the same order. A rank that sleeps before it issues the next one
has none left as soon as the others have caught up with it, and they all have that next one.

[Note: who queries] By a comment in torch's own watchdog, querying an event may block while another
thread is inside CUDA, and torch's `Event.query` keeps the GIL meanwhile: a watchdog that queried
might stop the very process it watches. `Event.synchronize` releases the GIL. So a separate
thread walks from event to event, and its position is the result. It does so only on request, when
something is wrong; in normal operation a collective costs two events.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.lanes import Event
from megatron.core.rank_waits import waiting_for_ranks

# More than fit into a device's launch queue, so that dropped records are over.
_MOST_RECORDS = 1024
_POLL_SECONDS = 0.02
# After so long in one place, the walking thread counts as waiting for the device.
_STILL_SECONDS = 0.2
# Ranks wait longer than this for each other's reports, of which this is a part.
_LOOK_SECONDS = 0.9


class Outstanding(NamedTuple):
    """A collective that is not over."""

    number: int  # among the collectives of this process
    name: str
    has_begun: bool  # see [Note: who waits]

    def __str__(self) -> str:
        state = "is waiting in" if self.has_begun else "has not come to"
        return f"its device {state} the {self.name}, collective {self.number} of this rank"


class _Record:
    """A collective that was issued, or is being issued and has no event behind it yet."""

    def __init__(self, number: int, name: str, device: Device) -> None:
        self.number = number
        self.name = name
        self.device = device
        self.before = device.event()
        self.behind: Event | None = None


class IssuedCollectives:
    """The records of one process."""

    def __init__(self) -> None:
        # Threads that issue append on the right; the walking thread removes on the left.
        self._records: deque[_Record] = deque(maxlen=_MOST_RECORDS)
        self._num_issued = 0
        self._lock = threading.Lock()  # for the two counts, and for starting the thread
        self._walker: threading.Thread | None = None
        self._is_asked = threading.Event()
        self._question = 0  # how often it has been asked
        self._answered = 0  # the last question since which it has found every record over
        self._position: Outstanding | None = None  # of the walking thread

    @contextmanager
    def issuing(self, name: str, device: Device) -> Iterator[None]:
        """Records the collective that is issued to this thread's current stream inside it."""
        with self._lock:
            self._num_issued += 1
            record = _Record(self._num_issued, name, device)
            self._records.append(record)
        try:
            yield
            record.behind = device.event()
        except BaseException:
            self._forget(record)
            raise

    def oldest(self) -> Outstanding | None:
        """The oldest unfinished collective, if any; None if the device makes progress. Takes at
        most a second.
        """
        if not self._records:
            return None

        question = self._ask()

        begin = still_since = time.monotonic()
        position = self._position
        while time.monotonic() - begin < _LOOK_SECONDS:
            time.sleep(_POLL_SECONDS)
            if self._answered >= question:
                return None
            if position is None or self._position != position:
                position, still_since = self._position, time.monotonic()
            elif time.monotonic() - still_since >= _STILL_SECONDS:
                return position
        return None

    def _ask(self) -> int:
        """Starts the walking thread. Returns the number of the question."""
        with self._lock:
            self._question += 1
            if self._walker is None or not self._walker.is_alive():
                self._walker = threading.Thread(target=self._walk, name="collectives", daemon=True)
                self._walker.start()
            self._is_asked.set()
            return self._question

    # Below, the walking thread.

    def _walk(self) -> None:
        while self._is_asked.wait():
            self._is_asked.clear()
            question = self._question  # later records belong to the next one
            try:
                while self._records:
                    # A thread that issues more may drop the record meanwhile.
                    with suppress(IndexError):
                        record = self._records[0]
                        self._pass(record)
                        self._forget(record)
            finally:
                self._position = None
            self._answered = question

    def _pass(self, record: _Record) -> None:
        """Waits until a collective is over, and shows meanwhile whether it has started."""
        self._position = Outstanding(record.number, record.name, has_begun=False)
        # An error of the device ends the wait. Users of the results get it too.
        with suppress(RuntimeError):
            # A thread that names no device is on the first one, and would open a context there.
            record.device.make_current()
            record.before.synchronize()

        self._position = Outstanding(record.number, record.name, has_begun=True)
        while record.behind is None:
            if record not in self._records:
                return  # issuing it has failed
            time.sleep(_POLL_SECONDS)
        with suppress(RuntimeError):
            record.behind.synchronize()

    def _forget(self, record: _Record) -> None:
        with suppress(ValueError):
            self._records.remove(record)


# One for the process, to which process groups belong as well: a watchdog must find what any part of
# it has issued.
OF_THIS_PROCESS = IssuedCollectives()


@contextmanager
def issuing(name: str, tensor: torch.Tensor) -> Iterator[None]:
    """Records the collective on `tensor` that is issued inside it.

    On the CPU a collective blocks: there this thread states that it waits, and leaves no record.

    Args:
        name: completes "waiting in the ...".
    """
    device = tensor.device
    if device.type == "cpu":
        waiting = waiting_for_ranks(name)
    else:
        waiting = OF_THIS_PROCESS.issuing(name, Device(device.type, device.index or 0))
    with waiting:
        yield
