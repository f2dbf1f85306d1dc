"""torch.compile of sharded modules, in the ways in which other projects call it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import fully_shard
from tests.helpers.ranks import on_ranks, run_ranks

WIDTH, NUM_BLOCKS, NUM_STEPS = 8, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


class Trained(NamedTuple):
    losses: list[float]
    gradients: list[torch.Tensor]  # of the last step
    num_graphs: list[int]  # compiled by the end of each step


def train(
    shard: Any, habit: str, *, recomputes: bool, policy: Any = None, **options: Any
) -> Trained:
    torch._dynamo.reset()
    num_graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return aot_eager(graph, inputs)

    options.setdefault("backend", counting)
    torch.manual_seed(0)
    model = Model(recomputes=recomputes)
    if habit == "layers, then sharded":
        for layer in model.layers:
            layer.compile(**options)
    arguments = {} if policy is None else {"mp_policy": policy}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in (*model.layers, model):
        shard(unit, mesh=mesh, **arguments)
    if habit == "sharded, then layers":
        for layer in model.layers:
            layer.compile(**options)
    run = torch.compile(model, **options) if habit == "the model" else model
    if habit == "the model in place":
        model.compile(**options)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses, counts = [], []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = run(torch.randn(3, 4, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts.append(num_graphs)
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return Trained(losses, gradients, counts)


def _compiles(habit: str, fullgraph: bool, recomputes: bool) -> None:
    plain = train(fully_shard, "not at all", recomputes=recomputes)
    own = train(fully_shard, habit, recomputes=recomputes, fullgraph=fullgraph)
    theirs = train(fsdp2.fully_shard, habit, recomputes=recomputes, fullgraph=fullgraph)
    torch.testing.assert_close(own.losses, plain.losses)
    torch.testing.assert_close(own.gradients, plain.gradients)
    assert own.losses == theirs.losses
    # Nothing is compiled anew after the first step, and as many graphs as FSDP2 has.
    assert own.num_graphs == theirs.num_graphs
    assert own.num_graphs[0] == own.num_graphs[-1]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("habit", ["layers, then sharded", "sharded, then layers"])
def test_layers_compiled_in_place_train_as_uncompiled_ones(habit, fullgraph, recomputes):
    run_ranks(2, _compiles, habit, fullgraph, recomputes)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("habit", ["the model", "the model in place"])
def test_a_compiled_model_of_sharded_layers_trains_as_an_uncompiled_one(habit, recomputes):
    run_ranks(2, _compiles, habit, False, recomputes)


@on_ranks(2)
def test_inputs_that_a_policy_casts_reach_a_compiled_layer_cast():
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    own, theirs = (
        train(shard, "layers, then sharded", recomputes=False, policy=policy, fullgraph=True)
        for shard in (fully_shard, fsdp2.fully_shard)
    )
    assert own.losses == theirs.losses
    assert own.num_graphs == theirs.num_graphs


@pytest.mark.wide
@on_ranks(2, timeout=600)
def test_layers_compiled_by_inductor_train_as_uncompiled_ones():
    plain = train(fully_shard, "not at all", recomputes=False)
    own = train(
        fully_shard, "layers, then sharded", recomputes=False, fullgraph=True, backend="inductor"
    )
    torch.testing.assert_close(own.losses, plain.losses)
    torch.testing.assert_close(own.gradients, plain.gradients)
