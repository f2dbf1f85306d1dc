"""The order of a blend, against a merge of everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset, BlendOrder

WEIGHTS = st.lists(
    st.one_of(st.floats(0.001, 1000), st.sampled_from([1.0, 2.0, 3.0, 0.5])), min_size=1, max_size=8
)


class _Numbered:
    """Sample m of dataset d is (d, m)."""

    def __init__(self, number: int, length: int) -> None:
        self.number = number
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert 0 <= index < self.length
        return {"tokens": torch.tensor([self.number, index])}


def _merged(weights: tuple[float, ...], num_samples: int) -> list[tuple[int, int]]:
    """The first samples of the blend, from a sort of more than can matter."""
    times = [
        ((sample + 0.5) / weight, dataset, sample)
        for dataset, weight in enumerate(weights)
        for sample in range(int(weight * (num_samples + len(weights))) + 3)
    ]
    return [(dataset, sample) for _, dataset, sample in sorted(times)[:num_samples]]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(weights=WEIGHTS, num_samples=st.integers(1, 200))
def test_order_is_that_of_the_merge(weights: list[float], num_samples: int) -> None:
    order = BlendOrder(weights)
    expected = _merged(order.weights, num_samples)
    assert [order.locate(index) for index in range(num_samples)] == expected
    drawn = [dataset for dataset, _ in expected]
    assert order.counts(num_samples) == [drawn.count(dataset) for dataset in range(len(weights))]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(weights=WEIGHTS, index=st.integers(0, 1 << 42))
def test_far_samples_follow_each_other_without_gap(weights: list[float], index: int) -> None:
    order = BlendOrder(weights)
    counts = order.counts(index)
    assert sum(counts) == index
    for later in range(index, index + 3):
        dataset, sample = order.locate(later)
        assert sample == counts[dataset]
        counts[dataset] += 1
        assert order.counts(later + 1) == counts


def test_samples_come_from_the_located_dataset() -> None:
    order = BlendOrder([0.7, 0.3])
    blend = BlendedDataset([_Numbered(0, 70), _Numbered(1, 30)], [0.7, 0.3], 100)
    assert len(blend) == 100
    assert [tuple(blend[index]["tokens"].tolist()) for index in range(100)] == [
        order.locate(i) for i in range(100)
    ]
    with pytest.raises(IndexError, match=r"range\(100\), got 100"):
        blend[100]


def test_a_dataset_nothing_is_taken_from_may_be_missing() -> None:
    blend = BlendedDataset([_Numbered(0, 3), None], [1000, 1], 3)
    assert [blend[index]["tokens"].tolist() for index in range(3)] == [[0, 0], [0, 1], [0, 2]]


def test_a_dataset_that_is_too_short_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="Expected at least 30 samples in dataset 1 of the blend, got 29"
    ):
        BlendedDataset([_Numbered(0, 70), _Numbered(1, 29)], [0.7, 0.3], 100)


@pytest.mark.parametrize(
    "weights",
    [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")], [1e-300, 1e300], [1e308, 1e308]],
)
def test_impossible_weights_are_rejected(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"Expected (positive weights|weights whose shares)"):
        BlendOrder(weights)
