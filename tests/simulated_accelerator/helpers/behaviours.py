"""The ways in which the device behaves while the project's own suites run on it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest


class Behaviour(NamedTuple):
    """Fields of the simulator's `Settings`, as plain values: this process must not import the
    simulator.
    """

    schedule: int  # device.Schedule
    poison: int  # device.Poison
    seed: int = 0

    def settings(self) -> Any:
        """For a rank."""
        import tests.simulated_accelerator.device as sim

        pause = 200 if self.schedule == sim.Schedule.PAUSES else 0
        return sim.Settings(
            sim.Schedule(self.schedule), sim.Poison(self.poison), max_pause_us=pause, seed=self.seed
        )

    def __str__(self) -> str:
        order = (f"pauses {self.seed}", "lanes last", "default last")[self.schedule]
        return f"{order}, poison when {('', 'freed', 'reused')[self.poison]}"


_PAUSES, _LANES_LAST, _DEFAULT_LAST = range(3)
_WHEN_FREED, _WHEN_REUSED = 1, 2

LANES_LAST = Behaviour(_LANES_LAST, _WHEN_REUSED)
DEFAULT_LAST = Behaviour(_DEFAULT_LAST, _WHEN_FREED)
WITH_PAUSES = Behaviour(_PAUSES, _WHEN_REUSED, seed=3)

_FEW = (LANES_LAST, DEFAULT_LAST)
_ALL = (
    *(
        Behaviour(_PAUSES, poison, seed)
        for seed, poison in itertools.product((3, 4, 5), (_WHEN_FREED, _WHEN_REUSED))
    ),
    *(
        Behaviour(order, poison)
        for order in (_LANES_LAST, _DEFAULT_LAST)
        for poison in (_WHEN_FREED, _WHEN_REUSED)
    ),
)

few_behaviours = pytest.mark.parametrize("behaviour", _FEW, ids=str)


def all_behaviours(*by_default: Behaviour) -> pytest.MarkDecorator:
    """Parametrises with every behaviour; all but the given ones are left to `make test-all`."""
    return pytest.mark.parametrize(
        "behaviour",
        [pytest.param(each, marks=() if each in by_default else pytest.mark.wide) for each in _ALL],
        ids=str,
    )
