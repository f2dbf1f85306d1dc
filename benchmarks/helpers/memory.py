"""How many bytes of tensors exist at a time, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes of tensors that exist at a time while `function` runs, beyond those that were
    there. Memory that torch does not allocate, such as slabs of host memory, is not counted.
    """
    return max(_live_bytes(function))


def kept_bytes(function: Callable[[], object]) -> int:
    """The bytes of tensors that `function` leaves while its result exists, such as the graph of a
    forward; counted as by `peak_bytes`.
    """
    return _live_bytes(function)[-1]


def _live_bytes(function: Callable[[], object]) -> list[int]:
    """The bytes that exist before `function`, none, and after each allocation and deallocation."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        result = function()
    del result
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    # In order of time: threads report their events one thread after the other.
    events = sorted(events, key=lambda event: event.start_ns())
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    return list(itertools.accumulate(changes, initial=0))
