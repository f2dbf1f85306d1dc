"""Where the rows of our tensors lie in the tensors of the transformers library.

A section of a fused weight here may be rows of a weight that is fused there, in another order. A
projection with an output gate, say, keeps each head's gate behind its query. For two heads of four
channels:

    theirs, rows   0 .. 3    4 .. 7    8 .. 11   12 .. 15
                   query 0   gate 0    query 1   gate 1

    query: RowMap("q_proj.weight", start=0, block=4, stride=8)
    gate:  RowMap("q_proj.weight", start=4, block=4, stride=8)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class RowRange(NamedTuple):
    """Consecutive rows of ours that are consecutive in theirs, too."""

    own_start: int
    own_stop: int
    start: int  # theirs


@dataclass(frozen=True)
class RowMap:
    """The place of one of our tensors in one of theirs, along dim 0. Other dims are the same.

    Attributes:
        name: of their tensor.
        start: their row that is our first.
        block: how many rows stay together; None: all of them.
        stride: their rows from the beginning of one block to that of the next.

    Raises:
        ValueError: blocks that would overlap.
    """

    name: str
    start: int = 0
    block: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        if (self.block is None) != (self.stride is None):
            raise ValueError(
                f"Expected block and stride together, got {self.block} and {self.stride}."
            )
        if self.block is not None and not 1 <= self.block <= (self.stride or 0):
            raise ValueError(
                f"Expected blocks of 1 to {self.stride} rows, their stride, got {self.block}."
            )

    def ranges(self, own_start: int, own_stop: int) -> Iterator[RowRange]:
        """The rows [own_start, own_stop) of ours in runs that are consecutive in theirs."""
        if self.block is None or self.stride is None:
            if own_start < own_stop:
                yield RowRange(own_start, own_stop, self.start + own_start)
            return

        while own_start < own_stop:
            number, within = divmod(own_start, self.block)
            stop = min(own_stop, (number + 1) * self.block)
            yield RowRange(own_start, stop, self.start + number * self.stride + within)
            own_start = stop
