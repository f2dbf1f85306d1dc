"""What loading a run's checkpoint honours, and what it refuses: whole runs of `pretrain_gpt.py`, on
one rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import pretrain_gpt
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.options import ConfigError
from megatron_hybrid.checkpoint import command as checkpoint
from tests.functional_tests.helpers.runner import assert_same_tensors, read_checkpoint, read_tensors
from tests.functional_tests.helpers.runs import SETTINGS, losses
from tests.helpers.ranks import RankError, run_ranks


def pretrain(*flags: object, world_size: int = 1) -> None:
    run_ranks(world_size, _run, [*SETTINGS, *map(str, flags)])


def _run(argv: list[str]) -> None:
    pretrain_gpt.run(argv)


def refusal(*flags: object, world_size: int = 1) -> tuple[str, str]:
    """(type, message) of the error that a run ends with."""
    answers = run_ranks(world_size, _refusal, [*SETTINGS, *map(str, flags)])
    assert len(set(answers)) == 1, "all ranks end alike"
    return answers[0]


def _refusal(argv: list[str]) -> tuple[str, str]:
    try:
        pretrain_gpt.run(argv)
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations with checkpoints at 2 and 4."""
    root = tmp_path_factory.mktemp("saved")
    pretrain("--save", root, "--save-interval", 2)
    return root


def train_state(root: Path, iteration: int) -> dict:
    return json.loads((root / f"iter_{iteration:07d}" / "train_state.json").read_text())


def test_the_run_is_described_beside_its_tensors(saved):
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_another_shape_is_refused_by_name(saved, world_size):
    kind, message = refusal("--load", saved, "--hidden-size", 24, world_size=world_size)
    assert kind == "CheckpointError"
    assert (
        "model.embedding.word_embeddings.weight has shape (128, 16) where the model has (128, 24)"
        in message
    )


def test_a_checkpoint_of_another_model_names_missing_and_unasked_for_keys(saved):
    kind, message = refusal(
        "--load", saved, "--disable-bias-linear", "--untie-embeddings-and-output-weights"
    )
    assert kind == "CheckpointError"
    assert "it lacks model.output_layer.weight" in message
    assert "nothing here takes model.decoder.layers.0" in message


def test_another_schedule_is_refused_until_a_flag_chooses(saved, tmp_path):
    longer = ["--load", saved, "--train-iters", 6]
    kind, message = refusal(*longer)
    assert kind == "ConfigError"
    assert "decay_iters 4 (checkpoint) and 6 (this run)" in message
    pretrain(*longer, "--override-opt-param-scheduler", "--save", tmp_path / "own")
    assert train_state(tmp_path / "own", 6)["schedule"]["decay_iters"] == 6
    pretrain(*longer, "--use-checkpoint-opt-param-scheduler", "--save", tmp_path / "saved")
    assert train_state(tmp_path / "saved", 6)["schedule"]["decay_iters"] == 4


def test_a_folder_with_newer_checkpoints_is_not_trained_over(saved):
    kind, message = refusal("--save", saved, "--recover-mode", "off")
    assert kind == "ConfigError"
    assert "--save: expected a folder without checkpoints beyond iteration 0" in message
    assert "[2, 4]" in message
    kind, message = refusal("--save", saved, "--load", saved, "--ckpt-step", 2)
    assert "beyond iteration 2" in message


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path, world_size):
    (tmp_path / "file").write_text("")
    kind, message = refusal("--save", tmp_path / "file" / "run", world_size=world_size)
    assert kind == "ConfigError"
    assert "--save: expected a folder that can be written" in message


def test_an_older_checkpoint_evaluates_beside_newer_ones(saved):
    pretrain("--load", saved, "--save", saved, "--ckpt-step", 2, "--skip-train")


def test_a_constant_rate_may_go_on_for_longer(tmp_path):
    constant = ["--lr-decay-style", "constant", "--save", tmp_path]
    pretrain(*constant)
    pretrain(*constant, "--load", tmp_path, "--train-iters", 6)
    assert train_state(tmp_path, 6)["progress"]["iteration"] == 6


def test_a_folder_without_checkpoints_starts_afresh_unless_that_is_to_be_an_error(tmp_path):
    pretrain("--load", tmp_path / "none", "--save", tmp_path / "new")
    assert train_state(tmp_path / "new", 4)["progress"]["iteration"] == 4
    kind, message = refusal("--load", tmp_path / "none", "--exit-on-missing-checkpoint")
    assert kind == "ConfigError"
    assert "--exit-on-missing-checkpoint is set" in message


def test_what_a_checkpoint_of_the_other_format_does_not_honour_is_refused(tmp_path):
    pretrain("--ckpt-format", "torch_dcp", "--save", tmp_path)
    for flags in (["--load-skip-keys", "model.*"], ["--dist-ckpt-strictness", "raise_unexpected"]):
        kind, message = refusal("--load", tmp_path, *flags)
        assert kind == "ConfigError"
        assert message.startswith(
            f"{flags[0]}: expected a checkpoint of the format fsdp_dtensor, got"
        )


@pytest.mark.parametrize("formats", [("fsdp_dtensor", "torch_dcp"), ("torch_dcp", "fsdp_dtensor")])
def test_a_run_goes_on_from_a_checkpoint_of_either_format(saved, tmp_path, formats):
    first, second = formats
    pretrain("--ckpt-format", first, "--exit-interval", 2, "--save", tmp_path / "first")
    more = ["--exit-interval", 3, "--save", tmp_path / "second"]
    pretrain("--load", tmp_path / "first", "--ckpt-format", second, *more)
    pretrain(
        "--load", tmp_path / "second", "--ckpt-format", "fsdp_dtensor", "--save", tmp_path / "last"
    )
    assert_same_tensors(read_checkpoint(tmp_path / "last"), read_checkpoint(saved))


def test_saving_beside_the_training_changes_nothing_and_keeps_what_it_was_told_to(saved, tmp_path):
    flags = ["--async-save", "--save", tmp_path, "--save-interval", 1, "--save-keep-last", 1]
    pretrain(*flags, "--save-retain-interval", 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "iter_0000002",
        "iter_0000004",
    ]
    assert_same_tensors(read_checkpoint(tmp_path), read_checkpoint(saved))


def test_a_run_that_falls_back_goes_on_in_place_and_sets_the_damaged_one_aside(saved, tmp_path):
    root, metrics = tmp_path / "run", tmp_path / "metrics.jsonl"
    shutil.copytree(saved, root)
    (root / "iter_0000004" / "__0_0.distcp").write_bytes(b"")
    pretrain("--load", root, "--save", root, "--metrics-jsonl", metrics)
    assert sorted(losses(metrics)) == [3, 4]
    assert_same_tensors(read_checkpoint(root), read_checkpoint(saved))
    names = sorted(path.name.split(".")[0] for path in root.iterdir() if path.is_dir())
    assert names == ["iter_0000002", "iter_0000004", "iter_0000004"], (
        "one of them is the damaged one"
    )
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    pretrain("--load", root, "--save", root)


def test_some_keys_may_be_left_unread_by_name(saved, tmp_path):
    more = ["--untie-embeddings-and-output-weights", "--load", saved]
    assert "it lacks model.output_layer.weight" in refusal(*more)[1]
    pretrain(
        *more, "--ckpt-step", 2, "--load-skip-keys", "*output_layer*", "--save", tmp_path / "untied"
    )
    assert train_state(tmp_path / "untied", 4)["progress"]["iteration"] == 4
    fewer = ["--load", tmp_path / "untied"]
    assert "nothing here takes model.output_layer.weight" in refusal(*fewer)[1]
    pretrain(*fewer, "--dist-ckpt-strictness", "raise_unexpected", "--save", tmp_path / "tied")
    pretrain(*fewer, "--load-skip-keys", "*output_layer*", "--save", tmp_path / "skipped")


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    data = tmp_path / "copy" / "iter_0000004" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[4096] ^= 1  # the first byte of the first tensor
    data.write_bytes(content)
    metrics = tmp_path / "metrics.jsonl"
    pretrain("--load", tmp_path / "copy", "--save", tmp_path / "again", "--metrics-jsonl", metrics)
    assert sorted(losses(metrics)) == [3, 4], "it went on from iteration 2"
    assert_same_tensors(read_checkpoint(tmp_path / "again"), read_checkpoint(saved))
    kind, message = refusal("--load", tmp_path / "copy", "--ckpt-step", 4)
    assert kind == "CheckpointError"
    assert "that is whole" in message


def test_a_step_that_is_not_there_is_named_with_those_that_are(saved):
    kind, message = refusal("--load", saved, "--ckpt-step", 3)
    assert kind == "ConfigError"
    assert message.startswith("--ckpt-step: expected one of [2, 4]")


def test_a_step_that_is_there_is_taken_and_the_run_goes_on_from_it(saved, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    pretrain(
        "--load", saved, "--ckpt-step", 2, "--save", tmp_path / "again", "--metrics-jsonl", metrics
    )
    assert sorted(losses(metrics)) == [3, 4]
    assert_same_tensors(read_checkpoint(tmp_path / "again"), read_checkpoint(saved))


def test_finetuning_takes_the_weights_and_begins_anew(saved, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    pretrain(
        "--load",
        saved,
        *"--finetune --lr 0 --save".split(),
        tmp_path / "tuned",
        "--metrics-jsonl",
        metrics,
    )
    assert sorted(losses(metrics)) == [1, 2, 3, 4]
    weights, tuned = read_checkpoint(saved), read_checkpoint(tmp_path / "tuned")
    model = {key: value for key, value in weights.items() if key.startswith("model.")}
    assert_same_tensors({key: tuned[key] for key in model}, model)
    assert train_state(tmp_path / "tuned", 4)["progress"]["consumed_samples"] == 16


def test_the_optimizer_may_be_left_out_of_loading_and_of_saving(saved, tmp_path):
    pretrain(
        "--load",
        saved,
        "--ckpt-step",
        2,
        "--no-load-optim",
        "--no-save-optim",
        "--save",
        tmp_path / "bare",
    )
    bare = read_checkpoint(tmp_path / "bare")
    assert not [key for key in bare if key.startswith("optimizer.")]
    weights = read_checkpoint(saved)
    assert not all(torch.equal(bare[key], weights[key]) for key in bare), (
        "a fresh optimizer steps differently"
    )
    kind, message = refusal("--load", tmp_path / "bare")
    assert kind == "CheckpointError"
    assert "it lacks optimizer." in message


def weights_of(root: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor for key, tensor in read_checkpoint(root).items() if key.startswith("model.")
    }


@pytest.fixture(scope="module")
def imported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of iteration 2, and nothing else, as our own tool makes a checkpoint of a
    file.
    """
    root = tmp_path_factory.mktemp("imported")
    assert checkpoint.main(["convert", str(saved / "iter_0000002"), str(root / "all.pt")]) == 0
    state = torch.load(root / "all.pt", weights_only=True)
    torch.save(
        {key: value for key, value in state.items() if key.startswith("model.")},
        root / "weights.pt",
    )
    assert (
        checkpoint.main(["convert", str(root / "weights.pt"), str(root / "runs" / "iter_0000001")])
        == 0
    )
    return root / "runs"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a program with PyTorch FSDP2 saves it, an optimizer beside it: no file of
    ours.
    """
    root = tmp_path_factory.mktemp("plain")
    pretrain("--exit-interval", 2, "--ckpt-format", "torch_dcp", "--save", root / "dcp")
    weights = {
        key.removeprefix("model."): tensor for key, tensor in weights_of(root / "dcp").items()
    }
    state = {
        "app": {"model": weights, "optim": {"state": {"a": torch.ones(3)}, "lr": 0.5}},
        "step": 2,
    }
    dcp.save(state, checkpoint_id=root / "runs" / "iter_0000001", no_dist=True)
    return root / "runs"


@pytest.mark.parametrize("name", ["imported", "plain"])
def test_weights_without_a_run_are_loaded_where_weights_are_asked_for(
    name, saved, tmp_path, request
):
    root = request.getfixturevalue(name)
    frozen = ["--finetune", "--optimizer", "sgd", "--lr", 0, "--train-iters", 1]
    # From the folder of checkpoints, and from the checkpoint's own.
    pretrain("--load", root, *frozen, "--save", tmp_path / "one", world_size=2)
    pretrain("--load", root / "iter_0000001", *frozen, "--save", tmp_path / "other")
    expected = {
        key: tensor
        for key, tensor in read_tensors(saved / "iter_0000002").items()
        if key.startswith("model.")
    }
    for found in (tmp_path / "one", tmp_path / "other"):
        assert_same_tensors(weights_of(found), expected)
        assert train_state(found, 1)["progress"]["iteration"] == 1


@pytest.mark.parametrize("name", ["imported", "plain"])
def test_weights_without_a_run_are_neither_damaged_nor_the_end_of_an_older_checkpoint(
    name, saved, tmp_path, request
):
    root = request.getfixturevalue(name)
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(root / "iter_0000001", tmp_path / "run" / "iter_0000005")
    (tmp_path / "run" / "events.jsonl").unlink()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    missing = {
        "imported": "its train_state.json has no schedule",
        "plain": "it has no train_state.json",
    }[name]
    for flags in (
        ["--load", root],
        ["--load", root / "iter_0000001"],
        ["--save", tmp_path / "run"],
    ):
        kind, message = refusal(*flags)
        assert kind == "CheckpointError"
        assert message.startswith("Expected the checkpoint of a run in ")
        assert f"got one without a run's state: {missing}" in message
        assert "--finetune loads its weights" in message
        assert "whole" not in message
    names = sorted(
        path.name for path in (tmp_path / "run").iterdir() if path.name != "events.jsonl"
    )
    assert names == before
    assert '"damaged"' not in (tmp_path / "run" / "events.jsonl").read_text()


def test_weights_are_loaded_beside_what_only_another_program_understands(tmp_path):
    in_theirs = ["--ckpt-format", "torch_dcp", "--save"]
    pretrain("--exit-interval", 2, *in_theirs, tmp_path / "run")
    weights = weights_of(tmp_path / "run")
    state = {f"app.{key}": tensor for key, tensor in weights.items()} | {
        "arguments": argparse.Namespace(a=1)
    }
    dcp.save(state, checkpoint_id=tmp_path / "runs" / "iter_0000001", no_dist=True)
    frozen = ["--finetune", "--optimizer", "sgd", "--lr", 0, "--train-iters", 1]
    pretrain("--load", tmp_path / "runs", *frozen, *in_theirs, tmp_path / "new")
    assert_same_tensors(weights_of(tmp_path / "new"), weights)


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dcp"])
def test_a_checkpoint_with_another_iterations_name_is_no_run_to_resume_but_its_weights_are_there(
    ckpt_format, tmp_path
):
    root = tmp_path / "run"
    pretrain("--ckpt-format", ckpt_format, "--save", root, "--save-interval", 2)
    (root / "iter_0000004").rename(root / "iter_0000009")
    (root / "latest_checkpointed_iteration.txt").write_text("9\n")
    kind, message = refusal("--load", root)
    assert kind == "CheckpointError"
    assert "to be that of iter_0000009, got 4" in message
    assert (root / "iter_0000009").is_dir(), "it is not set aside"
    frozen = ["--finetune", "--optimizer", "sgd", "--lr", 0, "--train-iters", 1]
    pretrain("--load", root, *frozen, "--ckpt-format", ckpt_format, "--save", tmp_path / "new")
    assert_same_tensors(weights_of(tmp_path / "new"), weights_of(root))


def test_weights_of_another_model_are_refused_by_name(imported, plain, tmp_path):
    more = ["--finetune", "--untie-embeddings-and-output-weights"]
    assert "it lacks model.output_layer.weight" in refusal("--load", imported, *more)[1]
    assert "it lacks app.model.output_layer.weight" in refusal("--load", plain, *more)[1]
    wider = ["--finetune", "--hidden-size", 24]
    assert "where the model has (128, 24)" in refusal("--load", imported, *wider)[1]
    assert "where the model has (128, 24)" in refusal("--load", plain, *wider)[1]
    dcp.save({"mine": torch.ones(3)}, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
    kind, message = refusal("--load", tmp_path, "--finetune")
    assert kind == "CheckpointError"
    assert "Expected the weights of this model in" in message
    assert "as model.<name> or under any other prefix, got mine" in message


def test_a_run_of_ours_that_has_lost_its_state_is_damaged_all_the_same(tmp_path):
    pretrain("--ckpt-format", "torch_dcp", "--save", tmp_path / "run", "--save-interval", 2)
    (tmp_path / "run" / "iter_0000004" / "train_state.json").unlink()
    metrics = tmp_path / "metrics.jsonl"
    pretrain("--load", tmp_path / "run", "--save", tmp_path / "new", "--metrics-jsonl", metrics)
    assert sorted(losses(metrics)) == [3, 4], "it went on from iteration 2"


def test_a_checkpoint_that_is_named_itself_is_the_one_that_is_loaded(saved, tmp_path):
    """A folder without checkpoints means a fresh start; one that is a checkpoint has none in it."""
    pretrain("--load", saved / "iter_0000002", "--save", tmp_path / "again")
    assert_same_tensors(read_checkpoint(tmp_path / "again"), read_checkpoint(saved))
    kind, message = refusal("--load", saved / "iter_0000002", "--ckpt-step", 2)
    assert kind == "ConfigError"
    assert message.startswith("--ckpt-step: expected a folder of checkpoints as --load, got")
    # Beside newer ones it is no place to go on from, as with --ckpt-step.
    kind, message = refusal("--load", saved / "iter_0000002", "--save", saved)
    assert "beyond iteration 2" in message
    shutil.copytree(saved / "iter_0000004", tmp_path / "damaged" / "iter_0000004")
    shutil.copytree(saved / "iter_0000002", tmp_path / "damaged" / "iter_0000002")
    (tmp_path / "damaged" / "iter_0000004" / "__0_0.distcp").write_bytes(b"")
    kind, message = refusal("--load", tmp_path / "damaged" / "iter_0000004")
    assert kind == "CheckpointError"
    assert "that is whole, got: Expected" in message


def test_this_runs_weight_decay_holds_over_the_checkpoints(saved, tmp_path):
    """The optimizer's groups are saved with their constants; loading must not silently undo a
    flag.
    """
    both = ["--load", saved, "--ckpt-step", 2]
    pretrain(*both, "--weight-decay", "0.01", "--save", tmp_path / "same")
    pretrain(*both, "--weight-decay", "0.9", "--save", tmp_path / "other")
    same, other = read_checkpoint(tmp_path / "same"), read_checkpoint(tmp_path / "other")
    assert_same_tensors(same, read_checkpoint(saved))
    key = "model.embedding.word_embeddings.weight"
    assert not torch.equal(same[key], other[key])


def test_the_loss_scaler_goes_on_with_the_optimizer_and_a_damaged_one_is_refused(saved, tmp_path):
    flags = ["--fp16", "--initial-loss-scale", 64, "--loss-scale-window", 3]
    pretrain(*flags, "--save", tmp_path / "fp16", "--save-interval", 2)
    scaler = {"scale": 64.0, "growth_tracker": 2, "hysteresis_tracker": 2}
    assert train_state(tmp_path / "fp16", 2)["loss_scaler"] == scaler
    assert "loss_scaler" not in train_state(saved, 2)

    def end_of(name: str, source: Path, *more: str) -> dict:
        pretrain(*flags, "--load", source, "--ckpt-step", 2, "--save", tmp_path / name, *more)
        return train_state(tmp_path / name, 4)["loss_scaler"]

    doubled = {"scale": 128.0, "growth_tracker": 1, "hysteresis_tracker": 2}
    assert (
        end_of("resumed", tmp_path / "fp16")
        == doubled
        == train_state(tmp_path / "fp16", 4)["loss_scaler"]
    )
    assert end_of("fresh", tmp_path / "fp16", "--no-load-optim") == scaler
    assert end_of("from_fp32", saved) == scaler, "which had none"
    # Of the format without digests: the other would notice the file before its content.
    other = ["--load", tmp_path / "fp16", "--ckpt-step", 2, "--ckpt-format", "torch_dcp"]
    pretrain(*flags, *other, "--save", tmp_path / "fp16_dcp")
    state_file = tmp_path / "fp16_dcp" / "iter_0000004" / "train_state.json"
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "loss_scaler": {"scale": "large"}}))
    kind, message = refusal(*flags, "--load", tmp_path / "fp16_dcp")
    assert kind == "CheckpointError"
    assert "Expected the state of a loss scaler in" in message


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dcp"])
def test_a_damaged_counter_file_is_an_error_and_no_fresh_start(saved, tmp_path, ckpt_format):
    pretrain(
        "--load", saved, "--ckpt-step", 2, "--ckpt-format", ckpt_format, "--save", tmp_path / "copy"
    )
    state_file = tmp_path / "copy" / "iter_0000004" / "train_state.json"
    whole_text = state_file.read_text()
    state_file.write_text(whole_text[:-20])
    kind, message = refusal("--load", tmp_path / "copy")
    assert kind == "CheckpointError"
    assert "train_state.json" in message
    if ckpt_format == "fsdp_dtensor":
        return  # whatever is in the file, it is not what was written
    whole = json.loads(whole_text)
    iteration = {"progress": {**whole["progress"], "iteration": 10**6}}
    for changes, expected in (
        (
            iteration,
            f"Expected progress.iteration in {state_file} to be that of iter_0000004, got 1000000.",
        ),
        (
            {"progress": {**whole["progress"], "consumed_samples": 8.0}},
            "Expected progress.consumed_samples in",
        ),
        (
            {"schedule": {**whole["schedule"], "peak": "1e-2"}},
            "Expected peak to be a finite number >= 0, got '1e-2'",
        ),
        (
            {"world_size": True},
            f"Expected world_size in {state_file} to be a number of ranks, got True.",
        ),
        ({"format_version": 2}, f"Expected format_version in {state_file} to be 1, got 2."),
    ):
        state_file.write_text(json.dumps(whole | changes))
        kind, message = refusal("--load", tmp_path / "copy")
        assert kind == "CheckpointError"
        assert expected in message
    # What is replaced by this run's own, or not asked for, need not be right.
    state_file.write_text(json.dumps(whole | {"schedule": {"peak": "1e-2"}}))
    pretrain("--load", tmp_path / "copy", "--override-opt-param-scheduler", "--train-iters", 5)
    state_file.write_text("[")
    pretrain("--load", tmp_path / "copy", "--finetune", "--train-iters", 1)


def test_a_loss_that_is_not_finite_ends_the_run_only_if_asked_to(tmp_path):
    """A learning rate that is absurd makes the second loss infinite or NaN."""
    absurd = "--lr 1e30 --optimizer sgd --lr-decay-style constant --clip-grad 0".split()
    pretrain(*absurd, "--metrics-jsonl", tmp_path / "metrics.jsonl")
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-3])
    assert (last["iteration"], last["loss"]) == (4, None)
    assert last["nan_iterations"] == last["skipped_iterations"] == 3
    with pytest.raises(
        RankError,
        match=r"NonFiniteLossError: Expected a finite loss in iteration 2, got .* \(on rank 0",
    ):
        pretrain(*absurd, "--check-for-nan-in-loss")
