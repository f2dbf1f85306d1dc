"""Which rank reads which sample, and that reading does not touch the global random numbers."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.core.datasets.sampler import (
    GlobalBatchSampler,
    _serve_the_rank_to_its_end,
    build_data_loader,
)
from megatron.core.options import ConfigError


def _global_batches(
    num_samples: int, consumed: int, micro: int, batch: int, size: int
) -> list[list[int]]:
    """All global batches, each put together from the ranks' samples, rank by rank within each
    micro-batch.
    """
    samplers = [
        GlobalBatchSampler(num_samples, consumed, micro, batch, rank, size) for rank in range(size)
    ]
    for sampler in samplers:
        assert len(list(sampler)) == len(sampler)
    passes = [list(itertools.chain(*parts)) for parts in zip(*samplers, strict=True)]
    per_batch = samplers[0].num_microbatches
    return [
        list(itertools.chain(*passes[begin : begin + per_batch]))
        for begin in range(0, len(passes), per_batch)
    ]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    micro=st.integers(1, 4),
    passes=st.integers(1, 3),
    num_batches=st.integers(0, 5),
    rest=st.integers(0, 11),
)
def test_a_global_batch_is_the_same_at_every_data_parallel_size(
    micro: int, passes: int, num_batches: int, rest: int
) -> None:
    batch = 4 * micro * passes
    num_samples = num_batches * batch + min(rest, batch - 1)
    expected = [list(range(number * batch, (number + 1) * batch)) for number in range(num_batches)]
    for size in (1, 2, 4):
        assert _global_batches(num_samples, 0, micro, batch, size) == expected


@settings(deadline=None, max_examples=100, derandomize=True)
@given(size=st.sampled_from([1, 2, 4]), rank=st.integers(0, 3), done=st.integers(0, 6))
def test_a_resumed_sampler_gives_the_tail_of_the_uninterrupted_sequence(
    size: int, rank: int, done: int
) -> None:
    whole = GlobalBatchSampler(100, 0, 2, 16, rank % size, size)
    resumed = GlobalBatchSampler(100, 16 * done, 2, 16, rank % size, size)
    assert list(resumed) == list(whole)[done * whole.num_microbatches :]


def test_ranks_take_micro_batches_in_turn() -> None:
    assert list(GlobalBatchSampler(9, 0, 2, 8, 1, 2)) == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 0, 3, 16, 0, 2), r"divisible by .* = 3 x 2 = 6, got 16"),
        ((100, 101, 2, 16, 0, 2), "0 to 100 consumed samples, got 101"),
        ((100, -1, 2, 16, 0, 2), "0 to 100 consumed samples, got -1"),
        ((100, 0, 2, 16, 2, 2), r"rank in range\(2\), got 2"),
        ((100, 0, 0, 16, 0, 2), "at least 1, got 0, 16 and 2"),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(*arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_draws_nothing_from_the_global_generator(num_workers: int) -> None:
    dataset = MockGPTDataset(100, 8, 32, seed=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = build_data_loader(
        dataset, GlobalBatchSampler(32, 8, 2, 8, 0, 2), num_workers, pin_memory=False
    )
    batches = list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    samples = [dataset[index] for index in itertools.chain(*GlobalBatchSampler(32, 8, 2, 8, 0, 2))]
    for name in ("tokens", "labels"):
        assert batches[0][name].shape == (2, 8)
        expected = torch.stack([sample[name] for sample in samples])
        assert torch.equal(torch.cat([batch[name] for batch in batches]), expected)


def test_a_data_worker_ignores_the_signals_to_its_job_and_the_end_of_its_rank(capfd):
    """A traceback of a worker's own is still printed."""
    pid = os.fork()
    if pid == 0:
        try:
            _serve_the_rank_to_its_end(0)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(os.getpid(), number)
            for error in (ConnectionResetError("rank"), EOFError("rank"), ValueError("own")):
                sys.excepthook(type(error), error, None)
        finally:
            sys.stderr.flush()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    printed = capfd.readouterr().err
    assert "ValueError: own" in printed
    assert "rank" not in printed


class _WithoutSharedMemory(MockGPTDataset):
    """Samples of a worker whose shared memory is full: its files cannot be enlarged."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # of the worker alone
        return super().__getitem__(index)


class _StackedBySample(_WithoutSharedMemory):
    """A batch that is not in shared memory by itself, unlike PyTorch's."""

    @staticmethod
    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


@pytest.mark.parametrize("kind", [_WithoutSharedMemory, _StackedBySample])
def test_a_lack_of_shared_memory_names_the_workers_and_does_not_hang(
    kind: type[MockGPTDataset],
) -> None:
    loader = build_data_loader(
        kind(100, 8, 32, seed=1), GlobalBatchSampler(32, 0, 2, 8, 0, 1), 1, pin_memory=False
    )
    with pytest.raises(ConfigError, match=r"^--num-workers: .*/dev/shm"):
        next(iter(loader))


def test_workers_that_cannot_be_started_for_want_of_shared_memory_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", fail)
    dataset, sampler = MockGPTDataset(100, 8, 32, seed=1), GlobalBatchSampler(32, 0, 2, 8, 0, 1)
    with pytest.raises(ConfigError, match=r"^--num-workers: .*/dev/shm"):
        iter(build_data_loader(dataset, sampler, 1, pin_memory=False))
    with pytest.raises(OSError, match="No space left"):
        iter(build_data_loader(dataset, sampler, 0, pin_memory=False))


def test_batches_of_workers_are_in_shared_memory_however_they_are_made() -> None:
    dataset = MockGPTDataset(100, 8, 32, seed=1)
    dataset.collate = _StackedBySample.collate
    sampler = GlobalBatchSampler(32, 0, 2, 8, 0, 1)
    for batch in build_data_loader(dataset, sampler, 1, pin_memory=False):
        assert all(tensor.is_shared() for tensor in batch.values())
