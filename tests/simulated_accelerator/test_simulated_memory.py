"""The simulated accelerator's memory, and copies from and to the host's: as on a GPU, property by
property.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.threads import A_MOMENT, ends, started

pytestmark = pytest.mark.sim


def on_one_rank(body: Callable[[], None]) -> None:
    run_ranks(1, body, device="sim")


# Memory


def _read_device_memory() -> None:
    tensor = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_a_host_that_reads_device_memory_dies():
    on_one_rank(_read_device_memory)


def _poison_when_reused() -> None:
    import tests.simulated_accelerator.device as sim

    with sim.configured(poison=sim.Poison.WHEN_REUSED):
        first = torch.ones(1000, device="sim")
        freed = sim._sim.kernel_view(first)
        address = first.data_ptr()
        del first
        torch.accelerator.synchronize()
        assert freed.eq(1).all(), "as on CUDA, what nobody has used again is still there"

        second = torch.empty(1000, device="sim")
        assert second.data_ptr() == address
        assert second.cpu().isnan().all()


def _poison_when_freed() -> None:
    import tests.simulated_accelerator.device as sim

    with sim.configured(poison=sim.Poison.WHEN_FREED):
        tensor = torch.ones(2000, device="sim")
        freed = sim._sim.kernel_view(tensor)
        del tensor
        torch.accelerator.synchronize()
        assert freed.isnan().all()


@pytest.mark.parametrize("body", [_poison_when_reused, _poison_when_freed])
def test_memory_that_was_freed_is_poisoned(body):
    on_one_rank(body)


def _reuse() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    first = torch.empty(3000, device="sim")
    address = first.data_ptr()
    with side:
        other = torch.empty(3000, device="sim")
    assert other.data_ptr() != address, "each stream has blocks of its own"

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


def test_a_freed_block_is_its_streams_next_one_unless_another_stream_is_recorded():
    on_one_rank(_reuse)


def _released_storage() -> None:
    tensor = torch.ones(8, device="sim")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tensor.add_(1)


def test_using_a_tensor_whose_storage_was_released_is_an_error():
    on_one_rank(_released_storage)


def _statistics() -> None:
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


def test_memory_is_counted_and_its_peak_kept():
    on_one_rank(_statistics)


# Copies


def _pinned_copies() -> None:
    import tests.simulated_accelerator.device as sim

    stream = torch.accelerator.current_stream()
    target = torch.zeros(4, device="sim")
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    with sim.held(stream):
        before = sim.counters()
        target.copy_(pinned, non_blocking=True)
        pinned.fill_(7)  # the copy takes what is there when its turn comes
        assert sim.counters().stream_syncs == before.stream_syncs
    assert target.cpu().tolist() == [7.0] * 4

    back = torch.zeros(4).pin_memory()
    with sim.held(stream):
        back.copy_(target, non_blocking=True)
        assert back.tolist() == [0.0] * 4
    stream.synchronize()
    assert back.tolist() == [7.0] * 4


def test_copies_from_and_to_pinned_memory_run_beside_the_host():
    on_one_rank(_pinned_copies)


def _pageable_copies() -> None:
    import tests.simulated_accelerator.device as sim

    target, pageable = torch.zeros(4, device="sim"), torch.ones(4)
    before = sim.counters()
    with sim.held(torch.accelerator.current_stream()):
        copying = started(lambda: target.copy_(pageable, non_blocking=True))
        assert not ends(copying, A_MOMENT)
    assert ends(copying)
    done = sim.counters() - before
    assert (done.pageable_copies, done.stream_syncs) == (1, 1)


def test_copies_from_pageable_memory_block_even_if_they_are_not_to():
    on_one_rank(_pageable_copies)


def _pinned_reuse() -> None:
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


def test_pinned_memory_is_not_used_again_while_a_copy_is_under_way():
    on_one_rank(_pinned_reuse)


def _registered_memory() -> None:
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


def test_memory_of_the_host_can_be_pinned_where_it_is_and_let_go_of_without_copies_only():
    on_one_rank(_registered_memory)
