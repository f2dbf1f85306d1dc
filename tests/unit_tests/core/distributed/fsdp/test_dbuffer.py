from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import Flat
from megatron.core.distributed.fsdp.uneven_rows import UnevenShard
from tests.helpers.ranks import on_ranks, run_ranks

SHAPES = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6), (3,)]


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def distributed(placement, mesh: DeviceMesh | None = None, seed: int = 0) -> DBuffer:
    mesh = mesh or line()
    placements = placement if isinstance(placement, list) else [placement]
    return DBuffer.distribute_tensors(tensors(seed), mesh, placements)


def assert_holds(buffer: DBuffer, expected: list[torch.Tensor]) -> None:
    """Asserts that each rank has the rows of its layout, with the values of `expected`."""
    for index, whole in enumerate(expected):
        chunk = buffer.chunk(index)
        rows = whole[chunk.first_row : chunk.first_row + chunk.num_rows]
        torch.testing.assert_close(buffer.get_local_tensor(index), rows)


def _gather() -> list[int]:
    buffer = distributed(Flat())
    assert_holds(buffer, tensors())
    whole = buffer.allgather(0)
    assert whole.placements == (Replicate(),)
    for index, expected in enumerate(tensors()):
        assert torch.equal(whole.get_local_tensor(index), expected)
    assert_holds(whole.scatter(0, Flat()), tensors())
    return [buffer.chunk(index).num_rows for index in range(len(SHAPES))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_is_distributed_comes_back_whole_and_every_row_has_one_owner(world_size):
    rows = run_ranks(world_size, _gather)
    assert [sum(counts) for counts in zip(*rows, strict=True)] == [shape[0] for shape in SHAPES]
    assert world_size < 3 or any(0 in counts for counts in rows), (
        "some rank has no rows of some tensor"
    )


def _reduce(reduce_op: str) -> None:
    size = dist.get_world_size()
    mine = distributed(Replicate(), seed=dist.get_rank())
    partial = DBuffer.from_local(mine.local_buffer, mine.mesh, [Partial(reduce_op)], mine.layout)
    total = [sum(parts) for parts in zip(*(tensors(rank) for rank in range(size)), strict=True)]
    expected = [t / size for t in total] if reduce_op == "avg" else total
    assert_holds(partial.reduce_scatter(0, Flat()), expected)
    assert_holds(partial.allreduce(0), expected)
    assert_holds(partial.redistribute([Flat()]), expected)
    in_place = partial.reduce_scatter(0, Flat(), out=partial.view([Flat()]))
    assert_holds(in_place, expected)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_partial_buffers_are_added_up_or_averaged(world_size, reduce_op):
    run_ranks(world_size, _reduce, reduce_op)


@on_ranks(3)
def test_16_bit_buffers_may_be_reduced_in_fp32() -> None:
    mesh = line()
    mine = DBuffer.distribute_tensors(tensors(dist.get_rank(), torch.bfloat16), mesh, [Replicate()])
    partial = DBuffer.from_local(mine.local_buffer, mesh, [Partial("avg")], mine.layout)
    size = dist.get_world_size()
    per_rank = (tensors(rank, torch.bfloat16) for rank in range(size))
    mean = [sum(part.float() for part in parts) / size for parts in zip(*per_rank, strict=True)]
    reduced = partial.reduce_scatter(0, Flat(), dtype=torch.float32)
    assert reduced.dtype == torch.float32
    assert_holds(reduced, mean)
    with pytest.raises(
        ValueError, match=r"Expected out with dtype torch.float32, got torch.bfloat16"
    ):
        partial.reduce_scatter(0, Flat(), dtype=torch.float32, out=partial.view([Flat()]))


def _every_transition(mesh_shape: tuple[int, ...]) -> int:
    """From every placement a buffer can have to every one without partial sums, with and without
    `out`.
    """
    mesh = init_device_mesh("cpu", mesh_shape)
    size = dist.get_world_size()
    kinds = (Replicate(), Partial("sum"), Partial("avg"), Flat())
    valid = [
        list(choice)
        for choice in itertools.product(kinds, repeat=len(mesh_shape))
        if _is_valid(choice)
    ]
    wholes = [tensors(rank) for rank in range(size)]
    count = 0
    for source, wanted in itertools.product(valid, valid):
        if any(isinstance(placement, Partial) for placement in wanted):
            continue
        # Ranks that differ only on partial axes hold different values; the others the same.
        mine = wholes[_number(mesh, source, mesh.get_coordinate())]
        buffer = DBuffer.distribute_tensors(mine, mesh, source)
        expected = _reduced(mesh, source, wholes)
        out = DBuffer(mesh, wanted, buffer.layout, torch.float32, "cpu")
        moved = buffer.redistribute(wanted)
        assert moved.placements == tuple(wanted)
        assert_holds(moved, expected)
        assert buffer.redistribute(wanted, out=out) is out
        assert_holds(out, expected)
        count += 1
    return count


def _is_valid(placements: tuple) -> bool:
    is_flat = [isinstance(placement, Flat) for placement in placements]
    return is_flat == sorted(is_flat)


def _number(mesh: DeviceMesh, placements: list, coordinate: tuple[int, ...]) -> int:
    """Numbers the ranks along the partial axes."""
    number = 0
    for axis_size, placement, place in zip(mesh.shape, placements, coordinate, strict=True):
        if isinstance(placement, Partial):
            number = number * axis_size + place
    return number


def _reduced(
    mesh: DeviceMesh, placements: list, wholes: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    """The reduced partial values."""
    partial_sizes = [
        size for size, p in zip(mesh.shape, placements, strict=True) if isinstance(p, Partial)
    ]
    averaged = [size for size, p in zip(mesh.shape, placements, strict=True) if p == Partial("avg")]
    addends = wholes[: math.prod(partial_sizes)]
    return [sum(parts) / math.prod(averaged) for parts in zip(*addends, strict=True)]


@pytest.mark.parametrize(
    ("world_size", "mesh_shape"),
    [(3, (3,)), (4, (2, 2)), pytest.param(4, (2, 1, 2), marks=pytest.mark.wide)],
)
def test_every_transition_on_every_mesh_gives_the_same_tensors(world_size, mesh_shape):
    counts = run_ranks(world_size, _every_transition, mesh_shape)
    assert counts[0] >= 8


@on_ranks(3)
def test_local_tensors_and_dtensors_are_views_also_where_a_rank_holds_no_rows() -> None:
    buffer = distributed(Flat())
    for index in range(len(SHAPES)):
        local, dtensor = buffer.get_local_tensor(index), buffer.get_dtensor(index)
        assert isinstance(dtensor, DTensor)
        assert tuple(dtensor.shape) == SHAPES[index]
        assert [type(placement) for placement in dtensor.placements] == [UnevenShard]
        assert dtensor.stride() == torch.empty(SHAPES[index]).stride()
        local.fill_(index)
        assert torch.equal(dtensor.to_local(), local)
        assert (
            local.untyped_storage().data_ptr() == buffer.local_buffer.untyped_storage().data_ptr()
        )
        assert dtensor.to_local().untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    total = sum(index * buffer.get_local_tensor(index).numel() for index in range(len(SHAPES)))
    held = [buffer.get_local_tensor(index).sum() for index in range(len(SHAPES))]
    assert float(sum(held)) == total


@on_ranks(1)
def test_a_dtensor_over_host_memory_stays_there_regardless_of_the_meshs_device() -> None:
    """The mesh has another device type than the buffer, as with a host buffer and a GPU mesh."""
    mesh = line()
    buffer = DBuffer(mesh, [Flat()], SHAPES, torch.float32, "cpu")
    mesh._device_type = "xla"
    dtensor = buffer.get_dtensor(1)
    local = buffer.get_local_tensor(1)
    assert dtensor._local_tensor.device.type == "cpu"
    assert dtensor._local_tensor.data_ptr() == local.data_ptr()


@on_ranks(3)
def test_padding_is_zero_so_that_sums_over_the_flat_buffer_are_right() -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        for placement in (Flat(), Replicate()):
            buffer = distributed(placement)
            assert not buffer.local_buffer.isnan().any()
            buffer.release_storage()
            buffer.reallocate_storage()
            buffer.local_buffer.fill_(float("nan"))
            buffer.zero_padding()
            held = sum(buffer.get_local_tensor(index).numel() for index in range(len(SHAPES)))
            assert int(buffer.local_buffer.isnan().sum()) == held
    finally:
        torch.use_deterministic_algorithms(False)


@on_ranks(2)
def test_a_released_buffer_is_neither_read_nor_written() -> None:
    """Writing into it would end the process without a word."""
    buffer, released = distributed(Replicate()), distributed(Replicate())
    half = distributed(Flat())
    released.release_storage()
    for call in (
        lambda: buffer.redistribute([Replicate()], out=released),
        lambda: buffer.cast(torch.float32, out=released),
        lambda: half.allgather(0, out=released),
        lambda: released.scatter(0, Flat()),
        lambda: released.cast(torch.bfloat16),
        lambda: released.redistribute([Replicate()], out=buffer),
        lambda: released.copy_from(0, torch.zeros(2, 6)),
    ):
        with pytest.raises(
            RuntimeError,
            match="Expected a buffer that has its memory, got one whose storage is rel",
        ):
            call()


@on_ranks(2)
def test_released_storage_comes_back_under_the_same_views() -> None:
    buffer = distributed(Replicate())
    view, storage = buffer.get_local_tensor(1), buffer.local_buffer.untyped_storage()
    buffer.release_storage()
    assert storage.nbytes() == 0
    buffer.release_storage()
    buffer.reallocate_storage()
    buffer.local_buffer.fill_(3.0)
    assert torch.equal(view, torch.full((4, 4), 3.0))
    address = storage.data_ptr()
    buffer.reallocate_storage()
    assert torch.equal(view, torch.full((4, 4), 3.0)), "memory that is there stays"
    assert storage.data_ptr() == address, "and is not copied to other memory"
    part = buffer.view([Flat()])
    covering = DBuffer.from_local(
        buffer.local_buffer, buffer.mesh, buffer.placements, buffer.layout
    )
    for borrowed in (part, covering):
        with pytest.raises(RuntimeError, match="Expected a buffer that owns its storage"):
            borrowed.release_storage()
        buffer.release_storage()
        with pytest.raises(RuntimeError, match="Expected a buffer that owns its storage"):
            borrowed.reallocate_storage()
        buffer.reallocate_storage()


@on_ranks(2)
def test_casting_keeps_layout_and_placements_and_does_nothing_needlessly() -> None:
    buffer = distributed(Flat())
    assert buffer.cast(torch.float32) is buffer
    half = buffer.cast(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.local_buffer, buffer.local_buffer.to(torch.bfloat16))
    assert buffer.redistribute([Flat()]) is buffer
    assert half.cast(torch.float32, out=buffer) is buffer
    assert torch.equal(buffer.local_buffer, half.local_buffer.float())


@on_ranks(2)
def test_any_device_may_hold_it_and_meta_tensors_leave_their_place_open() -> None:
    meta = DBuffer(line(), [Flat()], SHAPES, torch.float32, "meta")
    assert meta.get_local_tensor(0).is_meta
    mixed = [
        torch.empty(shape, device="meta") if i % 2 else torch.ones(shape)
        for i, shape in enumerate(SHAPES)
    ]
    real = DBuffer.distribute_tensors(mixed, line(), [Replicate()])
    assert [bool((real.get_local_tensor(i) == 1).all()) for i in (0, 2, 4)] == [True] * 3


def square_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1))


def _rest(num_axes: int) -> tuple:
    return [Replicate()] * num_axes, GlobalLayout.build(SHAPES, 2), torch.float32, "cpu"


def from_local(buffer: DBuffer, local: torch.Tensor) -> DBuffer:
    return DBuffer.from_local(local, buffer.mesh, buffer.placements, buffer.layout)


@on_ranks(2)
def test_each_mistake_has_its_own_message() -> None:
    mesh, buffer = line(), distributed(Flat())
    outputs = {
        "mesh": DBuffer(square_of_two(), *_rest(2)),
        "placements": DBuffer(mesh, [Flat()], buffer.layout, torch.float32, "cpu"),
        "layout": DBuffer(mesh, [Replicate()], [(8, 2)], torch.float32, "cpu"),
        "dtype": DBuffer(mesh, [Replicate()], buffer.layout, torch.bfloat16, "cpu"),
        "device": DBuffer(mesh, [Replicate()], buffer.layout, torch.float32, "meta"),
    }
    for name, out in outputs.items():
        with pytest.raises(ValueError, match=f"Expected out with {name} "):
            buffer.allgather(0, out=out)
    mixed = [torch.zeros(1), torch.zeros(1).half()]
    for call, message in (
        (lambda: buffer.reduce_scatter(0, Flat()), "Partial on axis 0 for reduce_scatter"),
        (lambda: buffer.allreduce(0), "Partial on axis 0 for allreduce"),
        (lambda: buffer.scatter(0, Flat()), "Replicate on axis 0 for scatter"),
        (lambda: buffer.allgather(0).allgather(0), "Shard on axis 0 for allgather"),
        (lambda: buffer.allgather(0).scatter(0, Replicate()), "new placement of axis 0"),
        (lambda: buffer.allgather(3), "axis of the mesh, 0 to 0, for allgather, got 3"),
        (lambda: buffer.allgather(-1), "axis of the mesh, 0 to 0, for allgather, got -1"),
        (lambda: buffer.redistribute([Flat(), Flat()]), "Expected 1 placements.* got 2"),
        (lambda: buffer.view([Replicate()]), "Expected placements whose range"),
        (lambda: buffer.copy_from(0, torch.zeros(6, 2)), r"of shape \(2, 6\), got \(6, 2\)"),
        (lambda: from_local(buffer, torch.zeros(3)), "elements on this rank, got 3"),
        (lambda: from_local(buffer, torch.zeros(2, 3)), "Expected a flat, contiguous tensor"),
        (lambda: DBuffer.distribute_tensors(mixed, mesh, [Flat()]), "of one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="on axis 0, got"):
        buffer.redistribute([Partial()])
