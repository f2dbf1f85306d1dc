"""Rows of samples with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.datasets.builder import build_image_text_datasets, image_format_of
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.image_text_dataset import ImageTextDataset
from megatron.core.datasets.image_text_files import ImageTextFiles
from megatron.core.datasets.sampler import GlobalBatchSampler, build_data_loader
from megatron.core.models.multimodal.patch_grid import decoder_positions
from megatron.core.options import ConfigError
from tests.unit_tests.core.datasets.helpers.image_samples import (
    FORMAT,
    IMAGE,
    VOCAB,
    some_samples,
    write,
)

ROW, FILLER = 40, 7


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = str(tmp_path_factory.mktemp("data") / "shapes")
    write(prefix, some_samples(30))
    return prefix


def dataset_of(prefix: str, num_samples: int = 50, **changed: Any) -> ImageTextDataset:
    arguments = {
        "documents": range(30),
        "seq_length": ROW,
        "seed": 3,
        "filler": FILLER,
        "vocab_size": VOCAB,
    }
    return ImageTextDataset(
        ImageTextFiles(prefix), num_samples=num_samples, **{**arguments, **changed}
    )


def documents_of(row: dict[str, Any]) -> list[list[int]]:
    """The tokens of a row's documents, without what fills it up."""
    parts = row["tokens"].split(row["lengths"])
    return [part.tolist() for part in parts if not bool((part == FILLER).all())]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        for name, value in one.items()
    )


def test_an_epoch_has_every_sample_once_and_whole(prefix: str) -> None:
    dataset = dataset_of(prefix)
    expected = sorted(sample.tokens.tolist() for sample in some_samples(30))
    for epoch in range(2):
        rows = [
            dataset[epoch * dataset.samples_per_epoch + n] for n in range(dataset.samples_per_epoch)
        ]
        assert sorted(text for row in rows for text in documents_of(row)) == expected
    first, second = (
        [dataset[epoch * dataset.samples_per_epoch + n]["lengths"] for n in range(4)]
        for epoch in range(2)
    )
    assert first != second, "each epoch has an order of its own"


def test_labels_are_the_next_tokens_of_a_document_and_answers_alone_are_learned(
    prefix: str,
) -> None:
    dataset = dataset_of(prefix)
    by_tokens = {tuple(sample.tokens.tolist()): sample for sample in some_samples(30)}
    row = max((dataset[n] for n in range(10)), key=lambda row: len(row["lengths"]))
    assert len(row["lengths"]) > 2
    begin = num_images = 0
    for length in row["lengths"]:
        part = slice(begin, begin + length)
        tokens = row["tokens"][part]
        begin += length
        sample = by_tokens.get(tuple(tokens.tolist()))
        if sample is None:
            assert bool((tokens == FILLER).all())
            assert row["loss_mask"][part].sum() == 0
            continue

        assert torch.equal(row["labels"][part][:-1], tokens[1:])
        assert row["loss_mask"][part].tolist() == [*sample.is_answer[1:].astype(float), 0.0]
        grids = [image.grid for image in sample.images]
        expected = decoder_positions(sample.tokens, IMAGE, grids, FORMAT.merge_size)
        assert row["positions"][:, part].tolist() == expected.tolist()
        assert list(row["grids"][num_images : num_images + len(grids)]) == grids
        num_images += len(grids)
    assert begin == ROW
    assert len(row["patches"]) == sum(grid.num_patches for grid in row["grids"])


def test_a_row_depends_on_the_seed_and_its_number_alone(prefix: str) -> None:
    long, short = dataset_of(prefix), dataset_of(prefix, num_samples=5)
    assert all(same(long[number], short[number]) for number in range(5))
    other = dataset_of(prefix, seed=4)
    assert not all(same(long[number], other[number]) for number in range(5))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_keep_numbers_of_the_host_apart(prefix: str, num_workers: int) -> None:
    dataset = dataset_of(prefix)
    sampler = GlobalBatchSampler(50, 0, 2, 4, 1, 2)
    loader = build_data_loader(dataset, sampler, num_workers, pin_memory=False)
    batch = next(iter(loader))
    rows = [dataset[2], dataset[3]]
    assert batch["tokens"].shape == (2, ROW)
    assert batch["positions"].shape == (3, 2, ROW)
    assert torch.equal(batch["positions"][:, 1], rows[1]["positions"])
    assert batch["lengths"] == rows[0]["lengths"] + rows[1]["lengths"]
    lengths = [row["lengths"][-1] if row["padding"][0] else 0 for row in rows]
    assert batch["padding"] == tuple(lengths) != (0, 0)
    assert batch["grids"] == rows[0]["grids"] + rows[1]["grids"]
    assert torch.equal(batch["patches"], torch.cat([row["patches"] for row in rows]))


def test_samples_longer_than_a_row_and_tokens_of_another_vocabulary_are_rejected(
    prefix: str,
) -> None:
    longest = max(len(sample.tokens) for sample in some_samples(30))
    with pytest.raises(ConfigError, match=f"--seq-length: expected at least {longest}"):
        dataset_of(prefix, seq_length=longest - 1)
    dataset = dataset_of(prefix, vocab_size=IMAGE)
    with pytest.raises(IndexedDatasetError, match=r"range\(99\).*got 99.*another tokenizer"):
        list(map(dataset.__getitem__, range(dataset.samples_per_epoch)))
    with pytest.raises(ConfigError, match="at least one sample"):
        dataset_of(prefix, documents=range(0))


def test_data_with_other_images_is_rejected(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "text.bin").touch()
    (tmp_path / "text.idx").touch()
    text = str(tmp_path / "text")
    assert image_format_of(GPTDatasetConfig(seq_length=8, data_path=(prefix,))) == FORMAT
    assert image_format_of(GPTDatasetConfig(seq_length=8, data_path=(text,))) is None
    with pytest.raises(ConfigError, match=r"--data-path: expected images as in .*shapes"):
        image_format_of(GPTDatasetConfig(seq_length=8, data_path=("1", prefix, "1", text)))
    with pytest.raises(ConfigError, match="--mock-data: expected --data-path with images"):
        build_image_text_datasets(
            GPTDatasetConfig(seq_length=8, mock_data=True), (1, 0, 0), VOCAB, 0, FILLER
        )
