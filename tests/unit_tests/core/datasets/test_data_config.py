"""The data configuration: values and refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.options import ConfigError

WriteTokens = Callable[..., IndexedDataset]


@pytest.fixture
def prefix(tmp_path: Path, write_tokens: WriteTokens) -> str:
    return write_tokens(tmp_path / "web", [[1, 2, 3]]).prefix


def test_a_blend_is_pairs_of_weight_and_prefix(
    prefix: str, tmp_path: Path, write_tokens: WriteTokens
) -> None:
    other = write_tokens(tmp_path / "books", [[1, 2, 3]]).prefix
    config = GPTDatasetConfig(seq_length=8, data_path=("0.3", prefix, "7", other))
    assert config.blend == [(0.3, prefix), (7.0, other)]


def test_a_dataset_that_is_given_several_times_counts_as_one(
    prefix: str, tmp_path: Path, write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = write_tokens(tmp_path / "books", [[1, 2, 3]]).prefix
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for same in (prefix, "web", "./web", "link/web", f"{tmp_path}//web"):
        config = GPTDatasetConfig(seq_length=8, data_path=("0.5", prefix, "1", other, "0.25", same))
        assert config.blend == [(0.75, prefix), (1.0, other)]


def test_split_shares_add_up_to_one() -> None:
    assert GPTDatasetConfig(seq_length=8, mock_data=True).split_fractions == (0.969, 0.03, 0.001)
    assert GPTDatasetConfig(seq_length=8, mock_data=True, split="2, 1,1").split_fractions == (
        0.5,
        0.25,
        0.25,
    )
    assert GPTDatasetConfig(seq_length=8, mock_data=True, split="1,0,0").split_fractions == (
        1,
        0,
        0,
    )


@pytest.mark.parametrize(
    "split", [",", "1,", "1,2,3,4", "a,b,c", "1,-1,1", "0,0,0", "nan,1,1", "inf,1,1", "1e308,1e308"]
)
def test_a_bad_split_is_rejected(split: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^--split: expected up to three non-negative .*, got '{split}'"
    ):
        GPTDatasetConfig(seq_length=8, mock_data=True, split=split)


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        ("1 P 2", "pairs of WEIGHT and PREFIX, got '1 .* 2'"),
        ("P P", "a WEIGHT > 0 before each PREFIX"),
        ("0 P 1 P", "a WEIGHT > 0 before each PREFIX, got '0'"),
        ("-1 P", "a WEIGHT > 0 before each PREFIX, got '-1'"),
        ("nan P", "a WEIGHT > 0 before each PREFIX, got 'nan'"),
    ],
)
def test_a_bad_blend_is_rejected(prefix: str, blend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--data-path: expected {message}"):
        GPTDatasetConfig(seq_length=8, data_path=tuple(blend.replace("P", prefix).split()))


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file_is_named_with_the_flag(prefix: str, missing: str) -> None:
    Path(prefix + missing).unlink()
    with pytest.raises(
        ConfigError, match=f"^--data-path: expected a PREFIX .*, got '{prefix}{missing}'"
    ):
        GPTDatasetConfig(seq_length=8, data_path=(prefix,))


def test_exactly_one_source_is_wanted(prefix: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--data-path: expected a PREFIX, or --mock-data, got None"
    ):
        GPTDatasetConfig(seq_length=8)
    with pytest.raises(ConfigError, match=r"^--data-path: expected no path with --mock-data"):
        GPTDatasetConfig(seq_length=8, data_path=(prefix,), mock_data=True)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "fifo", "/dev"])
def test_an_invalid_prefix_is_rejected_with_a_short_message(tmp_path: Path, name: str) -> None:
    for suffix in (".bin", ".idx"):
        os.mkfifo(tmp_path / f"fifo{suffix}")
    message = r"^--data-path: expected a PREFIX with files PREFIX.bin and PREFIX.idx"
    with pytest.raises(ConfigError, match=message) as error:
        GPTDatasetConfig(seq_length=8, data_path=(str(tmp_path / name),))
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()
