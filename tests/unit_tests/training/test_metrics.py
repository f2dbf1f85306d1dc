from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import logging
import math
import os
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.lane_timings import LaneTimings
from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config
from megatron.training.config import LoggingConfig, RunConfig
from megatron.training.log_lines import PeakMemory
from megatron.training.metrics import JsonlSink, Metrics, Rates, TensorBoardSink, build_sinks
from megatron.training.step import StepResult

RATES = Rates(
    train_iters=100, global_batch_size=4, seq_length=8, flops_per_sequence=1e12, num_devices=2
)


class Recorder:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict]] = []

    def write(self, kind, record):
        self.records.append((kind, record))

    def state(self):
        return {"recorder": len(self.records)}

    def close(self):
        self.records.append(("closed", {}))


def result(loss: float = 2.0, *, skipped: bool = False, is_masked: bool = False) -> StepResult:
    return StepResult(
        loss=loss,
        grad_norm=1.5,
        is_skipped=skipped,
        bad_ranks=(),
        votes=(0.0, 0.0),
        is_masked=is_masked,
    )


def report(metrics: Metrics, iteration: int, loss: float = 2.0, *, is_masked: bool = False) -> None:
    metrics.step(
        result(loss, is_masked=is_masked),
        iteration=iteration,
        consumed_samples=4 * iteration,
        learning_rate=0.1,
        skipped=0,
        nan=0,
    )


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def shown(caplog, monkeypatch):
    """The lines that the metrics log, also if an earlier test has configured the project's
    logger.
    """
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    caplog.set_level(logging.INFO, logger="megatron")
    return caplog


def make(now, sink, log_interval=2, state=None, start_iteration=0) -> Metrics:
    config = LoggingConfig(log_interval=log_interval, log_format="long")
    return Metrics(
        RATES,
        config,
        [sink],
        start_iteration=start_iteration,
        shows_progress=False,
        state=state,
        clock=lambda: now[0],
    )


def test_throughput_follows_from_the_time_of_the_step(now):
    sink = Recorder()
    metrics = make(now, sink)
    now[0] = 0.5
    report(metrics, 1)
    kind, record = sink.records[0]
    assert kind == "train"
    assert record["elapsed_ms"] == 500.0
    assert record["tokens_per_second"] == 64.0
    assert record["tflops_per_device"] == 4.0


def test_the_time_of_an_iteration_is_known_between_the_log_lines(now):
    metrics = make(now, Recorder(), log_interval=2)
    assert metrics.ms_per_iteration is None
    for iteration, (second, mean) in enumerate(
        [(1.0, 1000.0), (4.0, 2000.0), (4.5, 500.0)], start=1
    ):
        now[0] = second
        report(metrics, iteration)
        assert metrics.ms_per_iteration == mean


def test_pauses_are_left_out_of_the_next_steps_time(now):
    sink = Recorder()
    metrics = make(now, sink)
    now[0] = 1.0
    report(metrics, 1)
    now[0] = 61.0
    metrics.resume_clock()
    now[0] = 63.0
    report(metrics, 2)
    assert [record["elapsed_ms"] for _, record in sink.records] == [1000.0, 2000.0]


def test_the_loss_scale_and_the_zeros_are_reported_if_present(now, shown):
    sink = Recorder()
    metrics = make(now, sink, log_interval=1)
    for iteration, outcome in enumerate(
        (result(), dataclasses.replace(result(), loss_scale=2.0**32, num_zeros=7)), start=1
    ):
        now[0] += 1.0
        metrics.step(
            outcome, iteration=iteration, consumed_samples=4, learning_rate=0.1, skipped=0, nan=0
        )
    without, line = [record.getMessage() for record in shown.records]
    assert (
        "| loss scale: 4294967296.0 | grad norm: 1.500 | num zeros: 7 | number of skipped" in line
    )
    assert "loss scale" not in without
    assert "num zeros" not in without
    (_, before), (_, record) = sink.records
    assert record.keys() - before.keys() == {"loss_scale", "num_zeros"}
    assert (record["loss_scale"], record["num_zeros"]) == (2.0**32, 7)


def test_a_fully_masked_step_is_not_in_the_reported_losses(now, shown):
    sink = Recorder()
    metrics = make(now, sink, log_interval=2)
    for iteration, loss in ((1, 3.0), (2, 0.0)):
        now[0] += 1.0
        report(metrics, iteration, loss, is_masked=loss == 0)
    assert "lm loss: 3.000000E+00" in shown.records[0].getMessage()
    (_, learned), (_, masked) = sink.records
    assert learned["loss"] == 3.0
    assert math.isnan(masked["loss"])


def test_an_evaluation_reports_loss_and_perplexity(now, shown):
    sink = Recorder()
    make(now, sink).evaluation("validation", math.log(50.0), 7)
    assert sink.records[0][1]["perplexity"] == pytest.approx(50.0)
    assert (
        shown.records[0]
        .getMessage()
        .startswith("validation loss at iteration 7 | lm loss: 3.912023E+00")
    )


def test_jsonl_is_one_valid_object_a_line_and_numbers_come_back_exactly(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    for loss in (0.1 + 0.2, math.nan):
        sink = JsonlSink(str(path))
        sink.write("train", {"iteration": 1, "loss": loss})
        sink.close()
    first, second = (
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    )
    assert first == {"kind": "train", "iteration": 1, "loss": 0.1 + 0.2}
    assert second["loss"] is None


def test_a_full_disk_loses_lines_with_one_warning_and_does_not_end_the_run(
    tmp_path, monkeypatch, shown
):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(str(path))

    def fail(_descriptor, _line):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        for iteration in (1, 2):
            sink.write("train", {"iteration": iteration})
    sink.write("train", {"iteration": 3})
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [3]
    (message,) = shown.messages
    assert message.startswith(f"Could not write {path}: [Errno 28] No space left on device.")


def test_an_unwritable_default_metrics_file_is_one_warning(tmp_path, shown):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "metrics.jsonl"
    (sink,) = build_sinks(LoggingConfig(), {}, start_iteration=0, default_jsonl=str(path))
    sink.write("train", {"iteration": 1})
    (message,) = shown.messages
    assert message.startswith(f"Could not write {path}: ")


def test_metrics_jsonl_overrides_the_default_file(tmp_path):
    default, own = tmp_path / "metrics.jsonl", tmp_path / "own"
    build_sinks(LoggingConfig(metrics_jsonl=str(own)), {}, 0, default_jsonl=str(default))
    assert (own.exists(), default.exists()) == (True, False)
    assert build_sinks(LoggingConfig(metrics_jsonl="none"), {}, 0) == []
    assert build_sinks(LoggingConfig(), {}, 0, default_jsonl=None) == []


def config_of(*flags: object) -> RunConfig:
    required = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1 "
    required += "--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --train-iters 4 "
    required += "--micro-batch-size 2"
    return parse_config([*required.split(), *map(str, flags)], world_size=1)


def test_metrics_are_next_to_the_events_by_default(tmp_path):
    run, events = tmp_path / "run", tmp_path / "events"
    assert config_of().metrics_jsonl is None, "there is no folder for it"
    assert config_of("--save", run).metrics_jsonl == str(run / "metrics.jsonl")
    both = ("--save", run, "--events-dir", events)
    assert config_of(*both).metrics_jsonl == str(events / "metrics.jsonl")
    assert config_of(*both, "--metrics-jsonl", "own.jsonl").metrics_jsonl == "own.jsonl"
    assert config_of("--save", run, "--metrics-jsonl", "none").metrics_jsonl is None


def test_given_settings_are_the_ones_that_differ_from_defaults():
    given = config_of("--weight-decay", 0.125).given()
    assert given["weight_decay"] == 0.125
    assert given["num_layers"] == 1
    assert "adam_beta1" not in given
    assert json.loads(json.dumps(given)) == given


def test_memory_is_recorded_with_the_first_step_and_at_each_log_line(now):
    sink = Recorder()
    metrics = Metrics(
        RATES,
        LoggingConfig(log_interval=3, log_format="long"),
        [sink],
        start_iteration=0,
        shows_progress=False,
        memory=lambda: PeakMemory(None, 7),
        clock=lambda: now[0],
    )
    for iteration in range(1, 7):
        now[0] += 1.0
        report(metrics, iteration)
    told = [record.get("peak_host_memory_bytes") for _, record in sink.records]
    assert told == [7, None, 7, None, None, 7]
    assert not any("peak_device_memory_bytes" in record for _, record in sink.records)


def test_a_remote_events_dir_is_rejected():
    assert LoggingConfig(events_dir="runs/events").events_dir == "runs/events"
    with pytest.raises(
        ConfigError,
        match=r"--events-dir: expected a directory of the file system, got 's3://bucket/run'",
    ):
        LoggingConfig(events_dir="s3://bucket/run")


def test_tensorboard_gets_every_number_under_its_split(tmp_path):
    sink = TensorBoardSink(str(tmp_path), start_iteration=0)
    sink.write("train", {"iteration": 3, "loss": 2.5})
    sink.write("eval", {"iteration": 3, "split": "test", "loss": 1.5})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 2.5)]
    assert [(e.step, e.value) for e in events.Scalars("test/loss")] == [(3, 1.5)]


def test_a_resumed_run_drops_the_curve_beyond_its_start(tmp_path):
    for start, loss in ((0, 1.0), (2, 5.0)):
        sink = TensorBoardSink(str(tmp_path), start)
        for iteration in range(start + 1, 5):
            sink.write("train", {"iteration": iteration, "loss": loss})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 5.0),
        (4, 5.0),
    ]


def fake_wandb(monkeypatch, logged: list) -> list[dict]:
    """Installs a fake wandb with one run, run1. Returns the arguments of each call of `init`."""
    run = SimpleNamespace(
        id="run1",
        log=lambda scalars, step: logged.append((step, scalars)),
        finish=lambda: logged.append("end"),
    )
    asked: list[dict] = []
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **settings: asked.append(settings) or run)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return asked


def test_wandb_gets_the_metrics_of_tensorboard(monkeypatch):
    logged = []
    asked = fake_wandb(monkeypatch, logged)
    (sink,) = build_sinks(
        LoggingConfig(wandb_project="p", wandb_exp_name="e"), {"lr": 1.0}, start_iteration=0
    )
    sink.write("train", {"iteration": 3, "loss": 2.5})
    sink.close()
    settings = {
        "project": "p",
        "name": "e",
        "dir": None,
        "config": {"lr": 1.0},
        "id": None,
        "resume": "allow",
    }
    assert asked == [settings]
    assert logged == [(3, {"train/loss": 2.5}), "end"]


def test_a_resumed_run_continues_with_its_wandb_run(monkeypatch, now):
    asked = fake_wandb(monkeypatch, [])
    config = LoggingConfig(wandb_project="p")
    state = None
    for state_given in (None, {}, {"wandb_run_id": 7}):
        (sink,) = build_sinks(config, {}, 0, state_given)
        assert asked[-1]["id"] is None
        state = json.loads(json.dumps(make(now, sink).state()))
    build_sinks(config, {}, 5, state)
    assert (asked[-1]["id"], asked[-1]["resume"]) == ("run1", "allow")


def test_the_error_for_a_missing_wandb_has_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"--wandb-project: expected the package wandb .*\[wandb\]"
    ):
        LoggingConfig(wandb_project="p")


# Losses that a mean of three shows in its last digits, and ones outside of any mean.
LOSSES = {
    1: 0.1,
    2: 0.2,
    3: 0.3 + 2**-30,
    4: 1 / 3,
    5: math.nan,
    6: -math.inf,
    7: 1e-300,
    8: 5e-324,
    9: 0.7,
}


def run_with_a_restart(now, shown, restart_after: int | None) -> list[str]:
    """The lines of nine iterations; after `restart_after` of them the metrics are made anew from
    their state.
    """
    shown.clear()
    metrics = make(now, Recorder(), log_interval=3)
    for iteration, loss in LOSSES.items():
        now[0] += 0.5
        report(metrics, iteration, loss)
        if iteration == restart_after:
            state = json.loads(json.dumps(metrics.state(), allow_nan=False))
            now[0] += 1000.0
            metrics = make(now, Recorder(), log_interval=3, state=state, start_iteration=iteration)
    return list(shown.messages)


def test_a_resumed_run_prints_the_lines_of_an_uninterrupted_run(now, shown, monkeypatch):
    # Every digit of the loss, since a mean without the steps before the restart could look the same
    # in seven.
    monkeypatch.setattr(Metrics, "_interval_line", exact_line(Metrics._interval_line))
    uninterrupted = run_with_a_restart(now, shown, None)
    assert len(uninterrupted) == 3
    for restart_after in LOSSES:
        assert run_with_a_restart(now, shown, restart_after) == uninterrupted, restart_after


def exact_line(line):
    return lambda metrics, *arguments: (
        f"{line(metrics, *arguments)} {[loss.hex() for loss in metrics._losses]}"
    )


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"other": 1},
        {"interval_losses": "12"},
        {"interval_losses": [1.0, None]},
        {"interval_losses": [math.inf]},
    ],
)
def test_a_state_without_matching_losses_restarts_the_log_interval(now, shown, state):
    metrics = make(now, Recorder(), log_interval=1, state=state)
    now[0] += 1.0
    report(metrics, 1, 4.0)
    assert "lm loss: 4.000000E+00" in shown.messages[0]


def test_the_state_is_a_copy_and_includes_the_states_of_the_sinks(now):
    metrics = make(now, Recorder(), log_interval=5)
    report(metrics, 1, 2.0)
    state = metrics.state()
    report(metrics, 2, 3.0)
    assert state == {"interval_losses": [2.0], "recorder": 1}


def test_the_offloaded_optimizers_times_are_a_line_and_a_record_in_milliseconds(now, shown):
    sink = Recorder()
    timings = LaneTimings(
        num_steps=2,
        d2h=0.0012,
        host=0.01,
        h2d=0.0009,
        waited_d2h=0.0001,
        waited_host=0.0032,
        waited_h2d=0.0004,
        host_bytes=4.1e8,
    )
    make(now, sink).timings(timings, 6)
    assert shown.messages[-1] == (
        "offload (ms a step): d2h 1.2, host 10.0 (41.0 GB/s), h2d 0.9; waited for d2h 0.1, host "
        "3.2, h2d 0.4"
    )
    kind, record = sink.records[0]
    assert kind == "timing"
    assert (record["iteration"], record["num_steps"]) == (6, 2)
    assert (record["host_ms"], record["waited_host_ms"]) == (10.0, 3.2)
    assert record["host_gb_per_second"] == pytest.approx(41.0)
    make(now, sink).timings(timings._replace(host_bytes=0.0), 8)
    assert "host 10.0, h2d 0.9;" in shown.messages[-1]
    assert "host_gb_per_second" not in sink.records[1][1]
    make(now, sink).timings(timings._replace(early_bytes=1.025e8), 10)
    assert "host 10.0 (41.0 GB/s, 25 % early), h2d" in shown.messages[-1]
    assert sink.records[2][1]["early_share"] == pytest.approx(0.25)
