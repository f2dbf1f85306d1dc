"""The settings that models of many shapes are trained in."""

from __future__ import annotations

import pytest

from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import ON_TWO_AXES
from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import Setting


@pytest.fixture(
    params=[
        pytest.param(Setting(2, ("optim", "optim_grads_params")), id="2"),
        pytest.param(
            Setting(2, SHARDING_STRATEGIES, delay_seed=1), id="2-delayed", marks=pytest.mark.wide
        ),
        pytest.param(
            Setting(4, ("optim", "optim_grads_params", *ON_TWO_AXES)),
            id="4",
            marks=pytest.mark.wide,
        ),
    ]
)
def setting(request: pytest.FixtureRequest) -> Setting:
    value: Setting = request.param
    return value
