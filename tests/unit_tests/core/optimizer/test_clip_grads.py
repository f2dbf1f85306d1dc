from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.fsdp.fully_shard import fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.placement import Flat, Placements
from megatron.core.optimizer.clip_grads import (
    clip_coefficient,
    global_grad_norm,
    global_num_zeros,
    num_zeros,
    runs,
    scale_grads,
    squared_norm,
)
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import on_ranks, run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 3_000_001])
def test_squared_norm_is_right_to_seven_digits_at_any_length(dtype, numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = tensor.double().square().sum()
    torch.testing.assert_close(squared_norm(tensor), exact, rtol=1e-7, atol=0)


def parameter(grad: torch.Tensor | None) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(()) if grad is None else torch.zeros_like(grad))
    made.grad = grad
    return made


def test_plain_gradients_are_added_up_and_missing_ones_count_as_zero():
    parameters = [parameter(torch.tensor([3.0])), parameter(None), parameter(torch.tensor([[4.0]]))]
    assert float(global_grad_norm(parameters)) == 5.0
    assert float(global_grad_norm([parameter(None)])) == 0.0


def test_a_nan_shows_in_the_norm():
    assert global_grad_norm(
        [parameter(torch.tensor([float("nan")])), parameter(torch.ones(1))]
    ).isnan()


def test_clipping_scales_down_to_the_limit_and_otherwise_changes_no_bit():
    long, short = parameter(torch.tensor([30.0, 40.0])), parameter(torch.tensor([0.1, 0.3]))
    scale_grads([long], clip_coefficient(global_grad_norm([long]), 1.0))
    torch.testing.assert_close(long.grad, torch.tensor([0.6, 0.8]))
    before = short.grad.clone()
    scale_grads([short, parameter(None)], clip_coefficient(global_grad_norm([short]), 1.0))
    assert torch.equal(short.grad, before)


def _norms_on_a_mesh() -> list[float]:
    generator = torch.Generator().manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = [
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
    ]
    values = [torch.randn(5, 3, generator=generator) for _ in placements]
    parameters = []
    for value, placement in zip(values, placements, strict=True):
        made = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, placement))
        made.grad = distribute_tensor(
            value.clone(), mesh, placement
        )  # a replicated one aliases its source
        parameters.append(made)
    norm = global_grad_norm(parameters)
    scale_grads(parameters, torch.tensor(0.5, dtype=torch.float64))
    for made, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(made.grad.full_tensor(), value * 0.5)
    exact = torch.cat([value.flatten() for value in values]).double().norm()
    return [float(norm), float(exact)]


def test_every_element_counts_once_however_it_is_sharded_or_replicated():
    for ours, exact in run_ranks(4, _norms_on_a_mesh):
        assert ours == pytest.approx(exact, rel=1e-6)


def _norm_where_only_one_rank_has_gradients() -> float:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if mesh.get_rank() == 0:
        parameter.grad = DTensor.from_local(
            torch.tensor([3.0, 4.0]), mesh, [Shard(0)], run_check=False
        )
    return float(global_grad_norm([parameter]))


def test_a_rank_without_any_gradient_takes_part_in_the_sum_of_those_that_have_some():
    assert run_ranks(2, _norm_where_only_one_rank_has_gradients) == [5.0, 5.0]


@on_ranks(1)
def test_a_gradient_that_is_not_yet_reduced_is_rejected() -> None:
    mesh = init_device_mesh("cpu", (1,))
    made = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    made.grad = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="sharded or replicated"):
        global_grad_norm([made])


# Zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_either_sign_count_and_nothing_else_does(dtype):
    tensor = torch.tensor(
        [0.0, -0.0, 1.0, float("nan"), float("inf"), torch.finfo(dtype).smallest_normal],
        dtype=dtype,
    )
    assert num_zeros(tensor).dtype == torch.float64
    assert float(num_zeros(tensor)) == 2.0
    assert float(num_zeros(tensor[:0])) == 0.0


def test_zeros_of_all_gradients_are_added_up_and_a_missing_gradient_has_none():
    zeros, ones = parameter(torch.zeros(2, 3)), parameter(torch.ones(4))
    assert float(global_num_zeros([zeros, ones, parameter(None), zeros])) == 6.0, (
        "the one given twice counts once"
    )
    assert float(global_num_zeros([parameter(None)])) == 0.0


def with_zeros(seed: int) -> torch.Tensor:
    """[5, 3], some of it zero; on two ranks the parts are uneven."""
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    return value * (value > -0.3)


def _zeros_on_a_mesh() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    values = [with_zeros(seed) for seed in range(3)]
    parameters = []
    for value, placement in zip(values, [Shard(0), Replicate(), None], strict=True):
        made = nn.Parameter(torch.zeros(5, 3))
        made.grad = value
        if placement is not None:
            made = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [placement]))
            made.grad = distribute_tensor(value.clone(), mesh, [placement])
        parameters.append(made)
    return [
        float(global_num_zeros([*parameters, parameters[0]])),
        sum(float((value == 0).sum()) for value in values),
    ]


def test_every_zero_counts_once_be_it_sharded_replicated_plain_or_tied():
    for ours, exact in run_ranks(2, _zeros_on_a_mesh):
        assert ours == exact > 0


class Tied(nn.Module):
    """An embedding of 7 rows of 3, which the output reads too; only rows 0 to 2 and a bias of 3 get
    gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3)
        self.hidden = nn.Linear(3, 3)
        self.output = nn.Linear(3, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.hidden(self.embedding(tokens))))[:, :2]


def _mesh_and_placements(kind: str) -> tuple[DeviceMesh, Placements]:
    """Of all ranks: a strategy's, or "hsdp" in two instances."""
    world_size = torch.distributed.get_world_size()
    if kind != "hsdp":
        return init_device_mesh(
            "cpu", (world_size,), mesh_dim_names=("dp",)
        ), Placements.for_strategy(kind)

    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("outer", "inner"))
    placements = Placements(
        dp_axes=("outer", "inner"),
        parameter=(Replicate(), Flat()),
        gradient=(Partial("avg"), Flat()),
        optimizer=(Replicate(), Flat()),
    )
    return mesh, placements


# Runs


def numbered(numel: int = 20) -> torch.Tensor:
    return torch.arange(float(numel))


def test_tensors_end_to_end_in_one_storage_are_one_and_what_lies_between_others_is_in_none():
    flat = numbered()
    pieces = [flat[12:14], flat[2:8].view(2, 3), flat[9:9], flat[8:10]]
    assert [run.tolist() for run in runs(pieces)] == [flat[2:10].tolist(), flat[12:14].tolist()]


def test_tensors_of_other_storages_or_dtypes_or_strides_are_left_alone():
    flat, other = numbered(), numbered(4)
    strided = flat[4:12].view(2, 4).t()
    pieces = [other, flat[:4], strided, flat[12:14].view(torch.int32), flat[13:14], flat[14:16]]
    found = runs(pieces)
    assert [run.data_ptr() for run in found] == [
        each.data_ptr() for each in (*pieces[:3], pieces[3], flat[13:16])
    ]
    assert found[2].shape == (4, 2)
    assert sum(run.numel() for run in found) == sum(piece.numel() for piece in pieces)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=12), st.randoms())
def test_runs_hold_every_element_of_the_tensors_once_and_are_as_few_as_can_be(shapes, random):
    """Tensors of (elements) behind gaps of (elements), handed over in any order."""
    flat = numbered(100)
    pieces, begin, expected = [], 0, 0
    is_joined = False
    for numel, gap in shapes:
        begin += gap
        pieces.append(flat[begin : begin + numel])
        if numel:
            expected += not (is_joined and not gap)
        is_joined = (is_joined and not gap) or numel > 0
        begin += numel
    wanted = sorted(value for piece in pieces for value in piece.tolist())
    random.shuffle(pieces)
    found = runs(pieces)
    assert [value for run in found for value in run.tolist()] == wanted
    assert len(found) == expected


# On a device


class Kernels(TorchDispatchMode):
    """Counts the operators that launch something on a device, by name; views do not."""

    VIEWS = ("detach", "view", "as_strided", "slice", "_reshape_alias", "alias", "split", "select")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def flat_gradients(numels: list[int], device: str) -> list[nn.Parameter]:
    """Parameters with adjacent gradients in one buffer, like an FSDP group."""
    flat = torch.randn(sum(numels), generator=torch.Generator().manual_seed(0)).to(device)
    parameters = [nn.Parameter(torch.empty(numel, device=device)) for numel in numels]
    for made, grad in zip(parameters, flat.split(numels), strict=True):
        made.grad = grad
    return parameters


def test_the_norm_of_42_gradients_in_two_groups_takes_a_dozen_kernels_on_a_device():
    """One by one, seven for each gradient, it took 294. Each of the two runs has whole rows and a
    rest.
    """
    numels = [1024, 64, 4096, 256, 1024, 32, 16] * 3
    parameters = [*flat_gradients(numels, "meta"), *flat_gradients(numels, "meta")]
    with Kernels() as kernels:
        global_grad_norm(parameters)
    assert kernels.counts["linalg_vector_norm"] == 6
    # `new_empty` launches no kernel. The rows' norms are copied to fp64 in their norm: one kernel
    # more for each run.
    others = {name: count for name, count in kernels.counts.items() if name != "linalg_vector_norm"}
    assert others == {"new_empty": 2, "stack": 1, "pow": 1, "sum": 1, "sqrt": 1}

    with Kernels() as kernels:
        global_num_zeros(parameters)
    assert kernels.counts.total() <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 256, 257, 3_000_001])
def test_the_arithmetic_of_devices_is_right_to_seven_digits(monkeypatch, dtype, numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = tensor.double().square().sum()
    monkeypatch.setattr("megatron.core.optimizer.clip_grads.FLOAT_DTYPES", ())
    torch.testing.assert_close(squared_norm(tensor), exact, rtol=2e-7, atol=0)


def test_long_tensors_are_widened_piece_by_piece(monkeypatch):
    monkeypatch.setattr("megatron.core.optimizer.clip_grads.FLOAT_DTYPES", ())
    monkeypatch.setattr("megatron.core.optimizer.clip_grads._PIECE_NUMEL", 512)
    tensor = torch.randn(1300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with Kernels() as kernels:
        total = squared_norm(tensor)
    assert kernels.counts["linalg_vector_norm"] == 5, "of four pieces, and of their rows' norms"
    torch.testing.assert_close(total, tensor.double().square().sum(), rtol=2e-7, atol=0)


def test_fp32_tensors_are_read_in_one_pass(monkeypatch):
    monkeypatch.setattr("megatron.core.optimizer.clip_grads.FLOAT_DTYPES", ())
    monkeypatch.setattr("megatron.core.optimizer.clip_grads._PIECE_NUMEL", 512)
    with Kernels() as kernels:
        squared_norm(torch.ones(2048))
    assert kernels.counts["linalg_vector_norm"] == 2, "of the rows, and of their norms"


class LargestAllocation(TorchDispatchMode):
    """The bytes of the largest tensor that an operator has made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in Kernels.VIEWS and isinstance(made, torch.Tensor):
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def test_the_norm_of_many_runs_takes_no_more_memory_than_that_of_the_longest():
    lone = [parameter(torch.empty(256 * 1024, device="meta")) for _ in range(8)]
    with LargestAllocation() as largest:
        global_grad_norm(lone)
    assert 0 < largest.nbytes <= 8 * 1024, "fp64, of the rows of one"


def test_gradients_on_the_cpu_and_on_a_device_are_measured_apart():
    """The result is on the device, as the sum of two scalars is."""
    on_cpu, on_device = parameter(torch.ones(4)), parameter(torch.ones(4, device="meta"))
    for parameters in ([on_cpu, on_device, on_cpu], [on_device, on_cpu]):
        with arrays_measured() as calls:
            assert global_grad_norm(parameters).device.type == "meta"
        assert calls == [4]
        assert global_num_zeros(parameters).device.type == "meta"


# FSDP groups


def _norm_of_a_group(kind: str) -> None:
    """Padding is filled with junk; later the buffer holds a stale gradient."""
    mesh, placements = _mesh_and_placements(kind)
    model, expected = Tied(), Tied()
    with fully_shard_context("cpu"):
        fully_shard(model, mesh, placements)
    tokens = torch.tensor([0, 1, 2, 2])
    for each in (expected, model):
        each(tokens).square().sum().backward()
    main_grad = group_of(model.hidden.weight).main_grad
    local = main_grad.local_buffer
    for gap in main_grad.layout.gaps:
        start, numel = main_grad.range.overlap(gap)
        local[start - main_grad.range.start :][:numel].fill_(1e6)
    with arrays_measured() as calls:
        norm = global_grad_norm(model.parameters())
    torch.testing.assert_close(norm, global_grad_norm(expected.parameters()), rtol=1e-6, atol=0)
    assert len(calls) < len(list(model.parameters())), "the buffer is read in runs"
    zeros = sum(int((each.grad == 0).sum()) for each in expected.parameters())
    assert float(global_num_zeros([*model.parameters()] * 2)) == zeros >= 12

    model.hidden.weight.grad = expected.hidden.weight.grad = None
    norm = global_grad_norm(model.parameters())
    torch.testing.assert_close(norm, global_grad_norm(expected.parameters()), rtol=1e-6, atol=0)


@contextmanager
def arrays_measured() -> Iterator[list[int]]:
    """The elements of each array whose squares the host kernel adds meanwhile."""
    original, calls = HostAdam.squared_norm, []

    def squared(self: HostAdam, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.numel())
        return original(self, tensor)

    HostAdam.squared_norm = squared
    try:
        yield calls
    finally:
        HostAdam.squared_norm = original


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        (1, "optim_grads_params"),
        (2, "optim_grads_params"),
        (2, "optim"),
        (2, "no_shard"),
        (2, "hsdp"),
    ],
)
def test_a_group_is_measured_in_runs_that_neither_padding_nor_stale_gradients_enter(
    world_size, kind
):
    run_ranks(world_size, _norm_of_a_group, kind)
