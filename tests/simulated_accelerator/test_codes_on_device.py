"""Weights gathered as codes on accelerators whose lanes are slow or late: the same losses."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.behaviours import (
    GPU,
    LANES_LAST,
    ONE_QUEUE,
    WITH_PAUSES,
    Behaviour,
    these_behaviours,
)
from tests.unit_tests.training.helpers.code_runs import (
    ON_DEVICE,
    engine_for,
    expect_same,
    on_host,
    same_attention,
    train,
)

OPTIMIZERS = {"on the device": ON_DEVICE, "half on the host": on_host(0.5)}


def _same(name: str, recipe: str, behaviour: Behaviour) -> None:
    with behaviour.applied(), same_attention():
        expected = train(engine_for(False, recipe), range(4))
        expect_same(train(engine_for(True, recipe, OPTIMIZERS[name]), range(4)), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "recipe", ["blockwise", "delayed", pytest.param("nvfp4", marks=pytest.mark.wide)]
)
@these_behaviours(WITH_PAUSES, LANES_LAST, ONE_QUEUE, GPU)
def test_codes_change_no_loss(name: str, recipe: str, behaviour: Behaviour) -> None:
    run_ranks(2, _same, name, recipe, behaviour, device=behaviour.kind)
