"""Several datasets mixed by weight, without a stored index.

[Note: the order of a blend]

Dataset d, with share w_d of the samples, would ideally give its m-th sample at time (m + 0.5) /
w_d, where one sample is drawn per unit of time. All samples of all datasets, sorted by (ideal time,
d), are the blend. Until time t dataset d has given round(t * w_d) samples, so the number of samples
before t is t give or take half a sample per dataset. That bounds where sample i can be: to find
it, count the samples before a time that is surely early enough, and merge forward from there over a
number of steps that is about the number of datasets.

    w = (2/3, 1/3):   d=0 at 0.75 2.25 3.75 5.25 ...   d=1 at 1.5 4.5 ...   order 0 1 0 0 1 0 ...
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from megatron.core.datasets.sample_dataset import NumberedDataset, SampleDataset


class Located(NamedTuple):
    """A sample of a blend: which dataset it comes from, and which sample of that dataset it is."""

    dataset: int
    sample: int


class BlendOrder:
    """The order in which datasets of given weights take turns; a pure function of the weights.

    Args:
        weights: one positive number per dataset; only their proportions count.

    Raises:
        ValueError: no weights, one that is not a positive finite number, or one whose share is too
            small for a float.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"Expected positive weights, one per dataset, got {list(weights)}.")
        try:
            total = math.fsum(weights)
        except OverflowError:
            total = math.inf
        self.weights = tuple(weight / total for weight in weights)
        if min(self.weights) == 0:
            raise ValueError(
                f"Expected weights whose shares of their sum are positive, got {list(weights)}."
            )

    def locate(self, index: int) -> Located:
        """Which sample of which dataset is sample `index` of the blend. O(D log D) for D
        datasets.
        """
        _, dataset, sample = self._upcoming(index)[0]
        return Located(dataset, sample)

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples of the blend each dataset provides: [D]."""
        upcoming = sorted(self._upcoming(num_samples), key=lambda entry: entry[1])
        return [sample for _, _, sample in upcoming]

    def _upcoming(self, index: int) -> list[tuple[float, int, int]]:
        """The next sample of each dataset once `index` samples are drawn: a heap of (ideal time,
        dataset, its sample).
        """
        if index < 0:
            raise IndexError(f"Expected a sample number >= 0, got {index}.")
        earlier = index - len(self.weights) / 2 - 1
        while True:
            heap = [self._first_from(earlier, dataset) for dataset in range(len(self.weights))]
            num_drawn = sum(sample for _, _, sample in heap)
            if num_drawn <= index:
                break
            # Rounding at very large times; at a time of zero no sample is drawn.
            earlier -= 1 + (num_drawn - index)

        heapq.heapify(heap)
        for _ in range(index - num_drawn):
            _, dataset, sample = heap[0]
            heapq.heapreplace(heap, (self._time(dataset, sample + 1), dataset, sample + 1))

        return heap

    def _first_from(self, time: float, dataset: int) -> tuple[float, int, int]:
        """The dataset's first sample whose ideal time is not before `time`."""
        sample = max(0, math.ceil(time * self.weights[dataset] - 0.5))
        # The product may round to the other side of the quotient; the quotient decides.
        while sample > 0 and self._time(dataset, sample - 1) >= time:
            sample -= 1
        while self._time(dataset, sample) < time:
            sample += 1
        return (self._time(dataset, sample), dataset, sample)

    def _time(self, dataset: int, sample: int) -> float:
        return (sample + 0.5) / self.weights[dataset]


class BlendedDataset(NumberedDataset):
    """Samples drawn from several datasets in the order of a `BlendOrder`.

    Args:
        datasets: one per weight; None where the blend takes no sample from it.
        weights: their shares; only the proportions count.
        num_samples: length of the blend; which sample is drawn when does not depend on it.

    Raises:
        ValueError: as many weights as datasets are needed, and datasets that hold the samples the
            blend takes.
    """

    def __init__(
        self, datasets: Sequence[SampleDataset | None], weights: Sequence[float], num_samples: int
    ) -> None:
        if len(datasets) != len(weights):
            raise ValueError(
                f"Expected a weight for each of {len(datasets)} datasets, got {len(weights)}."
            )

        self.order = BlendOrder(weights)
        self.num_samples = num_samples
        self._datasets = list(datasets)
        # How samples become a batch, if the datasets in the blend define it.
        self.collate: Callable[[list[Any]], Any] = next(
            (getattr(one, "collate") for one in datasets if hasattr(one, "collate")),  # noqa: B009
            default_collate,
        )
        for number, (dataset, count) in enumerate(
            zip(datasets, self.order.counts(num_samples), strict=True)
        ):
            available = 0 if dataset is None else len(dataset)
            if available < count:
                raise ValueError(
                    f"Expected at least {count} samples in dataset {number} of the blend, got "
                    f"{available}."
                )

    def _sample(self, index: int) -> dict[str, Any]:
        number, sample = self.order.locate(index)
        dataset: Any = self._datasets[number]
        return dict(dataset[sample])
