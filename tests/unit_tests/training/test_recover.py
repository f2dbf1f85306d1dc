from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.training.engine import StepInfo
from megatron.training.recover import Frequency
from megatron.training.recover_info import RecoverInfo

SCHEDULE = LRSchedule.build(LRScheduleConfig(lr=1e-3, lr_warmup_iters=3), 10)


def info(**values: object) -> RecoverInfo:
    return RecoverInfo(StepInfo(7, 28, 2, 1), SCHEDULE, **values)


def test_what_a_checkpoint_says_of_its_run_survives_json():
    given_info = info(
        loss_scaler={"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": 1},
        data={"samples_per_epoch": 5},
        logger={"interval_losses": [0.1 + 0.2, 1e-300]},
        evaluator={"iteration": 5, "validation": 4.25},
        world_size=3,
        versions={"torch": "2.13.0"},
        config={"lr": 1e-3},
    )
    assert RecoverInfo.from_plain(json.loads(json.dumps(given_info.to_plain())), "there") == given_info


def test_checkpoints_of_before_there_were_loggers_and_evaluators_are_read():
    plain = info().to_plain()
    for name in ("data", "logger", "evaluator"):
        del plain[name]
    assert RecoverInfo.from_plain(plain, "there") == info()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format_version", 2, "Expected format version 1 in there, got 2"),
        ("format_version", None, "Expected format version 1 in there, got None"),
        ("progress", {"iteration": 1, "speed": 2}, "Expected the run's counters in there"),
        ("progress", [], "Expected the run's counters in there"),
        ("schedule", {"peak": 1}, "Expected a learning-rate schedule in there"),
        ("logger", [1], "Expected logger as a dict in there, got list"),
        ("world_size", "two", "Expected the number of ranks in there"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_checkpoint(name, value, message):
    with pytest.raises(CheckpointError, match=message):
        RecoverInfo.from_plain(info().to_plain() | {name: value}, "there")


@given(
    epoch=st.integers(1, 40),
    batches=st.lists(st.integers(1, 60), max_size=60),
)
def test_every_epoch_that_is_passed_is_followed_by_one_dump_however_large_the_batches(epoch, batches):
    frequency, consumed, dumped = Frequency(samples=epoch), 0, []
    for iteration, batch in enumerate(batches, start=1):
        before, consumed = consumed, consumed + batch
        is_due = frequency.is_due(StepInfo(iteration, consumed), batch, 0.0)
        assert is_due == any(before < multiple * epoch <= consumed for multiple in range(1, consumed // epoch + 1))
        dumped += [iteration] if is_due else []
    assert len(dumped) <= consumed // epoch


@pytest.mark.parametrize(
    ("frequency", "num_late", "due"),
    [
        (Frequency(), 0.0, []),
        (Frequency(steps=4), 0.0, [4, 8]),
        (Frequency(steps=4, samples=12), 0.0, [3, 4, 6, 8, 9]),
        (Frequency(steps=4, seconds=9.0), 2.0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_the_state_is_dumped_by_whichever_comes_first(frequency, num_late, due):
    found = [n for n in range(1, 10) if frequency.is_due(StepInfo(n, 4 * n), 4, num_late)]
    assert found == due
