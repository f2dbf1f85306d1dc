"""The device a rank computes on. The rest of the project uses it instead of branching on kinds.

A `Device` has its `torch.device`, its collective backend, its peak memory and the state of its
random generator, and makes lanes (lanes.py). So does the CPU. What differs between kinds of
accelerators is in drivers.py.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core import numa
from megatron.core.drivers import Driver, driver_of, kinds_of_accelerators
from megatron.core.lanes import Event, Lane, StreamEvent, StreamLane, ThreadEvent, ThreadLane
from megatron.core.log import counted
from megatron.core.options import ConfigError, expect
from megatron.core.spans import ClockSpan, Origin, Span, StreamClock, StreamSpan

_CPU = "cpu"
_LEAST_RESERVE, _RESERVED_SHARE = 2 * 10**9, 0.05  # of an accelerator's memory
_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Device:
    """One rank's device: its kind and, on an accelerator, its index among the machine's."""

    kind: str  # "cpu", or a kind registered in drivers.py
    index: int = 0

    @classmethod
    def for_rank(cls, kind: str, local_rank: int, local_world_size: int) -> Device:
        """The device of the rank with this number on its machine. ConfigError, on all of its ranks,
        if there are too few devices.
        """
        if kind == _CPU:
            return cls(kind)

        # Slurm may show each process only its own device, which is then its first one.
        count = driver_of(kind).device_count()
        if count == 1 and _is_bound_by_slurm(local_rank):
            local_rank = 0
        elif local_world_size > count:
            raise ConfigError(
                f"--nproc-per-node: expected at most one process for each of the {count} GPUs of "
                f"this machine, got {local_world_size}."
            )

        device = cls(kind, local_rank)
        device.make_current()
        return device

    @property
    def is_accelerator(self) -> bool:
        """Whether it has its own memory, and streams to which work is issued, as a GPU has."""
        return self.kind != _CPU

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.is_accelerator else torch.device(_CPU)

    def prepare_collectives(self) -> None:
        """Has the backend leave failures to the watchdog. Call it before the process group is made,
        if a watchdog will run.
        """
        if self.is_accelerator:
            self._driver.prepare_collectives()

    def order_collectives(self) -> None:
        """Has collectives of different groups start in the order in which this process launches
        them. Call it before the process group is made, if experts are divided over ranks or
        there are several machines.

        NCCL's kernels wait on the device for their peers. Ranks that start the exchange of tokens,
        gathers and reductions in different orders could wait for each other forever.
        """
        if self.is_accelerator:
            self._driver.order_collectives()

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """While open, this process computes the same bits from the same input each time; what
        cannot raises RuntimeError. Opened before the device is used; its libraries stay so.
        """
        if self.is_accelerator:
            self._driver.prepare_determinism()
        settings: Any = torch.utils.deterministic
        before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            settings.fill_uninitialized_memory,
        )
        # Attention's backward adds up in any order where PyTorch would only warn.
        torch.use_deterministic_algorithms(True, warn_only=False)
        # Filling every new tensor takes time, and has no effect on tensors that are written before
        # they are read.
        settings.fill_uninitialized_memory = False
        try:
            yield
        finally:
            is_on, warns, settings.fill_uninitialized_memory = before
            torch.use_deterministic_algorithms(is_on, warn_only=warns)

    @property
    def _driver(self) -> Driver:
        return driver_of(self.kind)

    @property
    def runs_collectives_side_by_side(self) -> bool:
        """Whether gathers and reductions overlap on two lanes."""
        # On the CPU, where the ranks add up themselves, a second thread would compete for cores.
        return self.is_accelerator

    @property
    def collective_backend(self) -> str:
        """The backend for `init_process_group`: it carries CPU tensors on any kind of device."""
        return self._driver.collective_backend if self.is_accelerator else "gloo"

    @property
    def pins_batches(self) -> bool:
        """Whether batches should be in pinned memory before they are copied to the device."""
        return self.is_accelerator

    @property
    def pins_host_memory(self) -> bool:
        """Whether `pin` lets copies reach host memory directly, during the computation."""
        return self.is_accelerator

    @property
    def description(self) -> str:
        """The device's name as a log or a result file shows it."""
        if self.is_accelerator:
            return self._driver.description(self.index)
        return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')} a rank"

    @property
    def numa_node(self) -> int | None:
        """The node of host memory nearest to the device; None on the CPU, if it is unknown, or if
        it does not matter (`--no-numa-binding`).
        """
        address = self._driver.pci_address(self.index) if self.is_accelerator else None
        if address is None or not numa.is_binding():
            return None

        try:
            node = int((_PCI_DEVICES / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1 on machines with a single node

    def make_current(self) -> None:
        """Makes this thread's later work on an accelerator run on this one."""
        # Every thread starts on the first device and would open a context there: half a gigabyte
        # on a GPU.
        if self.is_accelerator:
            self._driver.make_current(self.index)

    def peak_memory_bytes(self) -> int:
        """The most memory this rank has held, on the accelerator, or resident on the CPU."""
        if self.is_accelerator:
            return self._driver.peak_memory_bytes(self.index)
        return peak_host_memory_bytes()

    def memory_info(self) -> tuple[int, int]:
        """Bytes of an accelerator's memory that no process uses, and of all of it."""
        return self._driver.memory_info(self.index)

    def spare_memory_bytes(self) -> int:
        """Bytes of an accelerator's memory that may still be planned; 0 or less: none."""
        free, total = self.memory_info()
        reserve = reserve_of(total)
        # A context, which is in use already, is in the reserve, too; half of it is for what will
        # come.
        return min(total - reserve, free - reserve // 2)

    def pin(self, address: int, nbytes: int) -> None:
        """Keeps mapped host memory in its place, so the device can copy from and to it directly.

        On a GPU this makes all of its pages resident. On the CPU it has no effect.

        Args:
            address: where the memory starts, a multiple of the page size.
            nbytes: its size, more than 0.

        Raises:
            PinError: if the driver fails to.
        """
        if self.is_accelerator:
            self._driver.pin(self.index, address, nbytes)

    def unpin(self, address: int) -> None:
        """Undoes `pin` of the memory that starts at `address`, after all copies from and to it."""
        if self.is_accelerator:
            self._driver.unpin(self.index, address)

    def rng_state(self) -> torch.Tensor | None:
        """The state of an accelerator's random generator, uint8 on the CPU; else None."""
        return self._driver.rng_state(self.index) if self.is_accelerator else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores what `rng_state` returned."""
        if not self.is_accelerator:
            raise RuntimeError(
                f"Expected an accelerator, which has a random generator, got {self.kind}."
            )

        self._driver.set_rng_state(state, self.index)

    def lane(self, name: str, *, is_shared: bool = False, is_urgent: bool = False) -> Lane:
        """A new lane. See [Note: lanes].

        Args:
            name: shows in profiles and among the threads.
            is_shared: on the CPU, lanes of this name have one thread, which runs their work in the
                order in which it was queued. An error ends only its own lane.
            is_urgent: on an accelerator, the lane's work goes before what waits on others: for
                short work that much depends on.
        """
        if self.is_accelerator:
            return StreamLane(self._driver, self.index, name, is_urgent=is_urgent)
        return ThreadLane.make(name, is_shared)

    def host_lane(self, name: str) -> Lane:
        """A new lane for work of the host: a worker thread whose current device is this one."""
        return ThreadLane.make(name, is_shared=False, prepare=self.make_current)

    def span(self, clock: Callable[[], float] = time.perf_counter) -> Span:
        """Measures work of this thread, or issued to an accelerator's current stream.

        Args:
            clock: seconds, for the CPU. An accelerator has its own.
        """
        return StreamSpan(self._driver, self.index) if self.is_accelerator else ClockSpan(clock)

    def spans(self, clock: Callable[[], float] = time.perf_counter) -> Callable[[], Span]:
        """A function that makes spans of the stream that is current now, on any thread."""
        if self.is_accelerator:
            stream = self._driver.current_stream(self.index)
            return lambda: StreamSpan(self._driver, self.index, stream)
        return lambda: ClockSpan(clock)

    def origins(self, clock: Callable[[], float] = time.perf_counter) -> Callable[[], Origin]:
        """A function that returns the time, by `clock` and by the device's own."""
        if self.is_accelerator:
            return StreamClock(self._driver, self.index, clock)
        return lambda: Origin(clock())

    def event(self) -> Event:
        """An event that is done when everything that this thread has issued so far is."""
        return StreamEvent(self._driver, self.index) if self.is_accelerator else ThreadEvent.done()


def reserve_of(total: int) -> int:
    """The bytes of an accelerator's memory that are not planned: a CUDA context, NCCL's buffers,
    and memory that the allocator cannot join.
    """
    return max(_LEAST_RESERVE, int(_RESERVED_SHARE * total))


def kind_of(name: str = "auto") -> str:
    """The kind of device that `--device` names; `auto` is an accelerator if this machine has one,
    otherwise `cpu`.

    Raises:
        ConfigError: for an unknown kind, or one that this machine lacks.
    """
    check_kind(name)
    if name == "auto":
        available = (kind for kind in kinds_of_accelerators() if driver_of(kind).is_available())
        return next(available, _CPU)
    if name != _CPU and not driver_of(name).is_available():
        raise ConfigError(
            f"--device: expected a device that this machine has, got {name!r} without a usable GPU."
        )
    return name


def check_kind(name: str) -> None:
    """ConfigError unless `--device` is `auto`, `cpu` or a known kind of accelerator."""
    known = ("auto", _CPU, *kinds_of_accelerators())
    expect(name in known, "--device", f"one of {', '.join(known)}", name)


def _is_bound_by_slurm(local_rank: int) -> bool:
    """Whether Slurm started this very process and gave each of its tasks its own GPU
    (`--gpus-per-task=1`).
    """
    # If its tasks share a GPU, or if it started a torchrun, several ranks would end up on one. The
    # number of visible GPUs is no proof: a script may show all ranks the same one.
    names = ("SLURM_LOCALID", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND")
    own, per_task, binding = (os.environ.get(name, "") for name in names)
    if own != str(local_rank) or "TORCHELASTIC_RUN_ID" in os.environ:
        return False

    # `--gpus-per-task` binds each task to its own GPU, unless another binding was asked for: with a
    # map, or the closest one, several tasks may share a GPU.
    if binding and not binding.startswith("per_task:"):
        return False
    # One, or one of a kind: "a100:1".
    return per_task.rpartition(":")[2] == "1" and "," not in per_task


def peak_host_memory_bytes() -> int:
    """The most memory of this process that was ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. The host does not wait for the copy.

    It would for one from pageable memory, which an accelerator reads as soon as it has been asked.
    """
    if device.type in kinds_of_accelerators():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
