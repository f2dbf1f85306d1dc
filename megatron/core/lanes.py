"""Lanes: ordered queues of work alongside the computation.

[Note: lanes] A lane is an ordered queue of work that runs alongside the computation:

    event = lane.enqueue(work, after=[event, ...])

The work starts when everything before it on the lane and all events in `after` are done; the event
that is returned is done when the work is. On an accelerator a lane is a stream: enqueueing issues
the work at once, and the device keeps the order. On the CPU a lane is a worker thread, so overlap
and order are real there too, and tests exercise them: under `delays(seed)` each piece of work
starts after a random pause, which must not change any result.

Work that ends with work on another lane goes through `relay`: a host lane's kernel, then the copy
of its result.

[Note: the end of the program] A worker thread is a daemon, since a collective whose peer is dead
may block it forever. But when a daemon returns from C++ while the interpreter shuts down, Python
ends it by unwinding its stack, and through torch's frames that is std::terminate: a program that
did all its work would exit with SIGABRT. So queued work gets time to finish before the interpreter
shuts down. A program that fails does not wait: its peers may be waiting for it.
"""

from __future__ import annotations

import atexit
import logging
import queue
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Protocol, TypeAlias

import torch

from megatron.core.drivers import Driver
from megatron.core.log import counted
from megatron.core.rank_waits import waiting_for_thread

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0  # that work on lanes may still take when the program has ended
_POLL_SECONDS = 0.01


class Event(Protocol):
    """A moment in a lane's or a thread's work."""

    def wait(self) -> None:
        """Orders this thread's next work after the event. Raises the work's error.

        On the CPU the thread itself waits. On an accelerator its current stream does, and the
        thread continues.
        """

    def synchronize(self) -> None:
        """Blocks this thread until the event, on any device. Raises the work's error."""

    def is_done(self) -> bool:
        """Whether the work has ended, perhaps by an error. Neither waits nor raises."""


class Awaited:
    """An event with another `wait`."""

    def __init__(self, event: Event, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.synchronize = event.synchronize
        self.is_done = event.is_done


class Lane(Protocol):
    """An ordered queue of work alongside the computation. See [Note: lanes]."""

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """Queues `work`, to start after the events in `after`; autograd does not record it.

        On the CPU, work that fails, or that waits for work that failed, fails the lane: no work on
        it runs any more, and all its events fail with the same error. A rank that has missed one
        collective must not send another one in its place. On an accelerator the work is
        issued at once, and errors of issuing it are raised here.
        """

    def close(self) -> None:
        """Waits for queued work, and rejects more. Does not raise: the events have the errors.

        A lane that is dropped without this finishes its queued work and ends.
        """


def relay(lane: Lane, work: Callable[[], Event], after: Sequence[Event] = ()) -> RelayedEvent:
    """Queues work on a worker thread's lane that returns an event of another lane. The event that
    this returns is done when both are.

    A host lane can so compute something and then start to copy it to the device, without the
    caller.
    """
    ends: list[Event] = []
    return RelayedEvent(lane.enqueue(lambda: ends.append(work()), after), ends)


class EventSource(Protocol):
    """A device, as far as an `InlineLane` uses it."""

    def event(self) -> Event:
        """An event that is done when everything that this thread has issued so far is."""


class InlineLane:
    """A lane that runs work at once, in the thread that queues it: program order, no overlap."""

    def __init__(self, device: EventSource) -> None:
        self._device = device
        self._error: BaseException | None = None

    @torch.no_grad()
    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """As `Lane.enqueue`, but done when it returns. Errors are raised here, and by whatever
        comes after.
        """
        if self._error is not None:
            raise self._error

        try:
            for earlier in after:
                earlier.synchronize()
            work()
        except BaseException as error:
            self._error = error
            raise

        event = self._device.event()
        event.synchronize()
        return event

    def close(self) -> None:
        """Nothing is queued."""


class RelayedEvent:
    """Done when work on one lane is, and the work on another lane that it ended with."""

    def __init__(self, first: Event, ends: list[Event]) -> None:
        self._first = first
        self._ends = ends

    @property
    def first(self) -> Event:
        """Done when the work on the first lane is."""
        return self._first

    def wait(self) -> None:
        self._first.synchronize()
        self._ends[0].wait()

    def synchronize(self) -> None:
        self._first.synchronize()
        self._ends[0].synchronize()

    def is_done(self) -> bool:
        # Failed work has not queued any on the second lane.
        return self._first.is_done() and all(end.is_done() for end in self._ends)


class ThreadEvent:
    """An event on the CPU."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    @classmethod
    def done(cls) -> ThreadEvent:
        event = cls()
        event.finish(None)
        return event

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._traceback = None if error is None else error.__traceback__
        self._is_done.set()

    def wait(self) -> None:
        self.wait_quietly()
        if self._error is not None:
            # The work's own traceback: each raise would otherwise add the waiter's to it.
            raise self._error.with_traceback(self._traceback)

    def synchronize(self) -> None:
        self.wait()

    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait_quietly(self, seconds: float | None = None) -> bool:
        """Waits at most so long, without raising an error. Returns whether the event is done."""
        with waiting_for_thread():
            return self._is_done.wait(seconds)


class _Queued(NamedTuple):
    """A piece of work on a CPU lane."""

    lane: ThreadLane
    work: Callable[[], object]
    after: tuple[Event, ...]
    event: ThreadEvent
    is_inference: bool  # whether it was queued in inference mode, which is a property of threads


# Items of a worker's thread: work, an event that marks a place in the queue, or None to end.
_Queue: TypeAlias = "queue.SimpleQueue[_Queued | ThreadEvent | None]"


class _Worker:
    """The thread behind one or more CPU lanes; ends with the program, or its last reference."""

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self.queue: _Queue = queue.SimpleQueue()
        # The thread holds only the queue, so it keeps neither the worker nor lanes alive.
        thread = threading.Thread(target=_serve, args=(self.queue, prepare), name=name, daemon=True)
        thread.start()
        _queues[thread] = self.queue
        weakref.finalize(self, self.queue.put, None).atexit = False


# The queues of running threads, also of threads whose worker is unreferenced.
_queues: weakref.WeakKeyDictionary[threading.Thread, _Queue] = weakref.WeakKeyDictionary()


@atexit.register
def _finish_lanes() -> None:
    """See [Note: the end of the program]. The threads stay, for handlers that queue work later."""
    # Set once the traceback of an uncaught exception has been printed.
    if hasattr(sys, "last_value"):
        return

    # A forked process has these objects, but not the threads.
    ends = {thread: ThreadEvent() for thread in list(_queues) if thread.is_alive()}
    for thread, end in ends.items():
        _queues[thread].put(end)

    # A thread whose worker is unreferenced may end first, at the None in its queue.
    deadline = time.monotonic() + _EXIT_SECONDS
    late = []
    for thread, end in ends.items():
        while not end.wait_quietly(_POLL_SECONDS) and thread.is_alive():
            if time.monotonic() > deadline:
                late.append(thread.name)
                break

    if late:
        logger.warning(
            "The program ended with pending work on %s (%s) that did not finish within %g s. "
            "Another rank may have exited earlier; a signal may end this process.",
            counted(len(late), "lane"),
            ", ".join(late),
            _EXIT_SECONDS,
        )


_thread = threading.local()


def is_lane_thread() -> bool:
    """Whether this is a worker's thread, which must not wait for a lane.

    Finalizers have to check: garbage is collected in such threads too.
    """
    return getattr(_thread, "is_worker", False)


def _serve(items: _Queue, prepare: Callable[[], None] | None) -> None:
    _thread.is_worker = True
    if prepare is not None:
        prepare()

    # A separate function, whose frame ends with the work: otherwise its buffers, modules and
    # errors would stay alive until the next work comes.
    while _carry_out(items.get()):
        pass


def _carry_out(item: _Queued | ThreadEvent | None) -> bool:
    """Runs one piece of work; False if it was the sign to end."""
    if isinstance(item, ThreadEvent):
        item.finish(None)
    elif item is not None:
        item.lane.carry_out(item)
    return item is not None


# Workers that lanes share by name, for as long as any lane holds them.
_shared_workers: weakref.WeakValueDictionary[str, _Worker] = weakref.WeakValueDictionary()


class ThreadLane:
    """A lane on the CPU: a worker's queue, and the error that has ended this lane, if any."""

    def __init__(self, name: str, worker: _Worker) -> None:
        self._name = name
        self._worker = worker
        self._error: BaseException | None = None
        self._is_closed = False

    @classmethod
    def make(
        cls, name: str, is_shared: bool, prepare: Callable[[], None] | None = None
    ) -> ThreadLane:
        """A lane with a dedicated worker, whose thread first calls `prepare`, or with the worker
        that lanes of its name share.
        """
        if not is_shared:
            return cls(name, _Worker(name, prepare))

        worker = _shared_workers.get(name)
        if worker is None:
            worker = _shared_workers[name] = _Worker(name)
        return cls(name, worker)

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        if self._is_closed:
            raise RuntimeError(f"Expected an open lane, got {self._name}, which is closed.")
        return self._put(work, tuple(after))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._put(lambda: None, ()).wait_quietly()

    def carry_out(self, item: _Queued) -> None:
        """Runs queued work in the worker's thread, unless something before it has failed."""
        if self._error is None:
            try:
                for earlier in item.after:
                    earlier.synchronize()
                _pause(self._name)
                with torch.inference_mode(item.is_inference), torch.no_grad():
                    item.work()
            except BaseException as error:
                self._error = error
        item.event.finish(self._error)

    def _put(self, work: Callable[[], object], after: tuple[Event, ...]) -> ThreadEvent:
        event = ThreadEvent()
        self._worker.queue.put(_Queued(self, work, after, event, torch.is_inference_mode_enabled()))
        return event


class StreamEvent:
    """An event on an accelerator, recorded on this thread's current stream when it is made."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._index = index
        self._event = driver.new_event(index)
        self._event.record(driver.current_stream(index))

    def wait(self) -> None:
        self._driver.current_stream(self._index).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def is_done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:
            return True  # it failed, and waiting for it raises


class StreamLane:
    """A lane on an accelerator: a stream.

    Memory that work on it allocates belongs to its stream, and no code here calls `record_stream`.
    Another stream that reads such memory must be done before it is freed, and so must the work
    before anything that it reads is freed.
    """

    def __init__(self, driver: Driver, index: int, name: str, *, is_urgent: bool = False) -> None:
        self._driver = driver
        self._index = index
        self._stream = driver.new_stream(index, is_urgent=is_urgent)
        self._name = name
        self._is_closed = False

    @torch.no_grad()
    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        if self._is_closed:
            raise RuntimeError(f"Expected an open lane, got {self._name}, which is closed.")
        with self._driver.on_stream(self._stream):
            for earlier in after:
                earlier.wait()
            work()
            return StreamEvent(self._driver, self._index)

    def close(self) -> None:
        self._is_closed = True
        self._stream.synchronize()


class IssuingLane:
    """A device's lane, to which a host lane's thread issues the work. Its events are done when the
    work is.

    For copies to or from memory that is not pinned. They block the thread that issues them until
    they are done, even where it asked for the opposite: the driver stages them through its own
    pinned memory. Gradients are sent down from autograd's thread, in the middle of the backward,
    which would stop.

    Work is not issued yet when `enqueue` returns: whatever it looks at on the host, it looks at
    later.
    """

    def __init__(self, host_lane: Lane, device_lane: Lane) -> None:
        self._host_lane = host_lane
        self._device_lane = device_lane

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """As `Lane.enqueue`. Errors of issuing fail the lane, and its events raise them."""
        # The device waits for the events, not the worker, unless they are of other workers.
        return relay(self._host_lane, lambda: self._device_lane.enqueue(work, after))

    def close(self) -> None:
        """Waits for queued work; no more may be queued."""
        self._host_lane.close()
        self._device_lane.close()


class _Delays:
    """Random pauses that depend on the seed and the lane's name, not on thread scheduling."""

    _MOST_SECONDS = 0.004

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[str, random.Random] = {}

    def pause(self, lane: str) -> None:
        generator = self._generators.setdefault(lane, random.Random(f"{self._seed}:{lane}"))
        time.sleep(generator.random() * self._MOST_SECONDS)


# Not passed like everything else, since tests inject delays into lanes that others have made.
_injected: list[_Delays] = []


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """While open, every piece of work on a CPU lane starts after a random pause of up to 4 ms."""
    _injected.append(_Delays(seed))
    try:
        yield
    finally:
        _injected.pop()


def _pause(lane: str) -> None:
    for injected in _injected[-1:]:
        injected.pause(lane)
