"""How many bytes of tensors exist at a time, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object]) -> int:
    """The peak bytes of tensors while `function` runs, less the bytes of tensors that existed
    before. Memory that torch does not allocate, such as slabs of host memory, is not counted.
    """
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        function()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    # In order of time: threads report their events one thread after the other.
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
