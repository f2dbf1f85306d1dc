"""What the datasets of samples have in common: numbered samples, and a length."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch
from torch.utils.data import Dataset


class SampleDataset(Protocol):
    """A dataset of samples that knows its length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class NumberedDataset(Dataset[dict[str, torch.Tensor]]):
    """A dataset whose sample i is a function of i; `num_samples` is how many may be asked for."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`: "tokens" and "labels", int64 [seq_length] each.

        Raises:
            IndexError: an index outside range(num_samples).
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"Expected a sample in range({self.num_samples}), got {index}.")
        return self._sample(int(index))

    @abstractmethod
    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`, which is one of range(num_samples)."""
