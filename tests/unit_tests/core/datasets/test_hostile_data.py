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

from megatron.core.datasets.data_files import DataFile, IndexedDatasetError
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.sampler import GlobalBatchSampler, build_data_loader
from tests.helpers.special_files import SPECIAL_FILES

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
    """What is read is `expected`, or an error of one line that names the file."""
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


@settings(deadline=None, max_examples=300, derandomize=True)
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


@settings(deadline=None, max_examples=300, derandomize=True)
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


def test_two_kilobytes_that_claim_hundreds_of_gigabytes_are_refused_when_opened(
    tmp_path: Path,
) -> None:
    num_sequences = 150
    prefix = tmp_path / "lies"
    lengths = np.full(num_sequences, (1 << 31) - 1, dtype="<i4")
    pointers = np.zeros(num_sequences, dtype="<i8")
    boundaries = np.arange(num_sequences + 1)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num_sequences, num_sequences + 1)
    index = header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    assert len(index) < 4000
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(bytes(1000))
    with pytest.raises(
        IndexedDatasetError, match=r"lies.idx: expected sequence 1 to begin at byte 4294967294"
    ):
        IndexedDataset(prefix)
    # The same lies, consistently.
    ends = np.cumsum(lengths, dtype="<i8") * 2
    pointers[1:] = ends[:-1]
    prefix.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    )
    message = (
        r"lies.bin: expected at least 4294967294 bytes for sequences 0 to 0 of .*lies.idx, got 1000"
    )
    with pytest.raises(IndexedDatasetError, match=message):
        IndexedDataset(prefix)


NUM_SEQUENCES = sum(map(len, DOCUMENTS))
POINTERS_AT = LENGTHS_AT + 4 * NUM_SEQUENCES
BOUNDARIES_AT = POINTERS_AT + 8 * NUM_SEQUENCES


@pytest.mark.parametrize(
    ("offset", "number", "message"),
    [
        (
            LENGTHS_AT,
            struct.pack("<i", 2),
            "expected sequence 1 to begin at byte 4, where .* got 6",
        ),
        (LENGTHS_AT, struct.pack("<i", -3), "expected a length >= 0 of sequence 0, got -3"),
        (
            LENGTHS_AT + 4 * 7,
            struct.pack("<i", 4),
            "expected sequence 8 to begin at byte 30, where .* got 32",
        ),
        (
            LENGTHS_AT + 4 * 8,
            struct.pack("<i", 1),
            "expected at least 34 bytes for sequences 0 to 8 of .*, got 32",
        ),
        (
            POINTERS_AT,
            struct.pack("<q", 2),
            "expected sequence 0 to begin at byte 0, where .* got 2",
        ),
        (
            POINTERS_AT + 16,
            struct.pack("<q", -1),
            "expected sequence 2 to begin at byte 6, where .* got -1",
        ),
        (
            BOUNDARIES_AT,
            struct.pack("<q", 1),
            "expected the documents to begin with sequence 0, got 1",
        ),
        (
            BOUNDARIES_AT + 8,
            struct.pack("<q", -1),
            "expected document 1 to begin with sequence 0 or a later one, got",
        ),
        (
            BOUNDARIES_AT + 16,
            struct.pack("<q", 6),
            "expected document 3 to begin with sequence 6 or a later one, got 4",
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
        (18, struct.pack("<Q", 1 << 63), "document boundaries, got 206"),
    ],
)
def test_a_number_of_the_index_that_does_not_fit_the_others_is_named(
    tmp_path: Path, offset: int, number: bytes, message: str
) -> None:
    prefix = _write(tmp_path / "tokens")
    IndexedDataset(prefix)
    _spoil(prefix, offset, number)
    with pytest.raises(IndexedDatasetError, match=message):
        IndexedDataset(prefix)


def test_an_index_without_boundaries_is_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    prefix.with_suffix(".bin").touch()
    prefix.with_suffix(".idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 0))
    with pytest.raises(
        IndexedDatasetError, match="expected the documents to begin with sequence 0, got no bound"
    ):
        IndexedDataset(prefix)


@pytest.mark.parametrize("wrong", [0, 1, 40_000, 99_999])
def test_a_wrong_number_in_any_chunk_of_the_check_is_found(
    tmp_path: Path, write_tokens: WriteTokens, wrong: int
) -> None:
    prefix = Path(write_tokens(tmp_path / "tokens", [[1]] * 100_000).prefix)
    _spoil(prefix, LENGTHS_AT + 4 * 100_000 + 8 * wrong, struct.pack("<q", 2 * wrong + 2))
    with pytest.raises(
        IndexedDatasetError,
        match=rf"sequence {wrong} to begin at byte {2 * wrong}, .* {2 * wrong + 2}",
    ):
        IndexedDataset(prefix)
    _spoil(prefix, LENGTHS_AT + 4 * 100_000 + 8 * wrong, struct.pack("<q", 2 * wrong))
    IndexedDataset(prefix)
    _spoil(prefix, LENGTHS_AT + 12 * 100_000 + 8 * (wrong + 1), struct.pack("<q", -7))
    with pytest.raises(
        IndexedDatasetError,
        match=rf"expected document {wrong + 1} to begin with sequence {wrong} or",
    ):
        IndexedDataset(prefix)


def test_a_bin_with_more_than_its_index_says_is_refused(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "tokens")
    with prefix.with_suffix(".bin").open("ab") as stream:
        stream.write(b"\1\0")
    with pytest.raises(
        IndexedDatasetError, match=r"tokens.bin: expected 32 bytes, as .*tokens.idx says, got 34"
    ):
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
    # In a process of its own, which SIGBUS would kill.
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


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_only_regular_files_are_opened(tmp_path: Path, suffix: str, kind: str) -> None:
    prefix = _write(tmp_path / "tokens")
    path = prefix.with_suffix(suffix)
    path.unlink()
    SPECIAL_FILES[kind](path)
    with (
        _at_most(20),
        pytest.raises(IndexedDatasetError, match=rf"tokens{suffix}: Expected an? .*, got {kind}"),
    ):
        IndexedDataset(prefix)


def test_a_fifo_in_place_of_the_sample_index_is_replaced(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "tokens")
    expected = _windows(prefix)
    (cached,) = tmp_path.rglob("*.npy")
    cached.unlink()
    os.mkfifo(cached)
    with _at_most(20):
        assert _windows(prefix) == expected
    assert cached.is_file()


@pytest.mark.parametrize("kind", ["a FIFO", "a link"])
def test_the_lock_is_a_file_of_its_own(tmp_path: Path, kind: str) -> None:
    prefix = _write(tmp_path / "tokens")
    _windows(prefix)
    (lock,) = tmp_path.rglob("*.lock")
    for path in (lock, lock.with_suffix(".npy")):
        path.unlink()
    if kind == "a FIFO":
        os.mkfifo(lock)
    else:
        lock.symlink_to(tmp_path / "elsewhere")
    with (
        _at_most(20),
        pytest.raises(IndexedDatasetError, match=r"^--data-cache-path: expected a folder to write"),
    ):
        _windows(prefix)
    assert not (tmp_path / "elsewhere").exists()


def test_a_sample_index_that_is_pickled_objects_is_not_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    prefix = _write(tmp_path / "tokens")
    expected = _windows(prefix)
    (cached,) = tmp_path.rglob("*.npy")
    np.save(cached, np.array([Bomb()] * 7, dtype=object))
    assert _windows(prefix) == expected
    assert not (tmp_path / "executed").exists()


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


def test_what_is_not_in_a_file_is_not_allocated(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(10))
    file = DataFile(tmp_path / "small", "a file")
    for offset, num_bytes in ((0, 1 << 50), (5, 6), (-1, 1), (11, 0), (0, -1)):
        with pytest.raises(
            IndexedDatasetError,
            match=f"small: expected bytes {offset} to {offset + num_bytes} in it",
        ):
            file.read(offset, num_bytes)
    assert file.read(10, 0) == b""
