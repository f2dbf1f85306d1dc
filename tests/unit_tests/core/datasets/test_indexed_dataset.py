"""Token files: the format to the byte, refusal of other files, publication."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    optimal_dtype,
)

WriteTokens = Callable[..., IndexedDataset]

GOLDEN = Path(__file__).parent / "golden"


def test_files_match_megatron_core_byte_for_byte(tmp_path: Path) -> None:
    spec = json.loads((GOLDEN / "spec.json").read_text())
    with IndexedDatasetBuilder(tmp_path / "ours", spec["dtype"]) as builder:
        for sequences in spec["documents"]:
            builder.add_document(
                list(itertools.chain(*sequences)), [len(sequence) for sequence in sequences]
            )
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (GOLDEN / f"small{suffix}").read_bytes()


def test_files_of_megatron_core_are_read() -> None:
    spec = json.loads((GOLDEN / "spec.json").read_text())
    dataset = IndexedDataset(GOLDEN / "small")
    sequences = list(itertools.chain(*spec["documents"]))
    assert len(dataset) == len(sequences)
    assert dataset.dtype == np.uint16
    assert [dataset.get(index).tolist() for index in range(len(dataset))] == sequences
    assert dataset.sequence_lengths.tolist() == [len(sequence) for sequence in sequences]
    assert dataset.sequence_pointers.tolist() == [0, 6, 10, 12, 24, 28, 28]
    assert dataset.document_indices.tolist() == [0, 2, 3, 4, 7]
    assert dataset.num_tokens(range(1, 4)) == 9
    assert dataset.gather_lengths(np.array([3, 0, 5])).tolist() == [6, 3, 0]


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]
)
def test_every_dtype_of_the_format_comes_back(
    tmp_path: Path, write_tokens: WriteTokens, dtype: type
) -> None:
    dataset = write_tokens(tmp_path / "tokens", [[1, 2, 127], [3]], dtype)
    assert dataset.dtype == dtype
    assert dataset.get(0).tolist() == [1, 2, 127]
    assert dataset.get(1).dtype == dtype


def test_the_index_is_mapped_read_only() -> None:
    dataset = IndexedDataset(GOLDEN / "small")
    mapped = (dataset.sequence_lengths, dataset.sequence_pointers, dataset.document_indices)
    for array in mapped:
        assert np.shares_memory(array, dataset._index.content)
    for array in (dataset.get(0), *mapped):
        assert not array.flags.writeable


def test_a_part_of_a_sequence_is_read() -> None:
    dataset = IndexedDataset(GOLDEN / "small")
    assert dataset.get(3, offset=1).tolist() == [0, 1, 2, 3, 4]
    assert dataset.get(3, offset=2, length=3).tolist() == [1, 2, 3]
    assert dataset.get(3, offset=6).tolist() == []


@pytest.mark.parametrize(
    ("index", "offset", "length"), [(7, 0, None), (-1, 0, None), (3, 7, None), (3, 4, 3)]
)
def test_a_part_outside_a_sequence_is_rejected(index: int, offset: int, length: int | None) -> None:
    with pytest.raises(IndexError, match="Expected a"):
        IndexedDataset(GOLDEN / "small").get(index, offset, length)


def test_a_pickled_dataset_carries_no_tokens(tmp_path: Path, write_tokens: WriteTokens) -> None:
    dataset = write_tokens(tmp_path / "tokens", [list(range(10_000))])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).get(0).tolist() == list(range(10_000))


def test_a_pickled_dataset_is_not_opened_over_other_files(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    pickled = pickle.dumps(write_tokens(tmp_path / "tokens", [[1, 2]]))
    replaced = write_tokens(tmp_path / "tokens", [[1], [2]])
    os.utime(replaced.bin_path, ns=(0, 0))
    with pytest.raises(
        IndexedDatasetError, match=r"expected the \.idx and .bin the dataset was pickled with"
    ):
        pickle.loads(pickled)


def test_optimal_dtype_is_megatrons() -> None:
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32


def test_an_empty_dataset_is_written_and_read(tmp_path: Path, write_tokens: WriteTokens) -> None:
    assert len(write_tokens(tmp_path / "none", [])) == 0
    assert write_tokens(tmp_path / "empty", [[]]).get(0).tolist() == []


def _write_and_fail(prefix: Path) -> None:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([1, 2])
        raise KeyError


def test_an_exception_leaves_the_earlier_files(tmp_path: Path, write_tokens: WriteTokens) -> None:
    write_tokens(tmp_path / "tokens", [[7]])
    with pytest.raises(KeyError):
        _write_and_fail(tmp_path / "tokens")
    assert IndexedDataset(tmp_path / "tokens").get(0).tolist() == [7]


def test_only_the_two_files_exist_after_finalize(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "new" / "tokens", np.uint16)
    builder.add_document(np.array([1, 2], dtype=np.int64))
    builder.finalize()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "tokens.bin",
        "tokens.idx",
    ]
    with pytest.raises(RuntimeError, match="finalized"):
        builder.finalize()


def test_pointers_are_right_beyond_one_chunk(
    tmp_path: Path, write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.datasets.indexed_dataset._CHUNK", 3)
    documents = [[number] * (number % 4) for number in range(20)]
    dataset = write_tokens(tmp_path / "tokens", documents)
    assert [dataset.get(index).tolist() for index in range(20)] == documents
    assert dataset.num_tokens(range(2, 19)) == sum(map(len, documents[2:19]))


@pytest.mark.parametrize("token", [65536, -1, 1 << 40])
def test_a_token_that_does_not_fit_is_rejected(tmp_path: Path, token: int) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "tokens", np.uint16)
    with pytest.raises(ValueError, match=f"Expected tokens that uint16 can hold, got {token}"):
        builder.add_document([1, token])
    builder.abort()


def test_a_token_that_is_no_number_is_rejected_without_a_warning(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "tokens", np.uint16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="Expected tokens that uint16 can hold, got nan"):
            builder.add_document([1.0, float("nan")])
    builder.abort()


@pytest.mark.parametrize("length", [1 << 31, 1 << 70])
def test_a_length_beyond_31_bits_is_rejected(tmp_path: Path, length: int) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "tokens", np.uint16)
    with pytest.raises(
        ValueError, match=f"Expected sequences of at most 2147483647 tokens, got {length}"
    ):
        builder.add_document([1], [length, 1 - length])
    builder.abort()


def test_lengths_that_do_not_add_up_are_rejected(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "tokens", np.uint16)
    with pytest.raises(ValueError, match=r"add up to 3 tokens, got \[1, 1\]"):
        builder.add_document([1, 2, 3], [1, 1])
    builder.abort()


def test_a_dtype_without_a_code_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got uint64"):
        IndexedDatasetBuilder(tmp_path / "tokens", np.uint64)


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, write_tokens: WriteTokens, missing: str) -> None:
    write_tokens(tmp_path / "tokens", [[1]])
    (tmp_path / f"tokens{missing}").unlink()
    with pytest.raises(
        IndexedDatasetError, match=rf"tokens{missing}: expected a.*, got no such file"
    ):
        IndexedDataset(tmp_path / "tokens")


def _with_index(folder: Path, content: bytes) -> Path:
    (folder / "bad.bin").write_bytes((GOLDEN / "small.bin").read_bytes())
    (folder / "bad.idx").write_bytes(content)
    return folder / "bad"


def test_a_foreign_index_is_rejected_with_its_first_bytes(tmp_path: Path) -> None:
    with pytest.raises(IndexedDatasetError, match=r"got b'PK.x03.x04zipfi'"):
        IndexedDataset(_with_index(tmp_path, b"PK\x03\x04zipfile" + bytes(100)))


def test_an_index_with_modalities_is_read_without_them(tmp_path: Path) -> None:
    content = (GOLDEN / "small.idx").read_bytes()
    assert len(IndexedDataset(_with_index(tmp_path, content + bytes(7)))) == 7


def _fill_disk_of(stream: BinaryIO) -> None:
    """Has all that is written to the stream from now on meet a full disk."""
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), stream.fileno())


@pytest.mark.parametrize("name", ["_tokens", "_lengths", "_boundaries"])
def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, name: str) -> None:
    def write_to_a_full_disk() -> None:
        with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
            _fill_disk_of(getattr(builder, name))
            for _ in range(3 if name == "_tokens" else 20_000):
                builder.add_document(np.zeros(10_000 if name == "_tokens" else 1, np.int32))

    with pytest.raises(OSError, match="No space left") as caught:
        write_to_a_full_disk()
    assert str(caught.value.filename).startswith(str(tmp_path / "x."))
    assert list(tmp_path.iterdir()) == []


def test_a_builder_publishes_no_file_before_finalize(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder.add_document([1, 2])
        builder.complete()
        assert {path.suffix for path in tmp_path.iterdir()} == {".tmp"}
    assert IndexedDataset(tmp_path / "x").get(0).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="finalized or aborted"):
        builder.complete()
