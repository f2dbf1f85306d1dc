"""The synthetic language: determinism, bounds, and regularity."""

from __future__ import annotations

import pytest
import torch

from megatron.core.datasets.mock_dataset import MockGPTDataset


def test_a_sample_depends_on_seed_and_number_only() -> None:
    short, long = MockGPTDataset(1000, 32, 10, seed=1), MockGPTDataset(1000, 32, 100, seed=1)
    for index in (9, 3):
        assert torch.equal(short[index]["tokens"], long[index]["tokens"])
        assert torch.equal(short[index]["tokens"][1:], short[index]["labels"][:-1])
    assert not torch.equal(short[3]["tokens"], short[4]["tokens"])
    assert not torch.equal(short[3]["tokens"], MockGPTDataset(1000, 32, 10, seed=2)[3]["tokens"])


def test_the_stride_of_a_sample_foretells_most_of_it() -> None:
    dataset = MockGPTDataset(512, 256, 100, seed=1)
    strides = set()
    foretold = 0
    for index in range(100):
        sample = dataset[index]
        steps = (sample["labels"] - sample["tokens"]) % 512
        stride = int(steps.mode().values)
        strides.add(stride)
        foretold += int((steps == stride).sum())
    assert strides == set(range(1, 9))
    assert 0.95 < foretold / (100 * 256) < 0.99


def test_samples_and_vocabularies_outside_are_rejected() -> None:
    with pytest.raises(IndexError, match=r"range\(10\), got 10"):
        MockGPTDataset(100, 8, 10, seed=1)[10]
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        MockGPTDataset(1, 8, 10, seed=1)
