"""Collectives on the simulated accelerator: work on streams, in order, over any number of
groups.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.sim


def _all_kinds() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(4.0, device="sim") + 10 * rank
    found: dict[str, Any] = {}

    total = own.clone()
    dist.all_reduce(total)
    mean = own.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    greatest = own.bfloat16()
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    found["reduced"] = [tensor.tolist() for tensor in (total, mean, greatest)]

    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own)
    found["gathered"] = torch.stack(parts).tolist()

    part = torch.empty(4 // size, device="sim")
    work = torch.distributed.distributed_c10d._get_default_group()._reduce_scatter_base(
        part, own, dist.ReduceScatterOptions()
    )
    work.wait()
    found["scattered"] = part.tolist()

    value = own.clone()
    dist.broadcast(value, src=size - 1)
    found["broadcast"] = value.tolist()

    if rank == 0:
        dist.send(own, 1)
    elif rank == 1:
        dist.recv(own, 0)
    found["received"] = own.tolist()

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    found["objects"] = objects
    dist.barrier()
    return found


def test_collectives_give_the_expected_results():
    first, second = run_ranks(2, _all_kinds, device="sim")
    assert first["reduced"] == second["reduced"]
    assert first["reduced"] == [
        [10.0, 12.0, 14.0, 16.0],
        [5.0, 6.0, 7.0, 8.0],
        [10.0, 11.0, 12.0, 13.0],
    ]
    assert (
        first["gathered"] == second["gathered"] == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    )
    assert (first["scattered"], second["scattered"]) == ([10.0, 12.0], [14.0, 16.0])
    assert first["broadcast"] == second["broadcast"] == [10.0, 11.0, 12.0, 13.0]
    assert second["received"] == [0.0, 1.0, 2.0, 3.0]
    assert first["objects"] == [0, 1]


def _hello(peer: int) -> None:
    """Waits for the other rank over gloo, which the device's streams have no part in."""
    works = [dist.isend(torch.zeros(1), peer), dist.irecv(torch.zeros(1), peer)]
    for work in works:
        work.wait()


@on_ranks(2, device="sim")
def test_a_collective_whose_peer_is_late_holds_up_the_stream_and_not_the_host() -> None:
    import tests.simulated_accelerator.device as sim

    rank, stream = dist.get_rank(), torch.accelerator.current_stream()
    value = torch.ones(2, device="sim")
    torch.accelerator.synchronize()
    before = sim.counters()
    if rank == 0:
        dist.all_reduce(value)
        after = value + 1
        assert not stream.query(), "the stream waits for the peer, this thread does not"
        _hello(1)
        assert after.tolist() == [3.0, 3.0]
        assert (sim.counters() - before).event_syncs == 0
    else:
        _hello(0)
        dist.all_reduce(value)
    torch.accelerator.synchronize()


def _issued_on_two_streams() -> list[float]:
    import tests.simulated_accelerator.device as sim

    first, second = torch.Stream("sim"), torch.Stream("sim")
    values = [torch.full((), float(number), device="sim") for number in range(2)]
    torch.accelerator.synchronize()
    order = (first, second)
    # Ranks get to their streams at different times; a communicator keeps the order of issue.
    with sim.held(first if dist.get_rank() == 0 else second):
        for stream, value in zip(order, values, strict=True):
            with stream:
                dist.all_reduce(value)
    for stream in order:
        stream.synchronize()
    return [value.item() for value in values]


def test_collectives_of_a_group_keep_their_order_whichever_streams_they_are_issued_on():
    assert run_ranks(2, _issued_on_two_streams, device="sim") == [[0.0, 2.0]] * 2


@on_ranks(2, device="sim")
def test_an_async_collective_overlaps_with_the_current_stream_until_a_wait() -> None:
    import tests.simulated_accelerator.device as sim

    current = torch.accelerator.current_stream()
    value = torch.ones(3, device="sim")
    with sim.held(current):
        value.add_(1)
        work = dist.all_reduce(value, async_op=True)  # runs after the issued work
        assert not work.is_completed()
    work.wait()
    assert value.tolist() == [4.0] * 3

    # On a stream of the communicator: without `wait`, the two are not ordered.
    with sim.configured(schedule=sim.Schedule.LANES_LAST, patience_ms=10_000):
        work = dist.all_reduce(value, async_op=True)
        assert value.tolist() == [4.0] * 3
        work.wait()
        assert value.tolist() == [8.0] * 3


def _lost_peer() -> str:
    import tests.simulated_accelerator.device as sim

    group = dist.new_group([0, 1])
    value = torch.ones(2, device="sim")
    dist.all_reduce(value, group=group)
    torch.accelerator.synchronize()
    communicator = group._get_backend(torch.device("sim"))
    if dist.get_rank() == 1:
        _hello(0)
        communicator.close()
        return ""

    dist.all_reduce(value, group=group)
    assert not sim.has_error()
    _hello(1)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="simccl"):
            value.add_(1)
    finally:
        sim.reset_error()
    return str(raised.value)


def test_the_loss_of_a_peer_surfaces_later_and_names_the_collective():
    message, _ = run_ranks(2, _lost_peer, device="sim")
    assert "simccl: collective 2 of its group, ALLREDUCE, failed" in message
