"""The computed shuffle: a bijection, the same for scalars and arrays, and well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.permutation import RandomPermutation, derive_key

KEYS = st.integers(min_value=0, max_value=2**64 - 1)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(size=st.integers(1, 5000), key=KEYS)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    permuted = RandomPermutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(permuted), np.arange(size))


@pytest.mark.parametrize(
    "size", [1, 2, 3, 255, 256, 257, 511, 512, 513, (1 << 17) - 1, 1 << 17, 300_001]
)
def test_permutation_is_a_bijection_around_powers_of_two(size: int) -> None:
    permuted = RandomPermutation(size, 42)(np.arange(size))
    assert np.array_equal(np.bincount(permuted, minlength=size), np.ones(size))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(size=st.integers(1, 1 << 62), key=KEYS, data=st.data())
def test_scalars_and_arrays_of_any_size_agree(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    permutation = RandomPermutation(size, key)
    permuted = permutation(np.array(positions))
    assert permuted.dtype == np.int64
    assert permuted.tolist() == [permutation(position) for position in positions]
    assert all(0 <= value < size for value in permuted.tolist())
    assert len(set(permuted.tolist())) == len(set(positions))


@pytest.mark.parametrize("size", [0, -1, (1 << 62) + 1])
def test_impossible_size_is_rejected(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}"):
        RandomPermutation(size, 1)


@pytest.mark.parametrize("size", [5, 1000])
@pytest.mark.parametrize("position", [-1, 1000])
def test_position_outside_is_rejected(size: int, position: int) -> None:
    with pytest.raises(IndexError, match=rf"range\({size}\), got {position}"):
        RandomPermutation(size, 1)(position)


def test_values_stay_those_of_this_version() -> None:
    # A run that is resumed with a later version of the code must see the same samples.
    assert derive_key(1234, "documents", 0) == 6627909991493420777
    assert RandomPermutation(8, derive_key(2))(np.arange(8)).tolist() == [5, 4, 0, 2, 1, 3, 7, 6]
    assert RandomPermutation(1000, derive_key(1))(np.arange(8)).tolist() == [
        328,
        507,
        238,
        684,
        275,
        151,
        76,
        219,
    ]


def test_keys_depend_on_every_part_its_type_and_its_place() -> None:
    parts = [(1, 2), (2, 1), (12,), (1, "2"), ("1", 2), ("1,2",), (1, 2, 0), (1, "", 2)]
    assert len({derive_key(*part) for part in parts}) == len(parts)


@pytest.mark.parametrize("size", [2, 3, 5, 13, 100, 257])
def test_every_position_goes_everywhere_equally_often(size: int) -> None:
    num_keys = 200 * size if size <= 13 else 1500
    counts = np.zeros((size, size))
    for key in range(num_keys):
        counts[np.arange(size), RandomPermutation(size, derive_key(key))(np.arange(size))] += 1
    expected = num_keys / size
    per_freedom = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    # Chi squared over its degrees of freedom: 1, give or take a few times sqrt(2 / freedoms).
    assert abs(per_freedom - 1) < 5 * np.sqrt(2) / (size - 1)
