"""Weights that stay cut while modules compute with them: each rank its own block of rows, as
experts are under expert parallelism. No experts here, and no tokens that travel: the ranks of an
outer index share their inputs, and each computes with the rows it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.optimizer.clip_grads import global_grad_norm, global_num_zeros
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
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

    def forward(self, x: Tensor, learns: bool = True) -> Tensor:
        weight, bias = (own if learns else own.detach() for own in (self.weight, self.bias))
        return (x @ weight.mT + bias).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.matrices = Matrices()

    def forward(self, x: Tensor, *, learns: bool = True) -> Tensor:
        """
        Args:
            learns: whether the matrices get gradients.
        """
        return self.matrices(self.first(x), learns)


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


def sharded(way: Way, *, offload: OffloadPolicy | None = None) -> tuple[Model, FsdpContext]:
    kind = rank_device().type
    dense = init_device_mesh(kind, way.shape, mesh_dim_names=("o", "i")[: len(way.shape)])
    experts = init_device_mesh(
        kind, (*way.shape[:-1], way.shape[-1] // way.ep, way.ep), mesh_dim_names=way.kept.dp_axes
    )
    torch.manual_seed(3)
    model = Model()
    with fully_shard_context(rank_device()) as context:
        fully_shard(
            model.matrices, experts, way.kept, FP32, grad_divisor=way.ep, offload_policy=offload
        )
        fully_shard(model, dense, way.dense, FP32, offload_policy=offload)
    return model, context


def inputs(step: int, number: int, outer: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + number * 10 + outer)
    return torch.randn(5, WIDTH, generator=generator)


def train(
    way: Way, model: Model, context: FsdpContext, optimizer: torch.optim.Optimizer, num: int = 1
) -> None:
    """Three steps, whose last gradients stay."""
    rank = torch.distributed.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        for number in range(num):
            with microbatch(context, is_last=number == num - 1):
                output = model(inputs(step, number, rank // way.ep))
                assert output.shape == (5, NUM_EXPERTS * ROWS // way.ep)
                output.square().mean().backward()
        optimizer.step()


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


@pytest.mark.parametrize(
    ("way", "num_microbatches"),
    [pytest.param(way, 3 if way.ep == 2 else 1, id=way.name) for way in WAYS],
)
@on_ranks(4)
def test_training_with_kept_rows_is_training_on_one_rank(way, num_microbatches):
    model, context = sharded(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fully_shard_optimizer(optimizer)
    train(way, model, context, optimizer, num_microbatches)

    weights, gradients = trained_on_one(4, way.ep, num_microbatches)
    for own, weight, gradient in zip(model.parameters(), weights, gradients, strict=True):
        assert own.shape == weight.shape
        torch.testing.assert_close(own.full_tensor(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own.grad.full_tensor(), gradient, rtol=1e-5, atol=1e-6)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(global_grad_norm(model.parameters()).float(), norm)
    assert global_num_zeros(model.parameters()) == 0


ZERO3, HSDP = WAYS[6], WAYS[8]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("way", [ZERO3, HSDP], ids=lambda way: way.name)
@on_ranks(4)
def test_offloading_changes_no_bit_of_kept_rows(way, fraction):
    def weights(offload: OffloadPolicy, make: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
        model, context = sharded(way, offload=offload)
        optimizer = make(model.parameters(), lr=0.05)
        fully_shard_optimizer(optimizer, precision_aware=True)
        train(way, model, context, optimizer)
        return [parameter.full_tensor() for parameter in model.parameters()]

    on_host = OffloadPolicy(main_weights_on_host=fraction == 1.0)
    offloaded = weights(on_host, lambda own, lr: HybridDeviceOptimizer(own, fraction, lr=lr))
    others = weights(OffloadPolicy(), FusedAdam)
    assert all(torch.equal(one, other) for one, other in zip(offloaded, others, strict=True))


@on_ranks(4)
def test_only_a_block_is_gathered_and_only_a_block_has_gradients():
    model, _ = sharded(ZERO3)
    (group,) = model.matrices.parameter_groups
    assert group.layout.num_blocks == 2
    assert group.unsharded_weight.range.numel == group.layout.size // 2
    assert group.gradients.unsharded.range == group.unsharded_weight.range
    assert group.model_weight.range.numel == group.layout.size // 4
    assert [tuple(parameter.full.shape) for parameter in group.fsdp_parameters] == [(6, 6), (6,)]
    assert [tuple(parameter.sharded.shape) for parameter in group.fsdp_parameters] == [
        (12, 6),
        (12,),
    ]


@on_ranks(4)
def test_a_kept_axis_of_one_rank_has_no_effect():
    """But the mesh: of layout and weights, not a bit."""
    results = []
    for placements, names in ((ZERO3.dense, ("i",)), (ZERO3.kept, ("edp", "ep"))):
        torch.manual_seed(3)
        model = Model()
        shape = (4, 1)[: len(names)]
        mesh = init_device_mesh(rank_device().type, shape, mesh_dim_names=names)
        with fully_shard_context(rank_device()):
            fully_shard(model, mesh, placements, FP32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model(inputs(0, 0, torch.distributed.get_rank())).square().mean().backward()
        optimizer.step()
        (group,) = model.parameter_groups
        results.append((group.layout, group.main_weight.local_buffer.tolist()))
    assert results[0] == results[1]


@on_ranks(2)
def test_rows_drawn_on_each_rank_match_the_whole():
    def build() -> Model:
        with torch.device("meta"):
            return Model()

    kind = rank_device().type
    mesh = init_device_mesh(kind, (1, 2), mesh_dim_names=("edp", "ep"))
    model = build()
    reset = seeded_reset(model, rank_device(), 5)
    with fully_shard_context(rank_device(), reset_parameters=reset):
        fully_shard(model, mesh, ZERO3.kept, FP32)

    whole = build()
    materialize(whole, rank_device(), 5)
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert own._local_tensor.shape[0] == own.shape[0] // 2
        assert torch.equal(own.full_tensor(), other)


@on_ranks(4)
def test_pytorch_reads_and_writes_kept_rows_as_whole_tensors():
    model, _ = sharded(ZERO3)
    wholes = {name: own.full_tensor().clone() for name, own in model.named_parameters()}
    for own in model.matrices.parameters():
        shape, offset = compute_local_shape_and_global_offset(
            own.shape, own.device_mesh, own.placements
        )
        assert shape == own._local_tensor.shape
        assert offset[0] == own.rows.start or not shape[0]

    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert state.keys() == wholes.keys()
    assert all(torch.equal(state[name], whole) for name, whole in wholes.items())
    others = {
        name: torch.arange(float(whole.numel())).view_as(whole) for name, whole in wholes.items()
    }
    set_model_state_dict(model, dict(others), options=options)
    for name, own in model.named_parameters():
        assert torch.equal(own.full_tensor(), others[name])


@pytest.mark.parametrize("skipping", [(0, 1), (3,), (0, 2)], ids=str)
@on_ranks(4)
def test_ranks_without_gradients_of_kept_rows_are_noticed_before_the_step(skipping):
    """Also where ranks that gather and reduce with each other agree, as 0 and 2 do."""
    model, _ = sharded(ZERO3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank = torch.distributed.get_rank()
    model(inputs(0, 0, rank // 2), learns=rank not in skipping).sum().backward()
    with pytest.raises(RuntimeError, match=r"matrices without any for|other ranks"):
        optimizer.step()


@on_ranks(2)
def test_rows_that_a_kept_axis_does_not_divide_are_rejected_by_name():
    model = nn.Sequential(nn.Linear(4, 3))
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("edp", "ep"))
    with (
        pytest.raises(
            ValueError,
            match=r"Expected rows that the 2 ranks of the kept axes \('ep',\) divide, got "
            r"0\.weight of \(3, 4\)\.",
        ),
        fully_shard_context(rank_device()),
    ):
        fully_shard(model, mesh, ZERO3.kept, FP32)
