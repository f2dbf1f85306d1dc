from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from megatron.core.options import ConfigError, options_of
from megatron.core.transformer.config import TransformerConfig
from megatron.training.arguments import (
    as_yaml,
    parse_config,
    read_yaml,
    section_from_values,
)

MINIMAL = [
    *("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mock-data").split(),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "31"),
    *("--micro-batch-size", "1", "--train-iters", "4", "--lr", "0.1"),
]


def refusal(*flags: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config([*MINIMAL, *flags], world_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_flags_reach_their_owners_and_the_rest_has_megatrons_defaults():
    config = parse_config(
        [*MINIMAL, "--adam-beta2", "0.95", "--qk-layernorm", "--disable-bias-linear"], world_size=2
    )
    assert config.optimizer.adam_beta2 == 0.95
    assert config.model.qk_layernorm
    assert not config.model.add_bias_linear
    assert config.optimizer.adam_beta1 == 0.9
    assert config.model.hidden_dropout == 0.1
    assert config.data.split == "969,30,1"


def test_the_global_batch_is_one_microbatch_of_every_rank_unless_given():
    assert parse_config(MINIMAL, world_size=3).global_batch_size == 3
    config = parse_config([*MINIMAL, "--global-batch-size", "12"], world_size=3)
    assert (config.global_batch_size, config.num_microbatches(3)) == (12, 4)


def test_no_two_owners_share_a_flag():
    flags = Counter(
        flag
        for _, section in parse_config(MINIMAL, 1).sections()
        for field in options_of(type(section))
        for flag in ([field.flag, field.off_flag] if field.scalar is bool else [field.flag])
    )
    assert [flag for flag, count in flags.items() if count > 1] == []
    names = Counter(
        f.name
        for _, section in parse_config(MINIMAL, 1).sections()
        for f in options_of(type(section))
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_every_field_of_every_config_is_a_flag_with_a_help_line():
    for _, section in parse_config(MINIMAL, 1).sections():
        described = {field.name: field.option.help for field in options_of(type(section))}
        assert set(described) == {field.name for field in dataclasses.fields(section)}
        assert all(described.values())


def test_what_an_option_needs_is_an_option():
    options = {field.name: field.option for field in parse_config(MINIMAL, 1).options()}
    for option in options.values():
        needed = (*option.requires, option.overridden_by, *dict(option.no_effect_unless))
        assert {name for name in needed if name is not None} <= options.keys()


def test_a_global_batch_that_does_not_divide_is_refused_with_the_numbers():
    assert refusal("--global-batch-size", "7", world_size=2) == (
        "--global-batch-size: expected a multiple of 2, micro-batch-size 1 x 2 ranks, got 7."
    )


def test_an_unknown_flag_is_refused_and_the_nearest_one_named():
    assert refusal("--adam-bet1", "0.9") == (
        "--adam-bet1: expected a known flag, got one that does not exist. Did you mean "
        "--adam-beta1?"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "fast"], "--lr: expected a number >= 0, got 'fast'."),
        (["--lr", "nan"], "--lr: expected a number >= 0, got nan."),
        (["--train-iters", "0"], "--train-iters: expected an integer >= 1, got 0."),
        (
            ["--normalization", "BatchNorm"],
            "--normalization: expected one of LayerNorm, RMSNorm, got 'BatchNorm'.",
        ),
        (
            ["--save-interval", "5"],
            "--save: expected a folder, since --save-interval is given, got None.",
        ),
        (["--ckpt-step", "5"], "--load: expected a folder, since --ckpt-step is given, got None."),
        (["--ckpt-step", "0"], "--load: expected a folder, since --ckpt-step is given, got None."),
        (["--no-load-rng"], "--load: expected a folder, since --no-load-rng is given, got None."),
        (
            ["--load-skip-keys", "a", "--save", "x", "--recover-mode", "off"],
            "--load: expected a folder, since --load-skip-keys is given with --recover-mode off",
        ),
        (
            ["--no-save-optim"],
            "--save: expected a folder, since --no-save-optim is given, got None.",
        ),
        (["--save", ""], "--save: expected a non-empty string, got ''."),
        (
            ["--seed", str(2**32)],
            "--seed: expected an integer >= 0 and <= 4294967295, got 4294967296.",
        ),
        (
            ["--split", "0,1,1"],
            "--split: expected a share for training, or --skip-train, got '0,1,1'.",
        ),
        (
            ["--override-opt-param-scheduler"],
            "--load: expected a folder, since --override-opt-param-scheduler is given",
        ),
        (["--torch-fsdp2-no-reshard-after-forward"], "expected --use-torch-fsdp2"),
        (["--use-torch-fsdp2", "--use-megatron-fsdp"], "--use-torch-fsdp2: expected one engine"),
        (
            ["--use-torch-fsdp2", "--data-parallel-sharding-strategy", "optim"],
            "--data-parallel-sharding-strategy: expected --use-megatron-fsdp",
        ),
        (
            ["--data-parallel-sharding-strategy", "zero3"],
            "expected one of no_shard, optim, optim_grads, optim_grads_p",
        ),
        (
            ["--outer-dp-sharding-strategy", "optim"],
            "expected --num-distributed-optimizer-instances of at least 2",
        ),
        (
            (
                "--num-distributed-optimizer-instances 2 --data-parallel-sharding-strategy optim"
            ).split(),
            "expected --data-parallel-sharding-strategy optim_grads_params, got 'optim'",
        ),
        (["--num-distributed-optimizer-instances", "2"], "expected a divisor of 1 rank, got 2"),
        (["--wandb-exp-name", "a"], "--wandb-project: expected a name"),
        (
            ["--seq-length", "64", "--max-position-embeddings", "32"],
            "--seq-length: expected at most",
        ),
        (["--no-use-megatron-fsdp", "--bf16"], "--bf16: expected --use-megatron-fsdp"),
        (["--no-use-megatron-fsdp", "--fp16"], "--fp16: expected --use-megatron-fsdp"),
        (["--fp16", "--bf16"], "--fp16: expected one dtype to compute in, got '--bf16 too'."),
        (["--loss-scale", "8"], "--loss-scale: expected --fp16, got 8.0."),
        (["--hysteresis", "3", "--bf16"], "--hysteresis: expected --fp16, got 3."),
        (
            ["--override-opt-param-scheduler", "--load", "x", "--finetune"],
            "--override-opt-param-scheduler: expected no --finetune, which loads no schedule.",
        ),
        (
            ["--fp16", "--gpu-optimizer", "torch", "--main-grads-dtype", "fp16"],
            "--main-grads-dtype: expected fp32 with --fp16 and another optimizer than our own Adam",
        ),
        (
            ["--lr-warmup-iters", "9"],
            "--lr-warmup-iters: expected at most the 4 decay iterations, got 9.",
        ),
        (["--data-path", "/nowhere/data"], "--data-path"),
        (
            ["--ckpt-format", "zarr"],
            "--ckpt-format: expected one of fsdp_dtensor, torch_dcp, got 'zarr'.",
        ),
        (["--load-dcp", "x"], "--dcp-key-map: expected a table, since --load-dcp is given, got"),
        (["--dcp-key-map", "x"], "--load-dcp: expected a folder, since --dcp-key-map is given"),
        (["--load-dcp", "nil://x", "--dcp-key-map", "x"], "--load-dcp: expected a protocol that"),
        (
            ["--use-torch-fsdp2", "--save", "x", "--async-save"],
            "--async-save: expected --ckpt-format fsdp_dtensor, got 'torch_dcp'.",
        ),
        (["--async-save"], "--save: expected a folder, since --async-save is given"),
        (
            ["--save", "x", "--ckpt-format", "torch_dcp", "--async-save"],
            "--async-save: expected --ckpt-format fsdp_dtensor, got 'torch_dcp'.",
        ),
        (
            ["--save", "s3://bucket/run", "--ckpt-format", "torch_dcp"],
            "--save: expected a folder of a file system with --ckpt-format torch_dcp, got "
            "'s3://bucket/run'.",
        ),
        (
            ["--save", "x", "--async-save-busy", "skip"],
            "--async-save-busy: expected --async-save, got 'skip'.",
        ),
        (
            ["--save", "x", "--save-staging-share", "0.3"],
            "--save-staging-share: expected --async-save, got 0.3.",
        ),
        (
            ["--save-staging-share", "0.3"],
            "--save: expected a folder, since --save-staging-share is given",
        ),
        (
            ["--save-hf-weights"],
            "--save: expected a folder, since --save-hf-weights is given",
        ),
        (
            ["--save", "x", "--save-hf-weights", "fp16"],
            "--save-hf-weights: expected one of bf16, fp32, got 'fp16'.",
        ),
        (
            ["--save", "x", "--save-hf-interval", "2"],
            "--save-hf-weights: expected one of bf16, fp32, since --save-hf-interval is given",
        ),
        (
            ["--save", "x", "--save-hf-weights", "--ckpt-format", "torch_dcp"],
            "--save-hf-weights: expected --ckpt-format fsdp_dtensor, got 'torch_dcp'.",
        ),
        (
            ["--save", "memory://run", "--save-hf-weights"],
            "--save: expected a folder of a file system with --save-hf-weights, since ranks write "
            "at offsets within one file; `python -m megatron_hybrid checkpoint export` makes such "
            "a folder of any checkpoint, got 'memory://run'.",
        ),
        (["--lr"], "--lr: expected a number >= 0, got no value."),
    ],
)
def test_what_cannot_be_honoured_is_one_line_that_names_the_flag(flags, message):
    assert message in refusal(*flags)


def test_a_flag_without_default_that_is_missing_is_named():
    with pytest.raises(
        ConfigError, match=r"--lr: expected a number >= 0, got none; it has no default."
    ):
        parse_config(MINIMAL[:-2], 1)


def test_the_unsharded_engine_is_refused_on_several_ranks():
    assert (
        refusal("--no-use-megatron-fsdp", world_size=2)
        == "--no-use-megatron-fsdp: expected one process, got 2."
    )


@pytest.mark.parametrize(
    ("given", "value"),
    [([], None), (["--save-hf-weights"], "bf16"), (["--save-hf-weights", "fp32"], "fp32")],
)
def test_a_flag_may_mean_something_without_a_value(given, value):
    config = parse_config([*MINIMAL, "--save", "x", *given, "--async-save"], 1)
    assert config.checkpoint.save_hf_weights == value
    assert config.checkpoint.async_save


@pytest.mark.parametrize(
    ("text", "value"), [("true", "bf16"), ("fp32", "fp32"), ("false", None), ("", None)]
)
def test_so_may_a_key_of_a_file(tmp_path, text, value):
    path = write(tmp_path, f"save: x\nsave-hf-weights: {text}\n")
    config = parse_config(["--config", path, *MINIMAL], 1)
    assert config.checkpoint.save_hf_weights == value


def write(tmp_path: Path, content: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    return str(path)


def test_a_file_sets_flags_and_the_command_line_overrides_it(tmp_path):
    path = write(
        tmp_path,
        "hidden-size: 16\nadam_beta2: 0.5\nlr: 1e-3\nload: nowhere\nno-load-rng: true\nmock-data: "
        "true\n",
    )
    config = parse_config(["--config", path, *MINIMAL], 1)
    assert config.model.hidden_size == 8
    assert config.optimizer.adam_beta2 == 0.5
    assert not config.checkpoint.load_rng
    assert read_yaml(path)["lr"] == 1e-3


def test_an_unknown_key_of_a_file_is_refused_and_the_nearest_one_named(tmp_path):
    path = write(tmp_path, "hiden-size: 16\n")
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", path, *MINIMAL], 1)
    assert str(error.value) == (
        f"{path}: hiden-size: expected a known key, got one that does not exist. Did you mean "
        "hidden-size?"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "expected keys and values"),
        ("a: [1\n", "expected YAML"),
        ("hidden-size: wide\n", "--hidden-size: expected an integer"),
        ("hidden-size: 8\nhidden-size: 16\n", "expected each key once in"),
        (
            "hidden-size: 8\nhidden_size: 16\n",
            "hidden_size: expected --hidden-size to be set once, got it twice.",
        ),
        (
            "load-rng: true\nno-load-rng: true\n",
            "no-load-rng: expected --load-rng to be set once, got it twice.",
        ),
        ("bf16: 1\n", "--bf16: expected true or false, got '1'."),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(tmp_path, content, message):
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", write(tmp_path, content)], 1)
    assert message in str(error.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="--config: expected UTF-8 in"):
        parse_config(["--config", str(path)], 1)


def test_a_missing_file_is_named():
    with pytest.raises(
        ConfigError, match=r"--config: expected a readable file, got '/nowhere.yaml'"
    ):
        parse_config(["--config", "/nowhere.yaml"], 1)


def test_the_values_of_a_configuration_give_its_sections_back_through_json_and_yaml():
    config = parse_config([*MINIMAL, "--lr-decay-style", "cosine", "--clip-grad", "0.5"], 2)
    values = json.loads(json.dumps(yaml.safe_load(yaml.safe_dump(config.values()))))
    for _, section in config.sections():
        assert section_from_values(type(section), values) == section


def test_values_that_are_missing_or_wrong_are_refused_by_name():
    values = parse_config(MINIMAL, 1).values()
    with pytest.raises(ConfigError, match="--hidden-size: expected an integer >= 1, got 'wide'"):
        section_from_values(TransformerConfig, {**values, "hidden_size": "wide"})
    del values["hidden_size"]
    with pytest.raises(ConfigError, match="--hidden-size: expected an integer >= 1, got none"):
        section_from_values(TransformerConfig, values)


def test_the_effective_configuration_is_a_file_that_gives_the_same_one_again(tmp_path):
    special = ["--lr", "0.25", "--bf16", "--save", "1:30 # no comment", "--split", "8,1,1"]
    config = parse_config([*MINIMAL, *special], 2)
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(config))
    assert parse_config(["--config", str(path)], 2) == config
    assert "\nlr: 0.25\n" in path.read_text()


def test_an_unresolved_configuration_does_not_pretend_to_know_its_batch():
    config = parse_config(MINIMAL, 1)
    still_open = dataclasses.replace(
        config, training=dataclasses.replace(config.training, global_batch_size=None)
    )
    with pytest.raises(RuntimeError, match="resolved"):
        _ = still_open.global_batch_size
    assert still_open.resolve(3).global_batch_size == 3
