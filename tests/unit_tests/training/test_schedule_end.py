"""Programs that go on beyond the end of an engine's schedule."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine
from megatron.training.step import StepInfo
from tests.helpers.ranks import run_ranks

SCHEDULE = LRScheduleConfig(lr=1e-2)
STEPS = 3
CONFIG = EngineConfig(
    OptimizerConfig(), SCHEDULE, DataParallelConfig(use_megatron_fsdp=False), train_iters=STEPS
)


def rates(schedule: LRScheduleConfig, num_steps: int) -> tuple[list[float], str, StepInfo]:
    """(the learning rates of so many steps, the error that ended them, the counters)"""
    engine = ModuleEngine(replace(CONFIG, schedule=schedule), Device("cpu"), build_mesh("cpu", 1))
    engine.initialize(nn.Linear(2, 1))
    found: list[float] = []
    try:
        for _ in range(num_steps):
            result = engine.train_batch(
                [{"x": torch.ones(1, 2)}], lambda model, batch: model(batch["x"]).mean()
            )
            found.append(result.learning_rate)
    except RuntimeError as error:
        return found, str(error), engine.step_info()
    return found, "", engine.step_info()


def warned_rates(schedule: LRScheduleConfig, num_steps: int) -> tuple[list[float], list[str]]:
    """(the rates, the warnings)"""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.training.engines")
    logger.addHandler(handler)
    try:
        found, error, _ = rates(schedule, num_steps)
    finally:
        logger.removeHandler(handler)
    assert error == ""
    return found, lines


def test_a_step_that_would_train_nothing_is_rejected_before_it_starts():
    ((found, error, info),) = run_ranks(1, rates, SCHEDULE, STEPS + 2)
    assert len(found) == info.iteration == STEPS, "as many as the run was to have"
    assert error == (
        "Expected at most 3 steps, after which the learning rate stays at 0, got step 4, which "
        "would change no weight. Raise train_iters (3) or lr_decay_iters, or set min_lr, or "
        "lr_decay_style='constant'."
    )


def test_steps_beyond_the_end_are_made_at_the_least_rate_with_one_warning():
    schedule = replace(SCHEDULE, min_lr=1e-3)
    ((found, lines),) = run_ranks(1, warned_rates, schedule, STEPS + 3)
    assert found[STEPS - 1 :] == [1e-3] * 4
    assert lines == ["step 4 is beyond train_iters (3): the learning rate stays at min_lr, 0.001"]


@pytest.mark.parametrize("settings", [{"lr_decay_style": "constant"}, {"lr_decay_iters": 100}])
def test_an_unfinished_schedule_continues_without_a_warning(settings):
    ((found, lines),) = run_ranks(1, warned_rates, replace(SCHEDULE, **settings), STEPS + 2)
    assert len(found) == STEPS + 2
    assert min(found) > 0
    assert lines == []
