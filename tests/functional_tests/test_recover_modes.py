"""How a run starts: with initial weights, from its checkpoint, or not at all. Whole runs of
`pretrain_gpt.py` in this process's ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.options import ConfigError
from megatron.core.transformer.spec import ModelSpec
from megatron.training.checkpoint.loading import load_checkpoint
from megatron.training.checkpoint.saver import Saver
from megatron.training.health.events import read_events
from megatron.training.health.exits import ExitCode, ExitError, code_of
from megatron.training.model_loss import ModelLoss
from megatron.training.step import Batch, ForwardStep
from megatron_hybrid import pretrain_gpt
from tests.functional_tests.helpers.runner import assert_same_tensors, read_checkpoint
from tests.functional_tests.helpers.runs import SETTINGS, flip_last_weight, published, trained
from tests.helpers.ranks import run_ranks


class Run(NamedTuple):
    """The end of a run on one rank."""

    code: ExitCode
    error: str
    log: str
    num_read: int  # checkpoints that it started to load


def pretrain(*flags: object, restart: int = 0, world_size: int = 1) -> Run:
    """The result of a run on rank 0, after this number of restarts."""
    answers = run_ranks(world_size, _run, [*SETTINGS, *map(str, flags)], restart)
    assert len({answer[0] for answer in answers}) == 1, "all ranks end alike"
    return Run(*answers[0])


def _run(argv: Sequence[str], restart: int) -> tuple[Any, ...]:
    log, error, code, num_read = io.StringIO(), "", ExitCode.FINISHED, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return load_checkpoint(*args, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(log):
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        patch.setattr("megatron.training.checkpoint.loading.load_checkpoint", counted)
        try:
            code = pretrain_gpt.run(argv).code
        except (CheckpointError, ConfigError, ExitError) as failure:
            error, code = str(failure), code_of(failure)
    return code, error, log.getvalue(), num_read


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(root) if event["event"] == kind]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of four iterations, without its events."""
    root = tmp_path_factory.mktemp("saved")
    pretrain("--save", root, "--save-interval", 1)
    (root / "events.jsonl").unlink()
    assert len(published(root)) == 4
    return root


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """The same, stopped after two iterations."""
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    for name in ("iter_0000003", "iter_0000004"):
        shutil.rmtree(root / name)
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    return root


@pytest.mark.parametrize("mode", [(), ("--recover-mode", "on")])
def test_a_run_resumes_from_its_save_directory_bit_for_bit(run, saved, tmp_path, mode):
    done = pretrain("--save", run, *mode, "--metrics-jsonl", tmp_path / "metrics")
    assert done.code == 0, done.error
    assert trained(tmp_path / "metrics") == [3, 4]
    assert_same_tensors(read_checkpoint(run), read_checkpoint(saved))
    (resumed,) = events(run, "resume")
    assert (resumed["iteration"], resumed["consumed_samples"]) == (2, 8)
    assert resumed["checkpoint"] == f"{run.resolve()}/iter_0000002"


def test_without_a_checkpoint_auto_starts_and_on_fails(tmp_path):
    done = pretrain("--save", tmp_path / "new", "--recover-mode", "on")
    assert done.code == ExitCode.BAD_CONFIGURATION
    assert (
        done.error == f"--recover-mode on: expected a checkpoint in {tmp_path / 'new'}, got none."
    )
    assert pretrain("--save", tmp_path / "new").code == 0
    (resumed,) = events(tmp_path / "new", "resume")
    assert (resumed["iteration"], resumed["checkpoint"]) == (0, None)


def test_off_rejects_a_directory_with_checkpoints(run):
    done = pretrain("--save", run, "--recover-mode", "off")
    assert done.code == ExitCode.BAD_CONFIGURATION
    assert "--save: expected a directory without checkpoints beyond iteration 0" in done.error


def test_load_and_finetune_apply_to_the_first_start_only(saved, tmp_path):
    """Fine-tuned from another run's weights, stopped, and started by the same command."""
    flags = ["--load", saved, "--finetune", "--save", tmp_path / "tuned", "--save-interval", 1]
    whole = ["--load", saved, "--finetune", "--save", tmp_path / "whole"]
    assert pretrain(*flags, "--exit-interval", 3).code == 0
    metrics = tmp_path / "metrics"
    assert pretrain(*flags, "--metrics-jsonl", metrics).code == 0
    assert trained(metrics) == [4]
    assert pretrain(*whole).code == 0
    assert_same_tensors(read_checkpoint(tmp_path / "tuned"), read_checkpoint(tmp_path / "whole"))
    assert [event["iteration"] for event in events(tmp_path / "tuned", "resume")] == [0, 3]


def test_the_newest_intact_checkpoint_is_loaded_and_the_damaged_one_set_aside(run, tmp_path):
    flip_last_weight(run / "iter_0000002", 0)
    done = pretrain("--save", run, "--metrics-jsonl", tmp_path / "metrics")
    assert done.code == 0
    assert trained(tmp_path / "metrics") == [2, 3, 4]
    (line,) = [line for line in done.log.splitlines() if "DAMAGED" in line]
    assert f"{run}/iter_0000002 is passed over" in line
    (damaged,) = events(run, "damaged")
    assert damaged["checkpoint"] == f"{run.resolve()}/iter_0000002"
    assert "iter_0000002/__0_0.distcp" in damaged["reason"]
    assert len(events(run, "set_aside")) == 1
    assert [name.split(".")[-1] for name in published(run) if "iter_0000002" in name] == ["damaged"]


def test_without_an_intact_checkpoint_the_run_ends_and_relaunches_do_not_retry(run):
    for name in published(run):
        flip_last_weight(run / name, 0)
    for restart, num_read in enumerate((2, 0, 0)):
        done = pretrain("--save", run, restart=restart)
        assert done.code == ExitCode.BAD_FILES
        assert done.error.startswith(f"Expected a checkpoint in {run} that is whole, got: ")
        assert "iter_0000002/__0_0.distcp" in done.error
        assert done.log.count("DAMAGED") == 2
        assert done.num_read == num_read
    assert len(events(run, "damaged")) == 2
    assert events(run, "resume") == []
    assert pretrain("--save", run).num_read == 2, "a launch by hand reads them again"


def test_a_new_checkpoint_of_a_damaged_iteration_is_loaded(run):
    """A relaunch skips a damaged checkpoint, saves its iteration again, and dies; the next relaunch
    loads the new checkpoint.
    """
    flip_last_weight(run / "iter_0000002", 0)
    flags = [
        "--save",
        run,
        "--save-interval",
        1,
        "--check-for-nan-in-loss",
        "--inject",
        "nan:step=3,restart=1",
    ]
    assert pretrain(*flags, restart=1).code == ExitCode.NON_FINITE_LOSS
    done = pretrain(*flags, restart=2)
    assert done.code == 0
    assert "DAMAGED" not in done.log
    assert [event["iteration"] for event in events(run, "resume")] == [1, 2]
    assert len(events(run, "set_aside")) == 1


@pytest.mark.parametrize("flag", [("--no-load-optim",), ("--ckpt-step", "2")])
def test_flags_for_the_first_start_do_not_apply_to_relaunches(run, tmp_path, flag):
    """--load is the directory of --save."""
    flags = ["--load", run, "--save", run, "--save-interval", 1, *flag, "--check-for-nan-in-loss"]
    whole = shutil.copytree(run, tmp_path / "whole")
    assert pretrain("--load", whole, "--save", whole, *flag).code == 0
    assert pretrain(*flags, "--inject", "nan:step=4").code == ExitCode.NON_FINITE_LOSS
    done = pretrain(*flags, restart=1)
    assert done.code == 0, done.error
    assert [event["iteration"] for event in events(run, "resume")] == [2, 3]
    assert_same_tensors(read_checkpoint(run), read_checkpoint(whole))


@pytest.mark.parametrize(
    ("flag", "begins"),
    [
        (("--no-load-optim",), "alone"),
        (("--no-load-rng",), "alone"),
        (("--load-skip-keys", "*.exp_avg_sq"), "with another --load"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_flags_that_skip_parts_of_a_checkpoint_apply_to_a_resume_once(
    run, saved, tmp_path, flag, begins
):
    """Restarted by the same command, it keeps its progress."""
    whole = shutil.copytree(run, tmp_path / "whole")
    assert pretrain("--load", whole, "--save", whole, *flag).code == 0
    load = ["--load", saved, "--finetune"] if begins != "alone" else []
    flags = [*load, "--save", run, *flag]
    first = pretrain(*flags, "--exit-interval", 3)
    assert first.code == 0, first.error
    assert f"{flag[0]} holds for {run.resolve()}/iter_0000002" in first.log
    second = pretrain(*flags)
    assert second.code == 0, second.error
    assert f"{flag[0]} does not hold for {run.resolve()}/iter_0000003" in second.log
    assert [event["iteration"] for event in events(run, "resume")] == [2, 3]
    assert_same_tensors(read_checkpoint(run), read_checkpoint(whole))


def test_a_run_resumes_from_more_keys_than_its_model_has_by_strictness(tmp_path):
    run = ["--save", tmp_path / "run"]
    untied = "--untie-embeddings-and-output-weights"
    assert pretrain(*run, untied, "--exit-interval", 2).code == 0
    assert "it has unexpected keys model.output_layer.weight" in pretrain(*run).error
    lenient = [*run, "--dist-ckpt-strictness", "raise_unexpected"]
    for flags in (["--exit-interval", 3], []):
        done = pretrain(*lenient, *flags)
        assert done.code == 0, done.error
    assert [event["iteration"] for event in events(tmp_path / "run", "resume")] == [0, 2, 3]


def test_a_run_without_progress_stops_relaunching(run):
    """Each start fails in the iteration after the checkpoint."""
    flags = [
        "--save",
        run,
        "--recover-retries",
        2,
        "--check-for-nan-in-loss",
        "--inject",
        "nan:step=3,restart=any",
    ]
    codes = []
    for restart in range(5):
        done = pretrain(*flags, restart=restart)
        codes.append(done.code)
    assert codes == [ExitCode.NON_FINITE_LOSS] * 3 + [ExitCode.NO_PROGRESS] * 2
    assert "Expected to get from iteration 2 to the next checkpoint in 2 relaunches" in done.error
    assert pretrain("--save", run, restart=0).code == 0, "a human may try again"


def test_relaunches_that_get_further_are_not_counted(run):
    flags = ["--save", run, "--save-interval", 1, "--recover-retries", 1, "--check-for-nan-in-loss"]
    for restart, last in enumerate((3, 4)):
        done = pretrain(*flags, "--inject", f"nan:step={last},restart=any", restart=restart)
        assert done.code == ExitCode.NON_FINITE_LOSS
    assert pretrain(*flags, restart=2).code == 0


@pytest.mark.parametrize("flags", [(), ("--async-save",)])
def test_events_record_the_outcome_of_each_save_in_order(tmp_path, flags):
    done = pretrain(
        "--save", tmp_path, "--save-interval", 1, "--inject", "disk-full:step=2", *flags
    )
    assert done.code == 0
    kinds = ("save_begun", "save_published", "save_failed")
    told = [
        (event["event"], event["iteration"])
        for event in read_events(tmp_path)
        if event["event"] in kinds
    ]
    assert told == [
        ("save_begun", 1),
        ("save_published", 1),
        ("save_begun", 2),
        ("save_failed", 2),
        ("save_begun", 3),
        ("save_published", 3),
        ("save_begun", 4),
        ("save_published", 4),
    ]
    (failed,) = events(tmp_path, "save_failed")
    assert "No space left on device" in failed["reason"]


def test_seconds_between_saves_are_counted_by_each_rank_and_agreed(tmp_path):
    """The interval ends on the second rank only, in the third iteration."""

    def body(argv: list[str]) -> None:
        late = {"asked": 0}

        def clock() -> float:
            late["asked"] += torch.distributed.get_rank()
            # The clock is read as the saver is entered, and once for each iteration's votes.
            return 1000.0 if late["asked"] > 3 else 0.0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "megatron.training.pretrain.Saver",
                lambda *args, **named: Saver(*args, **named, clock=clock),
            )
            pretrain_gpt.run(argv)

    flags = ["--save", str(tmp_path), "--save-interval-seconds", "900"]
    run_ranks(2, body, [*SETTINGS, *flags])
    *early, last = published(tmp_path)
    assert last == "iter_0000004"
    assert early == ["iter_0000003"]


def test_saves_by_epoch_need_a_single_data_source(tmp_path):
    done = pretrain("--save", tmp_path, "--save-interval-epochs", 1)
    assert done.code == ExitCode.BAD_CONFIGURATION
    assert done.error.startswith("--save-interval-epochs: expected training data from one source")


def test_an_evaluation_skipped_by_a_stop_runs_after_the_resume(tmp_path):
    flags = ["--eval-interval", 2, "--save", tmp_path / "run", "--save-interval", 1]
    pretrain(*flags, "--exit-interval", 2, "--metrics-jsonl", tmp_path / "metrics")
    pretrain(*flags, "--metrics-jsonl", tmp_path / "metrics")
    pretrain("--eval-interval", 2, "--metrics-jsonl", tmp_path / "whole")

    def evaluations(path: Path) -> list[tuple[int, str, float]]:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [(r["iteration"], r["split"], r["loss"]) for r in records if r["kind"] == "eval"]

    assert evaluations(tmp_path / "metrics") == evaluations(tmp_path / "whole")
    assert evaluations(tmp_path / "whole")[0][0] == 2


def test_log_lines_after_a_resume_equal_an_uninterrupted_run(tmp_path):
    """The run stops between two log lines."""
    flags = ["--log-interval", 4, "--eval-iters", 0]
    whole = pretrain(*flags)
    pretrain(*flags, "--save", tmp_path, "--exit-interval", 3)
    resumed = pretrain(*flags, "--save", tmp_path)
    losses = [
        [part for line in done.log.splitlines() for part in line.split("|") if "lm loss" in part]
        for done in (whole, resumed)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


def disturb_forwards(patch: pytest.MonkeyPatch, disturb: Callable[[], None]) -> None:
    """Calls `disturb` before each forward of a run."""
    real = pretrain_gpt.forward_step_of

    def forward_step_of(spec: ModelSpec, *, is_per_token: bool = False) -> ForwardStep:
        step = real(spec, is_per_token=is_per_token)

        def forward_step(model: torch.nn.Module, batch: Batch) -> torch.Tensor | ModelLoss:
            disturb()
            return step(model, batch)

        return forward_step

    patch.setattr(pretrain_gpt, "forward_step_of", forward_step_of)


def signalled(iteration: int, *flags: object) -> tuple[ExitCode, str]:
    """A run that gets SIGTERM in the forward of an iteration, and ends with (code, reason)."""

    def body(argv: Sequence[str]) -> tuple[ExitCode, str]:
        calls = 0

        def disturb() -> None:
            nonlocal calls
            calls += 1
            if calls == 2 * iteration:  # the second of two microbatches
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.MonkeyPatch.context() as patch:
            disturb_forwards(patch, disturb)
            outcome = pretrain_gpt.run(argv)
        return outcome.code, outcome.reason

    return run_ranks(1, body, [*SETTINGS, "--exit-signal-handler", *map(str, flags)])[0]


@pytest.mark.parametrize("iteration", [3, 4])
def test_a_signal_ends_a_run_with_its_own_code_in_the_last_iteration_too(tmp_path, iteration):
    assert signalled(iteration, "--save", tmp_path) == (ExitCode.PREEMPTED, "SIGTERM was received")
    assert published(tmp_path) == [f"iter_{iteration:07d}"]
    assert events(tmp_path, "evaluation") == [], "there is no time for it"


def test_a_run_without_time_to_save_exits_with_its_code_in_the_last_iteration_too(tmp_path):
    flags = ["--save", tmp_path, "--exit-signal-grace-seconds", "1e-9"]
    code, reason = signalled(4, *flags)
    assert code == ExitCode.PREEMPTED_UNSAVED
    assert "a save takes longer than the rest of --exit-signal-grace-seconds 1e-09" in reason
    assert published(tmp_path) == []


def test_a_run_without_save_does_not_report_a_save():
    assert signalled(2) == (
        ExitCode.PREEMPTED_UNSAVED,
        "SIGTERM was received, and there is no --save",
    )


def test_a_save_in_flight_is_finished_if_there_is_no_time_for_another(tmp_path):
    """The save started in the previous iteration, on a slow disk."""

    def body(argv: Sequence[str]) -> ExitCode:
        real_open = LocalStore.open_data
        was_signalled = threading.Event()

        def open_data(store: LocalStore, path: str) -> Any:
            assert was_signalled.wait(600)
            return real_open(store, path)

        def disturb() -> None:
            if events(tmp_path, "save_begun") and not was_signalled.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                was_signalled.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "open_data", open_data)
            disturb_forwards(patch, disturb)
            return pretrain_gpt.run(argv).code

    flags = (
        "--exit-signal-handler --exit-signal-grace-seconds 1e-9 --async-save --save-interval 2"
    ).split()
    assert run_ranks(1, body, [*SETTINGS, *flags, "--save", str(tmp_path)]) == [
        ExitCode.PREEMPTED_UNSAVED
    ]
    assert published(tmp_path) == ["iter_0000002"]
    assert [event["iteration"] for event in events(tmp_path, "save_published")] == [2]


def test_skip_train_evaluates_the_loaded_checkpoint_and_writes_no_events(run, saved):
    assert pretrain("--save", run, "--skip-train").log.count("starting from the beginning") == 1
    assert (
        "loaded checkpoint" in pretrain("--save", run, "--skip-train", "--recover-mode", "on").log
    )
    assert "loaded checkpoint" in pretrain("--save", run, "--skip-train", "--load", saved).log
    assert read_events(run) == []


@pytest.mark.parametrize("format_flags", [(), ("--ckpt-format", "torch_dcp")])
def test_files_of_a_killed_save_are_deleted_at_the_next_start(tmp_path, format_flags):
    (tmp_path / "iter_0000003.saving").mkdir(parents=True)
    done = pretrain("--save", tmp_path, *format_flags)
    assert "swept what earlier runs left unfinished" in done.log
    assert published(tmp_path) == ["iter_0000004"]
