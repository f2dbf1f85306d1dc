"""Rows of whole conversations with their loss masks; each document is used once per epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.answer_dataset import AnswerDataset, AnswerFiles, mask_prefix
from megatron.core.datasets.builder import build_answer_datasets
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.options import ConfigError
from tests.unit_tests.core.datasets.conftest import write_tokens

FILLER, VOCAB = 999, 1000


def write_chats(prefix: Path, lengths: list[int], *, first_token: int = 0) -> Path:
    """Writes documents of distinct tokens, of which every third is in the loss."""
    with (
        IndexedDatasetBuilder(prefix, np.int32) as tokens,
        IndexedDatasetBuilder(mask_prefix(prefix), np.uint8) as mask,
    ):
        for length in lengths:
            numbers = np.arange(first_token, first_token + length)
            tokens.add_document(numbers)
            mask.add_document((numbers % 3 == 0).astype(np.uint8))
            first_token += length
    return prefix


def dataset(prefix: Path, seq_length: int, **others: Any) -> AnswerDataset:
    files = AnswerFiles(prefix)
    arguments = {"documents": range(len(files)), "num_samples": 1000, "seed": 1, **others}
    return AnswerDataset(files, seq_length=seq_length, filler=FILLER, vocab_size=VOCAB, **arguments)


def documents_of(sample: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Returns the documents of a row, without its padding."""
    names = ("tokens", "labels", "loss_mask", "positions")
    parts = [sample[name].split(sample["lengths"]) for name in names]
    found = [
        {name: part.tolist() for name, part in zip(names, each, strict=True)}
        for each in zip(*parts, strict=True)
    ]
    return [one for one in found if one["tokens"][0] != FILLER]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 17), min_size=1, max_size=30), seed=st.integers(0, 3))
def test_each_epoch_has_every_conversation_once_whole_and_with_its_loss_mask(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    prefix = write_chats(tmp_path_factory.mktemp("data") / "chats", [*lengths, 5])
    rows = dataset(prefix, 16, seed=seed)
    for epoch in range(2):
        begin = epoch * rows.samples_per_epoch
        samples = [rows[begin + number] for number in range(rows.samples_per_epoch)]
        for sample in samples:
            assert sum(sample["lengths"]) == 16
            assert sample["padding"] == (int((sample["tokens"] == FILLER).sum()),)
        found = sorted(
            (one for sample in samples for one in documents_of(sample)), key=lambda d: d["tokens"]
        )
        stops = np.cumsum([*lengths, 5]).tolist()
        wanted = [
            list(range(stop - length, stop))
            for stop, length in zip(stops, [*lengths, 5], strict=True)
            if length > 1
        ]
        assert [one["tokens"] for one in found] == [tokens[:-1] for tokens in wanted]
        for one, tokens in zip(found, wanted, strict=True):
            assert one["labels"] == tokens[1:]
            assert one["loss_mask"] == [float(token % 3 == 0) for token in tokens[1:]]
            assert one["positions"] == list(range(len(tokens) - 1))
        filled = sum(
            int(sample["loss_mask"][sample["tokens"] == FILLER].sum()) for sample in samples
        )
        assert filled == 0


def test_rows_do_not_depend_on_their_number_and_epochs_differ_in_order(
    tmp_path: Path,
) -> None:
    prefix = write_chats(tmp_path / "chats", [3 + number % 11 for number in range(60)])
    few, many = dataset(prefix, 16, num_samples=5), dataset(prefix, 16)
    for number in range(5):
        assert torch.equal(few[number]["tokens"], many[number]["tokens"])
    count = many.samples_per_epoch
    orders = [
        [tuple(many[epoch * count + n]["tokens"].tolist()) for n in range(count)]
        for epoch in range(2)
    ]
    assert Counter(orders[0]) == Counter(orders[1])
    assert orders[0] != orders[1]
    other = dataset(prefix, 16, seed=2)
    assert any(not torch.equal(other[n]["tokens"], many[n]["tokens"]) for n in range(3))


def test_conversations_longer_than_a_row_are_rejected_with_the_length_or_cut(
    tmp_path: Path,
) -> None:
    prefix = write_chats(tmp_path / "chats", [5, 18, 30])
    told = (
        r"--seq-length: expected at least 29, the longest conversation of .*chats, or "
        r"--sft-truncate, got 16\. 2 of 3 conversations are longer, the first of them \[1, 2\]"
    )
    with pytest.raises(ConfigError, match=told):
        dataset(prefix, 16)
    rows = dataset(prefix, 16, is_cut=True)
    found = sorted(
        one["tokens"] for n in range(rows.samples_per_epoch) for one in documents_of(rows[n])
    )
    assert found == [list(range(4)), list(range(5, 21)), list(range(23, 39))]


def test_truncated_conversations_with_an_empty_loss_mask_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In three conversations, all tokens in the loss are beyond the first row."""
    write_tokens(tmp_path / "chats", [[number] * 21 for number in range(5)])
    masks = [[0] * 20 + [1], [0] * 9 + [1] * 12, [1] + [0] * 20, [0] * 8 + [1] * 13, [1] * 21]
    write_masks(tmp_path / "chats", masks)
    rows = dataset(tmp_path / "chats", 8, is_cut=True)
    found = [one for n in range(rows.samples_per_epoch) for one in documents_of(rows[n])]
    assert sorted((one["tokens"][0], sum(one["loss_mask"])) for one in found) == [(3, 1), (4, 8)]
    (line,) = caplog.messages
    assert "3 of 5 conversations that --sft-truncate cuts" in line
    assert "[0, 1, 2]" in line
    with pytest.raises(ConfigError, match="--split: expected at least one document"):
        dataset(tmp_path / "chats", 8, is_cut=True, documents=range(2))
    config = GPTDatasetConfig(
        8, data_path=(str(tmp_path / "chats"),), split="1", sft=True, sft_truncate=True
    )
    assert build_answer_datasets(config, (1, 0, 0), VOCAB, seed=1, filler=FILLER).train is not None


def test_all_tokens_of_text_are_in_the_loss_and_long_text_is_divided(tmp_path: Path) -> None:
    write_tokens(tmp_path / "text", [list(range(40)), [50], list(range(60, 65))])
    rows = dataset(tmp_path / "text", 16)
    found = [one for n in range(rows.samples_per_epoch) for one in documents_of(rows[n])]
    assert sorted((one["tokens"][0], len(one["tokens"])) for one in found) == [
        (0, 16),
        (16, 16),
        (32, 7),
        (60, 4),
    ]
    for one in found:
        assert one["labels"] == [token + 1 for token in one["tokens"]]
        assert set(one["loss_mask"]) == {1.0}


def test_each_part_of_a_blend_of_conversations_and_text_is_split(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", [8] * 50)
    write_tokens(tmp_path / "text", [[500 + number] * 8 for number in range(50)])
    config = GPTDatasetConfig(
        seq_length=16,
        data_path=("1", str(chats), "3", str(tmp_path / "text")),
        split="80,20",
        sft=True,
    )
    splits = build_answer_datasets(config, (40, 8, 0), VOCAB, seed=1, filler=FILLER)
    assert splits.train is not None
    assert splits.valid is not None
    assert splits.test is None
    samples = [splits.train[number] for number in range(40)]
    of_text = sum(bool((sample["tokens"] >= 500)[0]) for sample in samples)
    assert of_text == 30
    train = set(torch.cat([sample["tokens"] for sample in samples]).tolist())
    valid = {int(t) for number in range(8) for t in splits.valid[number]["tokens"]}
    assert train & valid <= {FILLER}
    batch = splits.train.collate(samples[:2])  # type: ignore[attr-defined]
    assert sum(batch["lengths"]) == 32


@pytest.mark.parametrize("lost", [(".bin", ".idx"), (".bin",), (".idx",)], ids="".join)
@pytest.mark.parametrize("prefix", ["out_chat_document", "merged"])
def test_conversations_without_their_mask_are_rejected_in_every_part_and_split(
    tmp_path: Path, prefix: str, lost: tuple[str, ...]
) -> None:
    write_chats(tmp_path / "whole_chat_document", [8] * 50)
    write_chats(tmp_path / prefix, [8] * 50)
    for suffix in lost:
        Path(f"{mask_prefix(tmp_path / prefix)}{suffix}").unlink()
    whole, part = str(tmp_path / "whole_chat_document"), str(tmp_path / prefix)
    # Without either file, any other name means text, which can be blended.
    blends = (
        [(part,)] if len(lost) == 2 and prefix == "merged" else [(part,), ("9", whole, "1", part)]
    )
    for blend in blends:
        config = GPTDatasetConfig(seq_length=16, data_path=blend, split="80,10,10", sft=True)
        for num_samples in ((4, 0, 0), (0, 4, 0), (0, 0, 4)):
            with pytest.raises((ConfigError, IndexedDatasetError), match=rf"{prefix}.*--chat"):
                build_answer_datasets(config, num_samples, VOCAB, seed=1, filler=FILLER)


def write_masks(prefix: Path, masks: list[list[int]], dtype: Any = np.uint8) -> None:
    with IndexedDatasetBuilder(mask_prefix(prefix), dtype) as builder:
        for mask in masks:
            builder.add_document(mask)


@pytest.mark.parametrize(
    ("masks", "dtype", "told"),
    [
        ([[1, 1]], np.uint8, "expected 2 sequences of uint8, as .* has sequences, got 1 of uint8"),
        ([[1, 1], [1, 1, 1]], np.int32, "got 2 of int32"),
        ([[1, 1], [1, 1]], np.uint8, "got another length in sequence 1"),
    ],
)
def test_masks_that_do_not_fit_are_rejected(
    tmp_path: Path, masks: list[list[int]], dtype: Any, told: str
) -> None:
    write_tokens(tmp_path / "chats", [[1, 2], [3, 4, 5]])
    write_masks(tmp_path / "chats", masks, dtype)
    with pytest.raises(IndexedDatasetError, match=told):
        AnswerFiles(tmp_path / "chats")


def test_tokens_beyond_the_vocabulary_and_splits_without_documents_are_rejected(
    tmp_path: Path,
) -> None:
    prefix = write_chats(tmp_path / "chats", [5], first_token=VOCAB - 2)
    with pytest.raises(IndexedDatasetError, match=r"token ids in range\(1000\).*, got 1002"):
        dataset(prefix, 16)[0]
    with pytest.raises(ConfigError, match="--split: expected at least one document"):
        dataset(prefix, 16, documents=range(0))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mock_data": True}, "--sft: expected --data-path"),
        ({"data_path": ("x",), "eod_mask_loss": True}, "--sft: expected none of"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "x", [[1, 2]])
    with pytest.raises(ConfigError, match=told):
        GPTDatasetConfig(seq_length=16, sft=True, **options)
