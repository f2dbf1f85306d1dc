from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.layout.boxes import (
    Box,
    BoxIndex,
    range_of,
    ranges,
    row_major_strides,
)

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(
        offsets,
        tuple(
            draw(st.integers(1, size - start)) for start, size in zip(offsets, shape, strict=True)
        ),
    )


def places(box: Box) -> set[tuple[int, ...]]:
    return set(
        itertools.product(*(range(start, start + size) for start, size in zip(*box, strict=True)))
    )


@given(SHAPES.flatmap(lambda shape: st.tuples(boxes_in(shape), boxes_in(shape))))
def test_an_overlap_has_the_elements_of_both_boxes(pair: tuple[Box, Box]):
    one, other = pair
    overlap = one.overlap(other)
    assert (set() if overlap is None else places(overlap)) == places(one) & places(other)
    assert one.covers(other) == (places(other) <= places(one))


@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.lists(boxes_in(shape), max_size=12), boxes_in(shape)))
)
def test_an_index_finds_exactly_the_overlapping_boxes(drawn: tuple[list[Box], Box]):
    boxes, wanted = drawn
    found = list(BoxIndex(boxes).overlaps(wanted))
    assert sorted(found) == [
        (number, wanted.overlap(box)) for number, box in enumerate(boxes) if wanted.overlap(box)
    ]
    rows = [boxes[number].offsets[:1] for number, _ in found]
    assert rows == sorted(rows)


def test_an_index_reads_only_boxes_with_near_rows():
    boxes = _Recording(Box((999 - number, 0), (1, 4)) for number in range(1000))
    index = BoxIndex(boxes)
    boxes.seen.clear()
    found = [number for number, _ in index.overlaps(Box((500, 0), (3, 2)))]
    assert found == boxes.seen == [499, 498, 497], "those given, in the order of rows"


class _Recording(list[Box]):
    """Records the boxes that are read."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__(boxes)
        self.seen: list[int] = []

    def __getitem__(self, place):
        self.seen.append(place)
        return super().__getitem__(place)


def test_boxes_without_elements_have_no_overlaps():
    assert Box((2,), (0,)).overlap(Box((0,), (4,))) is None
    assert list(BoxIndex([Box((0,), (4,))]).overlaps(Box((2,), (0,)))) == []
    assert list(BoxIndex([]).overlaps(Box((0,), (4,)))) == []


@given(SHAPES)
def test_strides_match_a_contiguous_tensor(shape: tuple[int, ...]):
    assert row_major_strides(shape) == torch.empty(shape).stride()


@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))),
    st.integers(1, 300),
    st.integers(0, 300),
)
def test_ranges_hold_each_element_of_the_box_once_in_the_order_of_memory(
    drawn, max_span: int, max_gap: int
):
    shape, box = drawn
    memory = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = list(ranges(box, shape, max_span=max_span, max_gap=max_gap))
    seen = []
    for part in parts:
        elements = memory[part.box.slices()].flatten().tolist()
        assert (part.start, part.start + part.span - 1) == (elements[0], elements[-1])
        assert part.span <= max_span
        assert max((b - a - 1 for a, b in itertools.pairwise(elements)), default=0) <= max_gap
        assert part.is_gapless == (part.span == len(elements))
        seen += elements
    assert seen == memory[box.slices()].flatten().tolist()
    whole = range_of(box, shape)
    assert (whole.start, whole.start + whole.span - 1) == (seen[0], seen[-1])
    if whole.span <= max_span and max_gap >= memory.numel():
        assert parts == [whole]
