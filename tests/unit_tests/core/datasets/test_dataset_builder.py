"""From the configuration to the datasets of a run."""

from __future__ import annotations

import itertools
import logging
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.builder import build_gpt_datasets, split_documents, without_prefix
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.gpt_dataset import TooFewTokensError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.core.datasets.sample_dataset import SampleDataset

WriteTokens = Callable[..., IndexedDataset]


def _tokens(dataset: SampleDataset | None) -> set[int]:
    assert dataset is not None
    return set(torch.cat([dataset[index]["tokens"] for index in range(len(dataset))]).tolist())


@pytest.fixture
def prefixes(tmp_path: Path, write_tokens: WriteTokens) -> list[str]:
    """Two corpora of 100 documents of 10 tokens; token = 1000 * corpus + document."""
    return [
        write_tokens(
            tmp_path / f"part{part}", [[1000 * part + number] * 10 for number in range(100)]
        ).prefix
        for part in range(2)
    ]


def test_split_boundaries_are_rounded_cumulative_shares() -> None:
    assert split_documents((0.969, 0.03, 0.001), 1000) == [
        range(969),
        range(969, 999),
        range(999, 1000),
    ]
    assert split_documents((0.5, 0.5, 0.0), 5) == [range(2), range(2, 5), range(5, 5)]
    assert split_documents((0.1, 0.2, 0.7), 10) == [range(1), range(1, 3), range(3, 10)]


def test_a_split_without_samples_or_share_is_none(prefixes: list[str]) -> None:
    config = GPTDatasetConfig(seq_length=9, data_path=(prefixes[0],), split="9,1,0")
    train, valid, test = build_gpt_datasets(config, (5, 0, 5), vocab_size=2000, seed=1)
    assert train is not None
    assert valid is None
    assert test is None


def test_a_blend_draws_by_weight(prefixes: list[str]) -> None:
    config = GPTDatasetConfig(
        seq_length=9, data_path=("3", prefixes[0], "1", prefixes[1]), split="1,0,0"
    )
    train = build_gpt_datasets(config, (100, 0, 0), vocab_size=2000, seed=1).train
    assert isinstance(train, BlendedDataset)
    from_first = sum(int(train[index]["tokens"][0]) < 1000 for index in range(100))
    assert from_first == 75


def test_parts_of_a_blend_with_equal_lengths_come_in_orders_of_their_own(
    prefixes: list[str],
) -> None:
    """The first part has the order that it has alone."""

    def documents_of(*data_path: str) -> list[int]:
        config = GPTDatasetConfig(seq_length=9, data_path=data_path, split="1,1,0")
        built = build_gpt_datasets(config, (100, 60, 0), vocab_size=2000, seed=1)
        found = []
        for dataset in (built.train, built.valid):
            assert dataset is not None
            found += [int(dataset[index]["tokens"][0]) for index in range(len(dataset))]
        return found

    blended = documents_of("1", prefixes[0], "1", prefixes[1])
    assert blended == documents_of("1", prefixes[0], "1", prefixes[1])
    first, second = ([n for n in blended if n // 1000 == part] for part in range(2))
    assert len(first) == len(second) == 80
    # By chance one or two of 80 meet.
    assert sum(a == b - 1000 for a, b in zip(first, second, strict=True)) < 10
    alone = documents_of(prefixes[0])
    assert first == [*alone[:50], *alone[100:130]]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_a_dataset_given_twice_is_drawn_as_one_and_that_is_logged(
    prefixes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def train(*data_path: str) -> SampleDataset:
        config = GPTDatasetConfig(seq_length=9, data_path=data_path, split="1,0,0")
        built = build_gpt_datasets(config, (100, 0, 0), vocab_size=2000, seed=1).train
        assert built is not None
        return built

    alone, once = train(prefixes[0]), train("1", prefixes[0], "2", prefixes[1])
    assert _warnings(caplog) == []
    twice = train("0.5", prefixes[0], "0.5", prefixes[0])
    assert all(torch.equal(twice[n]["tokens"], alone[n]["tokens"]) for n in range(100))
    assert len(_tokens(twice)) >= 99, "an epoch has each document once, but for its remainder"
    apart = train("0.5", prefixes[0], "2", prefixes[1], "0.5", prefixes[0])
    assert all(torch.equal(apart[n]["tokens"], once[n]["tokens"]) for n in range(100))
    told = _warnings(caplog)
    assert [f"1 {prefixes[0]}" in message for message in told] == [True, True]
    assert f"2 {prefixes[1]}" in told[1]


def test_data_without_the_tokenizers_prefix_are_detected(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    """The documents of text may be parts of longer ones, so not each of them starts alike."""
    texts = {
        "with": [[7, 5, 1], [2, 2], [7, 5]],
        "without": [[1, 7, 5], [7], []],
        "other": [[7, 4, 5]] * 20,
    }
    names = [write_tokens(tmp_path / name, given).prefix for name, given in texts.items()]
    path = tuple(word for name in names for word in ("1", name))
    config = GPTDatasetConfig(seq_length=9, data_path=path, split="1")
    assert without_prefix(config, (7, 5)) == names[1:]
    assert without_prefix(config, (7,)) == []


def test_a_part_of_a_blend_that_is_never_drawn_needs_no_tokens(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    big = write_tokens(tmp_path / "big", [[1] * 100]).prefix
    tiny = write_tokens(tmp_path / "tiny", [[2]]).prefix
    config = GPTDatasetConfig(seq_length=9, data_path=("999", big, "1", tiny), split="1,0,0")
    assert _tokens(build_gpt_datasets(config, (20, 0, 0), vocab_size=10, seed=1).train) == {1}


def test_a_split_without_tokens_for_a_sample_is_rejected(prefixes: list[str]) -> None:
    config = GPTDatasetConfig(seq_length=64, data_path=(prefixes[0],), split="98,1,1")
    assert build_gpt_datasets(config, (5, 0, 0), vocab_size=2000, seed=1).train is not None
    message = (
        r"^--split: .*part0: expected at least 65 tokens .* got 10. "
        r".* valid split, 1 of 100 documents at 98,1,1"
    )
    with pytest.raises(TooFewTokensError, match=message):
        build_gpt_datasets(config, (5, 5, 0), vocab_size=2000, seed=1)


def test_mock_data_are_built_without_files() -> None:
    config = GPTDatasetConfig(seq_length=9, mock_data=True, split="9,1")
    train, valid, test = build_gpt_datasets(config, (5, 4, 3), vocab_size=1000, seed=1)
    assert isinstance(train, MockGPTDataset)
    assert valid is not None
    assert (len(train), len(valid), test) == (5, 4, None)
    assert build_gpt_datasets(config, (5, 0, 0), vocab_size=1000, seed=1).valid is None
    assert not torch.equal(train[0]["tokens"], valid[0]["tokens"])


def test_many_data_sets_raise_the_limit_of_open_files(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    paths = [
        write_tokens(tmp_path / f"part{number}", [[number] * 10] * 3).prefix for number in range(20)
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    blend = tuple(itertools.chain(*(("1", path) for path in paths)))
    config = GPTDatasetConfig(seq_length=9, data_path=blend, split="1,0,0")
    try:
        # Fewer than the data sets need. A descriptor beyond a lowered limit stays usable.
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        train, _, _ = build_gpt_datasets(config, (40, 0, 0), vocab_size=100, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert _tokens(train) == set(range(20))
