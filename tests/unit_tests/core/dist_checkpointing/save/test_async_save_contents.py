"""Saving during training: the saved values are those at the start of the save, and training is not
changed by it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
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
)

FRACTIONS = (None, 0.0, 0.5, 1.0)


NUM_STEPS, SAVED_AFTER = 4, (1, 3)  # steps


class Trained(NamedTuple):
    """The results of a run on one rank."""

    saved: list[Parts]  # after the steps that are saved
    last: Parts


def _train(fraction: float | None, with_states: bool) -> Trained:
    """Trains without saving."""
    training, saved = Training(fraction, with_states=with_states), []
    for number in range(1, NUM_STEPS + 1):
        training.backward(number)
        training.update(number)
        if number in SAVED_AFTER:
            saved.append(training.parts())
    return Trained(saved, training.parts())


def _train_and_save(fraction: float | None, with_states: bool, root: Path, seed: int) -> Parts:
    """Every save starts while updates are in flight, and reads only after the next update has
    started.
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
                # The previous save has been running until here.
                manager.finish()
                gate, contents = threading.Event(), training.contents()
                hold_all_back(contents, gate)
                manager.save(number, contents, {"number": number})
        gate.set()
        manager.finish()
    return training.parts()


def _saves_values(
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


@pytest.mark.parametrize(
    ("world_size", "fraction", "seeds"),
    [
        (1, 1.0, range(6)),
        (1, None, range(4)),
        (2, 0.5, range(4)),
        *(
            pytest.param(world_size, fraction, range(20), marks=pytest.mark.wide)
            for world_size, fraction in itertools.product((1, 2), FRACTIONS)
        ),
    ],
)
def test_a_save_during_training_has_the_values_at_its_start_under_any_delays(
    home, world_size, fraction, seeds
):
    root = home / f"{fraction}_{world_size}_{len(seeds)}"
    run_ranks(world_size, _saves_values, fraction, True, root, seeds, timeout=600)


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_a_save_of_weights_alone_has_the_values_at_its_start_under_any_delays(home, fraction):
    run_ranks(1, _saves_values, fraction, False, home / f"weights_{fraction}", range(2))


def hold_all_back(contents: Contents, gate: threading.Event) -> None:
    """Delays all reads until an event, except the copies at the start of a save."""
    hold_entries_back(contents.entries, gate)
