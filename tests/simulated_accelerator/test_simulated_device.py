"""The simulated accelerator's streams, kernels, memory and copies: as on a GPU, property by
property.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

from tests.helpers.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.sim

A_MOMENT = 0.05  # seconds in which work that is not held back would have finished
_LONG = 60.0  # seconds, longer than anything takes that does not hang


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread, seconds: float = _LONG) -> bool:
    """Whether a thread ends within so many seconds."""
    thread.join(seconds)
    return not thread.is_alive()


# Streams


def _two_streams(waits: bool) -> list[float]:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    found = []
    for changes in (
        {"schedule": sim.Schedule.LANES_LAST},
        {"schedule": sim.Schedule.PAUSES, "max_pause_us": 20_000, "seed": 3},
    ):
        value = torch.zeros((), device="sim")
        torch.accelerator.synchronize()
        with sim.configured(**changes):
            with side:
                for _ in range(20):
                    value.add_(1)
            if waits:
                torch.accelerator.current_stream().wait_stream(side)
            found.append(value.item())
            side.synchronize()
    return found


def test_a_stream_that_does_not_wait_for_another_reads_unfinished_results():
    assert run_ranks(1, _two_streams, True, device="sim") == [[20.0, 20.0]]
    [[late, paused]] = run_ranks(1, _two_streams, False, device="sim")
    assert late == 0
    assert paused < 20


@on_ranks(1, device="sim")
def test_the_default_stream_may_come_last() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(schedule=sim.Schedule.DEFAULT_LAST, patience_ms=10_000):
        value.add_(1)
        with side:
            assert value.item() == 0
            side.wait_stream(torch.accelerator.current_stream())
        side.wait_stream(torch.sim.current_stream())
        with side:
            assert value.item() == 1


@on_ranks(1, device="sim")
def test_a_stream_that_comes_last_comes_some_time() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(schedule=sim.Schedule.LANES_LAST, patience_ms=20):
        with side:
            value.add_(1)
        waiting = started(lambda: [None for _ in iter(lambda: sim.peek(value).item() == 1, True)])
        assert ends(waiting), "another rank may wait for this stream"


@pytest.mark.parametrize("is_one_queue", [False, True])
def test_streams_that_share_a_queue_wait_for_each_others_earlier_work(is_one_queue):
    [is_done] = run_ranks(1, _beside_a_held_stream, is_one_queue, device="sim")
    assert is_done != is_one_queue


def _beside_a_held_stream(is_one_queue: bool) -> bool:
    import tests.simulated_accelerator.device as sim

    current, side = torch.accelerator.current_stream(), torch.Stream("sim")
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    schedule = sim.Schedule.ONE_QUEUE if is_one_queue else sim.Schedule.PAUSES
    with sim.configured(schedule=schedule):
        with side:
            value.add_(1)
        side.synchronize()
        with sim.held(current):
            with side:
                value.add_(1)
            is_done = ends(started(side.synchronize), A_MOMENT if is_one_queue else _LONG)
        side.synchronize()
        assert value.item() == 2
    return is_done


@on_ranks(1, device="sim")
def test_a_full_launch_queue_keeps_its_place_in_the_queue_that_all_streams_share() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(schedule=sim.Schedule.ONE_QUEUE, queue_depth=4):
        for _ in range(20):
            with side:
                value.mul_(2)
            value.add_(1)
        assert value.item() == float(2**20 - 1)


@on_ranks(1, device="sim")
def test_a_launch_waits_while_the_queue_is_full() -> None:
    import tests.simulated_accelerator.device as sim

    stream = torch.accelerator.current_stream()
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(queue_depth=4):
        with sim.held(stream):
            issued = []
            issuing = started(lambda: [issued.append(value.add_(1)) for _ in range(10)])
            assert not ends(issuing, A_MOMENT)
            assert 3 <= len(issued) <= 4
        assert ends(issuing)
    assert value.item() == 10
    assert sim.counters().full_queues > 0


@on_ranks(1, device="sim")
def test_events_are_done_when_their_stream_has_come_to_them() -> None:
    import tests.simulated_accelerator.device as sim

    stream = torch.accelerator.current_stream()
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    plain = torch.Event("sim")
    begin.record()
    begin.synchronize()  # its time is taken when the stream comes to it
    with sim.held(stream):
        torch.ones(3, device="sim")
        plain.record()
        end.record()
        assert not plain.query()
        assert not stream.query()
        waiting = started(plain.synchronize)
        assert not ends(waiting, A_MOMENT)
    assert ends(waiting)
    end.synchronize()
    assert begin.elapsed_time(end) >= 1000 * A_MOMENT


# Threads, counters


@on_ranks(1, device="sim")
def test_every_thread_starts_on_the_first_device_and_its_use_is_noted() -> None:
    import tests.simulated_accelerator.device as sim

    torch.accelerator.set_device_index(2)
    sim.forget_touched_devices()
    torch.ones(2, device="sim").add_(1)
    assert sim.touched_devices() == {2: {"MainThread"}}

    def work() -> None:
        torch.sim.current_stream()
        torch.sim.set_device(1)
        assert sim.touched_devices().keys() == {2}, "to choose a device is not to use it"
        torch.sim.set_device(0)
        torch.Event("sim").record()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    assert ends(thread)
    assert sim.touched_devices() == {
        0: {"worker"},
        2: {"MainThread"},
    } or sim.touched_devices().keys() == {0, 2}
    torch.accelerator.set_device_index(0)


@on_ranks(1, device="sim")
def test_operations_that_block_the_host_are_counted() -> None:
    import tests.simulated_accelerator.device as sim

    tensor = torch.ones(4, device="sim")
    before, by_thread = sim.counters(), sim.syncs_by_thread()
    tensor.sum()
    assert (sim.counters() - before).stream_syncs == 0
    tensor.sum().item()
    tensor.cpu()
    torch.accelerator.current_stream().synchronize()
    event = torch.Event("sim")
    event.record()
    event.synchronize()
    done = sim.counters() - before
    assert (done.stream_syncs, done.event_syncs, done.kernels) == (3, 1, 2)
    assert sim.syncs_by_thread()["MainThread"] - by_thread.get("MainThread", 0) == 4

    tensor.nonzero()
    assert (sim.counters() - before).sync_operators == 1
    assert "aten::nonzero" in sim.sync_operator_names()


# Kernels


@on_ranks(1, device="sim")
def test_random_numbers_match_the_cpu_in_the_order_of_the_program() -> None:
    import tests.simulated_accelerator.device as sim

    torch.manual_seed(5)
    expected = [torch.randn(100), torch.rand(3), torch.randperm(9)]
    torch.manual_seed(5)
    got = [
        torch.randn(100, device="sim"),
        torch.rand(3, device="sim"),
        torch.randperm(9, device="sim"),
    ]
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)

    state = torch.sim.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(50, device="sim"))
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(50, device="sim")), first)

    # Drawn when they are asked for, not when the stream comes to it.
    torch.manual_seed(5)
    with sim.held(torch.accelerator.current_stream()):
        late = torch.randn(100, device="sim")
        torch.manual_seed(6)
    assert torch.equal(late.cpu(), expected[0])


@on_ranks(1, device="sim")
def test_the_failure_of_a_kernel_surfaces_in_later_calls_and_stays() -> None:
    import tests.simulated_accelerator.device as sim

    value, event = torch.zeros((), device="sim"), torch.Event("sim")
    event.record()
    torch.accelerator.synchronize()
    try:
        with sim.held(torch.accelerator.current_stream()):
            sim.fail_on_stream("the cause")  # does not raise yet
            value.add_(1)
        for call in (torch.accelerator.synchronize, lambda: value + 1, value.item, event.query):
            with pytest.raises(RuntimeError, match="the cause"):
                call()
        assert sim.peek(value) == 0, "the device has stopped"
    finally:
        sim.reset_error()
    assert value.item() == 0


# Memory


@on_ranks(1, device="sim")
def test_a_host_that_reads_device_memory_dies() -> None:
    tensor = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@on_ranks(1, device="sim")
def test_memory_may_be_poisoned_when_it_is_reused() -> None:
    import tests.simulated_accelerator.device as sim

    with sim.configured(poison=sim.Poison.WHEN_REUSED):
        first = torch.ones(1000, device="sim")
        freed = sim._sim.kernel_view(first)
        address = first.data_ptr()
        del first
        torch.accelerator.synchronize()
        assert freed.eq(1).all(), "as on CUDA, unused memory is unchanged"

        second = torch.empty(1000, device="sim")
        assert second.data_ptr() == address
        assert second.cpu().isnan().all()


@on_ranks(1, device="sim")
def test_memory_may_be_poisoned_when_it_is_freed() -> None:
    import tests.simulated_accelerator.device as sim

    with sim.configured(poison=sim.Poison.WHEN_FREED):
        tensor = torch.ones(2000, device="sim")
        freed = sim._sim.kernel_view(tensor)
        del tensor
        torch.accelerator.synchronize()
        assert freed.isnan().all()


@on_ranks(1, device="sim")
def test_a_freed_block_is_its_streams_next_one_unless_another_stream_is_recorded() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    first = torch.empty(3000, device="sim")
    address = first.data_ptr()
    with side:
        other = torch.empty(3000, device="sim")
    assert other.data_ptr() != address, "each stream has separate blocks"

    # Freed while the stream still works with it: at once the next one's, since the stream keeps the
    # order.
    with sim.held(torch.accelerator.current_stream()):
        first.add_(1)
        del first
        again = torch.empty(3000, device="sim")
        assert again.data_ptr() == address

    # Unless it was said that another stream uses it.
    with sim.held(side):
        with side:
            again.add_(1)
        again.record_stream(side)
        del again
        third = torch.empty(3000, device="sim")
        assert third.data_ptr() != address
    side.synchronize()
    assert torch.empty(3000, device="sim").data_ptr() == address


@on_ranks(1, device="sim")
def test_using_a_tensor_whose_storage_was_released_is_an_error() -> None:
    tensor = torch.ones(8, device="sim")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tensor.add_(1)


@on_ranks(1, device="sim")
def test_memory_is_counted_and_its_peak_kept() -> None:
    import tests.simulated_accelerator.device as sim

    torch.sim.reset_peak_memory_stats()
    before, blocks = torch.accelerator.memory_allocated(), sim.counters().fresh_blocks
    for _ in range(3):
        torch.empty(1 << 20, device="sim")
    assert sim.counters().fresh_blocks == blocks + 1
    assert torch.accelerator.memory_allocated() == before
    assert (
        torch.accelerator.max_memory_allocated()
        == torch.sim.max_memory_allocated()
        == before + (4 << 20)
    )


# Copies


@on_ranks(1, device="sim")
def test_copies_from_and_to_pinned_memory_overlap_with_the_host() -> None:
    import tests.simulated_accelerator.device as sim

    stream = torch.accelerator.current_stream()
    target = torch.zeros(4, device="sim")
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    with sim.held(stream):
        before = sim.counters()
        target.copy_(pinned, non_blocking=True)
        pinned.fill_(7)  # the copy reads the memory when it runs
        assert sim.counters().stream_syncs == before.stream_syncs
    assert target.cpu().tolist() == [7.0] * 4

    back = torch.zeros(4).pin_memory()
    with sim.held(stream):
        back.copy_(target, non_blocking=True)
        assert back.tolist() == [0.0] * 4
    stream.synchronize()
    assert back.tolist() == [7.0] * 4


@on_ranks(1, device="sim")
def test_copies_from_pageable_memory_block_even_if_they_are_not_to() -> None:
    import tests.simulated_accelerator.device as sim

    target, pageable = torch.zeros(4, device="sim"), torch.ones(4)
    before = sim.counters()
    with sim.held(torch.accelerator.current_stream()):
        copying = started(lambda: target.copy_(pageable, non_blocking=True))
        assert not ends(copying, A_MOMENT)
    assert ends(copying)
    done = sim.counters() - before
    assert (done.pageable_copies, done.stream_syncs) == (1, 1)


@on_ranks(1, device="sim")
def test_pinned_memory_is_not_used_again_while_a_copy_is_in_flight() -> None:
    import tests.simulated_accelerator.device as sim

    target, pinned = torch.zeros(512, device="sim"), torch.ones(512).pin_memory()
    address = pinned.data_ptr()
    with sim.held(torch.accelerator.current_stream()):
        target.copy_(pinned, non_blocking=True)
        del pinned
        other = torch.empty(512, pin_memory=True)
        assert other.data_ptr() != address
    assert target.cpu().eq(1).all()
    assert torch.empty(512, pin_memory=True).data_ptr() == address


@on_ranks(1, device="sim")
def test_memory_of_the_host_can_be_pinned_where_it_is_and_let_go_of_without_copies_only() -> None:
    import tests.simulated_accelerator.device as sim
    from megatron.core.device import Device
    from megatron.core.drivers import PinError

    device = Device("sim")
    memory = torch.ones(4096)
    assert not memory.is_pinned()
    device.pin(memory.data_ptr(), memory.nbytes)
    assert memory[7:].is_pinned()
    with pytest.raises(PinError, match="already mapped"):
        device.pin(memory.data_ptr() + 4096, 4096)

    target = torch.zeros(4096, device="sim")
    with sim.held(torch.accelerator.current_stream()):
        target.copy_(memory, non_blocking=True)
        with pytest.raises(RuntimeError, match="copies under way"):
            device.unpin(memory.data_ptr())
    torch.accelerator.synchronize()
    device.unpin(memory.data_ptr())
    assert not memory.is_pinned()
