"""Data files that are wrong, anywhere and at any time: one named error, or the very tokens that
were written.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import index_format
from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.sampler import GlobalBatchSampler, build_data_loader

WriteTokens = Callable[..., IndexedDataset]
# Documents of one and of several sequences, empty ones among them.
DOCUMENTS = [
    [[5, 6, 7]],
    [[], [8]],
    [[]],
    [[9, 10, 11, 12], [13, 14]],
    [[15]],
    [[16, 17, 18, 19, 20]],
    [[]],
]
VOCABULARY = 300
LENGTHS_AT = 34


def _write(prefix: Path, dtype: Any = np.uint16) -> Path:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in DOCUMENTS:
            builder.add_document(list(itertools.chain(*document)), list(map(len, document)))
    return prefix


def _windows(prefix: Path, seq_length: int = 2) -> list[list[int]]:
    """Two epochs of samples, as training reads them."""
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(
        indexed, range(len(indexed)), 14, seq_length, seed=1, vocab_size=VOCABULARY
    )
    assert dataset.samples_per_epoch == 15 // seq_length
    return [_window(dataset, number) for number in range(len(dataset))]


def _window(dataset: GPTDataset, number: int) -> list[int]:
    sample = dataset[number]
    return [*sample["tokens"].tolist(), sample["labels"][-1].item()]


def _expect_error_or(expected: Any, read: Callable[[], Any], file: Path) -> None:
    """Reading gives `expected`, or an error of one line that names the file."""
    try:
        found = read()
    except IndexedDatasetError as error:
        found = str(error)
    is_error = isinstance(found, str) and str(file) in found and "\n" not in found
    assert is_error or found == expected


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """What would wait for a FIFO's writer is interrupted."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def alterations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A few bytes replaced anywhere, an 8-byte number put anywhere, or the end cut off or grown."""
    kind = draw(st.sampled_from(["bytes", "number", "cut", "grow"]))
    place = draw(st.floats(0, 1, exclude_max=True))
    if kind == "cut":
        return lambda content: content[: int(place * len(content))]
    new = draw(st.binary(min_size=1, max_size=4))
    if kind == "number":
        interesting = st.sampled_from([-1, 1 << 31, 1 << 62, -(1 << 63), 0, 1, 2])
        new = struct.pack("<q", draw(interesting | st.integers(-20, 20)))
    if kind == "grow":
        return lambda content: content + new

    def replace(content: bytes) -> bytes:
        at = int(place * len(content))
        return (content[:at] + new + content[at + len(new) :])[: len(content)]

    return replace


@settings(deadline=None, max_examples=150, derandomize=True)
@given(alter=alterations(), dtype=st.sampled_from([np.uint8, np.uint16, np.int32]))
def test_an_index_altered_anywhere_gives_an_error_or_the_same_tokens(
    alter: Callable[[bytes], bytes], dtype: Any
) -> None:
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        prefix = _write(Path(folder) / "tokens", dtype)
        expected = _windows(prefix)
        shutil.rmtree(Path(folder) / "cache")
        index = prefix.with_suffix(".idx")
        index.write_bytes(alter(index.read_bytes()))
        _expect_error_or(expected, lambda: _windows(prefix), prefix)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(alter=alterations(), seq_length=st.sampled_from([2, 4, 15]))
def test_a_cached_sample_index_altered_anywhere_gives_an_error_or_the_same_tokens(
    alter: Callable[[bytes], bytes], seq_length: int
) -> None:
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        prefix = _write(Path(folder) / "tokens")
        expected = _windows(prefix, seq_length)
        (cached,) = (Path(folder) / "cache").rglob("*.npy")
        cached.write_bytes(alter(cached.read_bytes()))
        indexed = IndexedDataset(prefix)
        dataset = GPTDataset(indexed, range(len(indexed)), 14, seq_length, seed=1)
        for number in range(14):
            _expect_error_or(expected[number], lambda: _window(dataset, number), cached)  # noqa: B023


def _spoil(prefix: Path, offset: int, packed: bytes) -> None:
    content = bytearray(prefix.with_suffix(".idx").read_bytes())
    content[offset : offset + len(packed)] = packed
    prefix.with_suffix(".idx").write_bytes(bytes(content))


NUM_SEQUENCES = sum(map(len, DOCUMENTS))
POINTERS_AT = LENGTHS_AT + 4 * NUM_SEQUENCES
BOUNDARIES_AT = POINTERS_AT + 8 * NUM_SEQUENCES


@pytest.mark.parametrize(
    ("offset", "number", "message"),
    [
        (
            LENGTHS_AT,
            struct.pack("<i", 2),
            "expected sequence 1 to start at byte 4, where .* got 6",
        ),
        (LENGTHS_AT, struct.pack("<i", -3), "expected a length >= 0 of sequence 0, got -3"),
        (
            LENGTHS_AT + 4 * 8,
            struct.pack("<i", 1),
            "expected at least 34 bytes for sequences 0 to 8 of .*, got 32",
        ),
        (
            POINTERS_AT,
            struct.pack("<q", 2),
            "expected sequence 0 to start at byte 0, where .* got 2",
        ),
        (
            BOUNDARIES_AT,
            struct.pack("<q", 1),
            "expected the first document to start at sequence 0, got 1",
        ),
        (
            BOUNDARIES_AT + 8,
            struct.pack("<q", -1),
            "expected document 1 to start at sequence 0 or a later one, got",
        ),
        (
            BOUNDARIES_AT + 56,
            struct.pack("<q", 10),
            "expected the documents to end with sequence 9 or before it, got 10",
        ),
        (
            26,
            struct.pack("<Q", 7),
            "expected 198 bytes for 9 sequences and 7 document boundaries, got 206",
        ),
    ],
)
@pytest.mark.parametrize("checked", [2, 1 << 15])
def test_a_number_of_the_index_that_does_not_fit_the_others_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checked: int,
    offset: int,
    number: bytes,
    message: str,
) -> None:
    monkeypatch.setattr(index_format, "_CHECKED", checked)
    prefix = _write(tmp_path / "tokens")
    IndexedDataset(prefix)
    _spoil(prefix, offset, number)
    with pytest.raises(IndexedDatasetError, match=message):
        IndexedDataset(prefix)


def _read_what_is_cut(prefix: Path, cut: str) -> None:
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, range(len(indexed)), 14, 2, seed=1)
    (file,) = prefix.parent.rglob(cut)
    os.truncate(file, 0)
    for number in range(14):
        with pytest.raises(
            IndexedDatasetError, match=f"{file.name}: expected .* got .* cut while it was in use"
        ):
            dataset[number]


@pytest.mark.parametrize("cut", ["*.bin", "*.idx", "*.npy"])
def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_kills_nobody(
    tmp_path: Path, cut: str
) -> None:
    prefix = _write(tmp_path / "tokens")
    # In another process, which SIGBUS would kill.
    process = multiprocessing.get_context("fork").Process(
        target=_read_what_is_cut, args=(prefix, cut)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_worker_reaches_the_rank_as_its_one_line(
    tmp_path: Path, num_workers: int
) -> None:
    indexed = IndexedDataset(_write(tmp_path / "tokens"))
    dataset = GPTDataset(indexed, range(len(indexed)), 12, 2, seed=1, vocab_size=20)
    sampler = GlobalBatchSampler(12, 0, 2, 2, 0, 1)
    loader = build_data_loader(dataset, sampler, num_workers, pin_memory=False)
    with pytest.raises(IndexedDatasetError) as error:
        list(loader)
    assert str(error.value) == (
        f"{indexed.prefix}: expected token ids in range(20), the vocabulary size, got 20. The data "
        "was made with "
        "another tokenizer than this run's."
    )


def test_a_fifo_in_place_of_the_sample_index_is_replaced(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "tokens")
    expected = _windows(prefix)
    (cached,) = tmp_path.rglob("*.npy")
    cached.unlink()
    os.mkfifo(cached)
    with _at_most(20):
        assert _windows(prefix) == expected
    assert cached.is_file()


def test_the_sample_index_of_other_data_is_named(tmp_path: Path, write_tokens: WriteTokens) -> None:
    generator = np.random.default_rng(0)
    datasets = []
    for name in ("one", "two"):
        lengths = generator.permutation(np.arange(1, 20))
        indexed = write_tokens(tmp_path / name / "tokens", [[7] * length for length in lengths])
        datasets.append(GPTDataset(indexed, range(19), 20, 8, seed=1))
    (one,), (two,) = ((tmp_path / name).rglob("*.npy") for name in ("one", "two"))
    one.write_bytes(two.read_bytes())
    dataset = GPTDataset(datasets[0].indexed, range(19), 20, 8, seed=1)
    with pytest.raises(
        IndexedDatasetError, match=r"window \d+ of epoch 0: expected .*not that of the data"
    ):
        list(map(dataset.__getitem__, range(20)))


def test_a_bin_file_larger_than_its_index_is_rejected(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "tokens")
    with prefix.with_suffix(".bin").open("ab") as stream:
        stream.write(b"\1\0")
    with pytest.raises(
        IndexedDatasetError, match=r"tokens.bin: expected 32 bytes, as .*tokens.idx says, got 34"
    ):
        IndexedDataset(prefix)
