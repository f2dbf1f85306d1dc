"""Saving beside the training: what is saved is what there was, and the training goes on as if
nothing were saved.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.save.data_sink import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.lanes import delays
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.async_saves import (
    CPU,
    Parts,
    Training,
    hold_entries_back,
    in_place,
    is_same,
    saved_parts,
    saving,
)

FRACTIONS = (None, 0.0, 0.5, 1.0)


NUM_STEPS, SAVED_AFTER = 4, (1, 3)  # steps


class Trained(NamedTuple):
    """What a run came to on one rank."""

    saved: list[Parts]  # what there was after the steps that are saved
    last: Parts


def _train(fraction: float | None, with_states: bool) -> Trained:
    """Without saving anything."""
    training, saved = Training(fraction, with_states=with_states), []
    for number in range(1, NUM_STEPS + 1):
        training.backward(number)
        training.update(number)
        if number in SAVED_AFTER:
            saved.append(training.parts())
    return Trained(saved, training.parts())


def _train_and_save(fraction: float | None, with_states: bool, root: Path, seed: int) -> Parts:
    """Every save begins while updates are under way, and reads nothing before the next update has
    begun.
    """
    training, gate = Training(fraction, with_states=with_states), threading.Event()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (
        delays(seed),
        in_place(seed % 2 == 0),
        CheckpointManager(LocalStore(root), CPU, rank, world_size, "abcd") as manager,
    ):
        for number in range(1, NUM_STEPS + 1):
            training.backward(number)
            assert manager.is_busy or number - 1 not in SAVED_AFTER
            gate.set()
            training.update(number)
            if number in SAVED_AFTER:
                # The save before has been under way all the time until here.
                manager.finish()
                gate, contents = threading.Event(), training.contents()
                hold_all_back(contents, gate)
                manager.save(number, contents, {"number": number})
        gate.set()
        manager.finish()
    return training.parts()


def _saves_what_there_was(
    fraction: float | None, with_states: bool, root: Path, seeds: Sequence[int]
) -> None:
    expected = _train(fraction, with_states)
    assert not is_same(expected.saved[0], expected.saved[1])
    large = [part for _, part in expected.last.values() if part.nbytes > 4096]
    assert sum(part.nbytes for part in large) > 0.9 * sum(
        part.nbytes for _, part in expected.last.values()
    )
    for seed in seeds:
        own = root / f"{seed}"
        assert is_same(_train_and_save(fraction, with_states, own, seed), expected.last), (
            "saving changes nothing"
        )
        for number, parts in zip(SAVED_AFTER, expected.saved, strict=True):
            assert is_same(saved_parts(own, number, parts), parts), seed
            checkpoint = PublishedCheckpoint.open(LocalStore(own), checkpoint_name(number))
            if with_states:
                groups: Any = checkpoint.read_plain(PARAM_GROUPS)
                assert groups[0]["lr"] == 1e-2 / (number + 1)
            assert checkpoint.train_state == {"number": number}


MANY, FEW = range(20), range(20, 25)
DELAYED = [
    (1, 1.0, MANY),
    (1, None, FEW),
    *((2, fraction, FEW) for fraction in (0.5, 1.0)),
]


@pytest.mark.parametrize(
    ("world_size", "fraction", "seeds"),
    [
        *(pytest.param(*case, id=f"{case[0]}-{case[1]}-{len(case[2])}") for case in DELAYED),
        *(
            pytest.param(
                world_size, fraction, MANY, id=f"{world_size}-{fraction}-20", marks=pytest.mark.wide
            )
            for world_size, fraction in itertools.product((1, 2), FRACTIONS)
            if (world_size, fraction, MANY) not in DELAYED
        ),
    ],
)
def test_a_save_beside_the_training_is_what_there_was_whatever_is_delayed(
    home, world_size, fraction, seeds
):
    root = home / f"{fraction}_{world_size}_{len(seeds)}"
    run_ranks(world_size, _saves_what_there_was, fraction, True, root, seeds, timeout=300)


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_a_save_of_weights_alone_is_what_there_was_whatever_is_delayed(home, fraction):
    run_ranks(1, _saves_what_there_was, fraction, False, home / f"weights_{fraction}", range(5))


def hold_all_back(contents: Contents, gate: threading.Event) -> None:
    """Has nothing be read before an event, but what a save copies when it begins."""
    hold_entries_back(contents.entries, gate)


# Failures.


class BrokenStore(LocalStore):
    """A store that takes nothing, or ends a program that hands it something."""

    def __init__(self, root: Path, error: BaseException) -> None:
        super().__init__(root)
        self._error = error

    def open_data(self, _: str) -> DataSink:
        raise self._error


def _saves_fail(fraction: float | None, root: Path) -> None:
    expected = _train(fraction, True)
    for error in (
        OSError("no disk"),
        RuntimeError("no driver"),
        KeyboardInterrupt(),
        MemoryError(),
    ):
        training = Training(fraction)
        with saving(root, BrokenStore(root, error)) as manager:
            for number in range(1, NUM_STEPS + 1):
                training.backward(number)
                training.update(number)
                manager.save(number, training.contents(), {})
                with pytest.raises(
                    CheckpointError,
                    match=rf"iter_000000{number} .* got: .*\({number} failed so far",
                ):
                    manager.finish()
        assert is_same(training.parts(), expected.last)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_saves_that_fail_change_nothing_of_the_training(home, fraction):
    run_ranks(1, _saves_fail, fraction, home / f"broken_{fraction}")
