"""The base of all datasets of samples: numbered samples, and a length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Dataset


class SampleDataset(Protocol):
    """A dataset of samples with a length.

    Samples are dicts of tensors and of tuples, which stay on the host. A dataset may define in a
    function `collate` how samples become a batch; otherwise each entry is stacked.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...


def collate_rows(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch whose tensors are stacked, and whose tuples follow each other, row after row."""
    return {
        name: sum((sample[name] for sample in samples), ())
        if isinstance(first, tuple)
        else torch.stack([sample[name] for sample in samples])
        for name, first in samples[0].items()
    }


class SplitDatasets(NamedTuple):
    """Datasets of a run; None where no samples are asked for or --split leaves no share."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


class NumberedDataset(Dataset[dict[str, Any]]):
    """A dataset whose sample i is a function of i; `num_samples` is how many may be asked for."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample `index`: "tokens" and "labels", int64 [seq_length] each, and what else the dataset
        has.

        Raises:
            IndexError: an index outside range(num_samples).
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"Expected a sample in range({self.num_samples}), got {index}.")
        return self._sample(int(index))

    @abstractmethod
    def _sample(self, index: int) -> dict[str, Any]:
        """Sample `index`, which is one of range(num_samples)."""
