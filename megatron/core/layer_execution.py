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
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.low_precision.recipes import HistoryOptions, Recipe, recipe_named
from megatron.core.models.gpt.gpt_model import TransformerBlock
from megatron.core.options import expect
from megatron.core.transformer.experts import ExpertLinear
from megatron.core.transformer.fused_weight import Linear
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.moe_layer import MoELayer


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


def recipe_of(config: LowPrecisionConfig) -> Recipe | None:
    """The recipe that the flags describe, if any."""
    if config.recipe is None:
        return None
    history = HistoryOptions(config.fp8_amax_history_len, config.fp8_amax_compute_algo)
    return recipe_named(
        config.recipe, config.fp8_format or "e4m3", margin=config.fp8_margin, history=history
    )


def use_low_precision(model: nn.Module, config: LowPrecisionConfig, *, gathers_codes: bool) -> None:
    """Has a model that is not sharded yet compute by the recipe that the flags describe, if any.

    Args:
        gathers_codes: whether FSDP will gather weights as codes, which serve both directions.
    """
    recipe = recipe_of(config)
    if recipe is None:
        return
    recipe = recipe.with_one_plane() if gathers_codes else recipe
    use_recipe(model, recipe, *config.num_bf16_layers)


def use_recipe(
    model: nn.Module, recipe: Recipe, num_at_start: int = 0, num_at_end: int = 0
) -> None:
    """Has linear layers and experts of the decoder's layers compute by a recipe. Called before
    the model is sharded.

    Routers, gates of shared experts, and the input projection of delta nets, which contains their
    gates, stay as they are, as does all outside of the decoder's layers.

    Args:
        num_at_start, num_at_end: layers of the decoder that stay as they are.

    Raises:
        ConfigError: for a model without a layer that remains.
    """
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    layers = [
        layer
        for block in blocks
        for layer in block.layers[num_at_start : len(block.layers) - num_at_end]
    ]
    expected = f"decoder layers besides the {num_at_start + num_at_end} that stay in bf16"
    expect(bool(layers), "low precision", expected, "none")
    for layer in layers:
        kept = _modules_in_bf16(layer)
        for module in layer.modules():
            if isinstance(module, (Linear, ExpertLinear)) and module not in kept:
                module.recipe = recipe
                if recipe.history is not None:
                    module.amax_history = AmaxHistory(recipe.history)


def _modules_in_bf16(layer: nn.Module) -> set[nn.Module | None]:
    kept: set[nn.Module | None] = set()
    for module in layer.modules():
        if isinstance(module, GatedDeltaNet):
            kept.add(module.in_proj)
        elif isinstance(module, MoELayer):
            kept.add(module.shared_gate)
    return kept


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
