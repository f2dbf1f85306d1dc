"""The device a rank computes on. The only file that names cuda.

Everything else asks a `Device`: which `torch.device`, which collective backend, how much memory was used at most, the
state of its random generator. The CPU answers all of it too, so the rest of the project has no branches.
"""

from __future__ import annotations

import platform
import resource
from dataclasses import dataclass

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
