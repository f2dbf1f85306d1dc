"""The rows of our tensors in the tensors of the transformers library.

A section of our fused weight may be rows of a weight that the library fuses in another order. For
example, a projection with an output gate stores each head's gate after its query. For two heads of
four channels:

    library rows   0 .. 3    4 .. 7    8 .. 11   12 .. 15
                   query 0   gate 0    query 1   gate 1

    query: RowMap("q_proj.weight", start=0, block=4, stride=8)
    gate:  RowMap("q_proj.weight", start=4, block=4, stride=8)

A tensor of the library may also be a stack of matrices, one per expert of a mixture. Its rows are
numbered across all matrices. For two experts, whose gates and ups have three rows each:

    library [2, 6, columns]  matrix 0: gate 0, up 0   matrix 1: gate 1, up 1
    rows                     0 .. 2    3 .. 5         6 .. 8    9 .. 11

    up of expert 1: RowMap("experts.gate_up_proj", start=9, matrix_rows=6)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class RowRange(NamedTuple):
    """Consecutive rows of a tensor of this project that are also consecutive in the library's."""

    own_start: int
    own_stop: int
    start: int  # in the library's tensor


@dataclass(frozen=True)
class RowMap:
    """The rows of one of this project's tensors in one of the library's, along dim 0. Other dims
    are the same.

    Attributes:
        name: name of their tensor.
        start: their row that is our first.
        block: number of rows that stay together; None for all rows.
        stride: distance in their rows between the starts of two blocks.
        matrix_rows: rows of each matrix of a stack, which has one dim more; None if their
            tensor is not a stack.

    Raises:
        ValueError: for blocks that overlap, or matrices without rows.
    """

    name: str
    start: int = 0
    block: int | None = None
    stride: int | None = None
    matrix_rows: int | None = None

    def __post_init__(self) -> None:
        if (self.block is None) != (self.stride is None):
            raise ValueError(
                f"Expected block and stride together, got {self.block} and {self.stride}."
            )
        if self.block is not None and not 1 <= self.block <= (self.stride or 0):
            raise ValueError(
                f"Expected blocks of 1 to {self.stride} rows, their stride, got {self.block}."
            )
        if self.matrix_rows is not None and self.matrix_rows < 1:
            raise ValueError(f"Expected matrices of at least one row, got {self.matrix_rows}.")

    def ranges(self, own_start: int, own_stop: int) -> Iterator[RowRange]:
        """Yields our rows [own_start, own_stop) in runs that are consecutive in their tensor and
        within one matrix of a stack.
        """
        for run in self._blocks(own_start, own_stop):
            if self.matrix_rows is None:
                yield run
            else:
                yield from _within_matrices(run, self.matrix_rows)

    def shape_of_rows(self, rows: int, others: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of their tensor from its number of rows and our other dims."""
        if self.matrix_rows is None:
            return (rows, *others)
        return (rows // self.matrix_rows, self.matrix_rows, *others)

    def _blocks(self, own_start: int, own_stop: int) -> Iterator[RowRange]:
        if self.block is None or self.stride is None:
            if own_start < own_stop:
                yield RowRange(own_start, own_stop, self.start + own_start)
            return

        while own_start < own_stop:
            number, within = divmod(own_start, self.block)
            stop = min(own_stop, (number + 1) * self.block)
            yield RowRange(own_start, stop, self.start + number * self.stride + within)
            own_start = stop


def _within_matrices(run: RowRange, matrix_rows: int) -> Iterator[RowRange]:
    """Cuts a run at the ends of matrices of a stack."""
    own_start, own_stop, start = run
    while own_start < own_stop:
        stop = min(own_stop, own_start + matrix_rows - start % matrix_rows)
        yield RowRange(own_start, stop, start)
        own_start, start = stop, start + stop - own_start
