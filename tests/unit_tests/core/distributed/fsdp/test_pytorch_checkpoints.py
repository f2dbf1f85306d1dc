"""Checkpoints as a user of FSDP2 writes them, with PyTorch's helpers alone; only the import of
fully_shard differs.
"""

from __future__ import annotations

import copy
import io
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
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import megatron.core.distributed.fsdp as ours
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, run_ranks

BATCH, MICROBATCHES = 12, 2  # divisible by 2 and 3 ranks
STEPS, MORE_STEPS = 4, 3

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=1e-2, weight_decay=0.01),
    "Hybrid": lambda parameters: HybridDeviceOptimizer(
        parameters, 0.5, lr=1e-2, fetch_during_backward=False, overlap_step_with_forward=True
    ),
}


class Net(nn.Module):
    """Layers whose rows torch.chunk would cut otherwise, and a tensor with a row for each of two
    dims.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 17), nn.Linear(17, 17), nn.Linear(17, 5)])
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


def build(
    fully_shard: Any, seed: int, optimizer: str = "AdamW"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, number: int
) -> list[float]:
    """Losses, averaged over the ranks, of steps that see the same samples on any number of
    ranks.
    """
    losses = []
    share = BATCH // dist.get_world_size()
    rows = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for step in range(first, first + number):
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            torch.manual_seed(1000 + step * MICROBATCHES + microbatch)
            loss = model(torch.randn(BATCH, 8)[rows]).square().mean() / MICROBATCHES
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states by name, gathered by the tensors themselves."""
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach()
        state |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: (
            value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        ).clone()
        for name, value in state.items()
    }


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not differing, differing


def close(got: list[float], expected: list[float]) -> bool:
    return got == pytest.approx(expected, rel=1e-6, abs=1e-9)


# A run that is saved on two ranks and resumed on three


def _save(engine: Any, optimizer: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, own = build(engine.fully_shard, 0, optimizer)
    losses = train(model, own, 0, STEPS)
    model_state, optimizer_state = get_state_dict(model, own)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    saved = whole_state(model, own)
    return losses + train(model, own, STEPS, MORE_STEPS), saved


def _load(engine: Any, optimizer: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, own = build(engine.fully_shard, 1, optimizer)
    model_state, optimizer_state = get_state_dict(model, own)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, own, model_state_dict=state["model"], optim_state_dict=state["optim"])
    loaded = whole_state(model, own)
    return train(model, own, STEPS, MORE_STEPS), loaded


def test_a_run_saved_on_two_ranks_continues_on_three_as_with_fsdp2(tmp_path):
    saved, loaded = {}, {}
    for engine in (ours, fsdp2):
        folder = str(tmp_path / engine.__name__)
        saved[engine] = run_ranks(2, _save, engine, "AdamW", folder)[0]
        loaded[engine] = run_ranks(3, _load, engine, "AdamW", folder)[0]
    assert close(saved[ours][0], saved[fsdp2][0])
    assert close(loaded[ours][0], loaded[fsdp2][0])
    assert close(loaded[ours][0], saved[ours][0][STEPS:])
    assert_equal(loaded[ours][1], saved[ours][1])
    # What one engine has saved, the other loads: keys and shapes are PyTorch's.
    crossed = run_ranks(3, _load, fsdp2, "AdamW", str(tmp_path / ours.__name__))[0]
    assert_equal(crossed[1], saved[ours][1])


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "AdamW"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_the_other_optimizers_continue_as_saved(tmp_path, optimizer, world_size):
    losses, saved = run_ranks(2, _save, ours, optimizer, str(tmp_path))[0]
    more, loaded = run_ranks(world_size, _load, ours, optimizer, str(tmp_path))[0]
    assert_equal(loaded, saved)
    assert more == losses[STEPS:] if world_size == 2 else close(more, losses[STEPS:])


# State dicts that one rank has whole


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(n, marks=() if n == "AdamW" else pytest.mark.wide) for n in OPTIMIZERS],
)
@on_ranks(2)
def test_full_state_dicts_go_to_the_first_rank_and_come_back(optimizer: str) -> None:
    model, own = build(ours.fully_shard, 0, optimizer)
    train(model, own, 0, STEPS)
    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=on_first)
    states = get_optimizer_state_dict(model, own, options=on_first)
    expected = whole_state(model, own)
    if dist.get_rank():
        assert (weights, states) == ({}, {})
    else:
        assert_equal(weights, {name: expected[name] for name in weights})
        flat = {
            f"{name}.{key}": torch.as_tensor(v)
            for name, s in states["state"].items()
            for key, v in s.items()
        }
        assert_equal({**weights, **flat}, expected)
    weights, states = copy.deepcopy((weights, states))  # counters are still the optimizer's own
    losses = train(model, own, STEPS, MORE_STEPS)

    both = [weights, states]
    dist.broadcast_object_list(both)
    for options, source in (
        (StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), [weights, states]),
        (StateDictOptions(full_state_dict=True), both),
    ):
        other, other_optimizer = build(ours.fully_shard, 1, optimizer)
        source = copy.deepcopy(source)
        set_model_state_dict(other, source[0], options=options)
        set_optimizer_state_dict(other, other_optimizer, source[1], options=options)
        assert_equal(whole_state(other, other_optimizer), expected)
        assert train(other, other_optimizer, STEPS, MORE_STEPS) == losses


# The smallest thing that went wrong


def _one_layer(folder: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 17)
    expected = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    ours.fully_shard(layer)
    dcp.save({"model": layer.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    state = {"model": layer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    layer.load_state_dict(state["model"])
    assert_equal(
        {name: tensor.full_tensor() for name, tensor in layer.state_dict().items()}, expected
    )

    # The results of a copy of the state dict, of one copied to the CPU, of one that was averaged.
    for number, changed in enumerate(
        [
            copy.deepcopy(layer.state_dict()),
            {name: tensor.clone() for name, tensor in layer.state_dict().items()},
            {name: tensor.cpu() for name, tensor in layer.state_dict().items()},
            {name: (tensor + tensor) / 2 for name, tensor in layer.state_dict().items()},
        ]
    ):
        dcp.save({"model": changed}, checkpoint_id=f"{folder}/{number}")
        empty = {"model": {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}}
        dcp.load(empty, checkpoint_id=f"{folder}/{number}")
        assert_equal(empty["model"], expected)


def test_one_layer_is_saved_and_loaded_after_any_change_of_its_state_dict(tmp_path):
    run_ranks(2, _one_layer, str(tmp_path))


@on_ranks(2)
def test_a_module_loads_whole_tensors_even_shards_and_what_torch_save_kept() -> None:
    torch.manual_seed(0)
    plain = Net()
    model, _ = build(ours.fully_shard, 1)
    whole = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    even = {
        name: distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        for (name, tensor), parameter in zip(
            whole.items(), model.state_dict().values(), strict=True
        )
    }
    for state in (whole, even):
        model.load_state_dict({name: tensor * 0 for name, tensor in state.items()})
        assert not any(parameter.full_tensor().any() for parameter in model.parameters())
        model.load_state_dict(state)
        assert_equal(
            {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}, whole
        )
        # The full weights follow.
        x = torch.randn(3, 8)
        torch.testing.assert_close(model(x), plain(x))

    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    model.load_state_dict({name: tensor * 0 for name, tensor in whole.items()})
    stream.seek(0)
    model.load_state_dict(torch.load(stream, weights_only=True))
    assert_equal({name: tensor.full_tensor() for name, tensor in model.state_dict().items()}, whole)


class AppState(Stateful):
    """As in PyTorch's own recipe for DCP, and in AReaL."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def _stateful(folder: str) -> None:
    model, optimizer = build(ours.fully_shard, 0)
    train(model, optimizer, 0, STEPS)
    expected = whole_state(model, optimizer)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    # In a separate group: an asynchronous save must not mix with the training's collectives.
    future = dcp.async_save(
        {"app": AppState(model, optimizer)},
        checkpoint_id=f"{folder}/async",
        process_group=dist.new_group(backend="gloo"),
    )
    losses = train(model, optimizer, STEPS, MORE_STEPS)
    future.result()
    for source in (folder, f"{folder}/async"):
        other, other_optimizer = build(ours.fully_shard, 1)
        dcp.load({"app": AppState(other, other_optimizer)}, checkpoint_id=source)
        assert_equal(whole_state(other, other_optimizer), expected)
        assert train(other, other_optimizer, STEPS, MORE_STEPS) == losses


def test_a_stateful_application_saves_and_loads_itself_also_during_training(tmp_path):
    run_ranks(2, _stateful, str(tmp_path))


def _hybrid_sharding(folder: str) -> None:
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        ours.fully_shard(layer, mesh)
    ours.fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 2)
    expected = whole_state(model, optimizer)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    train(model, optimizer, 2, 1)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    assert_equal(whole_state(model, optimizer), expected)


def test_a_mesh_of_two_axes_means_hybrid_sharding_and_is_saved_as_well(tmp_path):
    run_ranks(4, _hybrid_sharding, str(tmp_path))


def test_nothing_of_this_would_pass_by_chance():
    """The weights of these tests are cut otherwise than torch would cut them."""
    assert run_ranks(2, _cuts_differ)[0]


def _cuts_differ() -> bool:
    model, _ = build(ours.fully_shard, 0)
    even = [
        parameter.redistribute(placements=parameter._spec.placements)
        for parameter in model.parameters()
    ]
    return any(
        e.to_local().shape != p.to_local().shape
        for e, p in zip(even, model.parameters(), strict=True)
    )


@on_ranks(2)
def test_a_shard_that_a_program_has_cut_itself_is_an_error_and_not_misplaced() -> None:
    """Loaders of adapters cut a whole tensor into equal chunks, and make a DTensor with the
    parameter's mesh, placements, shape and strides.
    """
    # The rows that this engine cuts: other ones than the chunks', and as many.
    for rows in (9, 8):
        model = ours.fully_shard(nn.Linear(4, rows, bias=False))
        weight, whole = model.weight, torch.arange(4.0 * rows).view(rows, 4)
        before = weight.full_tensor().detach().clone()
        part = whole.chunk(2)[dist.get_rank()]
        shape, strides = weight.shape, tuple(weight.stride())
        with pytest.raises(NotImplementedError, match=r"UnevenShard.*load_state_dict.*with_local"):
            DTensor.from_local(
                part, weight.device_mesh, weight.placements, shape=shape, stride=strides
            )
        assert torch.equal(weight.full_tensor(), before)

        replica = DTensor.from_local(whole, weight.device_mesh, [Replicate()])
        for value in (whole, replica, weight.with_local(weight.own_rows(whole))):
            model.load_state_dict({"weight": torch.zeros(rows, 4)})
            model.load_state_dict({"weight": value})
            assert torch.equal(weight.full_tensor(), whole)
