from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.fsdp import collectives
from megatron.core.distributed.fsdp.collectives import Label, Reduction, tag_of
from tests.helpers.ranks import on_ranks, run_ranks


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _gather(is_in_place: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.full((size * 5,), float("nan"))
    own = out[rank * 5 : (rank + 1) * 5] if is_in_place else torch.empty(5)
    own.copy_(values(rank, 5, torch.float32))
    collectives.all_gather(out, own, dist.group.WORLD)
    assert torch.equal(out, torch.cat([values(peer, 5, torch.float32) for peer in range(size)]))


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_gather_brings_every_part_to_its_place(world_size, is_in_place):
    run_ranks(world_size, _gather, is_in_place)


def _reduce_scatter(dtype: torch.dtype, is_average: bool, is_in_place: bool) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = values(rank, size * 6, dtype)
    before = whole.clone()
    out = whole[rank * 6 : (rank + 1) * 6] if is_in_place else torch.empty(6, dtype=dtype)
    collectives.reduce_scatter(out, whole, dist.group.WORLD, Reduction(is_average))
    others = [peer for peer in range(size) if peer != rank]
    assert all(torch.equal(whole.chunk(size)[peer], before.chunk(size)[peer]) for peer in others)
    return out.clone()


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("is_average", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_adds_up_every_ranks_part(
    world_size, dtype, tolerance, is_average, is_in_place
):
    parts = run_ranks(world_size, _reduce_scatter, dtype, is_average, is_in_place)
    total = sum(values(rank, world_size * 6, dtype).float() for rank in range(world_size))
    exact = total / world_size if is_average else total
    torch.testing.assert_close(torch.cat(parts).float(), exact, rtol=tolerance, atol=tolerance)


@on_ranks(3)
def test_maxima_of_every_element_are_combined() -> None:
    parts = [values(rank, 6, torch.float32) for rank in range(3)]
    expected = torch.stack(parts).amax(0)
    whole = parts[dist.get_rank()]
    collectives.combine_maxima(whole, dist.group.WORLD)
    assert torch.equal(whole, expected)


def _together(is_gather: bool) -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    order: list[tuple[str, int]] = []
    apart, moves = [], []
    for number, numel in enumerate((6, 3000, 1)):
        own, whole = values(rank, numel, torch.bfloat16), values(rank, size * numel, torch.bfloat16)
        source, shape = (own, whole.shape) if is_gather else (whole, own.shape)
        outs = [torch.zeros(shape, dtype=source.dtype if is_gather else None) for _ in range(2)]

        def move(label: Label, source=source, out=outs[0], number=number) -> None:
            order.append(("start", number))
            if is_gather:
                collectives.all_gather(out, source, group, label)
            else:
                collectives.reduce_scatter(out, source, group, Reduction(True), label)
            label.end(lambda: order.append(("end", number)))

        move(Label(), out=outs[1])
        apart.append(outs)
        label = Label(tag_of(number), f"part {number}")
        moves.append(collectives.Move(move, group, source, source.dtype, label))

    order.clear()
    collectives.carry_out(moves)
    assert order == [("start", 0), ("start", 1), ("start", 2), ("end", 0), ("end", 1), ("end", 2)]
    assert all(torch.equal(*outs) for outs in apart)

    order.clear()
    collectives.carry_out([move._replace(group=None) for move in moves])
    assert order == [("start", 0), ("end", 0), ("start", 1), ("end", 1), ("start", 2), ("end", 2)]


@pytest.mark.parametrize("is_gather", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_over_one_group_start_together_with_the_bits_of_one_after_the_other(
    world_size, is_gather
):
    run_ranks(world_size, _together, is_gather)


@on_ranks(2)
def test_collectives_after_an_error_among_those_that_start_together_are_carried_out() -> None:
    buffer, group, value = torch.empty(1, device="meta"), dist.group.WORLD, torch.ones(1)

    def move(label: Label) -> None:
        dist.all_reduce(value)
        if label.name:
            raise RuntimeError(label.name)

    moves = [
        collectives.Move(move, group, buffer, buffer.dtype, Label(name=name))
        for name in ("", "no memory")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "issuing", lambda *_: nullcontext())
        with pytest.raises(RuntimeError, match="no memory"):
            collectives.carry_out(moves)
    dist.all_reduce(value)
    assert value.item() == 2


def _widened(numel: int) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = values(rank, size * numel, torch.bfloat16)
    narrow_sent, wide_sent = torch.empty(numel), torch.empty(numel)
    collectives.reduce_scatter(narrow_sent, whole, dist.group.WORLD, Reduction(True))
    collectives.reduce_scatter(wide_sent, whole.float(), dist.group.WORLD, Reduction(True))
    assert torch.equal(narrow_sent, wide_sent)
    return narrow_sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_bf16_parts_are_added_in_fp32_with_the_bits_of_sending_them_in_fp32(world_size):
    parts = run_ranks(world_size, _widened, 1000)
    exact = (
        sum(values(rank, world_size * 1000, torch.bfloat16).double() for rank in range(world_size))
        / world_size
    )
    torch.testing.assert_close(torch.cat(parts).double(), exact, rtol=1e-6, atol=1e-7)


def _all_reduce(numel: int, is_average: bool) -> torch.Tensor:
    tensor = values(dist.get_rank(), numel, torch.float32)
    collectives.all_reduce(tensor, tensor, dist.group.WORLD, Reduction(is_average))
    return tensor


@pytest.mark.parametrize("is_average", [False, True])
@pytest.mark.parametrize("numel", [0, 6, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_gives_every_rank_the_same_bits(world_size, numel, is_average):
    results = run_ranks(world_size, _all_reduce, numel, is_average)
    total = sum(values(rank, numel, torch.float32) for rank in range(world_size))
    torch.testing.assert_close(results[0], total / world_size if is_average else total)
    assert all(torch.equal(result, results[0]) for result in results)


@on_ranks(2)
def test_fp32_parts_may_be_rounded_once_to_bf16_and_stay_as_they_are() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = values(rank, size * 10, torch.float32)
    before = whole.clone()
    out, exact = torch.empty(10, dtype=torch.bfloat16), torch.empty(10)
    collectives.reduce_scatter(out, whole, dist.group.WORLD, Reduction(True))
    assert torch.equal(whole, before)
    collectives.reduce_scatter(exact, whole, dist.group.WORLD, Reduction(True))
    assert torch.equal(out, exact.bfloat16())


def _large_halves(dtype: torch.dtype) -> list[float]:
    whole = torch.full((4,), 40000.0, dtype=dtype)
    out = torch.empty(2, dtype=dtype)
    collectives.reduce_scatter(out, whole, dist.group.WORLD, Reduction(True))
    collectives.all_reduce(whole, whole, dist.group.WORLD, Reduction(True))
    return [*out.tolist(), *whole.tolist()]


def test_an_average_of_fp16_does_not_overflow_on_the_way():
    assert run_ranks(2, _large_halves, torch.float16) == [[40000.0] * 6] * 2


@on_ranks(2)
def test_what_overlaps_or_does_not_divide_is_rejected_before_anything_is_sent() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = torch.zeros(6)
    wrong_place = whole.chunk(2)[1 - rank]
    for call in (
        lambda: collectives.all_gather(whole, wrong_place, group),
        lambda: collectives.reduce_scatter(wrong_place, whole, group, Reduction(False)),
    ):
        with pytest.raises(
            ValueError, match=f"no part of the whole but that of rank {rank}, got an overlap"
        ):
            call()
    with pytest.raises(ValueError, match="Expected 2 parts of 2 elements, got a whole of 6"):
        collectives.all_gather(whole, torch.zeros(2), group)
    with pytest.raises(ValueError, match="Expected 2 parts of 4 elements, got a whole of 6"):
        collectives.reduce_scatter(torch.zeros(4), whole, group, Reduction(False))


@on_ranks(2)
def test_other_messages_on_the_group_are_not_mixed_up_with_the_parts() -> None:
    """A point-to-point message of somebody else is under way on the same group and of the same
    size.
    """
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    foreign, received = torch.full((2,), -1.0), torch.empty(2)
    send = dist.isend(foreign, peer)
    out = torch.empty(4)
    collectives.all_gather(out, torch.full((2,), float(rank)), dist.group.WORLD)
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
    dist.recv(received, peer)
    send.wait()
    assert torch.equal(received, foreign)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("divisor", [1.0, 4.0])
@on_ranks(3)
def test_long_parts_are_exchanged_piece_by_piece_and_may_be_added_to_what_is_there(
    accumulates: bool, divisor: float
) -> None:
    """Parts of several pieces, the last of them shorter, over fp32 sums of their own pieces."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = 2 * collectives._PIECE_NUMEL + 77
    wholes = [values(peer, size * numel, torch.bfloat16) for peer in range(size)]
    out = torch.full((numel,), 3.0)
    how = Reduction(is_average=True, divisor=divisor, accumulates=accumulates)
    collectives.reduce_scatter(out, wholes[rank], dist.group.WORLD, how)
    order = [rank, *(peer for peer in range(size) if peer != rank)]
    total = torch.zeros(numel)
    for peer in order:
        total += wholes[peer].chunk(size)[rank].float()
    total /= size * divisor
    assert torch.equal(out, total + 3.0 if accumulates else total)


def _accumulated_all_reduce(dtype: torch.dtype) -> torch.Tensor:
    whole = torch.full((6,), float(dist.get_rank()), dtype=torch.bfloat16)
    out = torch.ones(6, dtype=dtype)
    collectives.all_reduce(
        out, whole, dist.group.WORLD, Reduction(is_average=False, accumulates=True)
    )
    assert whole.tolist() == [float(dist.get_rank())] * 6
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_reduce_may_be_added_to_another_tensor_of_another_dtype(dtype):
    for result in run_ranks(3, _accumulated_all_reduce, dtype):
        assert result.dtype == dtype
        assert result.tolist() == [4.0] * 6


@on_ranks(2)
def test_an_all_reduce_that_cannot_be_shared_out_is_rejected() -> None:
    with pytest.raises(ValueError, match="same length, a multiple of 2, got 7 for 7"):
        collectives.all_reduce(
            torch.zeros(7), torch.zeros(7), dist.group.WORLD, Reduction(is_average=False)
        )


@on_ranks(2)
def test_a_collective_that_another_rank_does_not_come_to_fails_by_name() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    label = Label(tag_of(1, 7), "the weights of layers.7")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"all-gather of the weights of layers\.7 failed"):
            collectives.all_gather(torch.empty(4), torch.ones(2), group, label)
    dist.barrier()


@given(st.integers(0, 2**62), st.sampled_from([1, 2, 3]))
def test_tags_fit_into_32_bits_and_keep_away_from_small_ones(group, kind):
    assert collectives.WHOLE_TENSOR.tag < tag_of(kind, group) < 2**31
    assert tag_of(kind, group) != tag_of(kind % 3 + 1, group)
