from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import replace

import pytest

from megatron.training.config import LoggingConfig
from megatron.training.log_lines import (
    LoggedSteps,
    PeakMemory,
    long_line,
    short_line,
)

TIME = "16:18:18 "  # what the logger puts in front
COLUMNS = 100
RECORD = {
    "iteration": 200,
    "consumed_samples": 1600,
    "learning_rate": 1.487062e-3,
    "grad_norm": 0.8801,
    "skipped_iterations": 0,
    "nan_iterations": 0,
}
INTERVAL = LoggedSteps(
    record=RECORD,
    train_iters=500,
    global_batch_size=8,
    loss=4.696198,
    seconds=0.3778,
    tokens_per_second=5421.2,
    tflops=0.1,
    memory=PeakMemory(None, 460 * 2**20),
)


def of(interval: LoggedSteps = INTERVAL, **fields) -> LoggedSteps:
    """The interval with other fields, of its record too."""
    record = {name: fields.pop(name) for name in list(fields) if name not in vars(interval)}
    return replace(interval, record={**interval.record, **record}, **fields)


def test_a_short_line_of_a_large_run_fits_a_hundred_columns():
    line = short_line(
        of(
            iteration=234567,
            train_iters=999999,
            loss=12.345678,
            grad_norm=1234.5,
            learning_rate=2.5e-5,
            tokens_per_second=9_876_543.0,
            seconds=1.43,
            memory=PeakMemory(139 * 2**30, 1900 * 2**30),
        )
    )
    assert line == (
        "234567/999999  loss 12.35  grad 1234  lr 2.50e-5  9.88M tok/s  mem 139+1900 GiB  "
        "eta 12d16h"
    )
    assert len(TIME + line) <= COLUMNS


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"loss": math.nan}, "loss nan"),
        ({"loss": 2.5e-6}, "loss 2.50e-6"),
        ({"grad_norm": 0.0}, "grad 0"),
        ({"grad_norm": 9.9e7}, "grad 9.90e7"),
        ({"tokens_per_second": 9999.0}, "9999 tok/s"),
        ({"tokens_per_second": 1.5e9}, "1.50G tok/s"),
        ({"memory": PeakMemory(2**29, 17 * 2**30)}, "mem 0.50+17 GiB"),
        ({"seconds": 25.0}, "eta 2h05m"),
        ({"seconds": math.nan}, "eta ?"),
        ({"loss_scale": 2.0**16}, "scale 65536"),
        ({"skipped_iterations": 3}, "skipped 3"),
    ],
)
def test_short_lines_give_three_digits_regardless_of_the_size(fields, part):
    assert part in re.split(" {2,}", short_line(of(**fields)))


class Stdout(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("flag", "is_terminal", "is_short"),
    [
        (None, True, True),
        (None, False, False),
        ("long", True, False),
        ("short", False, True),
    ],
)
def test_the_format_is_the_flags_or_else_the_outputs(monkeypatch, flag, is_terminal, is_short):
    monkeypatch.setattr(sys, "stdout", Stdout(is_terminal))
    assert LoggingConfig(log_format=flag).is_short == is_short


WITH_EXPERTS = {"expert_load_cv": 0.2142, "expert_load_cv_max": 0.5198, "idle_experts": 3}


def test_lines_of_a_mixture_give_the_balance_of_its_loads():
    interval = of(**WITH_EXPERTS, auxiliary={"balance": 0.010214})
    assert {"cv 0.52", "idle 3"} <= set(re.split(" {2,}", short_line(interval)))
    assert "idle" not in short_line(of(interval, idle_experts=0))
    parts = set(long_line(interval).split(" | "))
    assert {"balance loss: 1.021400E-02", "idle experts: 3"} <= parts
