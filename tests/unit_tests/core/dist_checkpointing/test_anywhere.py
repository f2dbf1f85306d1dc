"""A checkpoint loads with any number of ranks, strategy and offloaded fraction, fused or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    HFSDP,
    HSDP,
    ITERATION,
    Setting,
    Trained,
    differences,
    full_tensors,
    manager_of,
)

NUM_LOSSES = 3
FRACTIONS = (None, 0.0, 0.5, 1.0)
TOPOLOGIES = [
    *itertools.product((1, 2, 3, 4), SHARDING_STRATEGIES),
    (4, HSDP),
    (4, HFSDP),
]


class Place(NamedTuple):
    """A run's number of ranks, and its setting."""

    world_size: int
    setting: Setting

    def __str__(self) -> str:
        return f"{self.world_size}-{self.setting}"

    @property
    def topology(self) -> tuple[int, str]:
        return self.world_size, self.setting.strategy


def _train_and_save(root: str, setting: Setting) -> None:
    """Saves after two steps while training continues, and stores the tensors at that step and the
    next losses next to the checkpoint.
    """
    trained = Trained(setting, seed=0)
    for number in range(ITERATION):
        trained.delay_update()
        trained.step(number)
    with manager_of(root, trained) as manager:
        manager.save(ITERATION, trained.contents(), {})
        expected = full_tensors(trained)
        losses = [trained.step(number) for number in range(ITERATION, ITERATION + NUM_LOSSES)]
        manager.finish()
    if trained.rank == 0:
        torch.save(expected, f"{root}/expected.pt")
        (Path(root) / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


class Loaded(NamedTuple):
    """A run after it has loaded a checkpoint."""

    differences: list[str]
    losses: list[float]


def _load(root: str, setting: Setting, num_steps_before: int) -> Loaded:
    """Loads into a run with other weights, constants and, if it has stepped, states."""
    trained = Trained(setting, seed=1, lr=1e-3)
    for number in range(num_steps_before):
        trained.delay_update()
        trained.step(100 + number)
    trained.load(root)
    found = differences(full_tensors(trained), torch.load(f"{root}/expected.pt", weights_only=True))
    return Loaded(
        found, [trained.step(number) for number in range(ITERATION, ITERATION + NUM_LOSSES)]
    )


class Sources:
    """Runs that have saved. Each runs on first use."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._roots: dict[Place, Path] = {}

    def root(self, source: Place) -> Path:
        if source not in self._roots:
            root = self._make_folder("source")
            run_ranks(source.world_size, _train_and_save, str(root), source.setting)
            self._roots[source] = root
        return self._roots[source]

    def expect_loaded(self, source: Place, target: Place, num_steps_before: int) -> None:
        root = self.root(source)
        losses = json.loads((root / "losses.json").read_text())
        assert len(set(losses)) == NUM_LOSSES
        for loaded in run_ranks(
            target.world_size, _load, str(root), target.setting, num_steps_before
        ):
            assert loaded.differences == []
            if (
                source.topology == target.topology
                and source.setting.is_fused == target.setting.is_fused
            ):
                assert loaded.losses == losses
            else:
                assert loaded.losses == pytest.approx(losses, rel=1e-5)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp)


class Way(NamedTuple):
    """From one place to another."""

    source: Place
    target: Place

    def __str__(self) -> str:
        return f"{self.source}-to-{self.target}"


FUSED, UNFUSED = True, False
TIED, UNTIED = True, False
# (ranks, strategy, offloaded, fused, tied) -> [(ranks, strategy, offloaded, fused)]
_CUT = {
    (1, "no_shard", None, FUSED, TIED): [(2, "optim_grads_params", None, UNFUSED)],
    (2, "optim_grads_params", 0.0, FUSED, UNTIED): [
        (4, HSDP, 1.0, FUSED),
        (1, "optim", 0.0, UNFUSED),
    ],
    (3, "optim_grads", None, UNFUSED, TIED): [(3, "optim_grads", 1.0, UNFUSED)],
    (4, HFSDP, 1.0, FUSED, TIED): [(4, HFSDP, 0.5, FUSED), (3, "optim", 0.0, UNFUSED)],
}


def _cut() -> list[Way]:
    """The few ways that `make test` runs."""
    return [
        Way(
            Place(world_size, Setting(strategy, fraction, is_fused, is_tied)),
            Place(target[0], Setting(*target[1:], is_tied)),
        )
        for (world_size, strategy, fraction, is_fused, is_tied), targets in _CUT.items()
        for target in targets
    ]


MUON = (("optimizer", "muon"),)


def _with_muon() -> list[Way]:
    """On every rank Muon keeps one state of matrices, and AdamW two of all else."""
    source = Place(4, Setting(optimizer=MUON))
    others = [Setting(HSDP, optimizer=MUON), Setting("optim", is_fused=UNFUSED, optimizer=MUON)]
    return [
        Way(source, source),
        Way(source, Place(4, others[0])),
        Way(source, Place(3, others[1])),
        Way(source, Place(1, others[1])),
    ]


def _all_topologies() -> list[Way]:
    """From every topology to every other, the rest in rotation."""
    kinds = list(itertools.product(FRACTIONS, (FUSED, UNFUSED), (TIED, UNTIED)))
    others = list(itertools.product(FRACTIONS, (FUSED, UNFUSED)))
    ways = []
    for (i, (size, strategy)), (j, (other_size, other)) in itertools.product(
        enumerate(TOPOLOGIES), repeat=2
    ):
        # 3 and the number of others are coprime: each topology is combined with all of them.
        (fraction, is_fused, is_tied), target = (
            kinds[i % len(kinds)],
            others[(i + 3 * j) % len(others)],
        )
        source = Place(size, Setting(strategy, fraction, is_fused, is_tied))
        ways.append(Way(source, Place(other_size, Setting(other, *target, is_tied))))
    return ways


@pytest.mark.parametrize("way", [*_cut(), *_with_muon()], ids=str)
def test_a_run_continues_wherever_its_checkpoint_is_loaded(sources, way):
    # Half of the targets have states already, and updates in flight.
    sources.expect_loaded(*way, num_steps_before=way.target.world_size % 2)


@pytest.mark.wide
@pytest.mark.parametrize("way", _all_topologies(), ids=str)
def test_a_run_continues_wherever_its_checkpoint_is_loaded_in_all_topologies(sources, way):
    sources.expect_loaded(*way, num_steps_before=0)
