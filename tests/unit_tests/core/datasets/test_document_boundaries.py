"""Samples with the boundaries of their documents, as Megatron's flags mean them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.builder import build_gpt_datasets
from megatron.core.datasets.config import Boundaries, GPTDatasetConfig
from megatron.core.datasets.document_boundaries import DelimitedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.options import ConfigError
from tests.unit_tests.core.datasets.conftest import write_tokens

EOD = 7
ALL = Boundaries(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)


class Fixed:
    """A dataset of one window."""

    def __init__(self, window: list[int]) -> None:
        self._window = torch.tensor(window)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self._window[:-1], "labels": self._window[1:]}


class ByHand(NamedTuple):
    """What Megatron's flags mean, token by token."""

    sees: list[list[bool]]
    positions: list[int]
    is_learned: list[bool]


def by_hand(tokens: list[int]) -> ByHand:
    document, documents, positions = 0, [], []
    for place, token in enumerate(tokens):
        documents.append(document)
        positions.append(place - documents.index(document))
        document += token == EOD
    sees = [
        [other <= place and documents[other] == documents[place] for other in range(len(tokens))]
        for place in range(len(tokens))
    ]
    return ByHand(sees, positions, [token != EOD for token in tokens])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(5, EOD), min_size=2, max_size=20))
def test_samples_say_what_each_token_sees_where_it_stands_and_whether_it_counts(
    window: list[int],
) -> None:
    sample = DelimitedDataset(Fixed(window), EOD, ALL)[0]
    expected = by_hand(window[:-1])
    assert sample["tokens"].tolist() == window[:-1]
    assert sample["labels"].tolist() == window[1:]
    assert sample["positions"].tolist() == expected.positions
    assert sample["loss_mask"].tolist() == [float(one) for one in expected.is_learned]
    numbers = torch.arange(len(sample["lengths"])).repeat_interleave(
        torch.tensor(sample["lengths"])
    )
    is_same = numbers.unsqueeze(1) == numbers
    assert is_same.tril().tolist() == expected.sees


def test_each_flag_adds_its_own_and_nothing_else() -> None:
    for flags, name in (
        (Boundaries(reset_attention_mask=True), "lengths"),
        (Boundaries(reset_position_ids=True), "positions"),
        (Boundaries(eod_mask_loss=True), "loss_mask"),
    ):
        assert flags
        sample = DelimitedDataset(Fixed([1, EOD, 2, 3]), EOD, flags)[0]
        assert set(sample) == {"tokens", "labels", name}
    assert not Boundaries()


def test_rows_of_a_batch_follow_each_other() -> None:
    rows = [DelimitedDataset(Fixed(w), EOD, ALL)[0] for w in ([1, EOD, 2, 3], [1, 2, EOD, 3])]
    batch = DelimitedDataset.collate(rows)
    assert batch["lengths"] == (2, 1, 3)
    assert batch["positions"].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch["tokens"].shape == batch["loss_mask"].shape == (2, 3)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Documents with their end, the same without, and in another order with it."""
    with_end = [[number % 5] * (number % 9 + 1) + [EOD] for number in range(100)]
    without = [document[:-1] for document in with_end]
    names = {"with": with_end, "without": without, "turned": with_end[::-1]}
    return [write_tokens(tmp_path / name, texts).prefix for name, texts in names.items()]


def test_all_splits_and_blends_have_boundaries_and_samples_are_those_without(
    prefixes: list[str],
) -> None:
    blend = ("1", prefixes[0], "2", prefixes[2])
    for path in ((prefixes[0],), blend):
        plain = GPTDatasetConfig(seq_length=16, data_path=path, split="8,1,1")
        config = GPTDatasetConfig(
            seq_length=16, data_path=path, split="8,1,1", reset_attention_mask=True
        )
        expected = build_gpt_datasets(plain, (20, 5, 5), vocab_size=10, seed=1)
        found = build_gpt_datasets(config, (20, 5, 5), vocab_size=10, seed=1, eod=EOD)
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            for number in range(len(other)):
                sample = one[number]
                assert torch.equal(sample["tokens"], other[number]["tokens"])
                assert sum(sample["lengths"]) == 16
                assert len(sample["lengths"]) > 1
    plain = GPTDatasetConfig(seq_length=16, data_path=(prefixes[0],), split="1")
    assert isinstance(build_gpt_datasets(plain, (5, 0, 0), 10, seed=1, eod=EOD).train, GPTDataset)


def test_data_without_ends_of_documents_is_rejected(prefixes: list[str]) -> None:
    config = GPTDatasetConfig(
        seq_length=16, data_path=("1", prefixes[0], "1", prefixes[1]), eod_mask_loss=True
    )
    with pytest.raises(ConfigError, match=r"without that end with \[0, 1, 2\].*--append-eod"):
        build_gpt_datasets(config, (5, 0, 0), vocab_size=10, seed=1, eod=EOD)


def test_made_up_text_has_no_documents() -> None:
    with pytest.raises(ConfigError, match="--mock-data: expected --data-path, whose documents end"):
        GPTDatasetConfig(seq_length=16, mock_data=True, reset_position_ids=True)
