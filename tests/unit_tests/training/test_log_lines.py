from __future__ import annotations

import io
import math
import sys
from dataclasses import replace

import pytest

from megatron.core.options import ConfigError
from megatron.training.log_lines import (
    LoggedSteps,
    PeakMemory,
    long_line,
    short_evaluation,
    short_line,
)
from megatron.training.metrics import LoggingConfig, Metrics, Rates
from megatron.training.step import StepResult

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


def test_a_short_line_says_how_good_how_fast_how_large_and_how_long():
    assert short_line(INTERVAL) == (
        "200/500  loss 4.6962  grad 0.880  lr 1.49e-3  5421 tok/s  mem 0.45 GiB  eta 1m53s"
    )


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


def test_what_is_rare_is_told_where_there_is_any():
    line = short_line(of(loss_scale=2.0**16, num_zeros=7, skipped_iterations=3, nan_iterations=1))
    assert line == f"{short_line(INTERVAL)}  scale 65536  zeros 7  skipped 3  nan 1"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"iteration": 7, "train_iters": 5000}, "   7/5000  loss"),  # lines stay below each other
        ({"loss": math.nan}, "  loss nan  "),
        ({"loss": 2.5e-6}, "  loss 2.50e-6  "),
        ({"grad_norm": math.inf}, "  grad inf  "),
        ({"grad_norm": 0.0}, "  grad 0  "),
        ({"grad_norm": 3e-6}, "  grad 3.00e-6  "),
        ({"grad_norm": 9.9e7}, "  grad 9.90e7  "),
        ({"learning_rate": 0.0}, "  lr 0  "),
        ({"learning_rate": 1.0}, "  lr 1.00e0  "),
        ({"tokens_per_second": 9999.0}, "  9999 tok/s  "),
        ({"tokens_per_second": 12345.0}, "  12.3k tok/s  "),
        ({"tokens_per_second": 1.5e9}, "  1.50G tok/s  "),
        ({"memory": PeakMemory(2**29, 17 * 2**30)}, "  mem 0.50+17 GiB  "),
        ({"iteration": 500}, "  eta 0s"),
        ({"seconds": 0.1}, "  eta 30s"),
        ({"seconds": 25.0}, "  eta 2h05m"),
        ({"seconds": math.nan}, "  eta ?"),
    ],
)
def test_numbers_keep_their_width_whatever_their_size(fields, part):
    assert part in short_line(of(**fields))


def test_a_short_evaluation_fits_too():
    line = short_evaluation("validation", 999999, 12.5, 268337.3)
    assert line == "validation at iteration 999999: loss 12.50, perplexity 2.68e5"


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


def test_another_format_is_refused():
    with pytest.raises(ConfigError, match="--log-format: expected one of short, long, got 'tiny'"):
        LoggingConfig(log_format="tiny")


@pytest.mark.parametrize("log_format", ["short", "long"])
def test_metrics_use_the_format_for_steps_and_evaluations(monkeypatch, log_format):
    lines: list[str] = []
    monkeypatch.setattr(
        "megatron.training.metrics.logger.info", lambda text, *args: lines.append(text % args)
    )
    now = [0.0]
    metrics = Metrics(
        Rates(100, 4, 8, 1e12, 2),
        LoggingConfig(log_interval=1, log_format=log_format),
        [],
        start_iteration=0,
        shows_progress=False,
        memory=lambda: PeakMemory(3 * 2**30, 2**30),
        clock=lambda: now[0],
    )
    now[0] = 2.0
    outcome = StepResult(2.0, 1.5, is_skipped=False, bad_ranks=(), votes=())
    metrics.step(outcome, iteration=1, consumed_samples=4, learning_rate=0.1, skipped=0, nan=0)
    metrics.evaluation("test", 1.0, 1)

    if log_format == "short":
        assert lines == [
            "  1/100  loss 2.0000  grad 1.50  lr 1.00e-1  16 tok/s  mem 3.0+1.0 GiB  eta 3m18s",
            "test at iteration 1: loss 1.0000, perplexity 2.72",
        ]
    else:
        assert "| tokens per second: 16 |" in lines[0]
        assert lines[1] == "test loss at iteration 1 | lm loss: 1.000000E+00 | " + (
            "lm loss PPL: 2.718282E+00"
        )


def test_the_long_line_is_megatrons():
    assert long_line(INTERVAL) == (
        "iteration 200/500 | consumed samples:     1600 | elapsed time per iteration (ms): 377.8 | "
        "throughput per device (TFLOP/s): 0.100 | tokens per second: 5421 | "
        "learning rate: 1.487062E-03 | global batch size: 8 | lm loss: 4.696198E+00 | "
        "grad norm: 0.880 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


WITH_EXPERTS = {"expert_load_cv": 0.2142, "expert_load_cv_max": 0.5198, "idle_experts": 3}


def test_the_lines_of_a_mixture_say_how_even_its_loads_are():
    interval = of(**WITH_EXPERTS, auxiliary={"balance": 0.010214})
    line = short_line(interval)
    assert line == (
        "200/500  loss 4.6962  grad 0.880  cv 0.52  lr 1.49e-3  5421 tok/s  mem 0.45 GiB  "
        "eta 1m53s  idle 3"
    )
    assert len(TIME + line.removesuffix("  idle 3")) <= COLUMNS
    assert "idle" not in short_line(of(interval, idle_experts=0))

    line = long_line(interval)
    assert "| lm loss: 4.696198E+00 | balance loss: 1.021400E-02 | grad norm:" in line
    assert "| expert load cv: 0.214 (max 0.520) | idle experts: 3 | number of skipped" in line
