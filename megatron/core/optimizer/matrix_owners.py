"""Which rank orthogonalizes which matrix, and which rows it needs for that. Integers only.

Ranks that share the rows of a parameter are *places*, numbered as in their process group. Each
matrix has one owner among the places that hold some of its rows. Every place computes all owners
alike, from the cuts of all parameters. Two matrices of four rows in a parameter of eight, on three
places:

    rows of the parameter    0   1   2 | 3   4   5 | 6   7
    place                    0         | 1         | 2
    rows of the matrices     0   1   2   3 | 0   1   2   3
    segments                 a         | b | c     | d          c and d go to place 2, if b goes
    owner                    0               2                  to place 0

A place sends its segments in the order of their owners, and an owner receives them in the order of
their places; the results go the same way back, in the same memory.

Parameters travel in batches, of which a few are in flight at a time, so that a step's buffers stay
small: see `buffer_nbytes`.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

# Of a batch on each place: 64 MiB in bf16. All places together have enough matrices then.
_MOST_NUMEL = 1 << 25
_USUAL_BATCHES = 4  # about as many if there is little to exchange, so that they can overlap
NUM_SLOTS = 3  # batches in flight at a time


class HeldMatrices(NamedTuple):
    """The matrices that are stacked in a parameter [rows, columns].

    Attributes:
        num_rows: of each matrix.
        rows_at: the rows of the parameter that each place holds.
    """

    num_rows: tuple[int, ...]
    num_columns: int
    rows_at: tuple[range, ...]

    @property
    def numel(self) -> int:
        return sum(self.num_rows) * self.num_columns


class Matrix(NamedTuple):
    """One of the matrices of several parameters."""

    parameter: int  # index
    first_row: int  # of the parameter
    num_rows: int
    num_columns: int

    @property
    def cost(self) -> int:
        """Of its orthogonalization, up to a factor."""
        return self.num_rows * self.num_columns * min(self.num_rows, self.num_columns)

    @property
    def iterated_numel(self) -> int:
        """Elements that exist at a time in `orthogonalize`: the matrix, its iterate before and
        after a step, and two products of the smaller size.
        """
        return 3 * self.num_rows * self.num_columns + 2 * min(self.num_rows, self.num_columns) ** 2


class Segment(NamedTuple):
    """Consecutive rows of a matrix that one place holds."""

    matrix: int  # index in the division
    place: int
    first_row: int  # of the matrix
    num_rows: int


class Division(NamedTuple):
    """Matrices, their segments in the order of their rows, and their owners."""

    num_places: int
    matrices: list[Matrix]
    segments: list[Segment]
    owners: list[int]

    def sent(self, place: int) -> list[Segment]:
        """The segments of a place, in the order in which it sends them."""
        own = (segment for segment in self.segments if segment.place == place)
        return sorted(own, key=lambda segment: self.owners[segment.matrix])

    def received(self, place: int) -> list[Segment]:
        """The segments of an owner's matrices, in the order in which it receives them."""
        own = (segment for segment in self.segments if self.owners[segment.matrix] == place)
        return sorted(own, key=lambda segment: segment.place)

    def numel(self, segment: Segment) -> int:
        return segment.num_rows * self.matrices[segment.matrix].num_columns


class Batch(NamedTuple):
    """Parameters whose rows travel together.

    Attributes:
        parameters: indices.
        division: of their matrices, whose parameters are numbered within the batch.
    """

    parameters: list[int]
    division: Division


def batches_of(parameters: Sequence[HeldMatrices], kinds: Sequence[Hashable]) -> list[Batch]:
    """Puts parameters into batches, in the order of their first parameters.

    Args:
        kinds: of each parameter; only those of equal kinds share batches. They have the same
            places.

    Raises:
        ValueError: as `divide`.
    """
    together: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        together.setdefault(kind, []).append(index)

    found = []
    for own in together.values():
        num_places = len(parameters[own[0]].rows_at)
        loads = [0] * num_places
        ends = [*itertools.accumulate(parameters[index].numel for index in own)]
        most = min(_MOST_NUMEL * num_places, -(-ends[-1] // _USUAL_BATCHES))
        numbers = {index: (end - 1) // most for index, end in zip(own, ends, strict=True)}
        for _, run in itertools.groupby(own, key=numbers.__getitem__):
            batch = [*run]
            found.append(Batch(batch, divide([parameters[index] for index in batch], loads)))
    return sorted(found, key=lambda batch: batch.parameters[0])


def buffer_nbytes(batches: Sequence[Batch]) -> int:
    """The most bytes that a step of these batches takes on any place, all in bf16: rows that are
    sent, in as many slots as batches are in flight, rows that are received if there are several
    places, and one matrix with its iterations.
    """
    sent, received = [], []
    for _, division in batches:
        out, back = Counter[int](), Counter[int]()
        for segment in division.segments:
            out[segment.place] += division.numel(segment)
            back[division.owners[segment.matrix]] += division.numel(segment)
        sent.append(max(out.values(), default=0))
        received.append(max(back.values(), default=0) if division.num_places > 1 else 0)

    slots = sum(max(sent[slot::NUM_SLOTS], default=0) for slot in range(NUM_SLOTS))
    in_flight = max(
        (sum(received[number : number + NUM_SLOTS]) for number in range(len(batches))), default=0
    )
    matrices = (matrix for _, division in batches for matrix in division.matrices)
    largest = max((matrix.iterated_numel for matrix in matrices), default=0)
    return (slots + in_flight + largest) * torch.bfloat16.itemsize


def divide(parameters: Sequence[HeldMatrices], loads: list[int]) -> Division:
    """Finds the owners of all matrices of which a place holds rows. The most expensive matrix comes
    first; each goes to the place with the smallest load of all that hold some of it.

    Args:
        loads: the cost of the matrices that each place owns already, which grows.

    Raises:
        ValueError: for a matrix that places hold only in part.
    """
    matrices: list[Matrix] = []
    segments: list[Segment] = []
    for index, held in enumerate(parameters):
        firsts = [0, *itertools.accumulate(held.num_rows)]
        found: dict[int, list[tuple[int, range]]] = {}
        for place, rows in sorted(enumerate(held.rows_at), key=lambda each: each[1].start):
            number = bisect.bisect_right(firsts, rows.start) - 1
            while rows and number < len(held.num_rows) and firsts[number] < rows.stop:
                own = range(max(rows.start, firsts[number]), min(rows.stop, firsts[number + 1]))
                found.setdefault(number, []).append((place, own))
                number += 1

        for number, parts in sorted(found.items()):
            num_rows = held.num_rows[number]
            if sum(len(rows) for _, rows in parts) != num_rows:
                raise ValueError(
                    f"Expected all {num_rows} rows of a matrix on ranks that exchange them, got "
                    f"{[len(rows) for _, rows in parts]}."
                )
            segments += [
                Segment(len(matrices), place, rows.start - firsts[number], len(rows))
                for place, rows in parts
                if rows
            ]
            matrices.append(Matrix(index, firsts[number], num_rows, held.num_columns))
    return Division(len(loads), matrices, segments, _owners(matrices, segments, loads))


def _owners(matrices: Sequence[Matrix], segments: Sequence[Segment], loads: list[int]) -> list[int]:
    holders: list[list[int]] = [[] for _ in matrices]
    for segment in segments:
        holders[segment.matrix].append(segment.place)

    # A place that has a whole matrix keeps it, so these matrices come first.
    def order(number: int) -> tuple[bool, int]:
        return len(holders[number]) > 1, -matrices[number].cost

    owners = [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=order):
        owners[number] = min(holders[number], key=lambda place: (loads[place], place))
        loads[owners[number]] += matrices[number].cost
    return owners
