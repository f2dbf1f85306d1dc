"""Documents: sequences packed one behind the other, which must not see each other.

The lengths are numbers of the host. Attention is computed document by document, so a device that
had to report the lengths first would make the host wait in every layer.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.device import send
from megatron.core.log import counted


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch, row by row. A row ends where a document does.

    Not a tuple: wrappers that look for tensors among a module's inputs look into tuples.

    Attributes:
        lengths: positions of each document, of all rows together.
        padding: positions at the end of each row that only fill it up, a document by themselves;
            0 for a full row. Empty: no row has any.

    Raises:
        ValueError: no documents, or one without positions.
    """

    lengths: tuple[int, ...]
    padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(
                f"Expected documents of at least one position each, got {self.lengths}."
            )

    def check(self, batch: int, seq_length: int) -> None:
        """ValueError unless the documents fill each of `batch` rows of `seq_length` positions."""
        stops = set(itertools.accumulate(self.lengths))
        rows = range(seq_length, batch * seq_length + 1, seq_length)
        if max(stops) != batch * seq_length or not stops.issuperset(rows):
            raise ValueError(
                f"Expected documents that fill {counted(batch, 'row')} of {seq_length} positions, "
                f"and end where a row ends, got lengths {self.lengths}."
            )
        if not self.padding:
            return
        ends = [number * seq_length - length for number, length in enumerate(self.padding, start=1)]
        is_padding = len(ends) == batch and all(0 <= length < seq_length for length in self.padding)
        if not is_padding or not stops.issuperset(ends):
            raise ValueError(
                f"Expected padding that is the last document of each row ({batch}), and not all of "
                f"it, got {self.padding} positions and lengths {self.lengths}."
            )

    def without_padding(self, within: range | None = None) -> tuple[int, ...] | None:
        """How many positions of each row are no padding; of a part of each row, the positions
        `within` a range. None: all of all rows are.
        """
        if not any(self.padding):
            return None
        seq_length = self.num_positions // len(self.padding)
        part = within or range(seq_length)
        return tuple(
            min(max(seq_length - length - part.start, 0), len(part)) for length in self.padding
        )

    def real_positions(self, device: torch.device, within: range | None = None) -> Tensor:
        """The positions that are no padding, of all rows, or parts of rows, one behind the other:
        [positions] int64.
        """
        key = (device, within)
        if key not in self._real:
            lengths = torch.tensor(self.without_padding(within) or (self.num_positions,))
            width = self.num_positions // len(lengths) if within is None else len(within)
            positions = torch.arange(len(lengths) * width).view(len(lengths), width)
            self._real[key] = send(positions[torch.arange(width) < lengths[:, None]], device)
        return self._real[key]

    @property
    def num_positions(self) -> int:
        """Of all documents together."""
        return self._stops[-1]

    def starts(self, device: torch.device) -> Tensor:
        """The first position of each: [documents] int64."""
        return self._on(device)[:-1]

    def bounds(self, device: torch.device) -> Tensor:
        """Where each starts, and where the last one ends: [documents + 1] int64."""
        return self._on(device)

    def reach(self, start: int, stop: int) -> tuple[int, Documents]:
        """The first position that any position from `start` to `stop` sees, and the lengths of the
        documents from there to `stop`.
        """
        if (start, stop) not in self._reach:
            bounds = (0, *self._stops)
            first = bounds[bisect.bisect_right(bounds, start) - 1]
            ends = [end for end in self._stops if first < end < stop]
            lengths = (b - a for a, b in itertools.pairwise((first, *ends, stop)))
            self._reach[start, stop] = first, Documents(tuple(lengths))
        return self._reach[start, stop]

    def cut(self, part: range, seq_length: int) -> Documents:
        """The documents of a part of each row of `seq_length` positions. The positions of the part
        that are before a row's first one are a document by themselves.
        """
        if part not in self._cuts:
            bounds, lengths = (0, *self._stops), list[int]()
            for row in range(0, self.num_positions, seq_length):
                start, stop = row + part.start, row + part.stop
                first = bisect.bisect_right(bounds, max(start, row - 1))
                inside = bounds[first : bisect.bisect_left(bounds, stop)]
                lengths += (b - a for a, b in itertools.pairwise((start, *inside, stop)))
            self._cuts[part] = Documents(tuple(lengths))
        return self._cuts[part]

    def spread(self, gap: int, device: torch.device) -> tuple[Tensor, int]:
        """The new place of each position when `gap` places are put between documents.

        Returns:
            [positions] int64, and the number of all places.
        """
        key = (device, gap)
        if key not in self._spread:
            before = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
            places = torch.arange(self.num_positions) + gap * before
            self._spread[key] = send(places, device)
        return self._spread[key], self.num_positions + gap * (len(self.lengths) - 1)

    def _on(self, device: torch.device) -> Tensor:
        # Once for all layers of a forward, which share this object.
        if device not in self._bounds:
            self._bounds[device] = send(torch.tensor((0, *self._stops)), device)
        return self._bounds[device]

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.lengths))

    @cached_property
    def _bounds(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def _real(self) -> dict[tuple[torch.device, range | None], Tensor]:
        return {}

    @cached_property
    def _reach(self) -> dict[tuple[int, int], tuple[int, Documents]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[range, Documents]:
        return {}

    @cached_property
    def _spread(self) -> dict[tuple[torch.device, int], Tensor]:
        return {}
