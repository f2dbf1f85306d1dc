"""Samples of many lengths packed into rows of one length, all of them whole."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.permutation import RandomPermutation, derive_key
from megatron.core.datasets.sample_index import epoch_permutation

# Rows that are open at a time. With more, hardly any room is saved.
_OPEN_ROWS = 64


def pack_first_fit(lengths: Iterable[int], row_length: int) -> list[list[int]]:
    """Rows of consecutively numbered samples: each goes to the first open row that has room for it.

    The oldest row is closed where none has room and as many as may be are open, so the time is
    proportional to the number of samples.

    Args:
        lengths: of each sample, from 1 to `row_length`.

    Returns:
        The numbers of each row's samples, in the order in which they came.

    Raises:
        ValueError: for a sample that is longer than a row, or empty.
    """
    rows: list[list[int]] = []
    room: npt.NDArray[np.int64] = np.zeros(_OPEN_ROWS, np.int64)  # of the row in each place
    place_of: list[list[int]] = [[] for _ in range(_OPEN_ROWS)]
    oldest = 0
    for number, length in enumerate(lengths):
        if not 1 <= length <= row_length:
            raise ValueError(
                f"Expected samples of 1 to {row_length} tokens, got {length} of sample {number}."
            )
        # Places in the order of their age, so that "first" does not depend on where one is.
        fits = np.flatnonzero(np.roll(room, -oldest) >= length)
        if len(fits):
            place = (oldest + int(fits[0])) % _OPEN_ROWS
        else:
            place, oldest = oldest, (oldest + 1) % _OPEN_ROWS
            place_of[place] = []
            rows.append(place_of[place])
            room[place] = row_length
        place_of[place].append(number)
        room[place] -= length
    return rows


class PackedRows:
    """Rows of whole samples, packed once in a random order. Each epoch has the rows in another
    order, so which samples row i has is a function of the samples' lengths, the seed and i.

    Args:
        lengths: of the samples, each from 1 to `row_length`.
        row_length: room in a row.
        seed: decides both orders.

    Raises:
        ValueError: as `pack_first_fit`.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], row_length: int, seed: int) -> None:
        order = RandomPermutation(len(lengths), derive_key(seed, "packing"))
        numbers = order(np.arange(len(lengths), dtype=np.int64))
        packed = pack_first_fit(lengths[numbers].tolist(), row_length)
        self._rows = [numbers[row].tolist() for row in packed]
        self._seed = seed

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def __getitem__(self, index: int) -> list[int]:
        """The numbers of the samples in row `index`, which may be in any epoch."""
        epoch, position = divmod(index, len(self._rows))
        order = epoch_permutation(len(self._rows), self._seed, "samples", epoch)
        row: list[int] = self._rows[order(position)]
        return row
