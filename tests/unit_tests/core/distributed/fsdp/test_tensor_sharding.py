"""Parameters that tensor parallelism divides: fused ones by rows of each section, others by
columns. Each rank computes with its part; everything else sees the whole.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import OffloadPolicy, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.distributed.fsdp.uneven_rows import rows_at
from megatron.core.materialize import materialize
from megatron.core.optimizer.clip_grads import global_grad_norm, global_num_zeros
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, rank_device, run_ranks
from tests.helpers.tensor_models import (
    Model,
    Way,
    batch,
    full,
    on_meta,
    sharded,
    train,
)

WAYS = [
    *[(2, Way(2, strategy)) for strategy in SHARDING_STRATEGIES],
    *[(4, Way(tp, strategy)) for tp in (2, 4) for strategy in SHARDING_STRATEGIES],
    (4, Way(2, num_instances=2)),
    (4, Way(2, num_instances=2, outer="optim")),
]
ZERO3 = Way(2)


def whole_model(seed: int = 3) -> Model:
    model = on_meta()
    materialize(model, "cpu", seed)
    return model


def trained_on_one(num_data_ranks: int, num_microbatches: int) -> Model:
    """With the weights after three steps and the gradients of the last."""
    model = whole_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(num_microbatches):
            for data_rank in range(num_data_ranks):
                (model(batch(step, number, data_rank)) / num_data_ranks).backward()
        optimizer.step()
    return model


def _train(way: Way, num_microbatches: int) -> None:
    model, context = sharded(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fully_shard_optimizer(optimizer)
    train(way, model, context, optimizer, num_microbatches)

    other = trained_on_one(dist.get_world_size() // way.tp, num_microbatches)
    for own, whole in zip(model.parameters(), other.parameters(), strict=True):
        assert own.shape == whole.shape
        assert own.grad is not None
        torch.testing.assert_close(full(own), whole.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(full(own.grad), whole.grad, rtol=1e-5, atol=1e-5)
    gradients = [own.grad.flatten() for own in other.parameters() if own.grad is not None]
    norm = torch.cat(gradients).norm()
    torch.testing.assert_close(global_grad_norm(model.parameters()).float(), norm)
    assert global_num_zeros(model.parameters()) == int((torch.cat(gradients) == 0).sum())


@pytest.mark.parametrize(("num_ranks", "way"), WAYS, ids=str)
def test_training_with_parts_of_weights_is_training_on_one_rank(num_ranks: int, way: Way) -> None:
    run_ranks(num_ranks, _train, way, 3 if way.tp < num_ranks else 1)


def _initial_weights(way: Way) -> list[Tensor]:
    model, _ = sharded(way, seed=5)
    return [full(own) for own in model.parameters()]


@pytest.mark.parametrize(
    ("num_ranks", "tp"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)], ids=lambda n: str(n)
)
def test_initial_weights_are_the_same_bits_for_every_tp(num_ranks: int, tp: int) -> None:
    expected = list(whole_model(5).parameters())
    for weights in run_ranks(num_ranks, _initial_weights, Way(tp)):
        assert all(torch.equal(own, whole) for own, whole in zip(weights, expected, strict=True))


@on_ranks(4)
def test_a_unit_has_its_whole_and_its_divided_weights_in_groups_on_two_meshes() -> None:
    model, _ = sharded(ZERO3)
    whole, divided = model.layers[0].parameter_groups
    assert (whole.mesh.mesh_dim_names, divided.mesh.mesh_dim_names) == (("dp",), ("dp", "tp"))
    assert whole.names == ["layers.0.norm.weight", "layers.0.output.bias"]
    assert divided.names == [
        "layers.0.fused.weight",
        "layers.0.fused.bias",
        "layers.0.output.weight",
    ]
    assert [tuple(p.full.shape) for p in divided.fsdp_parameters] == [(10, 6), (10,), (6, 4)]
    assert [tuple(p.sharded.shape) for p in divided.fsdp_parameters] == [(20, 6), (20,), (6, 8)]
    assert divided.unsharded_weight.range.numel == divided.layout.size // 2
    # A single section is in order already.
    (_, table) = model.parameter_groups
    assert (table.names, table.layout.cuts) == (["table.weight"], ())


@on_ranks(4)
def test_each_rank_computes_with_its_part() -> None:
    model, _ = sharded(ZERO3)
    layer, rank = model.layers[0], dist.get_rank() % 2
    wholes = {name: full(own) for name, own in layer.named_parameters()}

    def part(whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(2, dim)[rank]

    layer.unshard()
    for name, own in layer.named_parameters():
        expected = wholes[name]
        if name.startswith("fused"):
            expected = torch.cat([part(section, 0) for section in expected.split([8, 8, 4])])
        elif name == "output.weight":
            expected = part(expected, 1)
        assert torch.equal(own, expected)


def _numbered(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.arange(float(whole.numel())).view_as(whole) for name, whole in wholes.items()
    }


@on_ranks(4)
def test_whole_tensors_are_loaded_and_read_by_pytorch() -> None:
    model, _ = sharded(ZERO3)
    wholes = {name: full(own) for name, own in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert all(torch.equal(state[name], whole) for name, whole in wholes.items())

    others = _numbered(wholes)
    model.load_state_dict(others)
    assert all(torch.equal(full(own), others[name]) for name, own in model.named_parameters())
    set_model_state_dict(model, dict(wholes), options=options)
    assert all(torch.equal(full(own), wholes[name]) for name, own in model.named_parameters())
    # As the state dict of the ranks: every rank its own boxes.
    set_model_state_dict(model, get_model_state_dict(model))
    assert all(torch.equal(full(own), wholes[name]) for name, own in model.named_parameters())


@on_ranks(2)
def test_weights_of_one_rank_are_rejected_for_parameters_of_several_boxes() -> None:
    model, _ = sharded(ZERO3)
    wholes = {name: full(own) for name, own in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(NotImplementedError, match="broadcast_from_rank0"):
        set_model_state_dict(model, wholes if dist.get_rank() == 0 else {}, options=options)


@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
@on_ranks(4)
def test_states_are_distributed_as_their_parameters(optimizer: str) -> None:
    def build(seed: int) -> tuple[Model, torch.optim.Optimizer]:
        model, context = sharded(ZERO3, seed)
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        own = (FusedAdam if optimizer == "FusedAdam" else kind)(model.parameters(), lr=0.05)
        fully_shard_optimizer(own)
        train(ZERO3, model, context, own)
        return model, own

    model, own = build(3)
    for parameter in model.parameters():
        for state in own.state[parameter].values():
            if state.dim():
                assert isinstance(state, DTensor)
                assert state.shape == parameter.shape
                assert state._local_tensor.shape == parameter._local_tensor.shape

    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, own, options=options)
    expected = [full(s) for p in model.parameters() for s in own.state[p].values()]
    other_model, other = build(4)
    set_optimizer_state_dict(other_model, other, states, options=options)
    got = [full(s) for p in other_model.parameters() for s in other.state[p].values()]
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("way", [ZERO3, Way(2, num_instances=2)], ids=str)
@on_ranks(4)
def test_offloading_changes_no_bit_of_divided_weights(way: Way, fraction: float) -> None:
    def weights(offload: OffloadPolicy, make: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
        model, context = sharded(way, offload=offload)
        optimizer = make(model.parameters(), lr=0.05)
        fully_shard_optimizer(optimizer, precision_aware=True)
        train(way, model, context, optimizer)
        return [full(own) for own in model.parameters()]

    on_host = OffloadPolicy(main_weights_on_host=fraction == 1.0)
    offloaded = weights(on_host, lambda own, lr: HybridDeviceOptimizer(own, fraction, lr=lr))
    others = weights(OffloadPolicy(), FusedAdam)
    assert all(torch.equal(one, other) for one, other in zip(offloaded, others, strict=True))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda p: p * 2 + 1,
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "largest": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "transposed": lambda p: p.mT @ p if p.dim() > 1 else p @ p,
    "a row": lambda p: p[3],
    "a column": lambda p: p[:, 1] if p.dim() > 1 else p[1],
    "columns": lambda p: p[:, :2] if p.dim() > 1 else p[:2],
    "another view": lambda p: p.unsqueeze(1) + 1,
    "flat": lambda p: p.view(-1),
    "the same view": lambda p: p.view(p.shape) - 1,
    "in bf16": lambda p: p.to(torch.bfloat16),
    "rows' norms": lambda p: p.norm(dim=-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(2)
def test_operations_have_the_results_of_one_process(name: str) -> None:
    model, _ = sharded(ZERO3)
    with torch.no_grad():
        for own in model.layers[0].parameters():
            expected = OPERATIONS[name](full(own))
            torch.testing.assert_close(full(OPERATIONS[name](own)), expected)


@on_ranks(2)
def test_copies_move_whole_tensors_and_those_of_other_orders_to_their_places() -> None:
    model, _ = sharded(ZERO3)
    with torch.no_grad():
        for own in model.layers[0].parameters():
            whole = torch.arange(float(own.numel())).view(own.shape)
            own.copy_(whole)
            assert torch.equal(full(own), whole)
            replicated = DTensor.from_local(-whole, own.device_mesh)
            assert replicated.placements != own.placements
            own.copy_(replicated)
            assert torch.equal(full(own), -whole)


@on_ranks(2)
def test_gradients_come_through_full_tensors_and_local_ones() -> None:
    model, _ = sharded(ZERO3)
    for own in model.layers[0].parameters():
        leaf = own.detach().requires_grad_()
        weights = torch.arange(float(own.numel())).view(own.shape)
        (leaf.full_tensor() * weights).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(full(leaf.grad), weights)
        leaf.grad = None
        leaf.to_local().sum().backward()
        assert torch.equal(full(leaf.grad), torch.ones(own.shape))


@on_ranks(2)
def test_saved_and_copied_tensors_have_the_same_boxes() -> None:
    model, _ = sharded(ZERO3)
    for own in model.layers[0].parameters():
        stream = io.BytesIO()
        torch.save(own.detach(), stream)
        stream.seek(0)
        for other in (torch.load(stream, weights_only=True), copy.deepcopy(own.detach())):
            assert other.placements == own.placements
            assert torch.equal(full(other), full(own))


@on_ranks(2)
def test_rows_of_a_matrix_in_block_order_are_rejected() -> None:
    """As Muon would ask for, which would take them for the rows of one matrix."""
    model, _ = sharded(ZERO3)
    with pytest.raises(NotImplementedError, match="TensorCut"):
        rows_at(model.layers[0].fused.weight, (0, 1))
    assert rows_at(model.table.weight, (0, 1)) == range(8, 16)


@on_ranks(2)
def test_a_mesh_with_a_tensor_parallel_axis_is_rejected_by_name() -> None:
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(NotImplementedError, match="--tensor-model-parallel-size"):
        fully_shard(nn.Linear(4, 4), mesh)
    assert group_of(fully_shard(nn.Linear(4, 4), mesh["dp"]).weight) is not None


@on_ranks(3)
def test_a_section_that_the_ranks_cannot_divide_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"3 ranks cannot divide the 8 .* fused\.weight"):
        sharded(Way(3))
