"""Samples from token files: their content, its dependencies, and their index."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron.core import files
from megatron.core.datasets import sample_index
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.permutation import RandomPermutation, derive_key

WriteTokens = Callable[..., IndexedDataset]


def _windows(dataset: GPTDataset) -> list[list[int]]:
    """Every sample of the dataset as its seq_length + 1 tokens."""
    windows = []
    for index in range(len(dataset)):
        sample = dataset[index]
        assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        windows.append([*sample["tokens"].tolist(), sample["labels"][-1].item()])
    return windows


def _reference(
    lists: list[list[int]], documents: range, num_samples: int, seq_length: int, seed: int
) -> list[list[int]]:
    """The definition, spelled out on whole lists."""
    samples: list[list[int]] = []
    epoch = 0
    while len(samples) < num_samples:
        order = RandomPermutation(len(documents), derive_key(seed, "documents", epoch))
        stream = [
            token for place in range(len(documents)) for token in lists[documents[order(place)]]
        ]
        num_windows = (len(stream) - 1) // seq_length
        windows = [stream[number * seq_length :][: seq_length + 1] for number in range(num_windows)]
        drawn = RandomPermutation(num_windows, derive_key(seed, "samples", epoch))
        samples += [windows[drawn(place)] for place in range(num_windows)]
        epoch += 1
    return samples[:num_samples]


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    seq_length=st.integers(1, 17),
    seed=st.integers(0, 100),
    chunk=st.sampled_from([1, 2, 7, 1 << 18]),
    data=st.data(),
)
def test_samples_match_the_naive_reference(
    lengths: list[int], seq_length: int, seed: int, chunk: int, data: st.DataObject
) -> None:
    ends = np.cumsum(lengths)
    lists = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    begin = data.draw(st.integers(0, len(lists) - 1))
    documents = range(begin, data.draw(st.integers(begin, len(lists))))
    num_tokens = sum(lengths[begin : documents.stop])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_index, "_CHUNK", chunk)
        with IndexedDatasetBuilder(f"{folder}/tokens", np.uint16) as builder:
            for tokens in lists:
                builder.add_document(tokens)
        indexed = IndexedDataset(f"{folder}/tokens")
        if num_tokens < seq_length + 1:
            with pytest.raises(ValueError, match=f"got {num_tokens}"):
                GPTDataset(indexed, documents, 1, seq_length, seed)
            return
        num_samples = 2 * ((num_tokens - 1) // seq_length) + 1
        dataset = GPTDataset(indexed, documents, num_samples, seq_length, seed)
        assert _windows(dataset) == _reference(lists, documents, num_samples, seq_length, seed)


def test_content_does_not_depend_on_num_samples(corpus: IndexedDataset) -> None:
    short = GPTDataset(corpus, range(len(corpus)), 50, seq_length=64, seed=1)
    long = GPTDataset(corpus, range(len(corpus)), 500, seq_length=64, seed=1)
    assert long.num_samples > 2 * long.samples_per_epoch
    assert _windows(long)[:50] == _windows(short)


def test_epochs_seeds_and_splits_differ(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(corpus, range(len(corpus)), 200, seq_length=64, seed=1)
    windows = _windows(dataset)
    per_epoch = dataset.samples_per_epoch
    assert not {tuple(window) for window in windows[:per_epoch]} & {
        tuple(w) for w in windows[per_epoch : 2 * per_epoch]
    }
    assert _windows(GPTDataset(corpus, range(len(corpus)), 200, seq_length=64, seed=2)) != windows
    half = GPTDataset(corpus, range(100), 20, seq_length=64, seed=1)
    first_of_second_half = corpus.num_tokens(range(100))
    assert max(max(window) for window in _windows(half)) < first_of_second_half


def test_the_error_for_too_few_tokens_has_the_numbers(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    indexed = write_tokens(tmp_path / "tokens", [[1, 2, 3], [4]])
    with pytest.raises(
        ValueError, match=r"tokens: expected at least 5 tokens .* in documents 0 to 2, got 4"
    ):
        GPTDataset(indexed, range(2), 1, seq_length=4, seed=0)


def test_a_negative_token_is_rejected(tmp_path: Path, write_tokens: WriteTokens) -> None:
    indexed = write_tokens(tmp_path / "web", [[1, -1]], np.int32)
    with pytest.raises(ValueError, match="got -1"):
        GPTDataset(indexed, range(1), 1, seq_length=1, seed=0, vocab_size=99)[0]


def test_non_integer_tokens_are_rejected(tmp_path: Path, write_tokens: WriteTokens) -> None:
    indexed = write_tokens(tmp_path / "web", [[1, 2, 3]], np.float32)
    with pytest.raises(ValueError, match="integer dtype, got float32"):
        GPTDataset(indexed, range(1), 1, seq_length=1, seed=0)


@pytest.mark.parametrize("index", [-1, 5])
def test_a_sample_outside_is_rejected(corpus: IndexedDataset, index: int) -> None:
    with pytest.raises(IndexError, match=rf"range\(5\), got {index}"):
        GPTDataset(corpus, range(len(corpus)), 5, seq_length=8, seed=0)[index]


def test_a_pickled_dataset_carries_no_index(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(corpus, range(len(corpus)), 2000, seq_length=8, seed=0)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3000 < dataset._starts.values.nbytes
    assert _windows(pickle.loads(pickled)) == _windows(dataset)


def test_the_index_is_built_once_and_described(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = GPTDataset(
        corpus, range(len(corpus)), 200, seq_length=8, seed=3, cache_path=tmp_path / "cache"
    )
    (file,) = (tmp_path / "cache").glob("*.npy")
    described = json.loads(file.with_suffix(".json").read_text())
    assert (described["documents"], described["seq_length"], described["seed"]) == ([0, 200], 8, 3)
    assert np.load(file).shape == (1, dataset.samples_per_epoch, 2)
    assert not list((tmp_path / "cache").glob("*.tmp"))
    monkeypatch.setattr(sample_index.SampleIndex, "_build", lambda _: pytest.fail("built again"))
    again = GPTDataset(
        corpus, range(len(corpus)), 200, seq_length=8, seed=3, cache_path=tmp_path / "cache"
    )
    assert _windows(again) == _windows(dataset)


def _rewrite(write_tokens: WriteTokens, prefix: Path, lists: list[list[int]]) -> IndexedDataset:
    """Replaces the files, with times that differ even where the clock is coarser than the test."""
    indexed = write_tokens(prefix, lists)
    for path in (indexed.bin_path, indexed.idx_path):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
    return IndexedDataset(prefix)


def test_data_replaced_after_they_were_opened_do_not_get_the_old_datas_index(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    before = [[number] * 10 for number in range(20)]
    after = [[0] * 9, *before[1:-1], [19] * 11]
    opened_before = write_tokens(tmp_path / "tokens", before)
    opened_after = _rewrite(write_tokens, tmp_path / "tokens", after)
    for indexed, lists in ((opened_before, before), (opened_after, after)):
        dataset = GPTDataset(indexed, range(20), 20, seq_length=9, seed=3)
        assert _windows(dataset) == _reference(lists, range(20), 20, 9, 3)


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "other shape"])
def test_a_damaged_index_is_rebuilt(corpus: IndexedDataset, tmp_path: Path, damage: str) -> None:
    dataset = GPTDataset(
        corpus, range(len(corpus)), 50, seq_length=8, seed=3, cache_path=tmp_path / "cache"
    )
    windows = _windows(dataset)
    (file,) = (tmp_path / "cache").glob("*.npy")
    content = file.read_bytes()
    file.unlink()
    if damage == "other shape":
        np.save(file, np.zeros((1, 1, 2), dtype=np.int64))
    else:
        file.write_bytes(
            {"truncated": content[:1000], "empty": b"", "foreign": b"x" * len(content)}[damage]
        )
    again = GPTDataset(
        corpus, range(len(corpus)), 50, seq_length=8, seed=3, cache_path=tmp_path / "cache"
    )
    assert _windows(again) == windows


def _build(corpus: IndexedDataset, folder: Path, seq_length: int = 8) -> GPTDataset:
    return GPTDataset(
        corpus, range(len(corpus)), 50, seq_length=seq_length, seed=3, cache_path=folder
    )


def test_the_error_for_a_full_disk_has_the_index_and_no_file_is_left(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync_stream", _refuse(errno.ENOSPC))
    with pytest.raises(IndexedDatasetError, match=r"No space left on device: '.*/cache/"):
        _build(corpus, tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock", ".json"}


def test_files_of_killed_builds_are_removed_after_an_hour(
    corpus: IndexedDataset, tmp_path: Path
) -> None:
    names = ("0" * 32 + ".npy.ab.tmp", "1" * 32 + ".npy.ab.tmp", "notes.tmp")
    old, fresh, other = (tmp_path / name for name in names)
    for path in (old, fresh, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    _build(corpus, tmp_path)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_files_of_killed_builds_of_the_same_index_are_removed_at_once(
    corpus: IndexedDataset, tmp_path: Path
) -> None:
    _build(corpus, tmp_path)
    (index,) = tmp_path.glob("*.npy")
    left = [index.with_name(f"{index.name}.{number}.tmp") for number in range(3)]
    for path in left:
        path.touch()
    index.unlink()
    _build(corpus, tmp_path)
    assert index.exists()
    assert not any(path.exists() for path in left)


def test_an_unfinished_index_that_another_process_removes_is_built_again(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = sample_index.EpochStream.sample_starts
    removed: list[Path] = []

    def robbed(*args: Any) -> Iterator[Any]:
        if not removed:
            removed.extend(tmp_path.glob("*.npy.*.tmp"))
            removed[0].unlink()
        return starts(*args)

    monkeypatch.setattr(sample_index.EpochStream, "sample_starts", robbed)
    _build(corpus, tmp_path)
    assert removed
    assert len(list(tmp_path.glob("*.npy"))) == 1


def _refuse(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EROFS])
def test_the_error_for_an_unwritable_directory_has_the_flag(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(Path, "mkdir", _refuse(number))
    reason = re.escape(os.strerror(number))
    with pytest.raises(
        IndexedDatasetError, match=f"^--data-cache-path: expected a writable directory .*{reason}"
    ):
        GPTDataset(
            corpus, range(len(corpus)), 50, seq_length=8, seed=3, cache_path=tmp_path / "cache"
        )


@pytest.mark.parametrize("number", [errno.ENOLCK])
def test_a_file_system_without_locks_costs_a_warning(
    corpus: IndexedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    monkeypatch.setattr(fcntl, "flock", _refuse(number))
    dataset = GPTDataset(
        corpus, range(len(corpus)), 50, seq_length=8, seed=3, cache_path=tmp_path / "cache"
    )
    assert len(_windows(dataset)) == 50
    assert "cannot be locked" in caplog.text


def test_an_index_that_points_beyond_the_data_is_named(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = GPTDataset(
        corpus, range(len(corpus)), 1, seq_length=500, seed=3, cache_path=tmp_path / "cache"
    )
    (file,) = (tmp_path / "cache").glob("*.npy")
    starts = np.load(file)
    starts[..., 0] = len(corpus) - 1
    np.save(file, starts)
    sequences = sample_index.EpochStream.sequences
    calls = itertools.count()

    def limited(*arguments: Any) -> Any:
        assert next(calls) < 100, "reading goes on for ever"
        return sequences(*arguments)

    monkeypatch.setattr(sample_index.EpochStream, "sequences", limited)
    dataset = GPTDataset(
        corpus, range(len(corpus)), 1, seq_length=500, seed=3, cache_path=tmp_path / "cache"
    )
    with pytest.raises(
        IndexedDatasetError,
        match=rf"{file.name}: window \d+ of epoch 0: "
        r"expected 501 tokens from document 199, token \d+ on, got \d+",
    ):
        dataset[0]


@pytest.mark.parametrize("method", ["fork"])
def test_data_loader_workers_give_the_samples_that_this_process_gives(
    corpus: IndexedDataset, method: str
) -> None:
    halves = (range(100), range(100, len(corpus)))
    parts = [
        GPTDataset(corpus, half, 40, seq_length=32, seed=3, vocab_size=10_000) for half in halves
    ]
    blend = BlendedDataset(parts, [3, 1], 40)
    loader = DataLoader(blend, batch_size=None, num_workers=2, multiprocessing_context=method)
    for index, sample in enumerate(loader):
        assert sample.keys() == blend[index].keys() == {"tokens", "labels"}
        assert all(torch.equal(sample[name], blend[index][name]) for name in sample)
    assert index == 39


def _count_builds(prefix: str, folder: str, barrier: object, counts: object) -> None:
    build = sample_index.SampleIndex._build

    def counted(self: sample_index.SampleIndex) -> None:
        with counts.get_lock():  # type: ignore[attr-defined]
            counts.value += 1  # type: ignore[attr-defined]
        build(self)

    sample_index.SampleIndex._build = counted  # type: ignore[method-assign]
    indexed = IndexedDataset(prefix)
    barrier.wait()  # type: ignore[attr-defined]
    GPTDataset(indexed, range(len(indexed)), 50, seq_length=8, seed=3, cache_path=folder)


def test_processes_that_come_together_build_the_index_once(
    corpus: IndexedDataset, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    barrier, counts = context.Barrier(4), context.Value("i", 0)
    arguments = (corpus.prefix, str(tmp_path / "cache"), barrier, counts)
    processes = [context.Process(target=_count_builds, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert counts.value == 1
