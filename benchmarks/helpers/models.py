"""The models that benchmarks train and save."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megatron.core.device import Device
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.units import sharding_units
from megatron.core.materialize import seeded_reset
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer,
    build_optimizer,
    plan_offload,
)
from megatron.core.transformer.config import TransformerConfig

SEED = 0
OFFLOADED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)


def llama_config(num_layers: int, hidden_size: int, **options: Any) -> TransformerConfig:
    """A Llama-like GPT with heads of 64 channels. `options` are added."""
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **options,
    )


def on_meta(config: TransformerConfig, vocabulary: int) -> GPTModel:
    """The model without memory."""
    with torch.device("meta"):
        return GPTModel(config, vocabulary)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    device: Device,
    optimizer: OptimizerConfig | None,
    *,
    num_local_ranks: int,
    data_parallel: DataParallelConfig | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> DistributedOptimizer | None:
    """Shards a model on the meta device over our engine, with initial weights that depend on the
    model alone. Returns its optimizer, if it has one.
    """
    plan = plan_offload(model, optimizer or OptimizerConfig())
    megatron_fsdp.shard_model(
        model,
        mesh,
        device,
        data_parallel or DataParallelConfig(),
        compute_dtype=compute_dtype,
        reset_parameters=seeded_reset(model, device.torch_device, SEED),
        offloaded=plan.names_on_host if plan else (),
    )
    if optimizer is None:
        return None
    return build_optimizer(model, optimizer, 1e-4, num_local_ranks)


def shard_by_fsdp2_offloaded(model: nn.Module, mesh: DeviceMesh, device: Device) -> None:
    """Shards a model over PyTorch's FSDP2, with parameters, gradients and states in host memory
    between uses.
    """
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.pins_host_memory),
    }
    for unit in sharding_units(model):
        fully_shard(unit, **policy)
    fully_shard(model, reshard_after_forward=False, **policy)
