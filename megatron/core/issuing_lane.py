"""A lane for copies that block the thread that issues them.

A copy from a device to memory that is not pinned blocks the thread that issues it until it is done,
even where that thread asked for the opposite: the driver stages it through its own pinned memory.
Gradients are sent down from autograd's thread, in the middle of the backward, which would stop. So
a worker thread issues such copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.lanes import Event, Lane, relay


class IssuingLane:
    """A device's lane, to which a host lane's thread issues the work. Its events are done when the
    work is.

    Work is not issued yet when `enqueue` returns: whatever it looks at on the host, it looks at
    later.
    """

    def __init__(self, host_lane: Lane, device_lane: Lane) -> None:
        self._host_lane = host_lane
        self._device_lane = device_lane

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """As `Lane.enqueue`. Errors of issuing fail the lane, and its events raise them."""
        # The device waits for the events, not the worker, unless they are of other workers.
        return relay(self._host_lane, lambda: self._device_lane.enqueue(work, after))

    def close(self) -> None:
        """Waits for queued work; no more may be queued."""
        self._host_lane.close()
        self._device_lane.close()
