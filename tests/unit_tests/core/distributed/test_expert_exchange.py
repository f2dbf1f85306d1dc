"""The exchange of tokens among ranks that divide the experts of a mixture."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.experts import ExpertExchange, divide_experts
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.spec import Activation, DenseSpec, MoeSpec, RouterSpec, Scores
from tests.helpers.ranks import on_ranks, run_ranks

# Tokens by source rank and expert; the first half of the experts is on rank 0.
LOADS = {
    "uneven": [[3, 0, 1, 5], [2, 2, 7, 1]],
    "an expert without tokens": [[3, 0, 1, 5], [2, 0, 7, 1]],
    "an expert without tokens of one rank": [[3, 0, 1, 5], [2, 4, 7, 1]],
    "ranks whose tokens all go away": [[0, 0, 4, 2], [3, 1, 0, 0]],
    "a rank without experts in use": [[0, 0, 4, 2], [0, 0, 1, 3]],
    "a rank without tokens": [[0, 0, 0, 0], [2, 1, 3, 1]],
    "no tokens": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


def _tokens(rank: int, expert: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens that say where they come from and go to: (rank, expert, number), exact in bf16."""
    return torch.tensor([[rank, expert, n] for n in range(count)]).view(-1, 3).to(dtype)


def _exchanged(loads: list[list[int]], dtype: torch.dtype) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_here = len(loads[0]) // num_ranks
    here = range(rank * num_here, (rank + 1) * num_here)
    exchange = ExpertExchange(dist.group.WORLD)
    own = torch.cat([_tokens(rank, expert, n, dtype) for expert, n in enumerate(loads[rank])])
    own.requires_grad_()

    sent = exchange.send(own, torch.tensor(loads[rank]))
    assert sent.counts.tolist() == [sum(load[expert] for load in loads) for expert in here]
    expected = [
        _tokens(source, expert, load[expert], dtype)
        for expert in here
        for source, load in enumerate(loads)
    ]
    assert torch.equal(sent.tokens, torch.cat(expected))

    # Each rank's experts multiply by a number of their own.
    outputs = exchange.bring_back(sent.tokens * (rank + 2), sent)
    factors = own.detach()[:, 1:2] // num_here + 2
    assert torch.equal(outputs, own * factors)
    weights = torch.arange(own.numel()).view_as(own).to(dtype)
    (outputs * weights).sum().backward()
    assert torch.equal(own.grad, weights * factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_tokens_travel_to_their_experts_and_back(loads, dtype):
    run_ranks(2, _exchanged, loads, dtype)


@on_ranks(4)
def test_tokens_of_four_ranks_travel_to_eight_experts() -> None:
    generator = torch.Generator().manual_seed(5)
    loads = torch.randint(4, (4, 8), generator=generator)
    assert (loads == 0).any()
    _exchanged(loads.tolist(), torch.float32)


SPEC = MoeSpec(
    RouterSpec(8, 3, Scores.SOFTMAX, is_scored_first=False, is_normalized=False),
    DenseSpec(16, Activation.SILU, is_gated=True, has_bias=True),
)


def _layer(spec: MoeSpec) -> MoELayer:
    torch.manual_seed(11)
    return MoELayer(spec, 12, init_std=0.3, output_init_std=0.3).double()


def _divided(whole: MoELayer) -> MoELayer:
    """The same layer with the rows of this rank's experts only."""
    layer = deepcopy(whole)
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        for name, parameter in list(linear.named_parameters()):
            rows = parameter.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
            setattr(linear, name, nn.Parameter(rows))
    divide_experts(layer, dist.group.WORLD)
    return layer


@pytest.mark.parametrize("rows_are_inputs", [False, True])
@on_ranks(4)
def test_a_divided_mixture_computes_and_derives_as_the_whole_one_does(
    rows_are_inputs: bool,
) -> None:
    whole = _layer(replace(SPEC, rows_are_inputs=rows_are_inputs))
    divided, rank = _divided(whole), dist.get_rank()
    # Batches of all ranks, each of another length.
    generator = torch.Generator().manual_seed(3)
    batches = [
        torch.randn(1, 5 + r, 12, dtype=torch.float64, generator=generator) for r in range(4)
    ]
    own = batches[rank].clone().requires_grad_()
    divided(own)[0].square().sum().backward()

    for batch in batches:
        batch.requires_grad_()
        whole(batch)[0].square().sum().backward()
    torch.testing.assert_close(own.grad, batches[rank].grad)
    expected = dict(whole.experts.named_parameters())
    for name, parameter in divided.experts.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad.chunk(4)[rank])


@on_ranks(2)
def test_ranks_that_send_tokens_of_different_mixtures_are_all_told() -> None:
    rank, names = dist.get_rank(), ["layers.0.mlp", "layers.1.mlp"]
    exchange = ExpertExchange(dist.group.WORLD, rank, names)
    expected = f"tokens of {names[rank]}, got {names[1 - rank]} on rank {1 - rank} of the ranks"
    with pytest.raises(RuntimeError, match=expected):
        exchange.send(torch.ones(2, 3), torch.tensor([1, 1]))


@on_ranks(2)
def test_experts_that_cannot_be_divided_are_rejected_by_name() -> None:
    model = nn.ModuleDict(
        {"mlp": _layer(replace(SPEC, router=replace(SPEC.router, num_experts=7)))}
    )
    with pytest.raises(
        ValueError, match=r"^Expected a number of experts that 2 ranks can .*, got 7 in mlp\.$"
    ):
        divide_experts(model, dist.group.WORLD)
