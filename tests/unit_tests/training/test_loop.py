from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.training.checkpoint.saver import Frequency
from megatron.training.health.events import EventLog
from megatron.training.health.exits import ExitCode
from megatron.training.health.inject import Injections
from megatron.training.loop import Loop, NoWatch
from megatron.training.metrics import Metrics, Rates
from megatron.training.step import AllMaskedError, NonFiniteLossError
from megatron.training.stop import Stop, StopConditions
from tests.unit_tests.training.helpers.fake_runs import FakeEngine, FakeSaver, config_of

DATA = MockGPTDataset(16, 8, 1000, 0)
FLAGS = ("--num-workers", "0", "--eval-iters", "2", "--save", "checkpoints")


class Run:
    """A loop over a fake engine: ten iterations, evaluations every 4, saves every 3."""

    def __init__(self, *flags: str, losses: dict[int, float] | None = None) -> None:
        self.calls: list[Any] = []
        self.config = config_of(*FLAGS, *flags)
        self.engine = FakeEngine(self.calls, losses)
        self.saver = FakeSaver(self.calls)
        self.marks: list[tuple[str, int]] = []
        events = EventLog(None)
        rates = Rates(
            train_iters=10, global_batch_size=4, seq_length=8, flops_per_sequence=1.0, num_devices=1
        )
        metrics = Metrics(rates, self.config.logging, [], start_iteration=0, shows_progress=False)
        self.loop = Loop(
            self.engine,
            self.config,
            lambda *_: None,
            metrics,
            StopConditions(self.config.stop),
            self.saver,
            Frequency(3),
            events,
            NoWatch(),
            Injections(self.config.inject, rank=0, restart=0, events=events),
            lambda phase, iteration: self.marks.append((phase, iteration)),
            data={},
            evaluated={"iteration": 0},
        )

    def train(self) -> Stop | None:
        return self.loop.train(DATA, DATA)

    def besides_steps(self) -> list[Any]:
        return [call for call in self.calls if call[0] != "step"]


def test_a_run_evaluates_and_saves_when_that_is_due_and_saves_its_end():
    run = Run()
    assert run.train() is None
    assert run.besides_steps() == [
        "check",
        ("save", 3),
        ("evaluate", 8),
        ("save", 6),
        ("evaluate", 8),
        ("save", 9),
        ("save_last", 10, {"iteration": 8, "validation": 2.5}),
        "synchronize",
    ]
    assert [call for call in run.calls if call[0] == "step"] == [("step", n) for n in range(1, 11)]
    assert run.engine.step_info().consumed_samples == 40
    assert run.marks == [
        ("save", 3), ("evaluate", 4), ("save", 6), ("evaluate", 8), ("save", 9), ("save", 10),
    ]  # fmt: skip


def test_a_reason_to_stop_ends_a_run_with_a_save_and_leaves_an_evaluation_that_is_due_out():
    run = Run("--exit-interval", "4")
    stop = run.train()
    assert stop == Stop(
        "iteration 4 is a multiple of --exit-interval 4", ExitCode.FINISHED, saves=True
    )
    assert run.calls[-3:] == [("step", 4), ("save_last", 4, {"iteration": 0}), "synchronize"]


def test_a_resumed_run_first_makes_up_for_the_evaluation_that_a_stop_left_out():
    run = Run()
    run.engine.state.step_info.iteration = 8
    run.engine.state.step_info.consumed_samples = 32
    assert run.train() is None
    assert run.calls[:3] == ["check", ("evaluate", 8), ("step", 9)]
    assert run.loop.evaluated == {"iteration": 8, "validation": 2.5}


def test_a_run_continues_without_the_loss_of_validation_data_of_which_nothing_is_learned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def learns_nothing(*_arguments: object, **_options: object) -> float:
        raise AllMaskedError("nothing")

    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    run = Run()
    run.loop.evaluated["validation"] = 1.0  # before this start, of other data
    monkeypatch.setattr(run.engine, "eval_batch", learns_nothing)
    assert run.train() is None
    assert run.besides_steps()[-2:] == [("save_last", 10, {"iteration": 8}), "synchronize"]
    assert run.loop.evaluate(DATA, "test") is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 3

    evaluating = Run("--skip-train")
    monkeypatch.setattr(evaluating.engine, "eval_batch", learns_nothing)
    with pytest.raises(AllMaskedError):
        evaluating.loop.evaluate(DATA, "test")


def test_a_failed_save_shows_in_the_next_votes_and_ends_the_run_if_that_is_asked_for():
    run = Run("--exit-on-save-failure")
    run.saver.fails_at = {3}
    stop = run.train()
    assert stop is not None
    assert stop.code is ExitCode.NOT_SAVED
    assert run.calls[-3:] == [("step", 4), ("save_last", 4, {"iteration": 0}), "synchronize"]


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved():
    run = Run("--check-for-nan-in-loss", losses={3: math.nan})
    with pytest.raises(NonFiniteLossError, match="in iteration 3, got nan"):
        run.train()
    assert run.calls[-1] == ("step", 3)


def test_a_run_that_has_already_ended_does_not_save():
    run = Run()
    run.engine.state.step_info.iteration = 10
    assert run.train() is None
    assert run.calls == ["check", "synchronize"]
