"""Samples of text with images in files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.image_text_files import ImageTextFiles, ImageTextSample, ImageTextWriter
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tests.unit_tests.core.datasets.helpers.image_samples import (
    FORMAT,
    IMAGE,
    are_equal,
    some_samples,
    write,
)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "shapes")


def test_samples_are_read_as_they_were_written(prefix: str) -> None:
    samples = some_samples(9)
    write(prefix, samples)
    files = ImageTextFiles(prefix)
    assert files.format == FORMAT
    assert len(files) == 9
    assert files.lengths.tolist() == [len(sample.tokens) for sample in samples]
    assert all(are_equal(files[number], sample) for number, sample in enumerate(samples))
    again = pickle.loads(pickle.dumps(files))
    assert are_equal(again[3], samples[3])
    with pytest.raises(IndexError, match=r"range\(9\), got 9"):
        files[9]


def test_tokens_and_pixels_are_pairs_that_any_reader_of_token_files_reads(prefix: str) -> None:
    (sample,) = some_samples(3)[2:]
    write(prefix, [sample])
    text, images = IndexedDataset(f"{prefix}_text"), IndexedDataset(f"{prefix}_images")
    assert text.dtype == np.int32
    assert text[0].tolist() == sample.tokens.tolist()
    first, stop = np.flatnonzero(sample.is_answer)[[0, -1]]
    assert text[1].tolist() == [first, stop + 1]
    assert images.dtype == np.uint8
    assert images[0][:8].tolist() == [2, 0, 0, 0, 4, 0, 0, 0]
    assert images[0][8:].tolist() == sample.images[0].pixels.flatten().tolist()


def test_a_failed_writer_leaves_only_the_old_files(prefix: str) -> None:
    write(prefix, some_samples(2))
    before = {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()}

    def fail() -> None:
        with ImageTextWriter(prefix, FORMAT) as writer:
            writer.add(some_samples(1)[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()} == before


def test_samples_whose_images_do_not_match_their_tokens_are_rejected(prefix: str) -> None:
    sample = some_samples(2)[1]
    cases = {
        "Expected 0 image tokens for 0 image": sample._replace(images=()),
        "multiples of 2": sample._replace(
            images=(sample.images[0]._replace(grid=sample.images[0].grid._replace(rows=1)),)
        ),
        r"pixels uint8 \(4, 12\)": sample._replace(
            images=(sample.images[0]._replace(pixels=sample.images[0].pixels[:1]),)
        ),
    }
    for told, wrong in cases.items():
        with pytest.raises(ValueError, match=told), ImageTextWriter(prefix, FORMAT) as writer:
            writer.add(wrong)
    assert not ImageTextFiles.exists(prefix)


def test_missing_files_and_files_of_another_kind_are_rejected(prefix: str) -> None:
    with pytest.raises(IndexedDatasetError, match=r"shapes\.json: expected a description"):
        ImageTextFiles(prefix)
    write(prefix, some_samples(3))
    description = Path(f"{prefix}.json")
    content = json.loads(description.read_text())
    for changed in ({"format": 2}, {"mean": None}, {"patch_size": "many"}):
        description.write_text(json.dumps({**content, **changed}))
        with pytest.raises(IndexedDatasetError, match="description of images in format 1"):
            ImageTextFiles(prefix)
    description.write_text("[")
    with pytest.raises(IndexedDatasetError, match="description of images, got"):
        ImageTextFiles(prefix)

    description.write_text(json.dumps(content))
    with IndexedDatasetBuilder(f"{prefix}_images", np.uint8) as builder:
        builder.end_document()
    with pytest.raises(IndexedDatasetError, match="as many documents of images as of text"):
        ImageTextFiles(prefix)


def _with(prefix: str, tokens: list[int], edges: list[int], image: list[int]) -> ImageTextSample:
    """The sample that such sequences make."""
    write(prefix, some_samples(1))
    with IndexedDatasetBuilder(f"{prefix}_text", np.int32) as builder:
        builder.add_document(tokens + edges, [len(tokens), len(edges)])
    with IndexedDatasetBuilder(f"{prefix}_images", np.uint8) as builder:
        if image:
            builder.add_item(image)
        builder.end_document()
    return ImageTextFiles(prefix)[0]


@pytest.mark.parametrize(
    ("tokens", "edges", "image", "told"),
    [
        ([1, 2, 3], [1], [], "ordered spans"),
        ([1, 2, 3], [2, 1], [], "ordered spans"),
        ([1, 2, 3], [0, 4], [], "ordered spans"),
        ([1, 2, 3], [-1, 2], [], "ordered spans"),
        ([1, IMAGE], [], [2, 0, 0], "rows and columns, got 3 bytes"),
        ([1, IMAGE], [], [2, 0, 0, 0, 2, 0, 0, 0, 5], "2 x 2 patches of 12 bytes, got 1"),
        ([1, IMAGE], [], [255] * 8, "patches of 12 bytes"),
        ([1, 2], [], [2, 0, 0, 0, 2, 0, 0, 0, *[7] * 48], "Expected 1 image tokens"),
        ([1], [], [1, 0, 0, 0, 4, 0, 0, 0, *[7] * 48], "multiples of 2"),
    ],
)
def test_invalid_contents_of_files_are_rejected(
    prefix: str, tokens: list[int], edges: list[int], image: list[int], told: str
) -> None:
    with pytest.raises(IndexedDatasetError, match=told):
        _with(prefix, tokens, edges, image)


def test_loss_spans_may_be_anywhere_or_missing(prefix: str) -> None:
    found = _with(prefix, [5, 6, 7, 8], [0, 1, 2, 4], [])
    assert found.is_answer.tolist() == [True, False, True, True]
    assert not _with(prefix, [5, 6], [], []).is_answer.any()
