"""Flags that select, load and reject checkpoints, in whole runs of `pretrain_gpt.py`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.functional_tests.helpers.runner import assert_same_tensors, read_checkpoint, read_tensors
from tests.functional_tests.helpers.runs import losses, published, refusal, train
from tests.helpers.checkpoints import whole, write_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations with checkpoints at 2 and 4."""
    root = tmp_path_factory.mktemp("saved")
    train("--save", root, "--save-interval", 2)
    return root


def train_state(root: Path, iteration: int) -> dict:
    return json.loads((root / f"iter_{iteration:07d}" / "train_state.json").read_text())


def test_a_checkpoint_has_the_progress_and_configuration_of_its_run(saved):
    state = train_state(saved, 2)
    assert state["progress"] == {
        "iteration": 2,
        "consumed_samples": 8,
        "skipped_iterations": 0,
        "nan_iterations": 0,
    }
    assert state["config"]["hidden_size"] == 16
    assert state["schedule"]["style"] == "cosine"
    assert state["world_size"] == 1
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4\n"


def test_a_checkpoint_of_another_model_is_rejected_on_all_ranks_with_its_keys(saved):
    flags = "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-size 24".split()
    error = refusal("--load", saved, *flags, world_size=2)
    assert error.startswith("CheckpointError: ")
    assert "word_embeddings.weight has shape (128, 16) where the model has (128, 24)" in error
    assert "it lacks model.output_layer.weight" in error
    assert "it has unexpected keys model.decoder.layers.0" in error


def test_a_save_directory_with_newer_checkpoints_is_rejected_except_for_evaluation(saved):
    error = refusal("--save", saved, "--recover-mode", "off")
    assert error.startswith("ConfigError: --save: expected a directory without checkpoints beyond")
    assert "[2, 4]" in error
    older = ["--load", saved, "--save", saved, "--ckpt-step", 2]
    assert "beyond iteration 2" in refusal(*older)
    train(*older, "--skip-train")


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_unwritable_save_directory_is_an_error_before_training(tmp_path, world_size):
    (tmp_path / "file").write_text("")
    error = refusal("--save", tmp_path / "file" / "run", world_size=world_size)
    assert error.startswith("ConfigError: --save: expected a writable directory")


def test_an_empty_load_directory_is_a_fresh_start_or_an_error_by_flag(tmp_path):
    train("--load", tmp_path / "none", "--save", tmp_path / "new")
    assert train_state(tmp_path / "new", 4)["progress"]["iteration"] == 4
    error = refusal("--load", tmp_path / "none", "--exit-on-missing-checkpoint")
    assert error.startswith("ConfigError: ")
    assert "--exit-on-missing-checkpoint is set" in error


def test_flags_that_torch_dcp_does_not_support_are_rejected(tmp_path):
    train("--ckpt-format", "torch_dcp", "--save", tmp_path)
    for flags in (["--load-skip-keys", "model.*"], ["--dist-ckpt-strictness", "raise_unexpected"]):
        error = refusal("--load", tmp_path, *flags)
        assert error.startswith(f"ConfigError: {flags[0]}: expected a checkpoint of the format")


@pytest.mark.parametrize("formats", [("fsdp_dtensor", "torch_dcp"), ("torch_dcp", "fsdp_dtensor")])
def test_a_run_resumes_from_a_checkpoint_of_either_format(saved, tmp_path, formats):
    first, second = formats
    train("--ckpt-format", first, "--exit-interval", 2, "--save", tmp_path / "first")
    more = ["--exit-interval", 3, "--save", tmp_path / "second"]
    train("--load", tmp_path / "first", "--ckpt-format", second, *more)
    train(
        "--load", tmp_path / "second", "--ckpt-format", "fsdp_dtensor", "--save", tmp_path / "last"
    )
    assert_same_tensors(read_checkpoint(tmp_path / "last"), read_checkpoint(saved))


def test_asynchronous_saves_do_not_change_training_and_keep_the_requested_checkpoints(
    saved, tmp_path
):
    flags = ["--async-save", "--save", tmp_path, "--save-interval", 1, "--save-keep-last", 1]
    train(*flags, "--save-retain-interval", 2)
    assert published(tmp_path) == ["iter_0000002", "iter_0000004"]
    assert_same_tensors(read_checkpoint(tmp_path), read_checkpoint(saved))


def test_a_run_falls_back_to_the_previous_checkpoint_and_sets_the_damaged_one_aside(
    saved, tmp_path
):
    root, metrics = tmp_path / "run", tmp_path / "metrics.jsonl"
    shutil.copytree(saved, root)
    (root / "iter_0000004" / "__0_0.distcp").write_bytes(b"")
    train("--load", root, "--save", root, "--metrics-jsonl", metrics)
    assert sorted(losses(metrics)) == [3, 4]
    assert_same_tensors(read_checkpoint(root), read_checkpoint(saved))
    names = [name.partition(".")[0] for name in published(root)]
    assert names == ["iter_0000002", "iter_0000004", "iter_0000004"], "one is the damaged one"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    train("--load", root, "--save", root)


def test_skipped_keys_and_unexpected_keys_are_not_loaded(saved, tmp_path):
    more = ["--untie-embeddings-and-output-weights", "--load", saved]
    assert "it lacks model.output_layer.weight" in refusal(*more)
    train(
        *more, "--ckpt-step", 2, "--load-skip-keys", "*output_layer*", "--save", tmp_path / "untied"
    )
    assert train_state(tmp_path / "untied", 4)["progress"]["iteration"] == 4
    fewer = ["--load", tmp_path / "untied"]
    assert "it has unexpected keys model.output_layer.weight" in refusal(*fewer)
    train(*fewer, "--dist-ckpt-strictness", "raise_unexpected", "--save", tmp_path / "tied")
    train(*fewer, "--load-skip-keys", "*output_layer*", "--save", tmp_path / "skipped")


def test_ckpt_step_loads_this_iteration_and_rejects_a_missing_one(saved, tmp_path):
    error = refusal("--load", saved, "--ckpt-step", 3)
    assert error.startswith("ConfigError: --ckpt-step: expected one of [2, 4]")
    again, metrics = tmp_path / "again", tmp_path / "metrics.jsonl"
    train("--load", saved, "--ckpt-step", 2, "--save", again, "--metrics-jsonl", metrics)
    assert sorted(losses(metrics)) == [3, 4]
    assert_same_tensors(read_checkpoint(again), read_checkpoint(saved))


def test_finetune_loads_weights_and_starts_at_iteration_0(saved, tmp_path):
    tuned_root, metrics = tmp_path / "tuned", tmp_path / "metrics.jsonl"
    flags = ["--finetune", "--lr", 0, "--save", tuned_root, "--metrics-jsonl", metrics]
    train("--load", saved, *flags)
    assert sorted(losses(metrics)) == [1, 2, 3, 4]
    weights, tuned = read_checkpoint(saved), read_checkpoint(tuned_root)
    model = {key: value for key, value in weights.items() if key.startswith("model.")}
    assert_same_tensors({key: tuned[key] for key in model}, model)
    assert train_state(tuned_root, 4)["progress"]["consumed_samples"] == 16


def test_optimizer_states_can_be_left_out_of_loads_and_saves(saved, tmp_path):
    without = ["--no-load-optim", "--no-save-optim", "--save", tmp_path / "bare"]
    train("--load", saved, "--ckpt-step", 2, *without)
    bare = read_checkpoint(tmp_path / "bare")
    assert not [key for key in bare if key.startswith("optimizer.")]
    weights = read_checkpoint(saved)
    assert not all(torch.equal(bare[key], weights[key]) for key in bare), (
        "a fresh optimizer steps differently"
    )
    error = refusal("--load", tmp_path / "bare")
    assert error.startswith("CheckpointError: ")
    assert "it lacks optimizer." in error


def weights_of(root: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor for key, tensor in read_checkpoint(root).items() if key.startswith("model.")
    }


@pytest.fixture(scope="module")
def imported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in fsdp_dtensor with the weights of iteration 2 only."""
    root = tmp_path_factory.mktemp("imported")
    tensors = {
        key: (tensor, whole(tensor))
        for key, tensor in read_tensors(saved / "iter_0000002").items()
        if key.startswith("model.")
    }
    state = {"format_version": 1, "progress": {"iteration": 1}}
    write_checkpoint(root / "iter_0000001", tensors, {}, world_size=1, train_state=state)
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, saved with an optimizer by `dcp.save` alone."""
    root = tmp_path_factory.mktemp("plain")
    train("--exit-interval", 2, "--ckpt-format", "torch_dcp", "--save", root / "dcp")
    weights = {
        key.removeprefix("model."): tensor for key, tensor in weights_of(root / "dcp").items()
    }
    state = {
        "app": {"model": weights, "optim": {"state": {"a": torch.ones(3)}, "lr": 0.5}},
        "step": 2,
        "arguments": argparse.Namespace(a=1),
    }
    dcp.save(state, checkpoint_id=root / "runs" / "iter_0000001", no_dist=True)
    return root / "runs"


@pytest.mark.parametrize("name", ["imported", "plain"])
def test_finetune_loads_checkpoints_that_have_weights_only(name, saved, tmp_path, request):
    root = request.getfixturevalue(name)
    frozen = ["--finetune", "--optimizer", "sgd", "--lr", 0, "--train-iters", 1]
    # From the directory of checkpoints, and from the checkpoint itself.
    train("--load", root, *frozen, "--save", tmp_path / "one", world_size=2)
    train("--load", root / "iter_0000001", *frozen, "--save", tmp_path / "other")
    expected = {
        key: tensor
        for key, tensor in read_tensors(saved / "iter_0000002").items()
        if key.startswith("model.")
    }
    for found in (tmp_path / "one", tmp_path / "other"):
        assert_same_tensors(weights_of(found), expected)
        assert train_state(found, 1)["progress"]["iteration"] == 1


@pytest.mark.parametrize("name", ["imported", "plain"])
def test_resuming_from_weights_only_is_an_error_and_not_treated_as_damage(
    name, saved, tmp_path, request
):
    root = request.getfixturevalue(name)
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(root / "iter_0000001", tmp_path / "run" / "iter_0000005")
    (tmp_path / "run" / "events.jsonl").unlink()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    for flags in (
        ["--load", root],
        ["--load", root / "iter_0000001"],
        ["--save", tmp_path / "run"],
    ):
        error = refusal(*flags)
        assert error.startswith("CheckpointError: Expected the checkpoint of a run in ")
        assert "--finetune loads its weights" in error
        assert "whole" not in error
    names = sorted(
        path.name for path in (tmp_path / "run").iterdir() if path.name != "events.jsonl"
    )
    assert names == before
    assert '"damaged"' not in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dcp"])
def test_a_renamed_checkpoint_cannot_be_resumed_but_its_weights_load(ckpt_format, tmp_path):
    root = tmp_path / "run"
    train("--ckpt-format", ckpt_format, "--save", root, "--save-interval", 2)
    (root / "iter_0000004").rename(root / "iter_0000009")
    (root / "latest_checkpointed_iteration.txt").write_text("9\n")
    error = refusal("--load", root)
    assert error.startswith("CheckpointError: ")
    assert "to be that of iter_0000009, got 4" in error
    assert (root / "iter_0000009").is_dir(), "it is not set aside"
    frozen = ["--finetune", "--optimizer", "sgd", "--lr", 0, "--train-iters", 1]
    train("--load", root, *frozen, "--ckpt-format", ckpt_format, "--save", tmp_path / "new")
    assert_same_tensors(weights_of(tmp_path / "new"), weights_of(root))


def test_finetune_rejects_weights_of_another_model_with_their_keys(imported, plain, tmp_path):
    more = ["--finetune", "--untie-embeddings-and-output-weights", "--hidden-size", 24]
    for root, prefix in ((imported, ""), (plain, "app.")):
        error = refusal("--load", root, *more)
        assert f"it lacks {prefix}model.output_layer.weight" in error
        assert "where the model has (128, 24)" in error
    dcp.save({"mine": torch.ones(3)}, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
    error = refusal("--load", tmp_path, "--finetune")
    assert error.startswith("CheckpointError: Expected the weights of this model in")


def test_a_checkpoint_that_lost_its_train_state_is_damaged(tmp_path):
    train("--ckpt-format", "torch_dcp", "--save", tmp_path / "run", "--save-interval", 2)
    (tmp_path / "run" / "iter_0000004" / "train_state.json").unlink()
    metrics = tmp_path / "metrics.jsonl"
    train("--load", tmp_path / "run", "--save", tmp_path / "new", "--metrics-jsonl", metrics)
    assert sorted(losses(metrics)) == [3, 4], "it resumed from iteration 2"


def test_load_accepts_the_path_of_a_single_checkpoint(saved, tmp_path):
    """A directory without checkpoints means a fresh start, unless it is itself a checkpoint."""
    train("--load", saved / "iter_0000002", "--save", tmp_path / "again")
    assert_same_tensors(read_checkpoint(tmp_path / "again"), read_checkpoint(saved))
    error = refusal("--load", saved / "iter_0000002", "--ckpt-step", 2)
    assert error.startswith("ConfigError: --ckpt-step: expected a directory of checkpoints")
    # With newer checkpoints in --save it is rejected, as with --ckpt-step.
    assert "beyond iteration 2" in refusal("--load", saved / "iter_0000002", "--save", saved)
    shutil.copytree(saved, tmp_path / "damaged")
    (tmp_path / "damaged" / "iter_0000004" / "__0_0.distcp").write_bytes(b"")
    error = refusal("--load", tmp_path / "damaged" / "iter_0000004")
    assert error.startswith("CheckpointError: ")
    assert "that is whole, got: " in error


def test_the_loss_scaler_is_restored_with_the_optimizer_and_a_damaged_one_is_rejected(
    saved, tmp_path
):
    flags = ["--fp16", "--initial-loss-scale", 64, "--loss-scale-window", 3]
    train(*flags, "--save", tmp_path / "fp16", "--save-interval", 2)
    scaler = {"scale": 64.0, "growth_tracker": 2, "hysteresis_tracker": 2}
    assert train_state(tmp_path / "fp16", 2)["loss_scaler"] == scaler
    assert "loss_scaler" not in train_state(saved, 2)

    def end_of(name: str, source: Path, *more: str) -> dict:
        train(*flags, "--load", source, "--ckpt-step", 2, "--save", tmp_path / name, *more)
        return train_state(tmp_path / name, 4)["loss_scaler"]

    doubled = {"scale": 128.0, "growth_tracker": 1, "hysteresis_tracker": 2}
    assert train_state(tmp_path / "fp16", 4)["loss_scaler"] == doubled
    # In torch_dcp: the digests of fsdp_dtensor would reject the edited file itself.
    assert end_of("resumed", tmp_path / "fp16", "--ckpt-format", "torch_dcp") == doubled
    assert end_of("fresh", tmp_path / "fp16", "--no-load-optim") == scaler
    assert end_of("from_fp32", saved) == scaler, "which had none"
    state_file = tmp_path / "resumed" / "iter_0000004" / "train_state.json"
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "loss_scaler": {"scale": "large"}}))
    error = refusal(*flags, "--load", tmp_path / "resumed")
    assert error.startswith("CheckpointError: Expected the state of a loss scaler in")


def test_a_damaged_train_state_is_an_error_and_not_a_fresh_start(saved, tmp_path):
    copy = tmp_path / "copy"
    train("--load", saved, "--ckpt-step", 2, "--ckpt-format", "torch_dcp", "--save", copy)
    state_file = copy / "iter_0000004" / "train_state.json"
    whole = json.loads(state_file.read_text())
    for text in ("[", json.dumps(whole | {"schedule": {**whole["schedule"], "peak": "1e-2"}})):
        state_file.write_text(text)
        error = refusal("--load", copy)
        assert error.startswith("CheckpointError: ")
        assert "train_state.json" in error
    # Invalid values are ignored if flags override them or if they are not loaded.
    state_file.write_text(json.dumps(whole | {"schedule": {"peak": "1e-2"}}))
    train("--load", copy, "--override-opt-param-scheduler", "--train-iters", 5)
    state_file.write_text("[")
    train("--load", copy, "--finetune", "--train-iters", 1)


def test_a_non_finite_loss_ends_the_run_only_with_the_flag(tmp_path):
    """An absurd learning rate makes the second loss infinite or NaN."""
    absurd = "--lr 1e30 --optimizer sgd --lr-decay-style constant --clip-grad 0".split()
    train(*absurd, "--metrics-jsonl", tmp_path / "metrics.jsonl")
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-3])
    assert (last["iteration"], last["loss"]) == (4, None)
    assert last["nan_iterations"] == last["skipped_iterations"] == 3
    error = refusal(*absurd, "--check-for-nan-in-loss")
    assert error.startswith("NonFiniteLossError: Expected a finite loss in iteration 2")
