"""A small model whose weights tensor parallelism divides in every way, sharded over (dp, tp).

A sequence is the rows of a batch. Outside of its matrices a rank has its share of them: it gathers
the rest, computes with its part of the weights, and gets its share of the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_grouping import TensorSharding
from megatron.core.distributed.megatron_fsdp import shardings_of
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import TENSOR_AXIS, build_hybrid_mesh, build_mesh, build_tensor_mesh
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from tests.helpers.ranks import rank_device

VOCABULARY, WIDTH, ROWS = 16, 6, 8
# Sections of different sizes, so that no order of rows passes for another.
SECTIONS = FusedWeight([("gate", 8), ("up", 8), ("scale", 4)])
FP32 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


class _Gather(torch.autograd.Function):
    """The rows of all ranks; the gradient is the sum of the ranks' for the own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_sums(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """The own rows of the sums over all ranks; the reverse of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sums(sums, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


def _own_sums(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = sums.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()]


class Table(nn.Module):
    """An embedding of which a rank has some rows."""

    tensor_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor, rank: int) -> Tensor:
        local = tokens - rank * len(self.weight)
        is_here = (local >= 0) & (local < len(self.weight))
        return self.weight[local * is_here] * is_here.unsqueeze(-1)


class Scale(nn.Module):
    """A parameter that is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Scale()
        self.fused = FusedLinear(WIDTH, SECTIONS, init_std=0.3)
        self.output = Linear(8, WIDTH, init_std=0.3)
        self.fused.tensor_dims = {"weight": 0, "bias": 0}  # type: ignore[assignment]
        self.output.tensor_dims = {"weight": 1}  # type: ignore[assignment]

    def forward(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        hidden, num_parts = self.norm(x), 1
        if group is not None:
            hidden, num_parts = _Gather.apply(hidden, group), group.size()
        sizes = [size // num_parts for size in SECTIONS.sizes]
        gate, up, scale = self.fused(hidden).split(sizes, -1)
        inner = gate.tanh() * up + scale.repeat_interleave(2, -1)
        sums = inner @ self.output.weight.mT
        if group is not None:
            sums = _Scatter.apply(sums, group)
        return x + sums + self.output.bias


class Model(nn.Module):
    """A model that computes with a rank's part of the weights, and its share of a batch.

    Attributes:
        group: the ranks that divide the weights; None: they are whole.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = Scale()

    def forward(self, tokens: Tensor) -> Tensor:
        """[ROWS] -> this rank's share of the sum of squares; the ranks' shares add up to it."""
        rank = 0 if self.group is None else self.group.rank()
        x = self.table(tokens, rank)
        if self.group is not None:
            x = _Scatter.apply(x, self.group)
        for layer in self.layers:
            x = layer(x, self.group)
        return self.norm(x).square().sum() / ROWS


@dataclass(frozen=True)
class Way:
    """How ranks are divided."""

    tp: int
    strategy: str = "optim_grads_params"
    num_instances: int = 1
    outer: str = "no_shard"

    def __str__(self) -> str:
        kind = self.strategy if self.num_instances == 1 else f"hybrid-{self.outer}"
        return f"tp{self.tp}-{kind}"

    @property
    def config(self) -> DataParallelConfig:
        return DataParallelConfig(
            data_parallel_sharding_strategy=self.strategy,
            num_distributed_optimizer_instances=self.num_instances,
            outer_dp_sharding_strategy=self.outer,
            tensor_model_parallel_size=self.tp,
        )


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def sharded(
    way: Way, seed: int = 3, offload: OffloadPolicy | None = None
) -> tuple[Model, FsdpContext]:
    """The model over all ranks, with the initial weights of a seed."""
    device, num_ranks = rank_device(), dist.get_world_size()
    model = on_meta()
    shardings = shardings_of(model, way.config, num_ranks)
    mesh: DeviceMesh = build_mesh(device.type)
    if way.num_instances > 1:
        mesh = build_hybrid_mesh(device.type, num_ranks, way.num_instances)
    tensor = None
    if shardings.tensor is not None:
        own = build_tensor_mesh(device.type, num_ranks, way.tp, way.num_instances)
        tensor = TensorSharding(own, shardings.tensor)
        model.group = own.get_group(TENSOR_AXIS)
    reset = seeded_reset(model, device, seed)
    with fully_shard_context(device, reset_parameters=reset, tensor=tensor) as context:
        for module in (*model.layers, model):
            fully_shard(
                module,
                mesh,
                shardings.dense.placements,
                FP32,
                shardings.dense.grad_divisor,
                offload_policy=offload,
            )
    return model, context


def batch(step: int, number: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + number * 10 + data_rank)
    return torch.randint(VOCABULARY, (ROWS,), generator=generator)


def train(
    way: Way,
    model: Model,
    context: FsdpContext,
    optimizer: torch.optim.Optimizer,
    num_microbatches: int = 1,
    steps: range = range(3),
) -> None:
    """Some steps, whose last gradients stay."""
    data_rank = dist.get_rank() // way.tp
    for step in steps:
        optimizer.zero_grad()
        for number in range(num_microbatches):
            with microbatch(context, is_last=number == num_microbatches - 1):
                model(batch(step, number, data_rank)).backward()
        optimizer.step()


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, as one rank would have it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()
