"""Which samples each data-parallel rank reads: arithmetic on the number of samples consumed."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.sample_dataset import SampleDataset
from megatron.core.log import printable
from megatron.core.options import ConfigError

# PyTorch's errors name the object, /torch_PROCESS_NUMBER, or describe it.
_ABOUT_SHARED_MEMORY = ("/torch_", "shared memory")


class GlobalBatchSampler(Sampler[list[int]]):
    """Sample numbers of one rank, one micro-batch after another.

    A global batch is the next `global_batch_size` samples, whatever the number of ranks:
    micro-batch m of rank r takes

        base + (m * data_parallel_size + r) * micro_batch_size + range(micro_batch_size)

    where base is the number of samples consumed before. An incomplete global batch at the end is
    dropped.

    Args:
        num_samples: samples of the dataset.
        consumed_samples: samples that earlier steps have used; the first global batch starts there.
        micro_batch_size: samples of one forward pass on one rank.
        global_batch_size: samples of one optimizer step over all ranks.
        data_parallel_rank, data_parallel_size: this rank among the ranks that read different
            samples.

    Raises:
        ValueError: numbers that do not fit each other.
    """

    def __init__(
        self,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if min(micro_batch_size, global_batch_size, data_parallel_size) < 1:
            raise ValueError(
                "Expected a micro batch size, a global batch size and a data parallel size of at "
                f"least 1, got {micro_batch_size}, {global_batch_size} and {data_parallel_size}."
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"Expected a data parallel rank in range({data_parallel_size}), got "
                f"{data_parallel_rank}."
            )

        per_pass = micro_batch_size * data_parallel_size
        if global_batch_size % per_pass:
            raise ValueError(
                "Expected a global batch size divisible by micro batch size x data parallel size "
                "= "
                f"{micro_batch_size} x {data_parallel_size} = {per_pass}, got {global_batch_size}."
            )
        if not 0 <= consumed_samples <= num_samples:
            raise ValueError(
                f"Expected 0 to {num_samples} consumed samples, got {consumed_samples}."
            )

        self.num_microbatches = global_batch_size // per_pass
        self.num_global_batches = (num_samples - consumed_samples) // global_batch_size
        self._consumed_samples = consumed_samples
        self._micro_batch_size = micro_batch_size
        self._per_pass = per_pass
        self._rank_offset = data_parallel_rank * micro_batch_size

    def __len__(self) -> int:
        """Number of micro-batches of this rank."""
        return self.num_global_batches * self.num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        # Global batches follow each other without a gap, and so do the passes within one.
        for number in range(len(self)):
            begin = self._consumed_samples + number * self._per_pass + self._rank_offset
            yield list(range(begin, begin + self._micro_batch_size))


class BatchLoader:
    """Micro-batches in the order of a sampler, read ahead by worker processes.

    A worker hands over an error in the data as a value. Raised in the worker, it would come out of
    PyTorch's loader with the worker's traceback instead of its one line. The same holds for a
    lack of shared memory. Without that, a thread of the worker would meet it and lose the batch,
    and the loader would wait forever.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Number of micro-batches."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Starts the workers, at once.

        Yields:
            "tokens" and "labels", int64 [micro_batch_size, seq_length] each, and what else the
            dataset has.

        Raises:
            IndexedDatasetError: data that cannot be used; raised where its batch would come.
            ConfigError: no shared memory for the workers or for their batches.
        """
        try:
            batches = iter(self._loader)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._loader.num_workers:
                raise
            raise _lack_of_shared_memory(error) from error
        return map(_raise_if_error, batches)


class _WithErrors(Dataset[Any]):
    """A dataset whose errors in the data are samples."""

    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, Any] | IndexedDatasetError:
        try:
            return self._dataset[index]
        except IndexedDatasetError as error:
            return error


@dataclass(frozen=True)
class _Collate:
    """Makes a batch, or the first error among its samples."""

    of_samples: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        errors = (sample for sample in samples if isinstance(sample, IndexedDatasetError))
        if error := next(errors, None):
            return error
        if get_worker_info() is None:
            return self.of_samples(samples)
        try:
            return _shared(self.of_samples(samples))
        except RuntimeError as failure:
            if not any(word in str(failure) for word in _ABOUT_SHARED_MEMORY):
                raise
            return _lack_of_shared_memory(failure)


def _shared(batch: Any) -> Any:
    """The batch, with its tensors in shared memory."""
    if isinstance(batch, Tensor):
        batch.share_memory_()
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            _shared(part)
    return batch


def _lack_of_shared_memory(error: Exception) -> ConfigError:
    return ConfigError(
        f"--num-workers: expected shared memory (/dev/shm) for the batches of data workers, got: "
        f"{printable(str(error))}. Enlarge it (docker run --shm-size), or use fewer workers; 0 "
        "needs none."
    )


def _raise_if_error(batch: Any) -> dict[str, Any]:
    if isinstance(batch, IndexedDatasetError | ConfigError):
        raise batch
    found: dict[str, Any] = batch
    return found


def build_data_loader(
    dataset: SampleDataset, sampler: GlobalBatchSampler, num_workers: int, pin_memory: bool
) -> BatchLoader:
    """A loader of micro-batches.

    Args:
        dataset: gives sample i.
        sampler: gives the sample numbers of each micro-batch.
        num_workers: processes that read ahead; 0 reads in this one.
        pin_memory: whether batches come in page-locked memory, for asynchronous copies to a GPU.
    """
    # A loader draws a seed for its workers whenever it is iterated. From its own generator:
    # drawn from the global one, it would shift every random number after a resume, which no longer
    # equal the uninterrupted run's.
    generator = torch.Generator()
    generator.manual_seed(0)
    loader: DataLoader[Any] = DataLoader(
        _WithErrors(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_Collate(getattr(dataset, "collate", default_collate)),
        pin_memory=pin_memory,
        generator=generator,
        persistent_workers=False,
        worker_init_fn=_serve_the_rank_to_its_end,
    )
    return BatchLoader(loader)


def _serve_the_rank_to_its_end(_worker: int) -> None:
    """In a worker: ignores what schedulers (SIGTERM, SIGUSR1) and terminals (SIGINT, for Ctrl-C)
    send to all processes of a job.

    A rank that has yet to finish its iteration and save needs its workers. They end when it does.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _report_own_error


def _report_own_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In a worker: an excepthook that is silent about a rank that has gone.

    A thread of multiprocessing passes batches on and calls it if the rank ends in the middle of
    one. Errors of the dataset take another way, to the rank.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
