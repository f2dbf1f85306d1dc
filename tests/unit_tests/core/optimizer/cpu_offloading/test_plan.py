from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan, PlannedGroup

FRACTIONS = st.one_of(
    st.floats(0, 1),
    st.integers(0, 1000).map(lambda thousandths: thousandths / 1000),
    st.sampled_from([0, 1, 0.0, 1.0, 5e-324, 1 - 2**-53]),
)


def plan(numels: list[int], fraction: float) -> OffloadPlan:
    return OffloadPlan.build(
        [(f"layers.{index}", numel) for index, numel in enumerate(numels)], fraction
    )


def num_on_host(numels: list[int], fraction: float) -> int:
    return sum(group.is_on_host for group in plan(numels, fraction).groups)


def test_the_worked_example():
    names = ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    built = OffloadPlan.build([(name, 10) for name in names], 0.5)
    assert built.groups[0] == PlannedGroup("embedding", 10, False)
    assert [built.is_on_host(index) for index in range(5)] == [False, False, True, True, True]
    assert (built.host_numel, built.device_numel, built.total_numel) == (30, 20, 50)
    assert built.host_fraction == 0.6


@given(tenths=st.integers(0, 10))
def test_a_tenth_is_a_tenth_and_not_its_binary_neighbour(tenths):
    assert num_on_host([10**9] * 10, tenths / 10) == tenths


def test_counts_beyond_the_precision_of_a_float_are_compared_exactly():
    assert num_on_host([2**60, 2**60 + 1], 0.5) == 1
    assert num_on_host([2**60 + 1, 2**60], 0.5) == 2


def test_groups_without_elements_need_no_host():
    assert num_on_host([0, 0], 0.5) == 0
    assert num_on_host([0, 0], 1) == 2
    assert plan([0, 0], 1).host_fraction == 0
    assert plan([], 0.5) == OffloadPlan(())


@pytest.mark.parametrize(
    "fraction",
    [-0.1, 1.0000001, float("nan"), float("inf"), True, None, "0.5"],
)
def test_what_is_no_number_from_zero_to_one_is_rejected(fraction):
    with pytest.raises(ValueError, match="Expected an offload fraction from 0 to 1, got "):
        plan([1, 2], fraction)


def test_a_negative_count_is_rejected():
    with pytest.raises(ValueError, match=r"at least 0 elements in group 'layers\.1', got -2"):
        plan([1, -2], 0.5)


# Groups that go first

GROUPS = st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=12)


@settings(max_examples=300, deadline=None)
@given(groups=GROUPS, fraction=FRACTIONS)
def test_others_follow_only_when_all_that_go_first_are_on_the_host(groups, fraction):
    numels = [numel for numel, _ in groups]
    first = [index for index, (_, goes_first) in enumerate(groups) if goes_first]
    named = [(f"layers.{index}", numel) for index, numel in enumerate(numels)]
    built = OffloadPlan.build(named, fraction, first)
    assert [(group.name, group.numel) for group in built.groups] == named
    assert [group.goes_first for group in built.groups] == [goes_first for _, goes_first in groups]

    taken = [[g.is_on_host for g in built.groups if g.goes_first is kind] for kind in (True, False)]
    assert all(sides == sorted(sides) for sides in taken), "each from its end"
    assert not any(taken[1]) or all(taken[0])

    wanted = Fraction(str(fraction)) * sum(numels)
    assert built.host_numel >= wanted
    others = [g for g in built.groups if g.is_on_host and not g.goes_first]
    last = (others or [g for g in built.groups if g.is_on_host])[:1]
    if last and fraction < 1:
        assert built.host_numel - last[0].numel < wanted, "the last one taken was needed"


def test_the_table_shows_groups_that_go_first_below_the_others():
    names = [f"layers.{index}{part}" for index in range(7) for part in ("", ".mlp.experts")]
    groups = [("embedding", 50), *((name, 90 if "experts" in name else 10) for name in names)]
    first = [index for index, (name, _) in enumerate(groups) if "experts" in name]
    assert str(OffloadPlan.build(groups, 0.2, first)) == "\n".join(
        [
            "embedding .. layers.6 (8 groups)                         120  device",
            "layers.0.mlp.experts .. layers.4.mlp.experts (5 groups)  450  device",
            "layers.5.mlp.experts                                      90  host",
            "layers.6.mlp.experts                                      90  host",
            "on the device                                            570  device",
            "on the host                                              180  host, 24.00%",
        ]
    )
