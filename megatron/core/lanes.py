"""Lanes: ordered queues of work beside the computation.

[Note: lanes] A lane is an ordered queue of work that runs beside the computation:

    event = lane.enqueue(work, after=[event, ...])

Work whose end is work on another lane goes through `relay`: a host lane's kernel, then the copy of
what it wrote.

The work begins when everything before it on the lane and all events it waits for are done; the
event it answers is done when the work is. On an accelerator a lane is a stream: enqueueing issues
the work at once, and the device keeps the order. On the CPU a lane is a worker thread, so that
overlap and order are real there too, and tests exercise them: under `delays(seed)` each piece of
work begins after a random pause, which must not change any result.

[Note: the end of the program] A worker thread is a daemon, since a collective whose peer is dead
may keep it for ever. But Python ends a daemon that comes back from C++ while the interpreter shuts
down by unwinding its stack, and through torch's frames that is std::terminate: a program that did
all its work would exit with SIGABRT. Before the interpreter shuts down, what is queued is therefore
given time to end. A program that fails has no reason to wait: its peers may be waiting for it.
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
from megatron.core.rank_waits import waiting_for_thread

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0  # that work on lanes may still take when the program has ended
_POLL_SECONDS = 0.01


class Event(Protocol):
    """A moment in a lane's or a thread's work."""

    def wait(self) -> None:
        """What this thread does from here on comes after the event. Raises what the work raised, if
        it failed.

        On the CPU the thread itself waits; on an accelerator its current stream does, and the
        thread goes on.
        """

    def synchronize(self) -> None:
        """This thread waits for the event, on any device. Raises what the work raised, if it
        failed.
        """

    def is_done(self) -> bool:
        """Whether the event is behind us, also by an error. Waits for nothing, raises nothing."""


class Span(Protocol):
    """A duration: of what is done, or issued, while it is open. Used once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def seconds(self) -> float | None:
        """How long it took; None while that is not known. Waits for nothing."""


class ClockSpan:
    """What a thread itself does, by a clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = 0.0
        self._seconds: float | None = None

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *error: object) -> None:
        self._seconds = self._clock() - self._begin

    @property
    def seconds(self) -> float | None:
        return self._seconds


class Lane(Protocol):
    """An ordered queue of work beside the computation. See [Note: lanes]."""

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """Queues `work`, to begin after the events in `after`; autograd does not record it.

        On the CPU, work that fails, or waits for an event of work that failed, fails the lane:
        nothing on it runs any more, and all its events fail with the same error. A rank that has
        missed one collective must not send what its peers would take for it. On an accelerator the
        work is issued at once, and errors of issuing it are raised here.
        """

    def close(self) -> None:
        """Waits for what is queued; nothing more may be. Errors are left to whoever waits for their
        events.

        A lane that is let go of without it does what is queued and ends.
        """


def relay(lane: Lane, work: Callable[[], Event], after: Sequence[Event] = ()) -> RelayedEvent:
    """Queues work on a worker thread's lane that ends with an event of another lane, and answers
    one of both.

    So a host lane may compute something and then begin to copy it to the device, and neither waits
    for the caller.
    """
    ends: list[Event] = []
    return RelayedEvent(lane.enqueue(lambda: ends.append(work()), after), ends)


class EventSource(Protocol):
    """A device, as far as an `InlineLane` knows it."""

    def event(self) -> Event:
        """An event that is done when everything that this thread has issued so far is."""


class InlineLane:
    """A lane that does its work at once, in the thread that queues it: the order of the program,
    and no overlap.
    """

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
    """Done when work on one lane is, and then the work on another with which it ended. What `relay`
    answers.
    """

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
        # Work that failed has come to no end on the second lane.
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
            # The traceback of the work alone: each raising would otherwise add the waiter's to it.
            raise self._error.with_traceback(self._traceback)

    def synchronize(self) -> None:
        self.wait()

    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait_quietly(self, seconds: float | None = None) -> bool:
        """Waits, at most so long, and leaves an error to others. Returns whether the event is
        done.
        """
        with waiting_for_thread():
            return self._is_done.wait(seconds)


class _Queued(NamedTuple):
    """A piece of work on a CPU lane."""

    lane: ThreadLane
    work: Callable[[], object]
    after: tuple[Event, ...]
    event: ThreadEvent
    is_inference: bool  # whether it was queued in inference mode, which is a property of threads


# What a worker's thread serves: work, an event that only marks a place, None as the sign to end.
_Queue: TypeAlias = "queue.SimpleQueue[_Queued | ThreadEvent | None]"


class _Worker:
    """The thread behind one CPU lane, or several; it ends with the program, or when nobody has it
    any more.
    """

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self.queue: _Queue = queue.SimpleQueue()
        # The thread knows the queue only, so that it keeps neither the worker nor lanes alive.
        thread = threading.Thread(target=_serve, args=(self.queue, prepare), name=name, daemon=True)
        thread.start()
        _queues[thread] = self.queue
        weakref.finalize(self, self.queue.put, None).atexit = False


# The queue of each thread that runs, also of one whose worker nobody has any more.
_queues: weakref.WeakKeyDictionary[threading.Thread, _Queue] = weakref.WeakKeyDictionary()


@atexit.register
def _finish_lanes() -> None:
    """See [Note: the end of the program]. The threads stay: other handlers may yet queue something
    and wait for it.
    """
    # Set once the traceback of an uncaught exception has been printed.
    if hasattr(sys, "last_value"):
        return

    # In a forked process the threads are not alive.
    ends = {thread: ThreadEvent() for thread in list(_queues) if thread.is_alive()}
    for thread, end in ends.items():
        _queues[thread].put(end)

    # A thread whose worker nobody has any more ends instead, once it comes to that sign in its
    # queue.
    deadline = time.monotonic() + _EXIT_SECONDS
    late = []
    for thread, end in ends.items():
        while not end.wait_quietly(_POLL_SECONDS) and thread.is_alive():
            if time.monotonic() > deadline:
                late.append(thread.name)
                break

    if late:
        logger.warning(
            "The program ended while work was under way on the lane(s) %s, which did not end "
            "within %g s. Another rank "
            "may have gone before; this process may be ended by a signal.",
            ", ".join(late),
            _EXIT_SECONDS,
        )


_thread = threading.local()


def is_lane_thread() -> bool:
    """Whether this thread is a worker's, in which garbage is collected too, and which must not wait
    for any lane.
    """
    return getattr(_thread, "is_worker", False)


def _serve(items: _Queue, prepare: Callable[[], None] | None) -> None:
    _thread.is_worker = True
    if prepare is not None:
        prepare()
    # Nothing of the work (buffers, modules, errors) may stay in this frame until the next one
    # comes.
    while _carry_out(items.get()):
        pass


def _carry_out(item: _Queued | ThreadEvent | None) -> bool:
    """Runs one piece of work; False if it was the sign to end."""
    if isinstance(item, ThreadEvent):
        item.finish(None)
    elif item is not None:
        item.lane.carry_out(item)
    return item is not None


# Workers that lanes share by name, for as long as one has them.
_shared_workers: weakref.WeakValueDictionary[str, _Worker] = weakref.WeakValueDictionary()


class ThreadLane:
    """A lane on the CPU: a place in a worker's queue, and the error that has ended the lane, if one
    has.
    """

    def __init__(self, name: str, worker: _Worker) -> None:
        self._name = name
        self._worker = worker
        self._error: BaseException | None = None
        self._is_closed = False

    @classmethod
    def make(
        cls, name: str, is_shared: bool, prepare: Callable[[], None] | None = None
    ) -> ThreadLane:
        """A lane with a worker of its own, whose thread first calls `prepare`, or that of all of
        its name.
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
        """For the worker: does what has been queued, unless something before it has failed."""
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
    """An event on an accelerator, recorded on this thread's current stream of a device when it is
    made.
    """

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
            return True  # it failed, which whoever waits for it is told


class StreamSpan:
    """What is issued to the current stream of an accelerator, from one of its events to another."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._index = index
        self._events = [driver.new_event(index, is_timed=True) for _ in range(2)]
        self._is_closed = False

    def __enter__(self) -> None:
        self._events[0].record(self._driver.current_stream(self._index))

    def __exit__(self, *error: object) -> None:
        self._events[1].record(self._driver.current_stream(self._index))
        self._is_closed = True

    @property
    def seconds(self) -> float | None:
        # An event that was never recorded would count as done.
        if not self._is_closed or not self._events[1].query():
            return None
        return float(self._events[0].elapsed_time(self._events[1])) / 1000.0


class StreamLane:
    """A lane on an accelerator: a stream.

    Memory that work on it allocates belongs to its stream. Who reads it on another must let go of
    it only after that stream's event, and keep what the work reads until the event of the work:
    nothing here calls `record_stream`.
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


class _Delays:
    """Random pauses; each lane's depend on the seed and its name alone, not on how the lanes'
    threads happen to run.
    """

    _MOST_SECONDS = 0.004

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[str, random.Random] = {}

    def pause(self, lane: str) -> None:
        generator = self._generators.setdefault(lane, random.Random(f"{self._seed}:{lane}"))
        time.sleep(generator.random() * self._MOST_SECONDS)


# For tests, which reach lanes that others have made: the one thing here that is not passed.
_injected: list[_Delays] = []


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """While open, every piece of work on a CPU lane begins after a random pause of up to 4 ms."""
    _injected.append(_Delays(seed))
    try:
        yield
    finally:
        _injected.pop()


def _pause(lane: str) -> None:
    for injected in _injected[-1:]:
        injected.pause(lane)
