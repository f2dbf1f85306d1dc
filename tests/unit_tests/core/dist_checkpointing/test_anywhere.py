"""A checkpoint is loaded wherever it is wanted: any ranks, strategy, share of offloading, fused or
not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    HFSDP,
    HSDP,
    ITERATION,
    Setting,
    Trained,
    build_gpt,
    canonical,
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
    """Where a run is, and how."""

    world_size: int
    setting: Setting

    def __str__(self) -> str:
        return f"{self.world_size}-{self.setting}"

    @property
    def topology(self) -> tuple[int, str]:
        return self.world_size, self.setting.strategy


def _train_and_save(root: str, setting: Setting) -> None:
    """Saves after two steps, while the run goes on, and leaves its tensors then and its next losses
    beside.
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
    """What a run has become that has loaded a checkpoint."""

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
    """Runs that have saved: each is run when it is asked for first."""

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
    (1, "no_shard", None, FUSED, TIED): [
        (1, "no_shard", 0.5, FUSED),
        (2, "optim_grads_params", None, UNFUSED),
    ],
    (1, "optim_grads_params", 0.5, UNFUSED, UNTIED): [
        (3, "optim_grads_params", 0.0, UNFUSED),
        (4, HFSDP, 0.5, FUSED),
    ],
    (2, "optim", 1.0, UNFUSED, TIED): [(2, "optim", 0.5, UNFUSED), (3, "optim_grads", 1.0, FUSED)],
    (2, "optim_grads_params", 0.0, FUSED, UNTIED): [
        (4, "optim_grads_params", 1.0, FUSED),
        (1, "optim", 0.0, UNFUSED),
    ],
    (3, "no_shard", 0.5, FUSED, UNTIED): [(3, "no_shard", None, FUSED), (4, HSDP, 1.0, UNFUSED)],
    (3, "optim_grads", None, UNFUSED, TIED): [
        (1, "no_shard", 0.0, FUSED),
        (2, "optim_grads", 1.0, UNFUSED),
    ],
    (4, HSDP, 0.0, UNFUSED, UNTIED): [
        (4, HSDP, 0.5, UNFUSED),
        (1, "optim_grads_params", None, FUSED),
    ],
    (4, HFSDP, 1.0, FUSED, TIED): [
        (4, HFSDP, None, FUSED),
        (2, "no_shard", None, FUSED),
        (3, "optim", 0.0, UNFUSED),
    ],
}


def _cut() -> list[Way]:
    """A few of all ways: what `make test` takes."""
    return [
        Way(
            Place(world_size, Setting(strategy, fraction, is_fused, is_tied)),
            Place(target[0], Setting(*target[1:], is_tied)),
        )
        for (world_size, strategy, fraction, is_fused, is_tied), targets in _CUT.items()
        for target in targets
    ]


def _all_topologies() -> list[Way]:
    """From every topology to every other, the rest in rotation."""
    kinds = list(itertools.product(FRACTIONS, (FUSED, UNFUSED), (TIED, UNTIED)))
    others = list(itertools.product(FRACTIONS, (FUSED, UNFUSED)))
    ways = []
    for (i, (size, strategy)), (j, (other_size, other)) in itertools.product(
        enumerate(TOPOLOGIES), repeat=2
    ):
        # 3 has no divisor in common with the number of others: each topology comes to know all of
        # them.
        (fraction, is_fused, is_tied), target = (
            kinds[i % len(kinds)],
            others[(i + 3 * j) % len(others)],
        )
        source = Place(size, Setting(strategy, fraction, is_fused, is_tied))
        ways.append(Way(source, Place(other_size, Setting(other, *target, is_tied))))
    return ways


def _all_options() -> list[Way]:
    """From every way to set up a model and its optimizer to every other, from three ranks to two,
    and four to four.
    """
    models = list(itertools.product(FRACTIONS, (FUSED, UNFUSED)))
    return [
        Way(
            Place(size, Setting(strategy, fraction, is_fused, is_tied)),
            Place(other_size, Setting(other, other_fraction, is_other_fused, is_tied)),
        )
        for size, strategy, other_size, other in (
            (3, "optim_grads_params", 2, "optim"),
            (4, HFSDP, 4, HSDP),
        )
        for (fraction, is_fused), (other_fraction, is_other_fused) in itertools.product(
            models, models
        )
        for is_tied in (TIED, UNTIED)
    ]


def test_the_few_ways_that_are_always_tried_cover_all_pairs_of_ranks_and_of_options():
    ways = _cut()
    assert {(w.source.world_size, w.target.world_size) for w in ways} == set(
        itertools.product((1, 2, 3, 4), repeat=2)
    )
    settings = [(way.source.setting, way.target.setting) for way in ways]
    assert {(a.fraction, b.fraction) for a, b in settings} == set(
        itertools.product(FRACTIONS, repeat=2)
    )
    kinds = {(a.is_fused, b.is_fused, a.is_tied) for a, b in settings}
    assert kinds == set(itertools.product((True, False), repeat=3))
    for side in (0, 1):
        assert {pair[side].strategy for pair in settings} == {*SHARDING_STRATEGIES, HSDP, HFSDP}
    same = {w.source.topology for w in ways if w.source.topology == w.target.topology}
    assert {world_size for world_size, _ in same} == {1, 2, 3, 4}
    assert {HSDP, HFSDP} < {strategy for _, strategy in same}


def test_ranks_cut_fused_weights_inside_their_sections():
    layer = build_gpt(Setting()).decoder.layers[0]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = set()
    for num_ranks in (3, 4):
        layout = GlobalLayout.build([parameter.shape for parameter in parameters], num_ranks)
        for rank in range(num_ranks):
            for chunk in layout.chunks(layout.local_range((num_ranks,), (True,), (rank,))):
                begin, name = 0, names[chunk.tensor]
                for section, num_rows in canonical(name, parameters[chunk.tensor].shape[0]):
                    if begin < chunk.first_row < begin + num_rows and section != name:
                        found.add(section)
                    begin += num_rows
    assert found == {
        "self_attention.key.weight",
        "self_attention.value.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
    }


@pytest.mark.parametrize("way", _cut(), ids=str)
def test_a_run_goes_on_wherever_its_checkpoint_is_loaded(sources, way):
    # Half of the targets have states already, and updates of them under way.
    sources.expect_loaded(*way, num_steps_before=way.target.world_size % 2)


@pytest.mark.wide
@pytest.mark.parametrize("way", [*_all_topologies(), *_all_options()], ids=str)
def test_a_run_goes_on_wherever_its_checkpoint_is_loaded_in_all_topologies(sources, way):
    sources.expect_loaded(*way, num_steps_before=0)
