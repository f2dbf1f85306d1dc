"""How the layers of a model run, and where their activations wait for backward. Losses stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from megatron.core.activation_offload import ActivationOffload
from megatron.core.compiled_layers import check_compiler, compile_layers
from megatron.core.device import Device
from megatron.core.host_memory import HostNeed
from megatron.core.models.gpt.gpt_model import TransformerBlock
from megatron.core.options import check_options, expect, option
from megatron.core.transformer.layer import TransformerLayer

_GIB = 1 << 30


@dataclass(frozen=True)
class ExecutionConfig:
    """How layers run."""

    activation_offload: bool = option(
        False, "keep activations in host memory from forward until backward"
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

    def __post_init__(self) -> None:
        check_options(self)

    def check(self, device: Device) -> None:
        """ConfigError for what cannot be on this device."""
        if self.compile_layers:
            check_compiler([device.kind])

    @property
    def nbytes_of_host(self) -> int:
        """Host memory for activations, of each rank."""
        return math.ceil(self.activation_offload_gib * _GIB) if self.activation_offload else 0

    def host_needs(self, device: Device) -> list[HostNeed]:
        """The same, for the check that it fits."""
        nbytes = self.nbytes_of_host
        return [HostNeed("activations", nbytes, device.pins_host_memory)] if nbytes else []


def prepare_layers(
    model: nn.Module, config: ExecutionConfig, device: Device, *, records_timings: bool = False
) -> ActivationOffload | None:
    """Has the layers of a sharded model run as in `config`. Returns the offload of their
    activations, if they move.

    Raises:
        ConfigError: for a model without transformer layers, or a machine without a compiler.
        HostMemoryError, PinError: see `HostSlab`.
    """
    if not config.compile_layers and not config.activation_offload:
        return None

    stacks = _stacks(model)
    flag = "--compile-layers" if config.compile_layers else "--activation-offload"
    expect(bool(stacks), flag, "a model of TransformerLayers", type(model).__name__)
    if config.compile_layers:
        compile_layers(model)
    if not config.activation_offload:
        return None

    offload = ActivationOffload(
        device,
        config.nbytes_of_host,
        smallest_nbytes=math.ceil(config.activation_offload_min_kib * 1024),
        records_timings=records_timings,
    )
    for number, stack in enumerate(stacks):
        offload.attach(stack, stays_at_end=number == len(stacks) - 1)
    return offload


def _stacks(model: nn.Module) -> list[list[TransformerLayer]]:
    """The layers of each stack, in the order in which the stacks run: the decoder is the last."""
    of_decoders = [block.layers for block in model.modules() if isinstance(block, TransformerBlock)]
    towers: list[list[TransformerLayer]] = []
    decoders: list[list[TransformerLayer]] = []
    for module in model.modules():
        layers = [child for child in module.children() if isinstance(child, TransformerLayer)]
        if layers:
            is_decoder = any(module is found for found in of_decoders)
            (decoders if is_decoder else towers).append(layers)
    return towers + decoders
