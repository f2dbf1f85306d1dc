"""The device a rank computes on, and the lanes that work beside it. The only file that names cuda.

Everything else asks a `Device`: which `torch.device`, which collective backend, how much memory was used at most, the
state of its random generator, a lane. The CPU answers all of it too, so the rest of the project has no branches.

[Note: lanes] A lane is an ordered queue of work that runs beside the computation:

    event = lane.enqueue(work, after=[event, ...])

The work begins when everything before it on the lane and all events it waits for are done; the event it answers is
done when the work is. On a GPU a lane is a stream: enqueueing issues the work at once, and the device keeps the order.
On the CPU a lane is a worker thread, so that overlap and order are real there too, and tests exercise them: under
`delays(seed)` each piece of work begins after a random pause, which must not change any result.
"""

from __future__ import annotations

import platform
import queue
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.options import ConfigError, check_options, option


@dataclass(frozen=True)
class DeviceConfig:
    """Which kind of device to compute on."""

    device: str = option(
        "auto", "device to compute on; auto takes the GPU if there is one", choices=("auto", "cpu", "cuda")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device: expected a device that this machine has, got 'cuda' without a usable GPU.")

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`, `auto` resolved."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device


@dataclass(frozen=True)
class Device:
    """One rank's device: its kind and, on a GPU, its index among the machine's."""

    kind: str  # "cpu" or "cuda"
    index: int = 0

    @classmethod
    def for_rank(cls, kind: str, local_rank: int, local_world_size: int) -> Device:
        """The device of the rank with this number on its machine. ConfigError, on all of them, if there are too few."""
        if kind == "cuda":
            count = torch.cuda.device_count()
            if local_world_size > count:
                raise ConfigError(
                    f"--nproc-per-node: expected at most one process for each of the {count} GPUs of this machine, "
                    f"got {local_world_size}."
                )
            torch.cuda.set_device(local_rank)
        return cls(kind, local_rank if kind == "cuda" else 0)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def collective_backend(self) -> str:
        """The backend for `init_process_group`: gloo carries CPU tensors on either kind of device."""
        return "cpu:gloo,cuda:nccl" if self.kind == "cuda" else "gloo"

    @property
    def pins_batches(self) -> bool:
        """Whether batches should lie in pinned memory before they are copied to the device."""
        return self.kind == "cuda"

    @property
    def description(self) -> str:
        """The device's name as a log or a result file shows it."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.index)
        return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) a rank"

    def peak_memory_bytes(self) -> int:
        """The most memory this rank has held: allocated on the GPU, or resident on the CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.index)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def rng_state(self) -> torch.Tensor | None:
        """The state of the device's own random generator, uint8 on the CPU; None where it is the CPU's."""
        return torch.cuda.get_rng_state(self.index) if self.kind == "cuda" else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Takes back what `rng_state` gave."""
        if self.kind != "cuda":
            raise RuntimeError(f"Expected a device with a random generator of its own, got {self.kind}.")
        torch.cuda.set_rng_state(state, self.index)

    def lane(self, name: str) -> Lane:
        """A new lane. See [Note: lanes]. The name shows in profiles and tracebacks."""
        return _StreamLane(self.torch_device) if self.kind == "cuda" else _ThreadLane(name)

    def event(self) -> Event:
        """An event that is done when everything that this thread has issued so far is."""
        return _StreamEvent(torch.cuda.current_stream(self.index)) if self.kind == "cuda" else _ThreadEvent.done()


class Event(Protocol):
    """A moment in a lane's or a thread's work."""

    def wait(self) -> None:
        """What this thread does from here on comes after the event. Raises what the work raised, if it failed.

        On the CPU the thread itself waits; on a GPU its current stream does, and the thread goes on.
        """

    def synchronize(self) -> None:
        """This thread waits for the event, on any device. Raises what the work raised, if it failed."""


class Lane(Protocol):
    """An ordered queue of work beside the computation. See [Note: lanes]."""

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """Queues `work`, to begin after the events in `after`; autograd does not record it.

        If an event in `after` is of work that failed, `work` is not run and its own event fails with the same error.
        """

    def close(self) -> None:
        """Waits for what is queued and lets go of the lane. Errors are left to whoever waits for their events."""


class _ThreadEvent:
    """An event on the CPU."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    @classmethod
    def done(cls) -> _ThreadEvent:
        event = cls()
        event.finish(None)
        return event

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        self.wait()


class _ThreadLane:
    """A lane on the CPU: one worker thread, which ends with the program or with `close`."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], tuple[Event, ...], _ThreadEvent] | None]
        self._work = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        if self._is_closed:
            raise RuntimeError(f"Expected an open lane, got {self._thread.name}, which is closed.")
        event = _ThreadEvent()
        self._work.put((work, tuple(after), event))
        return event

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._work.put(None)
            self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, after, event = item
            try:
                for earlier in after:
                    earlier.synchronize()
                _pause()
                work()
            except BaseException as error:
                event.finish(error)
            else:
                event.finish(None)
            # What the work refers to (buffers, modules) must not live until the next one comes.
            del item, work, after, event


class _StreamEvent:
    """An event on a GPU, recorded on a stream when it is made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class _StreamLane:
    """A lane on a GPU: a stream. Work that fails while it is being issued raises at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @torch.no_grad()
    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        with torch.cuda.stream(self._stream):
            for earlier in after:
                earlier.wait()
            work()
        return _StreamEvent(self._stream)

    def close(self) -> None:
        self._stream.synchronize()


_DELAY_SECONDS = 0.004
# For tests, which reach lanes that others have made: the one thing here that is not passed.
_injected: list[random.Random] = []


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """While open, every piece of work on a CPU lane begins after a random pause of up to 4 ms."""
    _injected.append(random.Random(seed))
    try:
        yield
    finally:
        _injected.pop()


def _pause() -> None:
    for generator in _injected[-1:]:
        time.sleep(generator.random() * _DELAY_SECONDS)
