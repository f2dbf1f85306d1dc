"""DTensors with uneven rows against the same operations on plain tensors, on several meshes."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import swa_utils

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import Flat
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.distributed.fsdp.uneven_rows import UnevenShard
from tests.helpers.ranks import on_ranks, run_ranks

# Weight and bias of a layer: the bias ends up on one rank, the weight is cut in the middle.
SHAPES = [(18, 8), (18,), (6, 2, 3)]
LINE, HYBRID, FULLY = [Flat()], [Replicate(), Flat()], [Flat(), Flat()]
MESHES = [
    pytest.param(2, (2,), LINE, 1, id="line of 2"),
    pytest.param(3, (3,), LINE, 1, id="line of 3", marks=pytest.mark.wide),
    pytest.param(4, (2, 2), HYBRID, 1, id="hybrid", marks=pytest.mark.wide),
    pytest.param(4, (2, 2), FULLY, 1, id="fully", marks=pytest.mark.wide),
    pytest.param(4, (2, 2), FULLY, 2, id="blocks"),
]


def on_meshes(function: Callable[..., None]) -> Callable[..., None]:
    """A test that calls the function with whole tensors and distributed ones, on the ranks of each
    mesh.
    """

    def on_ranks(*cut: Any) -> None:
        function(*distributed(*cut))

    def test(world_size, mesh_shape, placements, num_blocks):
        run_ranks(world_size, on_ranks, mesh_shape, placements, num_blocks)

    names = ("world_size", "mesh_shape", "placements", "num_blocks")
    return pytest.mark.parametrize(names, MESHES)(test)


def distributed(
    mesh_shape: tuple[int, ...],
    placements: list[Any],
    num_blocks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[DTensor]]:
    """Tensors that all ranks have whole, and the same as uneven DTensors."""
    torch.manual_seed(7)
    wholes = [torch.randn(shape).to(dtype) for shape in SHAPES]
    layout = GlobalLayout.build(SHAPES, math.prod(mesh_shape), num_blocks)
    buffer = DBuffer(mesh_of(mesh_shape), placements, layout, dtype, "cpu")
    for index, whole in enumerate(wholes):
        buffer.copy_from(index, whole)
    tensors = [buffer.get_dtensor(index) for index in range(len(SHAPES))]
    assert all(type(tensor) is UnevenDTensor for tensor in tensors)
    return wholes, tensors


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


@contextlib.contextmanager
def gathers() -> Iterator[list[int]]:
    """Counts the messages sent inside the context: [number of messages]."""
    counted, original = [0], collectives.all_gather

    def count(*args: Any, **kwargs: Any) -> None:
        counted[0] += 1
        original(*args, **kwargs)

    collectives.all_gather = count
    try:
        yield counted
    finally:
        collectives.all_gather = original


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _replicated(tensor: torch.Tensor, beside: DTensor) -> DTensor:
    return distribute_tensor(tensor, beside.device_mesh, [Replicate()] * beside.device_mesh.ndim)


def _beside(tensor: Any, other: torch.Tensor) -> torch.Tensor:
    """An argument of an operator on a tensor, which a DTensor takes as a DTensor only."""
    return _replicated(other, tensor) if isinstance(tensor, DTensor) else other


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(whole(got), expected, rtol=1e-6, atol=1e-6)


@on_meshes
def test_these_tensors_are_cut_otherwise_than_torch_would(wholes, tensors) -> None:  # noqa: ARG001
    even = [
        compute_local_shape_and_global_offset(t.shape, t.device_mesh, t._spec.placements)[0]
        for t in tensors
    ]
    differs = torch.tensor(
        [
            float(list(shape) != list(t._local_tensor.shape))
            for shape, t in zip(even, tensors, strict=True)
        ]
    )
    dist.all_reduce(differs)
    assert all(differs), "an evenly sharded tensor cannot fail this test"


@on_meshes
def test_full_tensor_and_redistribute_give_all_rows_in_order(wholes, tensors) -> None:
    for expected, tensor in zip(wholes, tensors, strict=True):
        assert torch.equal(tensor.full_tensor(), expected)
        mesh = tensor.device_mesh
        replicated = tensor.redistribute(placements=[Replicate()] * mesh.ndim)
        assert torch.equal(replicated.to_local(), expected)
        even = tensor.redistribute(placements=[Shard(0)] * mesh.ndim)
        assert type(even) is DTensor
        assert torch.equal(even.full_tensor(), expected)
        same = tensor.redistribute(placements=tensor.placements)
        assert same.to_local().data_ptr() == tensor.to_local().data_ptr()

        rows = tensor.rows
        assert torch.equal(tensor.to_local(), expected[rows.start : rows.stop])
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        assert shape == tuple(tensor.to_local().shape)
        assert not len(rows) or offset[0] == rows.start


Operation = Callable[[Any], Any]

# On the rows of each rank, without a message.
LOCAL: list[Operation] = [
    lambda t: t + t,
    lambda t: t * 2 - 1,
    lambda t: t.abs().sqrt(),
    lambda t: torch.where(t > 0, t, torch.zeros_like(t)),
    lambda t: torch.lerp(t, t * 3, 0.25),
    lambda t: torch.addcdiv(t, t, t.square() + 1),
    lambda t: t.double(),
    lambda t: t.to(torch.bfloat16).float(),
    lambda t: t.clone().mul_(3).add_(t),
    lambda t: t.clone().zero_(),
    lambda t: t.clone().copy_(t * 2),
    lambda t: t.detach() / t.new_ones(t.shape),
    lambda t: torch.full_like(t, 7.0),
    lambda t: t.frexp().mantissa,
    lambda t: t * torch.tensor(2.0),
    lambda t: t == t.clone(),
    lambda t: torch._foreach_add([t, t], [t, t * 2], alpha=2)[1],
    lambda t: torch._foreach_addcdiv(
        [t, t], [t, t], [t * t + 1, t * t + 1], torch.tensor([0.5, 2.0])
    )[1],
]
# The same, as views.
VIEWS: list[Operation] = [
    lambda t: t.data,
    lambda t: t.view(t.shape),
    lambda t: t.view(t.shape[0], -1),
    lambda t: t.unsqueeze(-1).transpose(-1, 1) if t.dim() > 1 else t.unsqueeze(-1),
    lambda t: t[:, 1:2] if t.dim() > 1 else t[:],
    lambda t: t.select(1, 0) if t.dim() > 1 else t[:],
    lambda t: t.permute(0, *range(t.dim() - 1, 0, -1)),
    lambda t: t.expand(t.shape),
    lambda t: t.unsqueeze(1).expand(-1, 3, *t.shape[1:]).select(1, 2),
    lambda t: t.chunk(2, dim=-1)[0] if t.dim() > 1 else t[:],
    lambda t: t.unbind(-1)[1] if t.dim() > 1 else t[:],
    lambda t: t.split([1, t.shape[-1] - 1], dim=-1)[1] if t.dim() > 1 else t[:],
]
# On each rank, then with one small message.
REDUCED: list[Operation] = [
    lambda t: t.norm(),
    lambda t: torch.linalg.vector_norm(t, 1),
    lambda t: torch.linalg.vector_norm(t, float("inf")),
    lambda t: t.sum(),
    lambda t: torch._foreach_norm([t])[0],
    lambda t: torch._foreach_norm([t], float("inf"))[0],
    lambda t: nn.utils.get_total_norm([t, t]),
]
# On all rows. Of views there are copies.
COPIED_VIEWS: list[Operation] = [
    lambda t: t[0],
    lambda t: t[2:4],
    lambda t: t[1:].view(-1),
    lambda t: t.unsqueeze(0),
    lambda t: t.t() if t.dim() < 3 else t.transpose(0, 2),
    lambda t: t.view(2, -1),
    lambda t: t.unbind()[1],
    lambda t: t.squeeze(),
    lambda t: t.view(torch.int32).view(torch.float32),
]
GATHERED: list[Operation] = [
    *COPIED_VIEWS,
    lambda t: t.view(-1),
    lambda t: t.mean(),
    lambda t: t.std(),
    lambda t: t.max(),
    lambda t: t.argmax(),
    lambda t: torch._foreach_max([t, t])[1],
    lambda t: t.sum(dim=0),
    lambda t: t.norm(dim=-1),
    lambda t: t.norm(p=-1),
    lambda t: t - t.sum(dim=0, keepdim=True),
    lambda t: t.cumsum(0),
    lambda t: t.sort(dim=0).values,
    lambda t: t.flip(0),
    lambda t: torch.cat([t, t]),
    lambda t: torch.stack([t, t]),
    lambda t: t.reshape(t.shape[0], -1) @ t.reshape(t.shape[0], -1).t(),
    # Rows of another length than the buffer's.
    lambda t: t[..., :3].contiguous().view(-1) if t.dim() > 1 else t.cumsum(0),
    lambda t: t.isfinite().all(),
    lambda t: torch.equal(t, t * 1),
    lambda t: torch.allclose(t, t + 1e-9),
    # In place, also with another DTensor as an argument.
    lambda t: [own := t.clone(), own.cumsum_(0)][0],
    lambda t: [own := t.clone(), own.index_fill_(0, _beside(t, torch.tensor([2])), 5.0)][0],
]
OPERATIONS = [
    *((operation, UnevenDTensor, False) for operation in (*LOCAL, *VIEWS)),
    *((operation, DTensor, False) for operation in REDUCED),
    *((operation, DTensor, True) for operation in GATHERED),
]


@on_meshes
def test_operations_give_the_same_results_as_in_one_process(wholes, tensors) -> None:
    for expected, tensor in zip(wholes, tensors, strict=True):
        for number, (operation, kind, gathers_rows) in enumerate(OPERATIONS):
            with gathers() as sent:
                got = operation(tensor)
            # In a tensor of one dim, some of these keep dim 0.
            assert bool(sent[0]) == gathers_rows or (gathers_rows and tensor.dim() == 1), number
            assert isinstance(got, (kind, bool)), number
            assert_same(got, operation(expected))
            if operation in REDUCED:
                # A number is the same on every rank, too.
                assert got.item() == pytest.approx(operation(expected).item(), rel=1e-6)
        assert torch.equal(tensor.full_tensor(), expected)
        assert str(tensor.to_local()) in str(tensor)


@on_meshes
def test_random_values_are_the_same_on_all_replicas(wholes, tensors) -> None:  # noqa: ARG001
    torch.manual_seed(dist.get_rank())  # not alike, as ranks of a careless program
    for tensor in tensors:
        own = nn.init.normal_(tensor.clone())
        drawn = own.full_tensor()
        others = [torch.empty_like(drawn) for _ in range(dist.get_world_size())]
        dist.all_gather(others, drawn)
        assert all(torch.equal(other, drawn) for other in others), "replicas differ"
        assert drawn.std() > 0.1


@on_meshes
def test_tensors_that_are_cut_otherwise_are_brought_to_the_same_rows(wholes, tensors) -> None:
    for expected, tensor in zip(wholes, tensors, strict=True):
        even = distribute_tensor(expected, tensor.device_mesh, tensor.placements)
        assert type(even) is DTensor
        replicated = _replicated(expected.clone(), tensor)
        for other in (even, replicated):
            for got in (tensor + other, other + tensor):
                assert isinstance(got, UnevenDTensor)
                assert_same(got, 2 * expected)
            assert_same(tensor.clone().mul_(other), expected * expected)
            assert torch.equal(tensor, other)
            # A copy into a plain DTensor takes all rows. It is the last to use `other`.
            assert_same(other.copy_(tensor * 3), expected * 3)
        assert_same(tensor.clone().zero_().copy_(expected), expected)  # a plain, whole tensor
        scalar = _replicated(torch.tensor(2.0), tensor)
        assert_same(tensor * scalar, expected * 2)

    weight, bias, _ = tensors
    assert not weight.is_cut_as(bias)
    assert_same(weight * bias.view(18, 1), wholes[0] * wholes[1].view(18, 1))
    assert_same(bias + weight[:, 0], wholes[1] + wholes[0][:, 0])


@on_meshes
def test_writes_to_a_view_reach_the_tensor_or_are_rejected(wholes, tensors) -> None:
    for expected, tensor in zip(wholes, tensors, strict=True):
        for view in VIEWS:
            own, plain = tensor.clone(), expected.clone()
            view(own).mul_(2)
            view(plain).mul_(2)
            assert_same(own, plain)
        for view in COPIED_VIEWS:
            own = tensor.clone()
            with pytest.raises(RuntimeError, match=r"own to write to in aten\.mul_"):
                view(own).mul_(2)
            assert_same(view(own) * 2, view(expected) * 2)
            assert_same(own, expected)
        own = tensor.clone()
        with pytest.raises(NotImplementedError, match="shape of an uneven DTensor to stay"):
            own.unsqueeze_(0)


@on_meshes
def test_meaningless_operations_are_rejected_by_name(wholes, tensors) -> None:
    weight = tensors[0]
    with pytest.raises(NotImplementedError, match=r"zeros_like\(parameter\)\.copy_"):
        weight.redistribute(placements=tensors[2].placements)
    with pytest.raises(ValueError, match=r"Expected placements of a tensor of 18 rows, got"):
        UnevenDTensor.over(
            weight.to_local(), weight.device_mesh, tensors[2].placements, (18, 8), (8, 1)
        )
    assert weight.is_pinned() is False
    parameter = nn.Parameter(weight.clone())
    (gradient,) = torch.autograd.grad(
        parameter.full_tensor().pow(3).sum(), parameter, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match=r"plain one of shape \(18, 8\).*full_tensor\(\)"):
        weight + wholes[0]
    with pytest.raises(RuntimeError, match=r"plain one of shape"):
        wholes[0].clone().copy_(weight)
    with pytest.raises(RuntimeError, match="Expected placements to redistribute to, got None"):
        weight.redistribute()
    # It writes to the transpose of a matrix that has more rows than columns.
    parameter.grad = parameter.detach().clone()
    with pytest.raises(RuntimeError, match=r"own to write to in aten\.div_"):
        torch.optim.Muon([parameter]).step()
    with pytest.raises(RuntimeError, match="Expected a leaf to deep-copy"):
        copy.deepcopy(weight.clone().requires_grad_() * 2)


@on_meshes
def test_gradients_come_back_to_the_rows_they_belong_to(wholes, tensors) -> None:
    losses: list[Callable[[Any], Any]] = [
        lambda t: whole(t).square().sum(),
        lambda t: whole((t * t).sum()),
        lambda t: whole((t.view(-1) * 3).square().sum()),
        lambda t: whole(t.mean().square()),
        lambda t: whole((t * t.norm()).sum()),
    ]
    for expected, tensor in zip(wholes, tensors, strict=True):
        for loss in losses:
            parameter = nn.Parameter(tensor.clone())
            plain = nn.Parameter(expected.clone())
            for _ in range(2):  # the second is accumulated
                loss(parameter).backward()
                loss(plain).backward()
            assert isinstance(parameter.grad, DTensor)
            assert_same(parameter.grad, plain.grad)
            # Also where all rows were needed, and the gradient came back whole.
            with torch.no_grad():
                assert_same(parameter.detach() - parameter.grad, expected - plain.grad)

        parameter = nn.Parameter(tensor.clone())
        parameter.to_local().square().sum().backward()
        assert isinstance(parameter.grad, UnevenDTensor)
        assert_same(parameter.grad, 2 * expected)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    *(
        partial(kind, foreach=foreach)
        for kind in (
            torch.optim.Adadelta,
            torch.optim.Adagrad,
            torch.optim.Adam,
            torch.optim.Adamax,
            partial(torch.optim.AdamW, amsgrad=True),
            torch.optim.ASGD,
            torch.optim.NAdam,
            torch.optim.RAdam,
            partial(torch.optim.RMSprop, centered=True, momentum=0.5),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        )
        for foreach in (True, False)
    ),
    *(
        partial(kind, fused=True)
        for kind in (
            torch.optim.Adagrad,
            partial(torch.optim.Adam, amsgrad=True),
            torch.optim.AdamW,
            partial(torch.optim.SGD, momentum=0.9),
        )
    ),
    partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False),
]
# Adafactor takes means over rows and columns, Rprop writes to masks, LBFGS has one vector of all
# gradients.
GATHERING = [torch.optim.Adafactor, torch.optim.Rprop, torch.optim.LBFGS]


@on_ranks(2)
def test_a_rank_without_rows_does_not_know_strides_and_sends_the_same_messages() -> None:
    mesh = mesh_of((2,))
    wholes = [torch.randn(shape) for shape in [(18, 8), (18,), (6, 2, 3), (1, 8), (18, 8)]]
    buffer = DBuffer.distribute_tensors(wholes, mesh, LINE)
    cases: list[tuple[int, Operation]] = [
        (2, lambda t: t.mT),
        (2, lambda t: t.mT.reshape(6, 6)),
        (2, lambda t: t.mT.reshape(36)),
        (2, lambda t: t[..., :2].reshape(6, 4)),
        (3, lambda t: t.unsqueeze(0)),
        (3, lambda t: t[:, :2]),
    ]
    for index, operation in cases:
        tensor, gradients = buffer.get_dtensor(index), []
        assert len(tensor.rows) in (0, len(tensor))
        for start in (tensor, wholes[index]):
            parameter = nn.Parameter(start.clone())
            found = whole(operation(parameter))
            (found * torch.arange(1.0, found.numel() + 1).view(found.shape)).sum().backward()
            gradients.append(parameter.grad)
        assert_same(*gradients)


@on_meshes
def test_the_optimizers_of_pytorch_step_without_sending_anything(wholes, tensors) -> None:
    for number, kind in enumerate([*OPTIMIZERS, *GATHERING]):
        ours = [nn.Parameter(tensor.clone()) for tensor in tensors]
        plain = [nn.Parameter(expected.clone()) for expected in wholes]
        optimizers = kind(ours), kind(plain)
        for step in range(2):
            for parameter, other in zip(ours, plain, strict=True):
                other.grad = torch.sin(other.detach() + step)
                parameter.grad = torch.sin(parameter.detach() + step)
            norms = [nn.utils.clip_grad_norm_(each, 0.5) for each in (ours, plain)]
            assert_same(norms[0], norms[1])
            with gathers() as sent:
                optimizers[0].step(*_closure(optimizers[0], ours))
            assert sent == [0] or kind in GATHERING, number
            optimizers[1].step(*_closure(optimizers[1], plain))
        for parameter, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(
                parameter.full_tensor(), other.detach(), rtol=1e-5, atol=1e-5
            )


def _closure(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> list[Callable[[], Any]]:
    """The closure that LBFGS requires; it does not change the gradients."""
    is_asked = isinstance(optimizer, torch.optim.LBFGS)
    return [lambda: whole(parameters[0].detach().sum())] if is_asked else []


class Plain(nn.Module):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.own = nn.ParameterList(tensor.clone() for tensor in tensors)


@on_meshes
def test_averages_of_weights_are_taken_without_sending_anything(wholes, tensors) -> None:
    averages = [
        {},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    ]
    for options in averages:
        with gathers() as sent:
            found = []
            for start in (tensors, wholes):
                model = Plain(start)
                average = swa_utils.AveragedModel(model, **options)
                by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}
                for _ in range(3):
                    for name, parameter in model.named_parameters():
                        parameter.data.mul_(1.5)
                        by_hand[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
                    average.update_parameters(model)
                found.append([*average.module.parameters(), *by_hand.values()])
        assert sent == [0]
        for own, expected in zip(*found, strict=True):
            assert_same(own.detach(), expected.detach())


@on_meshes
def test_a_gradient_scaler_gets_the_overflow_of_any_rank(wholes, tensors) -> None:  # noqa: ARG001
    parameter = nn.Parameter(tensors[0].clone())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for is_bad in (True, False):
        parameter.grad = torch.ones_like(parameter) * 4
        if is_bad and 3 in parameter.rows:
            parameter.grad._local_tensor[3 - parameter.rows.start, 0] = float("inf")
        before = parameter.full_tensor().detach()
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        expected = before if is_bad else before - 2  # the scale has been halved: 4 / 2
        assert_same(parameter.detach(), expected)


@on_meshes
def test_copies_keep_their_rows(wholes, tensors) -> None:
    for expected, tensor in zip(wholes, tensors, strict=True):
        parameter = nn.Parameter(tensor.clone())
        again = copy.deepcopy({"a": parameter, "b": parameter})
        assert again["a"] is again["b"]
        assert isinstance(again["a"], nn.Parameter)
        assert again["a"]._local_tensor.data_ptr() != parameter._local_tensor.data_ptr() or not len(
            tensor.rows
        )

        stream = io.BytesIO()
        torch.save({"tensor": tensor}, stream)
        assert stream.tell() < 4000, "the whole buffer has been saved"
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)["tensor"]
        for copied in (again["a"], loaded, tensor.cpu(), tensor.clone()):
            assert isinstance(copied, UnevenDTensor)
            assert copied.placements == tensor.placements
            assert torch.equal(copied.detach().full_tensor(), expected)


@on_ranks(4)
def test_ranks_agree_on_whether_tensors_have_the_same_sharding() -> None:
    """Layouts in which ranks see other cuts of the inner axis, and must agree all the same."""
    mesh = mesh_of((2, 2))
    shapes = [(8,), (8,), (8, 8), (8, 8), (8, 8), (8, 8), (16, 8), (8, 16)]
    buffer = DBuffer.distribute_tensors([torch.randn(shape) for shape in shapes], mesh, FULLY)
    tensors = [buffer.get_dtensor(index) for index in range(len(shapes))]
    answers = [one.is_cut_as(other) for one in tensors for other in tensors]
    everybodys = torch.zeros(len(answers))
    everybodys += torch.tensor(answers)
    dist.all_reduce(everybodys)
    assert set(everybodys.tolist()) == {0.0, 4.0}, "ranks disagree, or the values do not differ"
    for one in tensors:
        for other in tensors:
            if one.shape == other.shape:
                assert_same(one - other, one.full_tensor() - other.full_tensor())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int16]
)
@on_ranks(2)
def test_any_dtype_is_gathered_as_it_is(dtype: torch.dtype) -> None:
    wholes, tensors = distributed((2,), LINE, dtype=dtype)
    for expected, tensor in zip(wholes, tensors, strict=True):
        assert torch.equal(tensor.full_tensor().float(), expected.float())


@on_ranks(4)
def test_partial_sums_can_be_scaled_and_added_but_not_taken_for_results() -> None:
    mesh = mesh_of((2, 2))
    buffer = DBuffer(mesh, [Partial("avg"), Flat()], SHAPES, torch.float32, "cpu")
    buffer.local_buffer.fill_(1.0)
    tensor = buffer.get_dtensor(0)
    assert isinstance(tensor, UnevenDTensor)
    assert isinstance(tensor.placements[1], UnevenShard)
    tensor.mul_(2).add_(tensor)
    assert tensor._local_tensor.eq(4).all()
    tensor.zero_()
    for operation in (
        lambda: tensor.full_tensor(),
        lambda: tensor.norm(),
        lambda: tensor * tensor,
        lambda: 1 / tensor,
        lambda: tensor + 1,
        lambda: tensor + torch.ones(()),
        lambda: torch.ones_like(tensor),
        lambda: tensor.sqrt(),
        lambda: tensor.__create_chunk_list__(),
    ):
        with pytest.raises(
            RuntimeError, match=r"Expected a tensor that is reduced for .*, got the partial sums"
        ):
            operation()
