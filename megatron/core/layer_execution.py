"""How the layers of a model run, and where their activations wait for backward. Losses stay."""

from __future__ import annotations

import math

import torch
from torch import nn

from megatron.core.activation_offload import ActivationOffload
from megatron.core.compiled_layers import check_compiler, compile_layers
from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.host_memory import HostNeed
from megatron.core.models.gpt.gpt_model import TransformerBlock
from megatron.core.options import expect
from megatron.core.transformer.layer import TransformerLayer


def check_execution(config: ExecutionConfig, device: Device) -> None:
    """ConfigError for settings that this device cannot honour."""
    if config.compile_layers:
        check_compiler([device.kind])
    if config.tf32:
        expect(device.is_accelerator, "--tf32", "a GPU", device.kind)


def host_needs(config: ExecutionConfig, device: Device) -> list[HostNeed]:
    """Host memory for activations, for the check that it fits."""
    nbytes = config.nbytes_of_host
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
    if config.tf32:
        # For matrix products of this process. Convolutions follow torch's default, TF32.
        torch.set_float32_matmul_precision("high")
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
        offload.attach(
            stack,
            stays_at_end=number == len(stacks) - 1,
            fraction=config.activation_offload_fraction,
        )
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
