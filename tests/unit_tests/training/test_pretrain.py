"""The objects that `pretrain` builds, their order and arguments, without ranks and training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron.core.datasets.builder import SplitDatasets
from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.core.device import Device
from megatron.core.options import ConfigError
from megatron.training import pretrain as module
from megatron.training.arguments import parse_config
from megatron.training.checkpoint.loading import Loaded
from megatron.training.checkpoint.resume import Resumer
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.health.events import EventLog
from megatron.training.health.exits import ExitCode
from megatron.training.launch import Launch
from megatron.training.loop import NoWatch
from megatron.training.pretrain import Outcome, Providers
from megatron.training.step import StepInfo
from megatron.training.stop import StopConditions
from tests.unit_tests.training.helpers.fake_runs import FakeEngine, FakeSaver, config_of

DATA = MockGPTDataset(16, 8, 1000, 0)
EVERY = ("--num-workers", "0", "--eval-iters", "2", "--eval-interval", "100")


class Wired:
    """A run of `pretrain` with a fake engine, resumer and saver."""

    def __init__(
        self, patch: pytest.MonkeyPatch, folder: Path, *flags: str, loaded: Loaded | None = None
    ) -> None:
        self.calls: list[Any] = []
        self.folder = folder
        self.config = config_of(*EVERY, *flags)
        self.engine = FakeEngine(self.calls)
        self.loaded = loaded
        self.made: dict[str, Any] = {}
        patch.setattr(module, "build_mesh", lambda *_: None)
        patch.setattr(module, "build_engine", self._build_engine)
        patch.setattr(module, "Resumer", self._resumer)
        patch.setattr(module, "Saver", self._saver)
        patch.setattr(module, "seed_all", lambda *seed: self.calls.append(("seed", *seed)))

    def _build_engine(self, *_args: Any, **named: Any) -> FakeEngine:
        self.calls.append("build")
        self.made["engine"] = named
        return self.engine

    def _resumer(self, *_args: Any, **named: Any) -> SimpleNamespace:
        self.made["resumer"] = named
        return SimpleNamespace(load=self._load, prepare_folder=self._prepare_folder)

    def _load(self, engine: FakeEngine, _kept: object) -> Loaded | None:
        self.calls.append("load")
        if self.loaded is not None and self.loaded.info is not None:
            vars(engine.state.step_info).update(vars(self.loaded.info.step_info))
        return self.loaded

    def _prepare_folder(self, _engine: FakeEngine, loaded: Loaded | None) -> None:
        self.calls.append(("prepare folder", None if loaded is None else loaded.path))

    def _saver(self, *_args: Any, **named: Any) -> FakeSaver:
        self.made["saver"] = named
        return FakeSaver(self.calls)

    def _datasets(self, _config: Any, num_samples: tuple[int, int, int]) -> SplitDatasets:
        self.calls.append(("datasets", num_samples))
        return SplitDatasets(DATA, DATA, DATA)

    def start(self, *, restart_count: int = 0) -> module._Run:
        launch = Launch(0, 1, 0, 1, restart_count=restart_count)
        return module._Run(
            self.config,
            Providers(lambda _: nn.Linear(1, 1), self._datasets, lambda *_: None, 1.0),
            launch,
            Device.for_rank("cpu", 0, 1),
            EventLog(self.folder),
            StopConditions(self.config.stop),
            NoWatch(),
        )

    def run(self, *, restart_count: int = 0) -> Outcome:
        run = self.start(restart_count=restart_count)
        with run.told_how_it_ends():
            return run.run()

    def events(self) -> list[dict[str, Any]]:
        text = (self.folder / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def without_steps(self) -> list[Any]:
        return [call for call in self.calls if call[0] not in ("step", "initialize")]


def checkpoint(iteration: int, **says: Any) -> Loaded:
    info = RecoverInfo(StepInfo(iteration, 4 * iteration), {}, **says)
    return Loaded(f"/saved/iter_{iteration:07d}", info, [])


def test_a_run_builds_loads_reads_data_trains_and_evaluates_in_this_order(monkeypatch, tmp_path):
    wired = Wired(monkeypatch, tmp_path)
    outcome = wired.run()
    assert outcome == Outcome(10, validation_loss=2.5, test_loss=2.5)
    assert wired.without_steps() == [
        "build",
        ("seed", 1234, 0),
        "load",
        ("prepare folder", None),
        ("datasets", (40, 8, 8)),
        "enter saver",
        "check",
        "synchronize",
        ("evaluate", 8),
        ("evaluate", 8),
        "leave saver",
    ]


def test_a_resumed_run_builds_datasets_for_the_whole_run_and_trains_the_rest(monkeypatch, tmp_path):
    wired = Wired(monkeypatch, tmp_path, loaded=checkpoint(7))
    assert wired.run(restart_count=2).iteration == 10
    assert wired.made["resumer"]["restart_count"] == 2
    assert ("prepare folder", "/saved/iter_0000007") in wired.calls
    assert ("datasets", (40, 8, 8)) in wired.calls
    assert [call for call in wired.calls if call[0] == "step"] == [
        ("step", 8), ("step", 9), ("step", 10),
    ]  # fmt: skip


def test_a_run_that_only_evaluates_needs_no_save_directory_and_no_training_data(
    monkeypatch, tmp_path
):
    wired = Wired(monkeypatch, tmp_path, "--skip-train")
    assert wired.run() == Outcome(0, validation_loss=2.5, test_loss=2.5)
    assert wired.without_steps()[2:5] == ["load", ("datasets", (0, 8, 8)), "enter saver"]


def test_a_run_that_stops_early_skips_evaluations_and_has_a_reason(monkeypatch, tmp_path):
    wired = Wired(monkeypatch, tmp_path, "--exit-interval", "3")
    reason = "iteration 3 is a multiple of --exit-interval 3"
    outcome = wired.run()
    assert outcome == Outcome(3, None, None, ExitCode.FINISHED, reason)
    assert ("evaluate", 8) not in wired.calls


@pytest.mark.parametrize(("iteration", "name"), [(3, "STOPPED"), (10, "FINISHED")])
def test_a_planned_stop_before_the_end_is_not_finished(monkeypatch, tmp_path, iteration, name):
    wired = Wired(monkeypatch, tmp_path, "--train-iters", "10")
    wired.start().write_exit(ExitCode.FINISHED, "a reason", iteration)
    (event,) = wired.events()
    assert (event["name"], event["code"], event["reason"]) == (name, 0, "a reason")


def test_an_error_is_recorded_once_and_the_saver_is_closed(monkeypatch, tmp_path):
    wired = Wired(monkeypatch, tmp_path)
    monkeypatch.setattr(wired.engine, "train_batch", lambda *_args, **_named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wired.run()
    assert wired.calls[-1] == "leave saver"
    (event,) = wired.events()
    assert (event["event"], event["reason"], event["iteration"]) == ("exit", "division by zero", 0)


def test_data_that_differs_from_the_checkpoints_is_a_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(module.logger, "propagate", True)
    monkeypatch.setattr(module.logging.getLogger("megatron"), "propagate", True)
    Wired(monkeypatch, tmp_path, loaded=checkpoint(7, data={"seed": 1234})).run()
    assert "the training data has changed" not in caplog.text
    Wired(monkeypatch, tmp_path, loaded=checkpoint(7, data={"seed": 5})).run()
    assert "the training data has changed" in caplog.text


def test_epochs_between_saves_are_converted_to_samples(tmp_path):
    config = config_of("--save", str(tmp_path), "--save-interval-epochs", "0.5")
    has_end = SimpleNamespace(samples_per_epoch=9)
    assert module._frequency(config, has_end).samples == 4
    with pytest.raises(ConfigError, match="--save-interval-epochs: expected training data"):
        module._frequency(config, DATA)


def test_the_watchdog_gets_the_timeouts_of_a_step_and_of_two_saves():
    flags = ("--distributed-timeout-minutes", "3", "--save-timeout-minutes", "4", "--save", "x")
    assert module._hang_limits(config_of(*flags)) == (180.0, 480.0)
    assert module._hang_limits(config_of(*flags, "--hang-timeout-seconds", "5")) == (5.0, 480.0)


def test_the_configuration_is_a_file_next_to_the_events_and_one_line_of_the_log(tmp_path, caplog):
    caplog.set_level("INFO", logger="megatron")
    config = config_of("--events-dir", str(tmp_path / "new"), "--lr-warmup-iters", "3")
    for _ in range(2):  # a restart replaces it
        module._write_config(config)
    path = tmp_path / "new" / "config.yaml"
    assert caplog.messages == [f"configuration: {path}"] * 2
    assert "lr_warmup_iters: 3" in path.read_text()
    assert parse_config(["--config", str(path)], 1) == config


def test_a_configuration_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    module._write_config(config_of("--events-dir", str(tmp_path / "file")))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path / "file") in record.message


def test_a_resume_logs_only_settings_that_changed_since_the_checkpoint(caplog):
    caplog.set_level("INFO", logger="megatron")
    saved = config_of("--train-iters", "10", "--log-interval", "5", "--weight-decay", "0.1")
    own = config_of("--train-iters", "20", "--log-interval", "7", "--weight-decay", "0.1")
    info = RecoverInfo(StepInfo(), {}, config=saved.values())
    resumer = Resumer(own, Device("cpu"), events=EventLog(None), restart_count=0)
    resumer._report_differences(info)
    (line,) = caplog.messages
    assert "train_iters 10 -> 20" in line
    assert "log_interval" not in line  # of reports alone
    assert "weight_decay" not in line


class ReachedError(Exception):
    """The process group would be made now."""


@contextmanager
def _no_group(*_args: Any, **_named: Any) -> Iterator[None]:
    raise ReachedError
    yield


@pytest.mark.parametrize(
    ("sizes_of_groups", "local_size", "is_ordered"),
    [
        ({}, 4, False),
        ({"expert_model_parallel_size": 2}, 4, True),
        ({"context_parallel_size": 2}, 4, True),
        ({}, 2, True),
    ],
)
def test_collectives_of_several_groups_are_ordered_before_the_first_group_exists(
    sizes_of_groups, local_size, is_ordered, monkeypatch
):
    sizes = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_size}
    for name, value in sizes.items():
        monkeypatch.setenv(name, str(value))
    ordered: list[Device] = []
    monkeypatch.setattr(Device, "order_collectives", lambda device: ordered.append(device))
    monkeypatch.setattr(module, "process_group", _no_group)
    monkeypatch.setattr(module.log, "configure", lambda *_, **__: None)
    config = config_of(*EVERY)
    parallel = replace(config.parallel, **sizes_of_groups)
    with pytest.raises(ReachedError):
        module.pretrain(
            replace(config, parallel=parallel),
            model_provider=lambda _: nn.Linear(1, 1),
            datasets_provider=lambda *_: SplitDatasets(DATA, DATA, DATA),
            forward_step=lambda *_: None,
            flops_per_sequence=1.0,
        )
    assert bool(ordered) == is_ordered
