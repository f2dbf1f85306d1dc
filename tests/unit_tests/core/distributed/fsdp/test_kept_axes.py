"""Weights that stay cut while modules compute with them: each rank its own block of rows, as
experts are under expert parallelism. No experts here, and no tokens that travel: the ranks of an
outer index share their inputs, and each computes with the rows it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from tests.helpers.ranks import on_ranks, rank_device

WIDTH, ROWS, NUM_EXPERTS = 6, 3, 4
FP32 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


class Matrices(nn.Module):
    """Several matrices that are rows of one parameter; computes with those that are here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS * ROWS, WIDTH))
        self.bias = nn.Parameter(torch.empty(NUM_EXPERTS * ROWS))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.mT + self.bias).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.matrices = Matrices()

    def forward(self, x: Tensor) -> Tensor:
        return self.matrices(self.first(x))


@dataclass(frozen=True)
class Way:
    """How ranks are divided."""

    name: str
    shape: tuple[int, ...]
    dense: Placements
    ep: int

    @property
    def kept(self) -> Placements:
        others = ("outer", "edp") if len(self.dense.dp_axes) == 2 else ("edp",)
        return self.dense.with_kept_axis("ep", others)


AVG = Partial("avg")
HYBRID = {
    "hsdp": Placements(("o", "i"), (Replicate(), Flat()), (AVG, Flat()), (Replicate(), Flat())),
    "hfsdp": Placements(("o", "i"), (Replicate(), Flat()), (AVG, Flat()), (Flat(), Flat())),
}
WAYS = [
    *[
        Way(f"{strategy}-ep{ep}", (4,), Placements.for_strategy(strategy), ep)
        for strategy in SHARDING_STRATEGIES
        for ep in (2, 4)
    ],
    *[Way(f"{name}-ep2", (2, 2), placements, 2) for name, placements in HYBRID.items()],
]


def sharded(way: Way, policy: MixedPrecisionPolicy = FP32) -> tuple[Model, FsdpContext]:
    kind = rank_device().type
    dense = init_device_mesh(kind, way.shape, mesh_dim_names=("o", "i")[: len(way.shape)])
    experts = init_device_mesh(
        kind, (*way.shape[:-1], way.shape[-1] // way.ep, way.ep), mesh_dim_names=way.kept.dp_axes
    )
    torch.manual_seed(3)
    model = Model()
    with fully_shard_context(rank_device()) as context:
        fully_shard(model.matrices, experts, way.kept, policy, grad_divisor=way.ep)
        fully_shard(model, dense, way.dense, policy)
    return model, context


def inputs(step: int, number: int, outer: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + number * 10 + outer)
    return torch.randn(5, WIDTH, generator=generator)


def trained_on_one(num_ranks: int, ep: int, num_microbatches: int) -> tuple[list, list]:
    """(whole weights after three steps, whole gradients of the last)."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(num_microbatches):
            for outer in range(num_ranks // ep):
                output = model(inputs(step, number, outer))
                loss = output.square().unflatten(1, (ep, -1)).mean(dim=(0, 2)).sum()
                (loss / num_ranks).backward()
        optimizer.step()
    return (
        [parameter.detach() for parameter in model.parameters()],
        [parameter.grad for parameter in model.parameters()],
    )


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@on_ranks(4)
def test_training_with_kept_rows_is_training_on_one_rank(way, num_microbatches):
    model, context = sharded(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fully_shard_optimizer(optimizer)
    rank = torch.distributed.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        for number in range(num_microbatches):
            with microbatch(context, is_last=number == num_microbatches - 1):
                output = model(inputs(step, number, rank // way.ep))
                assert output.shape == (5, NUM_EXPERTS * ROWS // way.ep)
                output.square().mean().backward()
        optimizer.step()

    weights, gradients = trained_on_one(4, way.ep, num_microbatches)
    for own, weight, gradient in zip(model.parameters(), weights, gradients, strict=True):
        assert own.shape == weight.shape
        torch.testing.assert_close(own.full_tensor(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own.grad.full_tensor(), gradient, rtol=1e-5, atol=1e-6)
