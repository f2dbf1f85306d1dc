"""Models on meta that are given storage and values after `fully_shard`, in torchtitan's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import Placements, fully_shard, fully_shard_context
from tests.helpers.ranks import on_ranks


class Layer(nn.Module):
    """Without a `reset_parameters`, as grouped experts have none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(5, 6, 6))
        self.gate = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return x + torch.einsum("be,eij,bj->bi", weights, self.experts, x * angles)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", self.angles_of(), persistent=False)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.norm = nn.LayerNorm(6)

    @staticmethod
    def angles_of() -> torch.Tensor:
        return torch.arange(6.0).cos()

    def init_weights(self) -> None:
        """Values that do not depend on how parameters are cut."""
        self.angles = self.angles_of()
        for number, (name, parameter) in enumerate(sorted(self.named_parameters())):
            nn.init.constant_(parameter, 0.01 * number)
            if name.endswith("experts"):
                parameter.mul_(-1.0)
        self.norm.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.norm(x)


def on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder()


def sharded(fully: Callable[..., Any], model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully(module, mesh=mesh)
    return model


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 6)).pow(3).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@on_ranks(2)
def test_storage_then_weights_then_buffers_as_in_fsdp2() -> None:
    losses = []
    for fully in (fsdp2.fully_shard, fully_shard):
        model = sharded(fully, on_meta())
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        model.train()
        losses.append(train(model))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@on_ranks(2)
def test_storage_that_is_there_is_kept() -> None:
    model = sharded(fully_shard, on_meta())
    groups = [group for module in (*model.layers, model) for group in module.parameter_groups]
    places = [group.main_weight.local_buffer.data_ptr() for group in groups]
    parameters = dict(model.named_parameters())
    gate = model.layers[0].gate.weight.full_tensor().clone()
    model.to_empty(device="cpu")
    assert [group.main_weight.local_buffer.data_ptr() for group in groups] == places
    assert all(own is parameters[name] for name, own in model.named_parameters())
    assert not model.angles.is_meta
    # What fully_shard has drawn stays drawn.
    assert torch.equal(model.layers[0].gate.weight.full_tensor(), gate)
    assert float(gate.abs().sum()) > 0


@on_ranks(2)
def test_a_forward_before_everything_has_values_names_what_has_none() -> None:
    def fill(model: Any, but: str) -> None:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != but:
                    nn.init.constant_(parameter, 0.1)

    for use in (
        lambda model: model(torch.ones(2, 6)),
        lambda model: model.layers[1].unshard(),
        lambda model: model.layers[1](torch.ones(2, 6), torch.ones(6)),
    ):
        model = sharded(fully_shard, on_meta())
        fill(model, but="layers.1.experts")
        with pytest.raises(RuntimeError, match=r"sharded on meta.*experts"):
            use(model)
        with torch.no_grad():
            model.layers[1].experts.fill_(0.1)
        use(model)

    model = sharded(fully_shard, on_meta())
    with pytest.raises(RuntimeError, match=r"\['angles'\]"):
        model(torch.ones(2, 6))
    model.angles = model.angles_of()
    with pytest.raises(RuntimeError, match=r"\['layers\.0\.experts'\]"):
        model(torch.ones(2, 6))

    # One row that is missing, on one rank.
    model = sharded(fully_shard, on_meta())
    fill(model, but="layers.0.experts")
    with torch.no_grad():
        whole = torch.ones(5, 6, 6)
        whole[4, 0, 0] = float("nan")
        model.layers[0].experts.copy_(whole)
    with pytest.raises(RuntimeError, match=r"\['layers\.0\.experts'\]"):
        model(torch.ones(2, 6))


@on_ranks(2)
def test_replicas_must_be_filled_alike() -> None:
    torch.manual_seed(0)
    with fully_shard_context("cpu"):
        model = fully_shard(on_meta().layers[0], placements=Placements.for_strategy("no_shard"))
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(dist.get_rank()))
    with pytest.raises(ValueError, match="the same weights on every rank"):
        model(torch.ones(2, 6), torch.ones(6))


@on_ranks(2)
def test_values_may_come_from_a_checkpoint(tmp_path: Any) -> None:
    source = sharded(fully_shard, _real())
    dcp.save(get_model_state_dict(source), checkpoint_id=tmp_path / "saved")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(source, options=options)
    expected = train(source)

    def by_dcp(model: Any) -> None:
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        set_model_state_dict(model, state)

    def from_rank_0(model: Any) -> None:
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=broadcast)

    for load in (by_dcp, from_rank_0):
        with fully_shard_context("cpu"):
            model = sharded(fully_shard, on_meta())
        model.to_empty(device="cpu")
        model.angles.copy_(model.angles_of())
        load(model)
        assert train(model) == expected


def _real() -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    with torch.no_grad():
        for layer in model.layers:
            nn.init.normal_(layer.experts)
    return model
