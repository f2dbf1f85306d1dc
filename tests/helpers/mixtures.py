"""Small models with experts, and their training: alike on any number of ranks, however experts are
divided over these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.engines import EngineConfig, ModuleEngine, build_engine

VOCAB, SEQ, GLOBAL_BATCH = 31, 6, 12
# A dense layer and two mixtures, of experts whose rows no number of ranks divides.
MIXTURE = TransformerConfig(
    num_layers=3,
    hidden_size=20,
    num_attention_heads=2,
    ffn_hidden_size=28,
    moe_ffn_hidden_size=7,
    num_experts=8,
    moe_layer_freq="[0,1,1]",
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=9,
    moe_aux_loss_coeff=0.02,
    moe_z_loss_coeff=1e-3,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.2,
)
OFFLOADED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)


class Trained(NamedTuple):
    """What steps have shown, alike on all ranks."""

    losses: list[float]
    norms: list[float]


def mixture_engine(
    expert_size: int = 1,
    strategy: str = "optim_grads_params",
    *,
    optimizer: OptimizerConfig | None = None,
    model: TransformerConfig = MIXTURE,
    compute_dtype: str = "fp32",
    **parallel: Any,
) -> ModuleEngine:
    """An engine on all ranks with a model of `model`, before its first step."""
    config = EngineConfig(
        OptimizerConfig() if optimizer is None else optimizer,
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        DataParallelConfig(
            data_parallel_sharding_strategy=strategy,
            expert_model_parallel_size=expert_size,
            **parallel,
        ),
        99,
        compute_dtype,
        7,
    )
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(lambda: GPTModel(model, VOCAB))
    return engine


def train(
    engine: ModuleEngine, steps: Iterable[int], global_batch: int = GLOBAL_BATCH
) -> Trained:
    """Steps of `global_batch` sequences, one in each microbatch, which the ranks share out."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    trained = Trained([], [])
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(VOCAB, (global_batch, 1, SEQ + 1), generator=generator)
        result = engine.train_batch(
            [{"tokens": own} for own in tokens[rank::num_ranks]], loss_with_balance
        )
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
    return trained


def loss_with_balance(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a microbatch, and what the routers add to it."""
    tokens = batch["tokens"]
    losses, report = model(tokens[:, :-1], tokens[:, 1:].contiguous(), with_routing=True)
    return losses.mean() + report.balance_loss + report.z_loss
