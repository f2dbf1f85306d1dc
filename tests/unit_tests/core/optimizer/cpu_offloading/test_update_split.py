"""Which buckets the device updates, and how the first steps find the fraction."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.lane_timings import D2H, H2D, HOST
from megatron.core.optimizer.cpu_offloading.update_split import (
    PassTimes,
    SplitChooser,
    interleaved,
)
from tests.helpers.ranks import run_ranks

SECONDS = st.floats(0.0, 1e3)
TIMES = st.builds(PassTimes, SECONDS, SECONDS, SECONDS, SECONDS)


@given(st.lists(st.integers(0, 10**9)), st.floats(0.0, 1.0))
def test_up_to_each_bucket_the_device_has_its_share_within_half_of_the_largest(numels, fraction):
    flags = interleaved(numels, fraction)
    streamed = itertools.accumulate(n * flag for n, flag in zip(numels, flags, strict=True))
    for own, total in zip(streamed, itertools.accumulate(numels), strict=True):
        assert abs(own - fraction * total) <= max(numels) / 2 + 1e-6 * total


@given(st.lists(st.integers(1, 10**9)))
def test_the_device_has_all_buckets_or_none_at_the_ends(numels):
    assert interleaved(numels, 0.0) == [False] * len(numels)
    assert interleaved(numels, 1.0) == [True] * len(numels)


def test_equal_buckets_alternate():
    assert interleaved([8] * 6, 0.5) == [True, False] * 3
    assert sum(interleaved([8] * 12, 1 / 3)) == 4


@given(TIMES)
def test_no_fraction_is_faster_than_the_balanced_one(times):
    best = times.seconds(times.balanced())
    others = min(times.seconds(number / 64) for number in range(65))
    assert best <= 1.05 * others + 1e-9


@given(TIMES)
def test_the_device_updates_nothing_where_that_gains_little(times):
    fraction = times.balanced()
    assert fraction == 0 or times.seconds(0.0) >= 1.05 * times.seconds(fraction)


def test_the_host_is_left_alone_where_the_link_is_the_slower_one():
    # 28 bytes an element at 160 GB/s, 2 and 12 at 50 GB/s, as of one H200; 1e9 elements.
    h200 = PassTimes(0.175, 0.04, 0.24, 0.24)
    fraction = h200.balanced()
    assert 0.3 < fraction < 0.45
    assert h200.seconds(fraction) < 0.7 * h200.seconds(0.0)
    assert PassTimes(0.175, 0.04, 10.0, 10.0).balanced() == 0


def test_whole_passes_have_the_rates_of_a_step_with_both():
    alone = PassTimes(4.0, 1.0, 6.0, 6.0)
    # Together, both take twice as long.
    up = 2 * (1.0 * 0.75 + 6.0 * 0.25)
    assert alone.at_rates_of(2 * 4.0 * 0.75, up, 0.25) == pytest.approx((8.0, 2.0, 12.0, 12.0))
    assert alone.at_rates_of(8.0, up, 0.0) == alone


class _Step:
    """The times of a step."""

    def __init__(self, host: float, up: float, down: float) -> None:
        self._sums = {HOST: host, H2D: up, D2H: down}

    def sums(self) -> dict[str, float]:
        return self._sums


def _choose() -> tuple[list[float], int]:
    """The fraction after each of nine steps, whose times differ among the ranks."""
    size = dist.get_world_size()
    mesh, chooser = init_device_mesh("cpu", (size,)), SplitChooser()
    slower = 1.0 + dist.get_rank()
    fractions, num_waits = [], 0

    def wait() -> None:
        nonlocal num_waits
        num_waits += 1

    for number in range(9):
        assert not chooser.is_done
        own = chooser.fraction
        step = _Step(slower * 4 * (1 - own), 1 - own + 6 * own, 6 * own)
        # The first step of a part runs while the last part's is ending, and takes any time.
        if number % 3 == 0:
            step = _Step(100.0, 100.0, 100.0)
        chooser.step_ended(step, own, wait, mesh)
        fractions.append(chooser.fraction)
    assert chooser.is_done
    return fractions, num_waits


def test_nine_steps_find_the_balance_of_the_slowest_rank_on_all_ranks():
    (first, num_waits), (second, _) = run_ranks(2, _choose)
    assert first == second
    assert first[:5] == [0.0, 0.0, 1.0, 1.0, 1.0]
    # The slower rank's host takes 8 s; 1 s of weights or 6 s of states go up.
    expected = 7 / (7 + 6)
    assert first[5:] == pytest.approx([expected] * 4)
    assert num_waits == 3


@pytest.mark.parametrize(("states", "expected"), [(3.5, 1.0), (3.9, 0.0), (6.0, 0.0)])
def test_where_both_passes_share_all_of_the_memory_the_faster_one_has_all(states, expected):
    # Together, each takes as long as both would take one after the other.
    chooser = SplitChooser()
    while not chooser.is_done:
        own = chooser.fraction
        total = 4 * (1 - own) + states * own
        times = {0.0: (4.0, 1.0, 0.0), 1.0: (0.0, states, states)}.get(own, (total,) * 3)
        chooser.step_ended(_Step(*times), own, lambda: None, None)
    assert chooser.fraction == expected
