"""Muon over the rows of several ranks. The gradients are small integers, the same on all ranks, so
their means are exact, and every run has the bits of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp import (
    Flat,
    MixedPrecisionPolicy,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.optimizer import matrix_pass
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.newton_schulz import MuonStep
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import Muon
from tests.helpers.ranks import on_ranks, run_ranks

AnyOptimizer = RuleOptimizer | HybridDeviceOptimizer
FP32 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
AVG = Partial("avg")
NUM_EXPERTS, EP = 4, 2
STEPS, MICROBATCHES, CLIP = 4, 2, 0.3
FUSED = {"qkv": (9, 5, 5), "experts": (3,) * NUM_EXPERTS}
HSDP = Placements(("o", "i"), (Replicate(), Flat()), (AVG, Flat()), (Replicate(), Flat()))
HFSDP = Placements(("o", "i"), (Replicate(), Flat()), (AVG, Flat()), (Flat(), Flat()))


class Weights(nn.Module):
    """Parameters whose gradients are constants."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.1))

    def forward(self, number: int, block: int = 0, num_blocks: int = 1) -> Tensor:
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            own = constant(name, parameter.shape, number, num_blocks).chunk(num_blocks)[block]
            # One without a gradient on any rank, in one of the steps.
            if not (name == "rests" and number // MICROBATCHES == 1):
                total = total + (parameter * own).sum()
        return total


def constant(name: str, shape: Sequence[int], number: int, num_blocks: int = 1) -> Tensor:
    """The gradient of a microbatch, of all blocks."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * number)
    whole = (shape[0] * num_blocks, *shape[1:])
    return torch.randint(-8, 9, whole, generator=generator).float()


class Model(nn.Module):
    """Weights whose rows no number of ranks cuts evenly, of one row, and other than matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Weights(qkv=(19, 12), row=(1, 24), bias=(19,), rests=(7, 12))
        self.experts = Weights(experts=(3 * NUM_EXPERTS, 6))
        self.last = Weights(tall=(40, 8), frozen=(5, 8), norm=(8,))
        self.last.frozen.requires_grad_(False)

    def forward(self, number: int, block: int = 0, num_blocks: int = 1) -> Tensor:
        experts = self.experts(number, block, num_blocks)
        return self.first(number) + experts + self.last(number)


def optimizer_of(model: nn.Module, **options: Any) -> RuleOptimizer:
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 else others).append((name.split(".")[-1], parameter))
    rows = [FUSED.get(name, (parameter.shape[0],)) for name, parameter in matrices]
    groups = [
        {"params": [parameter for _, parameter in matrices], "matrix_rows": rows},
        {"params": [parameter for _, parameter in others], "use_muon": False},
    ]
    return RuleOptimizer(groups, Muon(), lr=0.02, weight_decay=0.1, **options)


def sharded(way: str) -> tuple[nn.Module, FsdpContext | None]:
    model, num_ranks = Model(), dist.get_world_size()
    shape, names, dense = (num_ranks,), ("i",), HSDP
    if way.startswith(("hsdp", "hfsdp")):
        shape, names = (2, num_ranks // 2), ("o", "i")
        dense = HSDP if way.startswith("hsdp") else HFSDP
    elif way != "fsdp2":
        dense = Placements.for_strategy(way.removesuffix("-ep"), "i")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if way == "fsdp2":
        for module in (model.first, model.experts, model):
            fsdp2.fully_shard(module, mesh=mesh)
        return model, None

    with fully_shard_context("cpu") as context:
        if way.endswith("-ep"):
            kept = dense.with_kept_axis("ep", ("o", "edp")[-len(shape) :])
            expert_mesh = init_device_mesh(
                "cpu", (*shape[:-1], shape[-1] // EP, EP), mesh_dim_names=kept.dp_axes
            )
            fully_shard(model.experts, expert_mesh, kept, FP32, grad_divisor=EP)
        else:
            fully_shard(model.experts, mesh, dense, FP32)
        for module in (model.first, model):
            fully_shard(module, mesh, dense, FP32)
    return model, context


def train(
    model: nn.Module, optimizer: AnyOptimizer, steps: range, context: Any, num_blocks: int = 1
) -> None:
    block = dist.get_rank() % num_blocks
    for step in steps:
        for number in range(MICROBATCHES):
            is_last = number == MICROBATCHES - 1
            index = step * MICROBATCHES + number
            if context is not None:
                with microbatch(context, is_last=is_last):
                    model(index, block, num_blocks).backward()
            else:
                model(index).backward()
        optimizer.step(grad_scale=CLIP)
        optimizer.zero_grad()


def trained_alone(num_steps: int, num_blocks: int = 1) -> dict[str, Tensor]:
    """Weights and states of a plain model."""
    model = Model()
    optimizer = optimizer_of(model)
    for step in range(num_steps):
        for number in range(MICROBATCHES):
            model(step * MICROBATCHES + number).backward()
        experts = model.experts.experts.grad
        # As kept rows have it, whose gradients are divided by the ranks that compute with others.
        experts.copy_(experts / num_blocks)
        optimizer.step(grad_scale=CLIP)
        optimizer.zero_grad()
    return values(model, optimizer)


def values(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        states = optimizer.state.get(parameter, {})
        for key, tensor in {"": parameter, **states}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{name}.{key}"] = whole.detach().clone()
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() >= expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@contextmanager
def counted_calls() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the matrices that this rank orthogonalizes meanwhile."""
    shapes: list[tuple[int, ...]] = []
    original = matrix_pass.orthogonalize

    def counted(matrix: Tensor, step: MuonStep) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_pass, "orthogonalize", counted)
        yield shapes


def _train_and_compare(way: str) -> tuple[list[str], list[tuple[int, ...]]]:
    num_blocks = EP if way.endswith("-ep") else 1
    expected = trained_alone(STEPS, num_blocks)
    model, context = sharded(way)
    optimizer = optimizer_of(model)
    if context is not None:
        fully_shard_optimizer(optimizer, precision_aware=True)
    with counted_calls() as shapes:
        train(model, optimizer, range(STEPS), context, num_blocks)
    return differing(values(model, optimizer), expected), shapes


MATRICES = [(9, 12), (5, 12), (5, 12), (1, 24), (7, 12), *[(3, 6)] * NUM_EXPERTS, (40, 8)]


@pytest.mark.parametrize(
    ("num_ranks", "way", "copies"),
    [
        *[(number, "optim_grads_params", 1) for number in (1, 2, 3, 4)],
        (3, "no_shard", 3),
        (3, "optim", 1),
        (3, "optim_grads", 1),
        (3, "fsdp2", 1),
        (4, "hsdp", 2),
        (4, "hfsdp", 1),
        (4, "optim_grads_params-ep", 1),
        (4, "hsdp-ep", 2),
        (4, "hfsdp-ep", 1),
    ],
)
def test_every_way_of_sharding_has_the_bits_of_one_process(num_ranks, way, copies):
    """With two microbatches, clipping, stacked matrices, frozen weights, and a missing gradient.
    `copies`: ranks that orthogonalize each matrix.
    """
    results = run_ranks(num_ranks, _train_and_compare, way)
    assert [names for names, _ in results] == [[]] * num_ranks
    found = sorted(itertools.chain.from_iterable(shapes for _, shapes in results))
    expected = (MATRICES * STEPS) * copies
    for _ in range(copies):
        expected.remove((7, 12))  # of the step without its gradient
    assert found == sorted(expected)


def _save(folder: str, num_steps: int) -> dict[str, Tensor]:
    model, context = sharded("optim_grads_params")
    optimizer = optimizer_of(model)
    train(model, optimizer, range(num_steps), context)
    save_checkpoint(model, optimizer, folder)
    return values(model, optimizer)


def _load_and_go_on(folder: str, first: int) -> dict[str, list[str]]:
    failed = {}
    for way in ("optim_grads_params", "fsdp2"):
        model, context = sharded(way)
        optimizer = optimizer_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(model, optimizer, folder)
        assert optimizer.param_groups[0]["matrix_rows"][0] == FUSED["qkv"]
        train(model, optimizer, range(first, STEPS), context)
        failed[way] = differing(values(model, optimizer), trained_alone(STEPS))
    return failed


def test_a_run_saved_on_four_ranks_continues_bit_for_bit_on_one_and_three(tmp_path):
    """By PyTorch's `get_state_dict` and `set_state_dict`, in DCP's format."""
    folder = str(tmp_path / "checkpoint")
    run_ranks(4, _save, folder, 2)
    for num_ranks in (1, 3, 4):
        for failed in run_ranks(num_ranks, _load_and_go_on, folder, 2):
            assert failed == {"optim_grads_params": [], "fsdp2": []}


@on_ranks(2)
def test_rows_travel_while_the_matrices_before_them_are_orthogonalized():
    model, context = sharded("optim_grads_params")
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1), context)
    events: list[str] = []
    exchange, orthogonalize = dist.all_to_all_single, matrix_pass.orthogonalize

    def recorded_exchange(*args: Any, **options: Any) -> Any:
        events.append("exchange")
        return exchange(*args, **options)

    def recorded_orthogonalize(matrix: Tensor, step: MuonStep) -> Tensor:
        events.append("matrix")
        return orthogonalize(matrix, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", recorded_exchange)
        patch.setattr(matrix_pass, "orthogonalize", recorded_orthogonalize)
        train(model, optimizer, range(1, 2), context)
    runs = [kind for kind, _ in itertools.groupby(events)]
    # The rows of the first two batches leave before any matrix of the first one.
    assert events[:2] == ["exchange", "exchange"]
    assert events.count("exchange") == 2 * 3
    assert runs[-1] == "exchange"


@on_ranks(2)
def test_states_take_the_memory_of_the_rule_that_a_parameter_has():
    """In groups of `fully_shard` with parameters of both rules, too."""
    model, context = sharded("optim_grads_params")
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1), context)
    storages = {
        tensor._local_tensor.untyped_storage()
        for states in optimizer.state.values()
        for tensor in states.values()
        if isinstance(tensor, DTensor)
    }
    numel = sum(
        parameter._local_tensor.numel() * (1 if parameter.ndim == 2 else 2)
        for parameter in model.parameters()
        if parameter.requires_grad
    )
    nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert 4 * numel <= nbytes < 4 * numel + 512


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_an_error_before_anything_is_exchanged():
    model, context = sharded("optim_grads_params")
    optimizer = optimizer_of(model)
    fully_shard_optimizer(optimizer)
    assert context is not None
    before = [parameter.full_tensor() for parameter in model.parameters()]
    with microbatch(context, is_last=True):
        # `rests` has none in the second step.
        model(dist.get_rank() * MICROBATCHES).backward()
    with pytest.raises(RuntimeError, match="rests"):
        optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter.full_tensor())


@on_ranks(2)
def test_matrices_that_are_cut_between_columns_are_rejected():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    optimizer = RuleOptimizer([parameter], Muon())
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NotImplementedError, match=r"Shard\(dim=1\)"):
        optimizer.step()
    assert torch.equal(parameter.full_tensor(), torch.ones(4, 4))


class Reading:
    """An event of a reader that reads no sooner than it is awaited."""

    def __init__(self, parameters: Sequence[Tensor], found: list[Tensor]) -> None:
        self._parameters, self._found = parameters, found
        self._has_read = False

    def is_done(self) -> bool:
        return self._has_read

    def synchronize(self) -> None:
        if not self._has_read:
            self._has_read = True
            self._found.extend(each._local_tensor.clone() for each in self._parameters)


@on_ranks(2)
def test_readers_on_one_rank_get_what_they_hold_and_all_ranks_step_in_one_order():
    model, context = sharded("optim_grads_params")
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2), context)
    weights = [p._local_tensor.clone() for p in model.parameters() if p.requires_grad]
    found: list[Tensor] = []
    for unit in reversed(optimizer.state_units()):
        if dist.get_rank() == 0:
            unit.hold(Reading(unit.parameters, found))
    train(model, optimizer, range(2, STEPS), context)
    assert differing(values(model, optimizer), trained_alone(STEPS)) == []
    assert len(found) == (len(weights) if dist.get_rank() == 0 else 0)
    assert all(any(torch.equal(each, old) for old in weights) for each in found)
