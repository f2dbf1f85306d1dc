"""Histories of maxima: what a scale is computed from, step by step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron.core.low_precision.amax_history import AmaxHistory, Slot, advance, update_histories
from megatron.core.low_precision.recipes import HistoryOptions
from tests.helpers.ranks import on_ranks


def chosen_after(history: AmaxHistory, *maxima: float) -> list[float]:
    """What is chosen for the inputs after each of some steps."""
    found = []
    for maximum in maxima:
        history.maximum(Slot.INPUTS, torch.tensor([maximum / 2, maximum]))
        advance([history], history.current[None])
        found.append(history.chosen(Slot.INPUTS).item())
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (HistoryOptions(1, "most_recent"), [5, 3, 4, 2]),
        (HistoryOptions(1, "max"), [5, 3, 4, 2]),
        (HistoryOptions(3, "most_recent"), [5, 3, 4, 2]),
        (HistoryOptions(3, "max"), [5, 5, 5, 4]),
    ],
)
def test_the_latest_maximum_is_chosen_or_the_largest_of_the_window(
    options: HistoryOptions, expected: list[float]
) -> None:
    assert chosen_after(AmaxHistory(options), 5, 3, 4, 2) == expected


def test_a_step_without_a_finite_maximum_changes_nothing() -> None:
    history = AmaxHistory(HistoryOptions(2, "max"))
    assert chosen_after(history, 5, math.inf, 0, math.nan, 3, 2) == [5, 5, 5, 5, 5, 3]


def test_before_the_first_step_ends_an_operand_is_scaled_by_its_own_maximum() -> None:
    history = AmaxHistory(HistoryOptions(2, "max"))
    assert history.maximum(Slot.WEIGHT, torch.tensor([2.0, 7.0])).tolist() == [[7.0]]
    assert history.maximum(Slot.WEIGHT, torch.tensor(4.0)).tolist() == [[4.0]]
    advance([history], history.current[None])
    assert history.maximum(Slot.WEIGHT, torch.tensor(9.0)).tolist() == [[7.0]]


def test_evaluation_records_nothing() -> None:
    history = AmaxHistory(HistoryOptions(2, "max")).eval()
    history.maximum(Slot.INPUTS, torch.tensor(5.0))
    assert history.current.tolist() == [0, 0, 0]


@on_ranks(2)
def test_a_step_ends_with_the_maxima_of_all_ranks() -> None:
    histories = [AmaxHistory(HistoryOptions(2, "max")) for _ in range(2)]
    histories[0].maximum(Slot.INPUTS, torch.tensor(3.0 + dist.get_rank()))
    histories[1].maximum(Slot.GRADIENT, torch.tensor(9.0 - dist.get_rank()))
    update_histories(histories, dist.group.WORLD)
    assert [[history.chosen(slot).item() for slot in Slot] for history in histories] == [
        [4, 0, 0],
        [0, 0, 9],
    ]
    assert all(not history.current.any() for history in histories)
