"""Boxes of a tensor: their overlaps, and their ranges of memory. Integers only.

A chunk is a box of its tensor, stored row-major in its file. A box that a rank wants may overlap
several chunks, and the part in one of them need not be contiguous there: the first two columns of a
chunk of shape (3, 5) are

    0 1 . . .       0 1 . . . 5 6 . . . 10 11 . . .
    5 6 . . .       ^-----------------------^ one range of 12 elements, with gaps of 3, or
   10 11. . .       ^-^       ^-^       ^---^ three ranges of 2
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class Box(NamedTuple):
    """A hyper-rectangle of a tensor; a scalar's has no dims."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The box of all elements in both; None if empty."""
        starts, sizes = [], []
        for start, size, other_start, other_size in zip(*self, *other, strict=True):
            begin, end = max(start, other_start), min(start + size, other_start + other_size)
            if begin >= end:
                return None
            starts.append(begin)
            sizes.append(end - begin)
        return Box(tuple(starts), tuple(sizes))

    def covers(self, other: Box) -> bool:
        """Whether all of `other` is in this box."""
        return all(
            start <= other_start and other_start + other_size <= start + size
            for start, size, other_start, other_size in zip(*self, *other, strict=True)
        )

    def within(self, origin: Sequence[int]) -> Box:
        """The same box, seen from `origin`."""
        return Box(
            tuple(start - zero for start, zero in zip(self.offsets, origin, strict=True)),
            self.sizes,
        )

    def slices(self) -> tuple[slice, ...]:
        """As an index of a tensor."""
        return tuple(slice(start, start + size) for start, size in zip(*self, strict=True))


class BoxIndex:
    """Finds the boxes of a tensor that overlap another box.

    Only boxes that overlap in the first dim are looked at, along which nearly all tensors are cut.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._order = sorted(range(len(boxes)), key=lambda number: boxes[number].offsets[:1])
        rows = [_rows(boxes[number]) for number in self._order]
        self._starts = [start for start, _ in rows]
        # Boxes may overlap and have any length. The furthest that any box up to this one reaches
        # ascends all the same, so it can be bisected.
        self._reaches = list(accumulate((stop for _, stop in rows), max))

    def overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The boxes that overlap `box`, in the order of rows: their numbers, and the overlap."""
        start, stop = _rows(box)
        # Boxes before `first` end by `start`; boxes from `last` on start at `stop` or later.
        first, last = bisect_right(self._reaches, start), bisect_left(self._starts, stop)
        for number in self._order[first:last]:
            overlap = box.overlap(self._boxes[number])
            if overlap is not None:
                yield number, overlap


def _rows(box: Box) -> tuple[int, int]:
    """The first row, and the one behind the last; a scalar counts as a row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """In elements, of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


class Range(NamedTuple):
    """The range of a box in row-major memory."""

    box: Box
    start: int  # of the first element
    span: int  # from the first to the last, gaps included

    @property
    def is_gapless(self) -> bool:
        return self.span == self.box.numel


def range_of(box: Box, whole: Sequence[int]) -> Range:
    """The range of a box with elements in a contiguous tensor of sizes `whole`."""
    strides = row_major_strides(whole)
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return Range(box, start, _span(box.sizes, strides))


def ranges(box: Box, whole: Sequence[int], *, max_span: int, max_gap: int) -> Iterator[Range]:
    """Cuts a box into short ranges of a contiguous tensor, in the order of memory.

    Args:
        box: it must have elements.
        whole: the sizes of the tensor.
        max_span: elements, at least 1; no range is longer.
        max_gap: elements; no gap within a range is longer.
    """
    yield from _cut(range_of(box, whole), row_major_strides(whole), 0, max_span, max_gap)


def pieces(shape: Sequence[int], max_numel: int) -> Iterator[Box]:
    """Cuts a tensor into boxes of at most `max_numel` elements that follow each other in memory."""
    if math.prod(shape):
        for part in ranges(Box.whole(shape), shape, max_span=max_numel, max_gap=0):
            yield part.box


def _cut(
    part: Range, strides: tuple[int, ...], dim: int, max_span: int, max_gap: int
) -> Iterator[Range]:
    """Cuts along `dim` and later dims; the part has one index in each earlier one."""
    offsets, sizes = part.box
    # Dims before `dim` have one index each, and so no gaps.
    gap = max((_gap(sizes, strides, inner) for inner in range(dim, len(sizes))), default=0)
    if part.span <= max_span and gap <= max_gap:
        yield part
        return

    assert dim < len(sizes), "a part with one index in every dim is one element"
    if sizes[dim] == 1:
        yield from _cut(part, strides, dim + 1, max_span, max_gap)
        return

    # As many indices as fit; one at a time if the elements of a single one must be cut further.
    one = _span(sizes[dim + 1 :], strides[dim + 1 :])
    count = 1 if gap > max_gap or one > max_span else (max_span - one) // strides[dim] + 1
    for index in range(0, sizes[dim], count):
        size = min(count, sizes[dim] - index)
        box = Box(_replaced(offsets, dim, offsets[dim] + index), _replaced(sizes, dim, size))
        span = (size - 1) * strides[dim] + one
        yield from _cut(
            Range(box, part.start + index * strides[dim], span), strides, dim, max_span, max_gap
        )


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _gap(sizes: Sequence[int], strides: Sequence[int], dim: int) -> int:
    """Elements skipped between one index of `dim` and the next."""
    return strides[dim] - _span(sizes[dim + 1 :], strides[dim + 1 :]) if sizes[dim] > 1 else 0


def _replaced(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
