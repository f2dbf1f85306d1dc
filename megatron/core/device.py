"""The device a rank computes on. Everything else asks it, so the rest of the project has no
branches.

A `Device` answers: which `torch.device`, which collective backend, how much memory was used at
most, the state of its random generator, a lane (lanes.py). The CPU answers all of it too. What
differs between kinds of accelerators is in drivers.py.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.drivers import Driver, driver_of, kinds_of_accelerators
from megatron.core.lanes import (
    ClockSpan,
    Event,
    Lane,
    Span,
    StreamEvent,
    StreamLane,
    StreamSpan,
    ThreadEvent,
    ThreadLane,
)
from megatron.core.options import ConfigError, check_options, option

_CPU = "cpu"
_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class DeviceConfig:
    """Which kind of device to compute on."""

    device: str = option(
        "auto",
        "device to compute on: auto (a GPU, if there is one), cpu, "
        f"{', '.join(kinds_of_accelerators())}",
    )

    def __post_init__(self) -> None:
        check_options(self)
        kinds = kinds_of_accelerators()
        if self.device not in ("auto", _CPU, *kinds):
            raise ConfigError(
                f"--device: expected one of auto, cpu, {', '.join(kinds)}, got {self.device!r}."
            )
        if self.device in kinds and not driver_of(self.device).is_available():
            raise ConfigError(
                f"--device: expected a device that this machine has, got {self.device!r} without a "
                "usable GPU."
            )

    @property
    def kind(self) -> str:
        """`cpu`, or the kind of an accelerator; `auto` resolved."""
        if self.device == "auto":
            available = (kind for kind in kinds_of_accelerators() if driver_of(kind).is_available())
            return next(available, _CPU)
        return self.device


@dataclass(frozen=True)
class Device:
    """One rank's device: its kind and, on an accelerator, its index among the machine's."""

    kind: str  # "cpu", or one that drivers.py knows
    index: int = 0

    @classmethod
    def for_rank(cls, kind: str, local_rank: int, local_world_size: int) -> Device:
        """The device of the rank with this number on its machine. ConfigError, on all of them, if
        there are too few.

        Where Slurm shows each of a machine's processes a device of its own, that is the first one
        of each.
        """
        if kind == _CPU:
            return cls(kind)
        count = driver_of(kind).device_count()
        if count == 1 and _is_bound_by_slurm(local_rank):
            local_rank = 0
        elif local_world_size > count:
            raise ConfigError(
                f"--nproc-per-node: expected at most one process for each of the {count} GPUs of "
                "this machine, "
                f"got {local_world_size}."
            )
        device = cls(kind, local_rank)
        device.make_current()
        return device

    @property
    def is_accelerator(self) -> bool:
        """Whether work is issued to streams, and memory of its own: a GPU, say."""
        return self.kind != _CPU

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.is_accelerator else torch.device(_CPU)

    def prepare_collectives(self) -> None:
        """Before the process group is made, where a watchdog will run: its backend must leave
        failures to that.
        """
        if self.is_accelerator:
            self._driver.prepare_collectives()

    @property
    def _driver(self) -> Driver:
        return driver_of(self.kind)

    @property
    def runs_collectives_side_by_side(self) -> bool:
        """Whether collectives of one group may run on two lanes. On the CPU they would mix up their
        messages.
        """
        return self.is_accelerator

    @property
    def collective_backend(self) -> str:
        """The backend for `init_process_group`: it carries CPU tensors on any kind of device."""
        return self._driver.collective_backend if self.is_accelerator else "gloo"

    @property
    def pins_batches(self) -> bool:
        """Whether batches should lie in pinned memory before they are copied to the device."""
        return self.is_accelerator

    @property
    def pins_host_memory(self) -> bool:
        """Whether `pin` makes a difference: copies reach pinned memory directly, beside the
        computation.
        """
        return self.is_accelerator

    @property
    def description(self) -> str:
        """The device's name as a log or a result file shows it."""
        if self.is_accelerator:
            return self._driver.description(self.index)
        return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) a rank"

    @property
    def numa_node(self) -> int | None:
        """The node of the host's memory that is nearest to the device; None on the CPU, or where
        that is not known.
        """
        address = self._driver.pci_address(self.index) if self.is_accelerator else None
        if address is None:
            return None
        try:
            node = int((_PCI_DEVICES / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1 on machines that have one

    def make_current(self) -> None:
        """What this thread does on an accelerator from here on, it does on this one.

        Every thread begins on the first one, and would open a context there: half a gigabyte on a
        GPU.
        """
        if self.is_accelerator:
            self._driver.make_current(self.index)

    def peak_memory_bytes(self) -> int:
        """The most memory this rank has held: allocated on the accelerator, or resident on
        the CPU.
        """
        if self.is_accelerator:
            return self._driver.peak_memory_bytes(self.index)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def pin(self, address: int, nbytes: int) -> None:
        """Keeps host memory that is mapped already where it is, so that the device can copy from
        and to it directly.

        On the CPU there is nothing to do. The pages become resident with it, on a GPU.

        Args:
            address: where the memory begins, a multiple of the page size.
            nbytes: its size, more than 0.

        Raises:
            PinError: if the driver refuses.
        """
        if self.is_accelerator:
            self._driver.pin(self.index, address, nbytes)

    def unpin(self, address: int) -> None:
        """Takes back `pin` of the memory that begins at `address`; copies from and to it must be
        done.
        """
        if self.is_accelerator:
            self._driver.unpin(self.index, address)

    def rng_state(self) -> torch.Tensor | None:
        """The state of the device's own random generator, uint8 on the CPU; None where it is the
        CPU's.
        """
        return self._driver.rng_state(self.index) if self.is_accelerator else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Takes back what `rng_state` gave."""
        if not self.is_accelerator:
            raise RuntimeError(
                f"Expected a device with a random generator of its own, got {self.kind}."
            )
        self._driver.set_rng_state(state, self.index)

    def lane(self, name: str, *, is_shared: bool = False, is_urgent: bool = False) -> Lane:
        """A new lane. See [Note: lanes].

        Args:
            name: shows in profiles and among the threads.
            is_shared: on the CPU, lanes of this name have one thread, so that what is queued on any
                of them runs in the order in which it was queued. An error ends only its own lane.
            is_urgent: on an accelerator, what is issued to the lane goes before what others have
                waiting: for short work that much waits for.
        """
        if self.is_accelerator:
            return StreamLane(self._driver, self.index, name, is_urgent=is_urgent)
        return ThreadLane.make(name, is_shared)

    def host_lane(self, name: str) -> Lane:
        """A new lane of work that the host does itself: a worker thread on any device, which is its
        current one.
        """
        return ThreadLane.make(name, is_shared=False, prepare=self.make_current)

    def span(self, clock: Callable[[], float] = time.perf_counter) -> Span:
        """What measures how long something takes that this thread does, or issues to an
        accelerator's current stream.

        Args:
            clock: seconds, for the CPU. An accelerator has its own.
        """
        return StreamSpan(self._driver, self.index) if self.is_accelerator else ClockSpan(clock)

    def event(self) -> Event:
        """An event that is done when everything that this thread has issued so far is."""
        return StreamEvent(self._driver, self.index) if self.is_accelerator else ThreadEvent.done()


def _is_bound_by_slurm(local_rank: int) -> bool:
    """Whether Slurm started this very process and gave each of its tasks a GPU of its own
    (`--gpus-per-task=1`).

    Where it gave them one together, or where it started a torchrun, several ranks would find
    themselves on one. How many GPUs the machine has proves nothing: a script may show all ranks the
    same one of them.
    """
    names = ("SLURM_LOCALID", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND")
    own, per_task, binding = (os.environ.get(name, "") for name in names)
    if own != str(local_rank) or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    # `--gpus-per-task` implies that each task is bound to its own, unless another binding was asked
    # for: by a map, or by what is closest, several may have the same one.
    if binding and not binding.startswith("per_task:"):
        return False
    # One, or one of a kind: "a100:1".
    return per_task.rpartition(":")[2] == "1" and "," not in per_task
