"""Small models with experts, and their training: alike on any number of ranks, however experts are
divided over these.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed import experts
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.ranks import rank_device

VOCAB, SEQ = 31, 6
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


# (step, sequences) -> tokens [sequences, SEQ + 1]
Data = Callable[[int, int], torch.Tensor]


class Trained(NamedTuple):
    """What steps have shown.

    Attributes:
        losses, norms: by step, alike on all ranks.
        loads: tokens of each expert from this rank: [steps, layers with experts, experts].
    """

    losses: list[float]
    norms: list[float]
    loads: torch.Tensor


def mixture_engine(
    expert_size: int = 1,
    strategy: str = "optim_grads_params",
    *,
    optimizer: OptimizerConfig | None = None,
    model: TransformerConfig | nn.Module = MIXTURE,
    compute_dtype: str = "fp32",
    **parallel: Any,
) -> ModuleEngine:
    """An engine on all ranks, before its first step.

    Args:
        model: a model with values, or what to make one of.
    """
    config = EngineConfig(
        OptimizerConfig() if optimizer is None else optimizer,
        LRScheduleConfig(lr=2e-3, lr_decay_style="constant"),
        DataParallelConfig(
            data_parallel_sharding_strategy=strategy,
            expert_model_parallel_size=expert_size,
            **parallel,
        ),
        99,
        compute_dtype,
        7,
    )
    kind, index = rank_device().type, rank_device().index or 0
    device = Device(kind, index)
    engine = build_engine(config, device, build_mesh(kind, dist.get_world_size()))
    engine.initialize(model if isinstance(model, nn.Module) else lambda: GPTModel(model, VOCAB))
    return engine


def any_tokens(step: int, num_sequences: int) -> torch.Tensor:
    """A step's random tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(VOCAB, (num_sequences, SEQ + 1), generator=generator)


def train(
    engine: ModuleEngine, steps: Iterable[int], num_sequences: int = 12, data: Data = any_tokens
) -> Trained:
    """Trains with one sequence in each microbatch, which ranks take in turns."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    losses, norms, loads = [], [], []

    def forward_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        output, report = model(tokens[:, :-1], tokens[:, 1:].contiguous(), with_routing=True)
        loads[-1] = loads[-1] + report.load.cpu()
        loss: torch.Tensor = output.mean() + report.balance_loss + report.z_loss
        return loss

    for step in steps:
        loads.append(torch.zeros((), dtype=torch.int64))
        own = data(step, num_sequences)[rank::num_ranks]
        result = engine.train_batch([{"tokens": tokens[None]} for tokens in own], forward_step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return Trained(losses, norms, torch.stack(loads))


@contextmanager
def delayed_exchanges(seed: int) -> Iterator[None]:
    """While open, this rank comes to every exchange of tokens after a random pause."""
    generator = random.Random(1000 * seed + dist.get_rank())
    exchange = experts.dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(generator.uniform(0, 0.004))
        return exchange(*args, **kwargs)

    with mock.patch.object(experts.dist, "all_to_all_single", late):
        yield
