from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.options import ConfigError


def build(train_iters: int = 100, **settings) -> LRSchedule:
    return LRSchedule.build(LRScheduleConfig(**{"lr": 1.0, **settings}), train_iters)


def test_warm_up_is_linear_and_its_first_step_already_learns():
    schedule = build(lr_warmup_iters=4, lr_decay_style="constant")
    assert [schedule(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_may_start_above_zero_and_be_a_fraction_of_the_decay():
    schedule = build(lr_warmup_fraction=0.02, lr_warmup_init=0.5, lr_decay_style="constant")
    assert [schedule(i) for i in range(3)] == [0.75, 1.0, 1.0]


def test_cosine_is_half_way_down_in_the_middle_and_stays_at_the_least_rate_after_the_end():
    schedule = build(lr_decay_style="cosine", min_lr=0.1)
    assert schedule(49) == pytest.approx(0.55)
    assert schedule(99) == schedule(500) == 0.1


def test_linear_goes_down_by_the_same_amount_every_iteration():
    schedule = build(10, lr_decay_style="linear")
    assert [schedule(i) for i in range(10)] == pytest.approx(
        [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    )


@pytest.mark.parametrize(
    ("style", "middle"), [("linear", 0.5), ("cosine", 0.5), ("exponential", math.sqrt(2) - 1)]
)
def test_wsd_is_stable_until_its_last_phase(style, middle):
    schedule = build(
        lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style=style, lr_warmup_iters=10
    )
    assert {schedule(i) for i in range(9, 80)} == {1.0}
    assert schedule(89) == pytest.approx(middle)
    assert schedule(99) == 0.0


@given(
    style=st.sampled_from(["constant", "linear", "cosine", "WSD"]),
    warmup=st.integers(0, 30),
    wsd=st.integers(1, 50),
    least=st.floats(0, 1),
)
def test_the_rate_never_leaves_its_bounds_and_never_rises_after_the_warm_up(
    style, warmup, wsd, least
):
    schedule = build(
        lr_decay_style=style,
        lr_warmup_iters=warmup,
        min_lr=least,
        lr_wsd_decay_iters=wsd if style == "WSD" else None,
    )
    rates = [schedule(i) for i in range(120)]
    assert all(0 <= rate <= 1 for rate in rates)
    decay = rates[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(decay))
    assert all(rate >= least - 1e-12 for rate in decay)


def test_a_constant_rate_is_the_same_schedule_in_a_longer_run():
    assert build(10, lr_decay_style="constant") == build(20, lr_decay_style="constant")
    assert build(10, lr_decay_style="linear") != build(20, lr_decay_style="linear")


def test_the_rate_is_set_on_every_group():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weights[0]]}, {"params": [weights[1]]}], lr=9.0)
    assert build(10).apply(optimizer.param_groups, 4) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


WSD = build(lr_decay_style="WSD", lr_wsd_decay_iters=5, lr_warmup_iters=3)


@pytest.mark.parametrize(
    ("schedule", "name", "value"),
    [
        *((WSD, "peak", value) for value in ("1", None, True, -1.0, math.nan, math.inf)),
        *((WSD, "least", value) for value in ("0", -0.5, 2.0)),
        *((WSD, "warmup_init", value) for value in (math.nan, 2.0)),
        *((WSD, "decay_iters", value) for value in (100.0, "100", -1, 7, True, 2**63)),
        *((WSD, "warmup_iters", value) for value in (3.0, -3, None)),
        *((WSD, "wsd_iters", value) for value in (5.0, None, -5)),
        *((WSD, "wsd_style", value) for value in (None, "WSD", ["linear"])),
        *((WSD, "style", value) for value in ("linear", "WSDX", None, {})),
        (build(lr_decay_style="cosine"), "wsd_iters", 5),
        (build(lr_decay_style="cosine"), "wsd_style", "linear"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_state_that_is_no_schedules_is_rejected_and_names_the_field(schedule, name, value):
    state = {**schedule.state(), name: value}
    # Another style makes other fields wrong.
    named = "wsd_style" if value == "linear" and name == "style" else name
    with pytest.raises(ValueError, match=named):
        LRSchedule.from_state(state)


@pytest.mark.parametrize("state", [{"peak": 1.0}, {**WSD.state(), "other": 1}, [], None], ids=str)
def test_a_state_of_other_fields_is_rejected(state):
    with pytest.raises(ValueError, match=r"Expected the fields peak, least, style, .*, got "):
        LRSchedule.from_state(state)


@given(
    style=st.sampled_from(["constant", "linear", "cosine", "WSD"]),
    warmup=st.integers(0, 30),
    wsd=st.integers(1, 50),
    least=st.floats(0, 1),
)
def test_every_schedule_that_can_be_built_comes_back(style, warmup, wsd, least):
    settings = {"lr_decay_style": style, "lr_warmup_iters": warmup, "min_lr": least}
    schedule = build(**settings, lr_wsd_decay_iters=wsd if style == "WSD" else None)
    assert LRSchedule.from_state(json.loads(json.dumps(schedule.state()))) == schedule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_lr": 2.0}, "--min-lr: "),
        ({"lr_warmup_init": 2.0}, "--lr-warmup-init: "),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters: "),
        ({"lr_wsd_decay_iters": 3}, "--lr-wsd-decay-iters: "),
        ({"lr_warmup_iters": 101}, "--lr-warmup-iters: .* 101"),
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, "--lr-warmup-fraction: "),
        (
            {"lr_decay_style": "WSD", "lr_warmup_iters": 60, "lr_wsd_decay_iters": 50},
            "--lr-wsd-decay-iters: .* 40",
        ),
        (
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
            "both",
        ),
    ],
)
def test_phases_that_do_not_fit_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)
