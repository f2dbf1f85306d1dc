from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.loss_scaler import (
    ConstantLossScaler,
    DynamicLossScaler,
    LossScaler,
    build_loss_scaler,
)
from megatron.core.options import ConfigError

INF, CLEAN = True, False


def scales(scaler: LossScaler, steps: list[bool]) -> tuple[list[float], LossScaler]:
    """The scale after each step, and the scaler at the end."""
    found = []
    for found_inf in steps:
        scaler = scaler.after(found_inf)
        found.append(scaler.scale)
    return found, scaler


def reference(settings: dict[str, Any], steps: list[bool]) -> list[float]:
    """From the whole history: how many steps since the last event, instead of counters."""
    scale, found = settings["initial_loss_scale"], []
    # The step after the last doubling; the step after that or the last inf.
    doubled, clean_from = 0, 0
    for number, found_inf in enumerate(steps):
        if found_inf:
            clean_from = number + 1
            if steps[doubled : number + 1].count(INF) >= settings["hysteresis"]:
                scale = max(scale / 2, settings["min_loss_scale"])
        elif number + 1 - clean_from == settings["loss_scale_window"]:
            doubled = clean_from = number + 1
            scale *= 2
        found.append(scale)
    return found


SETTINGS = st.fixed_dictionaries(
    {
        "initial_loss_scale": st.sampled_from([1.0, 3.0, 8.0, 2.0**32]),
        "min_loss_scale": st.sampled_from([1.0, 0.75, 0.125]),
        "loss_scale_window": st.integers(1, 4),
        "hysteresis": st.integers(1, 4),
    }
)


@given(SETTINGS, st.lists(st.booleans(), max_size=40))
def test_the_scale_is_the_references_after_every_step(settings, steps):
    found, _ = scales(build_loss_scaler(OptimizerConfig(**settings)), steps)
    assert found == reference(settings, steps)


@given(SETTINGS, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
@example({"loss_scale_window": 3, "hysteresis": 3}, [CLEAN, INF, CLEAN, CLEAN], [CLEAN, INF, INF])
def test_a_scaler_that_continues_from_its_state_in_a_file_is_the_same_scaler(
    settings, before, after
):
    config = OptimizerConfig(**settings)
    _, scaler = scales(build_loss_scaler(config), before)
    resumed = build_loss_scaler(config).from_state(json.loads(json.dumps(scaler.state())))
    assert resumed == scaler
    assert scales(resumed, after) == scales(scaler, after)


def test_the_docstrings_example_is_what_happens():
    config = OptimizerConfig(initial_loss_scale=8.0, loss_scale_window=2, hysteresis=2)
    scaler = build_loss_scaler(config)
    assert isinstance(scaler, DynamicLossScaler)
    left = []
    found = []
    for found_inf in (CLEAN, CLEAN, INF, INF, INF, CLEAN, CLEAN, INF):
        scaler = scaler.after(found_inf)
        found.append(scaler.scale)
        left.append(scaler.hysteresis_tracker)
    assert found == [8, 16, 16, 8, 4, 4, 8, 8]
    assert left == [2, 2, 1, 0, -1, -1, 2, 1]


def test_megatrons_defaults_halve_the_scale_one_step_after_the_first_overflow():
    scaler = build_loss_scaler(OptimizerConfig())
    found, scaler = scales(scaler, [INF] * 3)
    assert found == [2.0**32, 2.0**31, 2.0**30]
    found, _ = scales(scaler, [CLEAN] * 1000)
    assert found[-2:] == [2.0**30, 2.0**31]


def test_a_scale_that_is_given_never_changes():
    scaler = build_loss_scaler(OptimizerConfig(loss_scale=128.0))
    assert scaler == ConstantLossScaler(128.0)
    assert set(scales(scaler, [INF, CLEAN] * 2000)[0]) == {128.0}


def test_between_a_given_scale_and_one_that_adapts_this_runs_flags_hold():
    given_scaler = ConstantLossScaler(128.0)
    dynamic = build_loss_scaler(OptimizerConfig())
    assert given_scaler.from_state(dynamic.after(INF).state()) is given_scaler
    assert dynamic.from_state(given_scaler.state()) == dynamic


def test_settings_are_this_runs_and_only_what_training_has_changed_is_taken_over():
    _, saved = scales(
        build_loss_scaler(OptimizerConfig(initial_loss_scale=64.0, loss_scale_window=7)),
        [CLEAN] * 3,
    )
    own = build_loss_scaler(OptimizerConfig(loss_scale_window=5, hysteresis=3))
    assert own.from_state(saved.state()) == dataclasses.replace(
        own, scale=64.0, growth_tracker=3, hysteresis_tracker=2
    )


GOOD = {"scale": 8.0, "growth_tracker": 1, "hysteresis_tracker": 2}


@pytest.mark.parametrize(
    "changes",
    [
        *({"scale": scale} for scale in (0.0, -1.0, math.inf, math.nan, None, True, "8")),
        *({"growth_tracker": steps} for steps in ("1", 1.0, -1, True, 2**63)),
        *({"hysteresis_tracker": steps} for steps in ("1", 1.5, 2**63, -(2**63))),
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_state_that_is_none_is_rejected_and_names_the_field(changes):
    scaler = build_loss_scaler(OptimizerConfig())
    assert scaler.from_state(GOOD).scale == 8.0
    assert scaler.from_state({**GOOD, "hysteresis_tracker": -3}).hysteresis_tracker == -3
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        scaler.from_state({**GOOD, **changes})


@pytest.mark.parametrize("state", [{"scale": 8.0}, {**GOOD, "other": 1}, [], None], ids=str)
def test_a_state_of_other_fields_is_rejected(state):
    with pytest.raises(ValueError, match="Expected a scale and two trackers, got"):
        build_loss_scaler(OptimizerConfig()).from_state(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": 0.0}, "--loss-scale: "),
        ({"loss_scale": 8.0, "hysteresis": 3}, "--loss-scale: "),
        ({"loss_scale_window": 0}, "--loss-scale-window: "),
        ({"hysteresis": 0}, "--hysteresis: "),
        ({"initial_loss_scale": 0.5}, "--min-loss-scale: .* 0.5, got 1.0"),
    ],
    ids=str,
)
def test_settings_of_a_scaler_that_cannot_work_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)
