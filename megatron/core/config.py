"""On which device a rank computes, and how its layers run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.options import check_options, option

_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceConfig:
    """Which kind of device to compute on. `kind_of` in device.py checks and resolves it."""

    device: str = option(
        "auto",
        "device to compute on; auto: a GPU if available, otherwise cpu",
        metavar="{auto,cpu,cuda}",
    )
    numa_binding: bool = option(
        True,
        "keep a rank's host memory and threads on the NUMA node of its GPU",
        off_flag="--no-numa-binding",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ExecutionConfig:
    """How layers run."""

    activation_offload: bool = option(
        False, "keep activations in host memory from forward until backward"
    )
    activation_offload_fraction: float | Literal["auto"] = option(
        1.0,
        "share of the layers whose activations are moved; auto: all in the first two steps, then "
        "as many as are copied while layers compute",
        at_least=0,
        at_most=1,
        no_effect_unless="activation_offload",
    )
    activation_offload_gib: float = option(
        8.0,
        "most GiB of host memory per rank for activations; further ones stay on the device",
        more_than=0,
        ceiling=2**20,
        no_effect_unless="activation_offload",
    )
    activation_offload_min_kib: float = option(
        64.0,
        "least KiB of an activation that is moved; smaller ones stay on the device",
        more_than=0,
        ceiling=2**30,
        no_effect_unless="activation_offload",
    )
    compile_layers: bool = option(False, "compile the transformer layers with torch.compile")
    tf32: bool = option(
        False,
        "multiply fp32 matrices in TF32 on a GPU: faster, with 10 bits of mantissa",
        no_effect_unless={"bf16": False, "fp16": False},
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def nbytes_of_host(self) -> int:
        """Host memory for activations, of each rank."""
        return math.ceil(self.activation_offload_gib * _GIB) if self.activation_offload else 0
