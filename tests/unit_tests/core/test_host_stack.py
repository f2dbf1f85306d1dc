"""Pieces of the stack: apart while they live, and all of it free when they are gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.host_stack import HostStack

CPU = Device("cpu")


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 7)), max_size=40))
def test_living_pieces_of_the_stack_never_overlap(steps: list[tuple[int, int]]) -> None:
    stack = HostStack(1000, CPU)
    living: list[tuple[Any, int]] = []
    for nbytes, number in steps:
        if number < len(living):
            living.pop(number)[0].give_back()
        place = stack.take(nbytes)
        if place is not None:
            assert place.memory.numel() == nbytes
            living.append((place, nbytes))
        for value, (place, _) in enumerate(living):
            place.memory.fill_(value)
        for value, (place, _) in enumerate(living):
            assert bool((place.memory == value).all())
    assert stack.peak_nbytes <= 1000
    for place, _ in living:
        place.give_back()
    assert stack.take(1000) is not None
