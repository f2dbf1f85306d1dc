"""Token files as users of `indexed_dataset` of megatron-core write and read them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
)

SEQUENCES = [[1, 2, 3], [], [4], [5, 6]]


def index_bytes(lengths: Sequence[int], boundaries: Sequence[int]) -> bytes:
    """The index of int32 tokens as megatron-core writes it."""
    pointers = np.cumsum([0, *lengths])[:-1] * 4
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, len(lengths), len(boundaries))
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.array(boundaries, "<i8").tobytes()
    )


def written(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def as_there(prefix: Path, sequences: Sequence[Sequence[int]], ends: Sequence[int]) -> Path:
    """Writes items, and ends documents behind these numbers of them, with the calls of there."""
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=np.int32)
    for number, sequence in enumerate(sequences, start=1):
        builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        for _ in range(ends.count(number)):
            builder.end_document()
    builder.finalize(str(prefix) + ".idx")
    return prefix


def test_items_become_the_documents_that_are_ended(tmp_path: Path) -> None:
    tokens = np.array([1, 2, 3, 4, 5, 6], "<i4").tobytes()
    prefix = as_there(tmp_path / "tokens", SEQUENCES, [2, 2, 4])
    assert written(prefix) == (tokens, index_bytes([3, 0, 1, 2], [0, 2, 2, 4]))

    # The same, document by document, and by default in the same dtype.
    with IndexedDatasetBuilder(tmp_path / "other") as builder:
        builder.add_document([1, 2, 3], [3, 0])
        builder.end_document()
        builder.add_document([4, 5, 6], [1, 2])
    assert written(tmp_path / "other") == written(prefix)
    assert (builder.num_sequences, builder.num_documents, builder.num_tokens) == (4, 3, 6)


@pytest.mark.parametrize("ends", [[], [2], [1, 3]])
def test_items_behind_the_last_document_are_sequences_like_all_others(
    tmp_path: Path, ends: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """GPT data is made of sequences, whatever documents they belong to, there and here. (There,
    `add_index` and the fast cache load read such an index; otherwise an assertion fails.)
    """
    caplog.set_level("INFO", logger="megatron")
    prefix = as_there(tmp_path / "open", SEQUENCES, ends)
    assert written(prefix)[1] == index_bytes([3, 0, 1, 2], [0, *ends])
    dataset = IndexedDataset(prefix)
    assert [each.tolist() for each in dataset] == SEQUENCES
    assert dataset.document_indices.tolist() == [0, *ends]
    assert (
        f"the last {4 - max(ends, default=0)} of 4 sequences belong to no document" in caplog.text
    )
    assert {record.levelname for record in caplog.records} == {"INFO"}, "each rank opens it"

    caplog.clear()
    ended = IndexedDataset(as_there(tmp_path / "ended", SEQUENCES, [*ends, 4]))
    samples = [
        [GPTDataset(each, range(4), 4, 2, seed=1)[number]["tokens"].tolist() for number in range(4)]
        for each in (dataset, ended)
    ]
    assert samples[0] == samples[1]
    assert "no document" not in caplog.text


def test_documents_beyond_the_last_sequence_are_rejected(tmp_path: Path) -> None:
    prefix = as_there(tmp_path / "tokens", SEQUENCES, [4])
    prefix.with_suffix(".idx").write_bytes(index_bytes([3, 0, 1, 2], [0, 5]))
    with pytest.raises(IndexedDatasetError, match="end with sequence 4 or before it, got 5"):
        IndexedDataset(prefix)


def test_sequences_are_indexed_and_sliced(tmp_path: Path) -> None:
    dataset = IndexedDataset(as_there(tmp_path / "tokens", SEQUENCES, [4]))
    for index in range(-4, 4):
        assert dataset[index].tolist() == SEQUENCES[index]
    assert dataset[np.int64(2)].tolist() == [4]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(2, 100), slice(3, 1)):
        assert [each.tolist() for each in dataset[part]] == SEQUENCES[part]
    assert dataset[0].dtype == np.int32

    with pytest.raises(ValueError, match="Expected a slice with step 1, got slice"):
        dataset[::2]
    with pytest.raises(TypeError, match="Expected an integer or a slice, got str"):
        dataset["1"]
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"Expected one of 4 sequences, got {index}"):
            dataset[index]


def test_indices_are_added_with_their_documents(tmp_path: Path) -> None:
    one = as_there(tmp_path / "one", [[1, 2], [3]], [1, 2])
    other = as_there(tmp_path / "other", [[4], [], [5, 6]], [2])  # the last item's is not ended
    builder = IndexedDatasetBuilder(f"{tmp_path}/merged.bin", dtype=np.int32)
    builder.add_item([9])  # joins the first document that is added
    for prefix in (one, other, one):
        builder.add_index(str(prefix))
    builder.finalize(f"{tmp_path}/merged.idx")
    lengths = [1, 2, 1, 1, 0, 2, 2, 1]
    tokens = np.array([9, 1, 2, 3, 4, 5, 6, 1, 2, 3], "<i4").tobytes()
    # [5, 6], in no its own document files, joins the one that follows.
    expected = index_bytes(lengths, [0, 2, 3, 5, 7, 8])
    assert written(tmp_path / "merged") == (tokens, expected)
    assert (builder.num_sequences, builder.num_documents, builder.num_tokens) == (8, 5, 10)


def test_an_index_that_cannot_be_added_changes_nothing(tmp_path: Path) -> None:
    other = as_there(tmp_path / "other", [[4]], [1])
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        builder.add_document([1])
        with pytest.raises(ValueError, match=r"Expected tokens of uint16 in .*other, .*got int32"):
            builder.add_index(other)
        with pytest.raises(IndexedDatasetError, match="got no such file"):
            builder.add_index(tmp_path / "nothing")
    assert [each.tolist() for each in IndexedDataset(tmp_path / "tokens")] == [[1]]


def test_an_index_in_another_directory_than_its_tokens_is_rejected(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "tokens", np.int32)
    with pytest.raises(ValueError, match=r"Expected the index at .*tokens\.idx, next to its \.bin"):
        builder.finalize(tmp_path / "other.idx")
    builder.abort()


def test_arguments_of_megatron_core_are_taken_or_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    assert not IndexedDataset.exists(prefix)
    with IndexedDatasetBuilder(prefix, dtype=np.int32, multimodal=False) as builder:
        builder.add_document([1, 2])
    assert IndexedDataset.exists(str(prefix))
    for mmap in (True, False):
        assert IndexedDataset(str(prefix), multimodal=False, mmap=mmap)[0].tolist() == [1, 2]

    message = "Expected token files of text, got multimodal=True"
    with pytest.raises(NotImplementedError, match=message):
        IndexedDataset(prefix, multimodal=True)
    with pytest.raises(NotImplementedError, match=message):
        IndexedDatasetBuilder(tmp_path / "images", multimodal=True)
    prefix.with_suffix(".bin").unlink()
    assert not IndexedDataset.exists(prefix)
