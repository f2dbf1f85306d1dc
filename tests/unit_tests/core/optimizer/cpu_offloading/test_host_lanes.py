"""The host's threads have the next bucket before the one that they work on is awaited."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.piece import HostKernel, Piece
from megatron.core.optimizer.rules import Adam
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    FORWARD,
    IN_ORDER,
    Net,
    backward,
    fsdp,
    same,
    weights,
)

WAIT = 300.0  # seconds, for what must happen


class Ahead:
    """Kernels of Adam whose work on a bucket ends only once the next bucket is theirs."""

    def __init__(self, num_buckets: int, *, is_ahead: bool = True) -> None:
        self.num_buckets = num_buckets
        self.is_ahead = is_ahead
        self.num_waits = 0
        self._submitted: list[threading.Event] = []
        self._real = Adam.host_kernel

    def __enter__(self) -> Ahead:
        Adam.host_kernel = self._kernel
        return self

    def __exit__(self, *_: object) -> None:
        Adam.host_kernel = self._real

    def _kernel(self, *args: object, **named: object) -> HostKernel:
        real = HostKernel.of(self._real(Adam(), *args, **named))
        self._submitted = [threading.Event() for _ in range(100)]
        number = 0

        def submit(pieces: Iterable[Piece], grad_scale: float) -> Callable[[], None]:
            nonlocal number
            own, number = number, number + 1
            wait = real.submit(pieces, grad_scale)
            self._submitted[own].set()

            def wait_for_next() -> None:
                is_last = own % self.num_buckets == self.num_buckets - 1
                assert is_last or not self.is_ahead or self._submitted[own + 1].wait(WAIT), own
                self.num_waits += 1
                wait()

            return wait_for_next

        return HostKernel(submit)


def _trained(num_steps: int = 3, **settings: bool) -> tuple[int, list]:
    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    for number in range(num_steps):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return len(optimizer._sides.host_side.buckets), weights(model)


@on_ranks(1)
def test_a_bucket_is_started_while_the_one_before_it_is_being_updated() -> None:
    num_buckets, expected = _trained()
    assert num_buckets > 2
    for settings in ({}, FORWARD, ALL):
        with Ahead(num_buckets) as kernel:
            assert same(_trained(**settings)[1], expected), settings
        assert kernel.num_waits == 3 * num_buckets
    with Ahead(num_buckets, is_ahead=False):
        assert same(_trained(**IN_ORDER)[1], expected), "where everything is in order"
