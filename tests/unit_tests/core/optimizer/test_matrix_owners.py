from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer.matrix_owners import Division, HeldMatrices, divide


def cut(num_rows: int, cuts: list[int]) -> tuple[range, ...]:
    """Rows of each place, in an order in which places need not follow each other."""
    edges = [0, *sorted(min(edge, num_rows) for edge in cuts), num_rows]
    rows = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    return (*rows[1:], rows[0])


@st.composite
def stacks(draw: st.DrawFn) -> list[HeldMatrices]:
    num_places = draw(st.integers(1, 5))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        num_rows = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
        edge = st.integers(0, sum(num_rows))
        cuts = draw(st.lists(edge, min_size=num_places - 1, max_size=num_places - 1))
        found.append(HeldMatrices(num_rows, draw(st.integers(1, 9)), cut(sum(num_rows), cuts)))
    return found


def messages(division: Division, stack: list[HeldMatrices]) -> list[list[list[tuple]]]:
    """What each place sends to each: (matrix, row), element by element of a message."""
    places = range(len(stack[0].rows_at))
    return [
        [
            [
                (segment.matrix, segment.first_row + row)
                for segment in division.sent(source)
                if division.owners[segment.matrix] == owner
                for row in range(segment.num_rows)
            ]
            for owner in places
        ]
        for source in places
    ]


@settings(deadline=None)
@given(stacks())
def test_owners_get_every_row_once_in_the_order_in_which_it_is_sent(stack):
    num_places = len(stack[0].rows_at)
    loads = [0] * num_places
    division = divide(stack, loads)
    sent = messages(division, stack)
    for owner in range(num_places):
        got = [row for source in range(num_places) for row in sent[source][owner]]
        listed = [
            (segment.matrix, segment.first_row + row)
            for segment in division.received(owner)
            for row in range(segment.num_rows)
        ]
        assert got == listed
        own = [number for number, who in enumerate(division.owners) if who == owner]
        assert sorted(got) == [
            (number, row) for number in own for row in range(division.matrices[number].num_rows)
        ]
        assert loads[owner] == sum(division.matrices[number].cost for number in own)

    # Every matrix of every parameter, and its owner has some of it.
    assert [matrix.num_rows for matrix in division.matrices] == [
        rows for held in stack for rows in held.num_rows
    ]
    for number, owner in enumerate(division.owners):
        matrix = division.matrices[number]
        rows = stack[matrix.parameter].rows_at[owner]
        assert any(matrix.first_row + row in rows for row in range(matrix.num_rows))


@given(num_places=st.integers(1, 8), num_layers=st.integers(2, 6))
def test_costs_are_balanced_and_a_place_sends_four_bytes_for_each_of_its_elements(
    num_places, num_layers
):
    """Matrices of a layer in even cuts, as of a model with a few layers for each rank."""
    shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (256, 128), (256, 128), (128, 256)]
    stack = [
        HeldMatrices(
            (rows,), columns, cut(rows, [rows * n // num_places for n in range(1, num_places)])
        )
        for rows, columns in shapes * num_layers * num_places
    ]
    loads = [0] * num_places
    division = divide(stack, loads)
    assert max(loads) <= 1.1 * sum(loads) / num_places
    numel = sum(held.numel for held in stack)
    for place in range(num_places):
        travelling = sum(
            division.numel(segment)
            for segment in division.segments
            if (segment.place == place) != (division.owners[segment.matrix] == place)
        )
        assert 2 * travelling <= 1.1 * 4 * numel / num_places


def test_a_place_keeps_what_it_has_whole_and_others_take_the_rest():
    whole = HeldMatrices((4, 4), 4, (range(8), range(8, 8)))
    shared = HeldMatrices((8,), 4, (range(4), range(4, 8)))
    assert divide([shared, whole], [0, 0]).owners == [1, 0, 0]


def test_rows_of_other_blocks_are_left_out_but_no_part_of_a_matrix_is():
    """On a kept axis, the other ranks' rows are on no place."""
    held = HeldMatrices((2, 2, 2, 2), 3, (range(4, 7), range(7, 8)))
    division = divide([held], [0, 0])
    assert [matrix.first_row for matrix in division.matrices] == [4, 6]
    assert [tuple(segment) for segment in division.segments] == [
        (0, 0, 0, 2),
        (1, 0, 0, 1),
        (1, 1, 1, 1),
    ]
    with pytest.raises(ValueError, match="all 2 rows"):
        divide([held._replace(rows_at=(range(3, 7), range(7, 8)))], [0, 0])
