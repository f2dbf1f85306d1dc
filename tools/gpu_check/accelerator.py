"""The accelerator that stages run on, as far as they look at it from outside: a GPU, or the
simulated one.

`open_accelerator` is the only place that imports from tests/, and only for `--simulate`.
"""

from __future__ import annotations

import os
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron.core.device import Device
from megatron.core.lanes import StreamLane
from megatron.core.optimizer.kernels import device_adam
from megatron.core.optimizer.kernels.adam import AdamPiece
from tools.gpu_check.findings import Findings, SkippedError

_CLOCK_HZ = 1.7e9  # of a GPU at work, near enough for pauses
_LONGEST_PAUSE_SECONDS = 0.002
_SYNC_WARNING = "called a synchronizing"


class Peak(NamedTuple):
    """The most device memory so far, in bytes."""

    allocated: int  # that tensors have held at once
    reserved: int  # that the allocator has taken from the device


class Accelerator:
    """A GPU."""

    kind = "cuda"
    # What two processes can use on one device, the first that works.
    shared_backends: tuple[str, ...] = ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo")

    def __init__(self) -> None:
        self._check_available()
        self.device = Device(self.kind)
        self.device.make_current()
        self._shown: set[str] = set()  # warnings that have been printed once

    def _check_available(self) -> None:
        if not torch.cuda.is_available():
            raise SkippedError("no usable GPU")

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    @property
    def backend(self) -> str:
        """The backend of one rank's process group."""
        return self.device.collective_backend

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def run_adam(self, pieces: Iterable[AdamPiece]) -> None:
        """The pass of Adam that steps tensors of this device."""
        device_adam.run(pieces)

    def pause(self, seconds: float) -> None:
        """Keeps the current stream busy for so long; the host goes on."""
        torch.cuda._sleep(int(seconds * _CLOCK_HZ))

    def num_segments(self) -> int:
        """How often memory has been taken from the device so far."""
        return int(torch.cuda.memory_stats()["segment.all.allocated"])

    def peak(self) -> Peak:
        """The peak since `reset_peak`."""
        return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory_bytes(self) -> int:
        """The memory of the whole device."""
        return int(torch.cuda.get_device_properties(0).total_memory)

    @contextmanager
    def counting_syncs(self) -> Iterator[list[str]]:
        """While open, the main thread's waits for the device; where each was, once the context is
        closed.

        torch warns of what synchronises by itself: `item`, `tolist`, copies to pageable memory.
        What a program asks for in so many words is counted where it is asked for.
        """
        places: list[str] = []
        main = threading.get_ident()

        def count(*_arguments: object, **_options: object) -> None:
            if threading.get_ident() == main:
                places.append(_place())

        def show(message: Warning | str, *arguments: Any, **options: Any) -> None:
            if _SYNC_WARNING in str(message):
                count()
            elif str(message) not in self._shown:
                self._shown.add(str(message))
                shown(message, *arguments, **options)

        with warnings.catch_warnings(), ExitStack() as patches:
            warnings.simplefilter("always")
            shown = warnings.showwarning
            warnings.showwarning = show
            for owner in (torch.cuda.Event, torch.cuda.Stream):
                patches.enter_context(_called_first(owner, "synchronize", count))
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def blocking_launches(self) -> Iterator[None]:
        """While open, every kernel is waited for. CUDA reads this from the environment, once."""
        if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            raise RuntimeError(
                "Expected CUDA_LAUNCH_BLOCKING=1 in the environment, got another value."
            )
        yield

    @contextmanager
    def pauses(self, seed: int) -> Iterator[None]:
        """While open, the device pauses for up to 2 ms before the work of every lane."""
        generator, enqueue = random.Random(seed), StreamLane.enqueue

        def enqueue_later(lane: StreamLane, work: Callable[[], object], after: Any = ()) -> Any:
            seconds = generator.random() * _LONGEST_PAUSE_SECONDS

            def paused() -> object:
                self.pause(seconds)
                return work()

            return enqueue(lane, paused, after)

        with mock.patch.object(StreamLane, "enqueue", enqueue_later):
            yield


def open_accelerator(findings: Findings) -> Accelerator:
    """What this run's stages work on."""
    if not findings.simulate:
        return Accelerator()
    from tools.gpu_check.simulated import SimulatedAccelerator

    return SimulatedAccelerator()


def _called_first(owner: type, name: str, function: Callable[..., None]) -> Any:
    """Patches a method so that `function` is called before it."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **options: Any) -> Any:
        function()
        return original(*arguments, **options)

    return mock.patch.object(owner, name, patched)


def _place() -> str:
    """The innermost line of the project that the calling thread is in."""
    frames = [frame for frame in traceback.extract_stack() if "/megatron/" in frame.filename]
    return (
        f"{frames[-1].filename.rpartition('/megatron/')[2]}:{frames[-1].lineno}"
        if frames
        else "elsewhere"
    )
