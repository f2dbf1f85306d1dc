"""`fully_shard` of a list of modules, as FSDP2 has it: one unit, whose weights are gathered and
whose gradients are reduced together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FsdpModule, fully_shard
from tests.helpers.ranks import on_ranks


class Decoder(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(12, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 12, bias=False)
        if is_tied:
            self.head.weight = self.tok.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, has_head: bool = True) -> torch.Tensor:
        x = self.hidden(tokens)
        return self.head(x) if has_head else x


def sharded(fully: Callable[..., Any], is_tied: bool = False, **options: Any) -> Any:
    """As torchtitan shards a decoder: norm and head together, with the embedding if they share."""
    torch.manual_seed(0)
    model = Decoder(is_tied)
    options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    together = [model.norm, model.head]
    fully((model.tok, *together) if is_tied else together, **options)
    if not is_tied:
        fully(model.tok, **options)
    for layer in model.layers:
        fully(layer, **options)
    fully(model, **options)
    return model


def tokens(seed: int) -> torch.Tensor:
    torch.manual_seed(10 * seed + dist.get_rank())
    return torch.randint(12, (2, 4))


def train(model: Any, step: Callable[[Any, int], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number in range(3):
        losses.append(float(step(model, number)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: Any, number: int) -> torch.Tensor:
    loss = model(tokens(number)).logsumexp(-1).mean()
    loss.backward()
    return loss


def in_chunks(model: Any, number: int) -> torch.Tensor:
    """Runs the head alone, once for each chunk, and then the rest of the backward."""
    hidden = model(tokens(number), has_head=False)
    cut = hidden.detach().requires_grad_()
    total = torch.zeros(())
    for chunk in cut.chunk(2, dim=1):
        loss = model.head(chunk).logsumexp(-1).sum() / 8
        loss.backward()
        total += loss.detach()
    hidden.backward(cut.grad)
    return total


def by_weight(model: Any, number: int) -> torch.Tensor:
    """Takes the head's weight in place of its forward, as TRL's trainers do."""
    hidden = model(tokens(number), has_head=False)
    loss = nn.functional.linear(hidden, model.head.weight).logsumexp(-1).mean()
    loss.backward()
    return loss


def gathers(model: Any) -> list[int]:
    """How often the unit is gathered from now on, in a list that grows."""
    (group,), found = model.norm.parameter_groups, []
    prepare = group._prepare_gather

    def counted() -> Any:
        gather = prepare()
        found.extend([1] if gather is not None else [])
        return gather

    group._prepare_gather = counted
    return found


@on_ranks(2)
def test_losses_match_fsdp2() -> None:
    for is_tied in (False, True):
        for options in ({}, {"reshard_after_forward": False}):
            # In chunks, FSDP2 of torch 2.11 fails.
            theirs = train(sharded(fsdp2.fully_shard, is_tied, **options), whole)
            for step in (whole, in_chunks):
                ours = train(sharded(fully_shard, is_tied, **options), step)
                assert ours == pytest.approx(theirs, rel=1e-5), (is_tied, options, step)


@on_ranks(2)
def test_the_weight_of_a_module_that_does_not_run_is_whole() -> None:
    for is_tied in (False, True):
        kept = {"reshard_after_forward": False}
        theirs = train(sharded(fsdp2.fully_shard, is_tied, **kept), by_weight)
        for options in (kept, {}):
            model = sharded(fully_shard, is_tied, **options)
            assert train(model, by_weight) == pytest.approx(theirs, rel=1e-5), (is_tied, options)
            assert isinstance(model.head.weight, DTensor)


@on_ranks(2)
def test_a_list_is_gathered_and_reduced_once() -> None:
    model = sharded(fully_shard)
    assert all(isinstance(module, FsdpModule) for module in (model.norm, model.head))
    assert model.head.parameter_groups == ()
    (group,) = model.norm.parameter_groups
    assert len(group.fsdp_parameters) == 3

    model(tokens(0))
    assert group.names == ["norm.weight", "norm.bias", "head.weight"]
    found, reductions = gathers(model), []
    reduce = model.context.reduce
    model.context.reduce = lambda own, *rest: (reductions.extend(own), reduce(own, *rest))
    whole(model, 0)
    assert found == [1, 1]  # forward, backward
    assert [own for own in reductions if own is group] == [group]
    assert not model.norm.is_unsharded
    with torch.no_grad():
        model(tokens(0), has_head=False)
        assert model.norm.is_unsharded  # for a head that does not come
        model(tokens(0))
    assert not model.norm.is_unsharded


@on_ranks(2)
def test_any_module_of_a_list_has_the_methods_of_the_unit() -> None:
    model = sharded(fully_shard)
    assert isinstance(model.head, fsdp2.FSDPModule)
    model.head.unshard()
    assert model.norm.weight.shape == (6,)
    assert type(model.head.weight) is nn.Parameter
    state = get_model_state_dict(model)
    assert state["head.weight"].full_tensor().shape == (12, 6)
    assert not model.norm.is_unsharded

    model.head.set_reshard_after_forward(False)
    model(tokens(0)).sum().backward()
    model.head.set_gradient_divide_factor(1.0)
    mean = model.norm.weight.grad.full_tensor().clone()
    model.zero_grad()
    model(tokens(0)).sum().backward()
    torch.testing.assert_close(model.norm.weight.grad.full_tensor(), 2 * mean)


@on_ranks(2)
def test_a_list_may_name_modules_twice_and_inside_each_other() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given = [layers, layers[0], layers]
    assert fully_shard(given) is given
    assert isinstance(layers, FsdpModule)
    assert not isinstance(layers[0], FsdpModule)
    layers(torch.ones(2, 4)).sum().backward()
    assert layers[1].weight.grad is not None

    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    with pytest.raises(TypeError, match="Expected a module or a list of modules, got a str"):
        fully_shard([nn.Linear(2, 2), "head"])


@on_ranks(2)
def test_a_weight_shared_with_a_module_outside_is_named_on_both_sides() -> None:
    model = Decoder(is_tied=True)
    fully_shard([model.norm, model.head])
    with pytest.raises(ValueError, match=r"got tok\.weight of Decoder.* as head\.weight"):
        fully_shard(model)
    with pytest.raises(ValueError, match=r"got 1\.weight of Linear and Embedding.*FsdpLinear"):
        fully_shard([model.layers[0], model.tok])


@on_ranks(2)
def test_recomputed_modules_of_a_list_give_the_same_gradients() -> None:
    found = []
    for use_reentrant in (None, False, True):
        model = sharded(fully_shard)
        x = torch.ones(2, 6, requires_grad=True)
        for module in (model.norm, model.head):
            if use_reentrant is None:
                x = module(x)
            else:
                x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=use_reentrant)
        x.logsumexp(-1).sum().backward()
        found.append([p.grad.full_tensor() for p in (model.norm.weight, model.head.weight)])
        assert not model.norm.is_unsharded
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
