"""Groups that would have much padding are split by the sizes of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    parameter_grouping,
)
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.distributed.fsdp.layout import GlobalLayout, row_numel
from megatron.core.distributed.fsdp.parameter_grouping import (
    Sharding,
    owned_parameters,
    plan_groups,
)
from megatron.core.distributed.fsdp.precision import OffloadPolicy
from megatron.core.optimizer import FusedAdam, HybridDeviceOptimizer
from tests.helpers.ranks import run_ranks

QWEN3_4B = [(2560,), (6144, 2560), (2560, 4096), (2560,), (19456, 2560), (2560, 9728), (128,)]
LLAMA_8B = [(4096,), (6144, 4096), (4096, 4096), (4096,), (28672, 4096), (4096, 14336)]
QWEN2_5_7B = [(3584,), (4608, 3584), (4608,), (3584, 3584), (37888, 3584), (3584, 18944)]


class Shapes(nn.Module):
    """Parameters of some shapes, on meta."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            parameter = nn.Parameter(torch.empty(shape, device="meta"))
            self.register_parameter(f"p{number}", parameter)


def plans_of(shapes: list[tuple[int, ...]], num_ranks: int) -> list[GroupPlan]:
    planned = plan_groups(
        owned_parameters([Shapes(shapes)], lambda _: False),
        Sharding((num_ranks,), Placements.for_strategy("optim_grads_params")),
        lambda _: MixedPrecisionPolicy(),
        OffloadPolicy(),
    )
    return [plan for plan, _ in planned]


def padding_share(plans: list[GroupPlan], shapes: list[tuple[int, ...]]) -> float:
    numel = sum(math.prod(shape) for shape in shapes)
    return sum(plan.layout.size for plan in plans) / numel - 1


@pytest.mark.parametrize("shapes", [QWEN3_4B, LLAMA_8B, QWEN2_5_7B], ids=["qwen3", "llama", "2.5"])
def test_layers_of_known_models_have_little_padding_on_any_number_of_ranks(shapes):
    for num_ranks in (8, 64, 256, 512):
        assert padding_share(plans_of(shapes, num_ranks), shapes) <= 0.01
    # One row of each tensor for each rank.
    most = sum(1024 * row_numel(shape) for shape in shapes)
    plans = plans_of(shapes, 1024)
    assert sum(plan.layout.size for plan in plans) - sum(map(math.prod, shapes)) <= most
    assert padding_share(plans, shapes) < 0.08


def test_few_ranks_keep_one_group():
    assert len(plans_of(LLAMA_8B, 64)) == 1
    assert len(plans_of(LLAMA_8B, 1024)) > 1
    # Little padding in elements, though much of these small tensors.
    small = [(8, 6), (8, 7), (8, 5)]
    assert len(plans_of(small, 64)) == 1


SHAPE = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@contextmanager
def splitting_always() -> Iterator[None]:
    """Any padding is too much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_grouping, "_MAX_PADDING_SHARE", 0.0)
        patch.setattr(parameter_grouping, "_MIN_PADDING_NUMEL", 0)
        yield


@settings(deadline=None, max_examples=60)
@given(shapes=st.lists(SHAPE, min_size=1, max_size=8), num_ranks=st.integers(1, 300))
def test_parts_have_every_parameter_once_and_at_most_a_row_too_much_for_each_rank(
    shapes, num_ranks
):
    whole = GlobalLayout.build(shapes, num_ranks)
    with splitting_always():
        parts = plans_of(shapes, num_ranks)
    names = [parameter.fqns[0] for plan in parts for parameter in plan.parameters]
    assert sorted(names) == sorted(f"p{number}" for number in range(len(shapes)))
    assert sum(plan.layout.size for plan in parts) <= whole.size
    if len(parts) > 1:
        for plan in parts:
            own = [parameter.shape for parameter in plan.parameters]
            assert [parameter.shape for parameter in plan.parameters] == list(
                plan.layout.tensor_shapes
            )
            longest = max(map(row_numel, own))
            assert all(longest % row_numel(shape) == 0 for shape in own)
            numel = sum(map(math.prod, own))
            assert plan.layout.size - numel <= longest * (num_ranks + len(own))


class Layer(nn.Module):
    """Rows of 6, 10 and 1 elements: much padding even on 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(offloads: bool) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = Placements.for_strategy("optim_grads_params")
    with fully_shard_context("cpu"):
        for module in (*model.layers, model):
            fully_shard(module, mesh, placements)
    if offloads:
        return model, HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.01)
    return model, FusedAdam(model.parameters(), lr=0.01)


def train(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_weights(model: Model) -> dict[str, torch.Tensor]:
    state = model.state_dict()  # waits for pending updates
    return {name: value.full_tensor().clone() for name, value in state.items()}


def _splits(path: Path, offloads: bool) -> None:
    with splitting_always():
        split, own = build(offloads)
    assert [len(layer.parameter_groups) for layer in split.layers] == [3, 3]
    expected, reference = build(offloads)
    assert [len(layer.parameter_groups) for layer in expected.layers] == [1, 1]
    for number in range(3):
        train(split, own, number)
        train(expected, reference, number)
    # Each rank adds up its own rows first, and three ranks have others in another layout.
    exact = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 2 else {}
    torch.testing.assert_close(whole_weights(split), whole_weights(expected), **exact)

    # Checkpoints do not depend on groups.
    dcp.save({"app": DCPState(split, own)}, checkpoint_id=path)
    loading, other = build(offloads)
    dcp.load({"app": DCPState(loading, other)}, checkpoint_id=path)
    for model, optimizer in ((split, own), (loading, other)):
        train(model, optimizer, 3)
    torch.testing.assert_close(whole_weights(split), whole_weights(loading), **exact)


@pytest.mark.parametrize("offloads", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_split_groups_train_and_are_saved_as_whole_ones(tmp_path, world_size, offloads):
    run_ranks(world_size, _splits, tmp_path / "checkpoint", offloads)
