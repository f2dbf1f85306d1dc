from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.load.checkpoint import parse_train_state
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.step import StepInfo

SCHEDULE = LRSchedule.build(LRScheduleConfig(lr=1e-3, lr_warmup_iters=3), 10)


def info(**values: object) -> RecoverInfo:
    return RecoverInfo(StepInfo(7, 28, 2, 1), SCHEDULE.state(), **values)


def test_the_plain_data_of_a_run_survives_json():
    given_info = info(
        loss_scaler={"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": 1},
        data={"samples_per_epoch": 5},
        logger={"interval_losses": [0.1 + 0.2, 1e-300]},
        evaluator={"iteration": 5, "validation": 4.25},
        world_size=3,
        versions={"torch": "2.13.0"},
        config={"lr": 1e-3},
    )
    assert (
        RecoverInfo.from_plain(json.loads(json.dumps(given_info.to_plain())), "there") == given_info
    )


@pytest.mark.parametrize("name", info().to_plain())
def test_a_missing_field_is_an_error_that_names_it(name):
    plain = info().to_plain()
    del plain[name]
    with pytest.raises(CheckpointError, match=f"Expected {name} in there"):
        RecoverInfo.from_plain(plain, "there")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("format_version", value) for value in (2, None, True, "1")),
        ("progress", {"iteration": 1}),
        ("progress", {**info().to_plain()["progress"], "speed": 2}),
        ("progress", []),
        *((name, [1]) for name in ("schedule", "data", "logger", "evaluator", "config")),
        ("versions", None),
        ("loss_scaler", [1]),
        *(("world_size", value) for value in ("two", 0, True, 2.0)),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_an_error_that_names_the_file_and_the_field(name, value):
    with pytest.raises(CheckpointError, match=f"^Expected {name} in there to be "):
        RecoverInfo.from_plain(info().to_plain() | {name: value}, "there")


@pytest.mark.parametrize("value", ["7", 7.0, -1, True, None, math.nan, 2**63], ids=str)
def test_a_counter_is_a_whole_number_without_conversion(value):
    for name in vars(info().step_info):
        plain = info().to_plain()
        plain["progress"] |= {name: value}
        with pytest.raises(CheckpointError, match=f"Expected progress.{name} in there to be an"):
            RecoverInfo.from_plain(plain, "there")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=9), each, max_size=3)
    ),
    max_leaves=6,
)
PLAIN = info(
    loss_scaler={"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": 1}
).to_plain()
PLACES = [(name,) for name in [*PLAIN, "other"]] + [
    (name, inner)
    for name in ("progress", "schedule", "loss_scaler")
    for inner in [*PLAIN[name], "other"]
]


@given(place=st.sampled_from(PLACES), value=JSON)
def test_any_value_of_a_field_is_kept_or_is_an_error_of_one_line(place, value):
    plain = json.loads(json.dumps(PLAIN))
    within = plain if len(place) == 1 else plain[place[0]]
    within[place[-1]] = value
    plain = json.loads(json.dumps(plain))
    try:
        found = RecoverInfo.from_plain(plain, "there")
        schedule = LRSchedule.from_state(found.schedule)
        scaler = build_loss_scaler(OptimizerConfig())
        if found.loss_scaler is not None:
            scaler = scaler.from_state(found.loss_scaler)
    except (CheckpointError, ValueError) as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  it may as well not be raised
        assert len(str(error)) < 400  # noqa: PT017
        return
    # Compared as text, since NaN is not equal to itself.
    taken = found.to_plain() | {"schedule": schedule.state()}
    if found.loss_scaler:
        taken["loss_scaler"] = scaler.state()
    given_text, text = (
        {name: str(each[name]) for name in each if each[name] is not None}
        for each in (plain, taken)
    )
    assert text == given_text or place == ("loss_scaler", "scale")
    assert all(rate >= 0 for rate in (schedule(0), schedule(1), schedule(10**9)))


def test_an_unknown_field_is_an_error():
    with pytest.raises(CheckpointError, match="speed"):
        RecoverInfo.from_plain(info().to_plain() | {"speed": 3}, "there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"progress": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON"),
        (b'{"data": ' + b"[" * 40 + b"]" * 40 + b"}", "more than 32 levels"),
        (b'{"progress": {"iteration": ' + b"1" * 5000 + b"}}", "an integer of 5000 digits"),
        (b'{"progress": {"iteration": 1, "iteration": 2}}', "the key 'iteration' twice"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        (b"[1]", "a JSON object in there, got list"),
        (b"", "JSON"),
    ],
    ids=range(7),
)
def test_a_file_that_is_not_a_plain_object_is_a_bounded_error(text, message):
    with pytest.raises(CheckpointDamagedError, match=message) as caught:
        parse_train_state(text, "there")
    assert len(str(caught.value)) < 300
