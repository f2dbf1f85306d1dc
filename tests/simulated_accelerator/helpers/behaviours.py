"""The ways in which devices behave while the project's own suites run on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest

from tests.helpers import gpu


class Behaviour(NamedTuple):
    """How a kind of device behaves, as plain values: this process must not import the simulator.

    A GPU is left alone, or pauses before the work of its lanes if there is a seed.
    """

    kind: str = "sim"  # or "cuda"
    schedule: int = 0  # device.Schedule
    poison: int = 0  # device.Poison
    seed: int | None = None

    @property
    def mark(self) -> pytest.MarkDecorator:
        """The mark of tests on this kind of device."""
        return pytest.mark.gpu if self.kind == "cuda" else pytest.mark.sim

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While open, the devices of this rank behave so."""
        if self.kind == "cuda":
            with nullcontext() if self.seed is None else gpu.pauses(self.seed):
                yield
            return

        import tests.simulated_accelerator.device as sim

        pause = 200 if self.schedule == sim.Schedule.PAUSES else 0
        schedule, poison = sim.Schedule(self.schedule), sim.Poison(self.poison)
        sim.configure(sim.Settings(schedule, poison, max_pause_us=pause, seed=self.seed or 0))
        try:
            yield
        finally:
            sim.configure(sim.Settings())

    def __str__(self) -> str:
        if self.kind == "cuda":
            return "GPU" if self.seed is None else f"GPU, pauses {self.seed}"
        order = (f"pauses {self.seed}", "lanes last", "default last", "one queue")[self.schedule]
        return f"{order}, poison when {('', 'freed', 'reused')[self.poison]}"


_PAUSES, _LANES_LAST, _DEFAULT_LAST, _ONE_QUEUE = range(4)
_WHEN_FREED, _WHEN_REUSED = 1, 2

LANES_LAST = Behaviour("sim", _LANES_LAST, _WHEN_REUSED)
DEFAULT_LAST = Behaviour("sim", _DEFAULT_LAST, _WHEN_FREED)
ONE_QUEUE = Behaviour("sim", _ONE_QUEUE, _WHEN_REUSED)
WITH_PAUSES = Behaviour("sim", _PAUSES, _WHEN_REUSED, seed=3)
GPU, GPU_WITH_PAUSES = Behaviour("cuda"), Behaviour("cuda", seed=3)

ALL = (
    *(
        Behaviour("sim", _PAUSES, poison, seed)
        for seed, poison in itertools.product((3, 4, 5), (_WHEN_FREED, _WHEN_REUSED))
    ),
    *(
        Behaviour("sim", order, poison)
        for order in (_LANES_LAST, _DEFAULT_LAST, _ONE_QUEUE)
        for poison in (_WHEN_FREED, _WHEN_REUSED)
    ),
)


def these_behaviours(*behaviours: Behaviour) -> pytest.MarkDecorator:
    """Parametrises with these behaviours."""
    return _parametrised([pytest.param(each, marks=each.mark) for each in behaviours])


def all_behaviours(*by_default: Behaviour) -> pytest.MarkDecorator:
    """Parametrises with these behaviours, and leaves all others of the simulated accelerator to
    `make test-all`.
    """
    others = [each for each in ALL if each not in by_default]
    return _parametrised(
        [
            *(pytest.param(each, marks=each.mark) for each in by_default),
            *(pytest.param(each, marks=(each.mark, pytest.mark.wide)) for each in others),
        ]
    )


def _parametrised(parameters: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("behaviour", parameters, ids=str)
