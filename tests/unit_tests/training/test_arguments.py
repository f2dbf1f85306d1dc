from __future__ import annotations

import dataclasses
import json
import shlex
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
from megatron.training.config import all_options

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
    options = {field.name: field.option for field in all_options().values()}
    for option in options.values():
        needed = (*option.requires, option.overridden_by, *dict(option.no_effect_unless))
        assert {name for name in needed if name is not None} <= options.keys()


def test_a_global_batch_that_does_not_divide_is_rejected_with_the_numbers():
    assert refusal("--global-batch-size", "7", world_size=2) == (
        "--global-batch-size: expected a multiple of 2, micro-batch-size 1 x 2 ranks, got 7."
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--lr fast", "--lr"),
        ("--lr nan", "--lr"),
        ("--train-iters 0", "--train-iters"),
        ("--normalization BatchNorm", "--normalization"),
        ("--save-interval 5", "--save"),
        ("--ckpt-step 5", "--load"),
        ("--no-load-rng", "--load"),
        ("--load-skip-keys a --save x --recover-mode off", "--load"),
        ("--no-save-optim", "--save"),
        ("--save ''", "--save"),
        ("--seed 4294967296", "--seed"),
        ("--split 0,1,1", "--split"),
        ("--override-opt-param-scheduler", "--load"),
        ("--torch-fsdp2-no-reshard-after-forward", "--torch-fsdp2-no-reshard-after-forward"),
        ("--use-torch-fsdp2 --use-megatron-fsdp", "--use-torch-fsdp2"),
        (
            "--use-torch-fsdp2 --data-parallel-sharding-strategy optim",
            "--data-parallel-sharding-strategy",
        ),
        ("--data-parallel-sharding-strategy zero3", "--data-parallel-sharding-strategy"),
        ("--outer-dp-sharding-strategy optim", "--outer-dp-sharding-strategy"),
        (
            "--num-distributed-optimizer-instances 2 --data-parallel-sharding-strategy optim",
            "--num-distributed-optimizer-instances",
        ),
        ("--num-distributed-optimizer-instances 2", "--num-distributed-optimizer-instances"),
        ("--wandb-exp-name a", "--wandb-project"),
        ("--seq-length 64 --max-position-embeddings 32", "--seq-length"),
        ("--no-use-megatron-fsdp --bf16", "--bf16"),
        ("--no-use-megatron-fsdp --fp16", "--fp16"),
        ("--fp16 --bf16", "--fp16"),
        ("--loss-scale 8", "--loss-scale"),
        ("--hysteresis 3 --bf16", "--hysteresis"),
        ("--override-opt-param-scheduler --load x --finetune", "--override-opt-param-scheduler"),
        ("--fp16 --gpu-optimizer torch --main-grads-dtype fp16", "--main-grads-dtype"),
        ("--lr-warmup-iters 9", "--lr-warmup-iters"),
        ("--data-path /nowhere/data", "--data-path"),
        ("--ckpt-format zarr", "--ckpt-format"),
        ("--dcp-key-map x", "--load-dcp"),
        ("--load-dcp nil://x --dcp-key-map x", "--load-dcp"),
        ("--use-torch-fsdp2 --save x --async-save", "--async-save"),
        ("--async-save", "--save"),
        ("--save x --ckpt-format torch_dcp --async-save", "--async-save"),
        ("--save s3://bucket/run --ckpt-format torch_dcp", "--save"),
        ("--save x --async-save-busy skip", "--async-save-busy"),
        ("--save x --save-staging-share 0.3", "--save-staging-share"),
        ("--save-staging-share 0.3", "--save"),
        ("--save-hf-weights", "--save"),
        ("--save x --save-hf-weights fp16", "--save-hf-weights"),
        ("--save x --save-hf-interval 2", "--save-hf-weights"),
        ("--save x --save-hf-weights --ckpt-format torch_dcp", "--save-hf-weights"),
        ("--save memory://run --save-hf-weights", "--save"),
        ("--lr", "--lr"),
        ("--load-dcp x", "--dcp-key-map"),
    ],
)
def test_flags_that_cannot_be_combined_are_rejected_by_name(flags, named):
    assert refusal(*shlex.split(flags)).startswith(f"{named}: expected ")


def test_the_unsharded_engine_is_rejected_on_several_ranks():
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


def test_an_unknown_key_of_a_file_is_rejected_and_the_nearest_one_named(tmp_path):
    path = write(tmp_path, "hiden-size: 16\n")
    with pytest.raises(ConfigError, match=f"{path}: hiden-size: .* hidden-size"):
        parse_config(["--config", path, *MINIMAL], 1)


@pytest.mark.parametrize(
    "content",
    [
        "hidden-size: 8\nhidden-size: 16\n",
        "hidden-size: 8\nhidden_size: 16\n",
        "load-rng: true\nno-load-rng: true\n",
    ],
)
def test_a_file_that_sets_an_option_twice_is_rejected(tmp_path, content):
    with pytest.raises(ConfigError, match=r"once|twice"):
        parse_config(["--config", write(tmp_path, content)], 1)


def test_the_values_of_a_configuration_give_its_sections_back_through_json_and_yaml():
    config = parse_config([*MINIMAL, "--lr-decay-style", "cosine", "--clip-grad", "0.5"], 2)
    values = json.loads(json.dumps(yaml.safe_load(yaml.safe_dump(config.values()))))
    for _, section in config.sections():
        assert section_from_values(type(section), values) == section


def test_values_that_are_missing_or_wrong_are_rejected_by_name():
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


SIZE = "--expert-model-parallel-size"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (f"--num-experts 6 {SIZE} 4", SIZE),
        (f"--num-experts 6 {SIZE} 3", SIZE),
        (f"--num-experts 8 {SIZE} 4 --num-distributed-optimizer-instances 2", SIZE),
        (f"--num-experts 8 {SIZE} 0", SIZE),
        (f"{SIZE} 2", "--num-experts"),
        (f"--num-experts 8 {SIZE} 2 --use-torch-fsdp2", SIZE),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk"),
        (
            "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
            "--moe-router-num-groups",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5",
            "--moe-router-group-topk",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 "
            "--moe-router-topk 3",
            "--moe-router-topk",
        ),
    ],
)
def test_flags_of_experts_that_contradict_each_other_are_rejected_by_name(flags, named):
    assert refusal(*flags.split(), world_size=4).startswith(f"{named}: expected ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [(f"{SIZE} 2", "--num-experts"), (f"--num-experts 8 {SIZE} 2 --no-use-megatron-fsdp", SIZE)],
)
def test_one_rank_cannot_divide_experts_without_experts_or_an_engine(flags, named):
    assert refusal(*flags.split()).startswith(f"{named}: expected ")


CONTEXT = "--context-parallel-size"
DELTA_NETS = (
    "--linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 2 "
    "--linear-key-head-dim 4 --linear-value-head-dim 4"
)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (f"{CONTEXT} 0", CONTEXT),
        (f"{CONTEXT} 3", CONTEXT),
        (f"{CONTEXT} 2 --seq-length 15", "--seq-length"),
        (f"{CONTEXT} 4", CONTEXT),  # of 2 heads
        (f"{CONTEXT} 4 --num-attention-heads 4 {DELTA_NETS}", CONTEXT),  # of 2 value heads
        (f"{CONTEXT} 2 --global-batch-size 3", "--global-batch-size"),
        (f"{CONTEXT} 2 --use-torch-fsdp2", CONTEXT),
        ("--cp-comm-type all_gather", "--cp-comm-type"),
        (f"{CONTEXT} 2 --cp-comm-type ring", "--cp-comm-type"),
    ],
)
def test_flags_of_context_parallelism_that_do_not_fit_are_rejected_by_name(flags, named):
    assert refusal(*flags.split(), world_size=4).startswith(f"{named}: expected ")


TENSOR = "--tensor-model-parallel-size"
ONE_GROUP = "--group-query-attention --num-query-groups 1"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (f"{TENSOR} 0", TENSOR),
        (f"{TENSOR} 3", TENSOR),
        (f"{TENSOR} 4", TENSOR),  # of 2 heads
        (f"{TENSOR} 4 --num-attention-heads 4 {ONE_GROUP} --kv-channels 2", TENSOR),
        (f"{TENSOR} 2 --compile-layers", "--compile-layers"),
        (f"{TENSOR} 2 --ffn-hidden-size 15", TENSOR),
        (f"{TENSOR} 2 {DELTA_NETS.replace('key-heads 2', 'key-heads 1')}", TENSOR),
        (f"{TENSOR} 2 --num-experts 4 --moe-shared-expert-intermediate-size 5", TENSOR),
        (
            f"{TENSOR} 2 --num-experts 4 --expert-model-parallel-size 3",
            "--expert-model-parallel-size",
        ),
        (f"{TENSOR} 4 --num-distributed-optimizer-instances 2", TENSOR),
        (f"{TENSOR} 2 --qk-layernorm --qk-layernorm-across-heads", TENSOR),
        (f"{TENSOR} 2 --use-torch-fsdp2", TENSOR),
        (f"{TENSOR} 2 --optimizer muon", "--optimizer"),
        (f"{TENSOR} 2 --seq-length 15", "--seq-length"),
        (f"{TENSOR} 2 {CONTEXT} 2 --seq-length 14", "--seq-length"),
        (f"{TENSOR} 2 {CONTEXT} 4", CONTEXT),  # of 4 ranks
        (f"{TENSOR} 2 {CONTEXT} 2", CONTEXT),  # of 2 / 2 heads
        (f"{TENSOR} 2 --global-batch-size 3", "--global-batch-size"),
    ],
)
def test_flags_of_tensor_parallelism_that_do_not_fit_are_rejected_by_name(flags, named):
    assert refusal(*flags.split(), world_size=4).startswith(f"{named}: expected ")


def test_heads_that_no_layer_has_need_not_be_divided():
    only_delta_nets = DELTA_NETS.replace("-freq 2", "-freq [1]")
    config = parse_config([*MINIMAL, *f"{TENSOR} 2 {ONE_GROUP} {only_delta_nets}".split()], 2)
    assert config.parallel.tensor_model_parallel_size == 2


def test_ranks_that_divide_sequences_or_layers_do_not_add_to_the_batch():
    for size in (CONTEXT, TENSOR):
        config = parse_config([*MINIMAL, size, "2"], 8)
        assert config.global_batch_size == 4
        assert [config.parallel.data_parallel_rank(rank) for rank in range(8)] == [
            *(0, 0, 1, 1),
            *(2, 2, 3, 3),
        ]
    both = parse_config([*MINIMAL, TENSOR, "2", CONTEXT, "2", "--cp-comm-type", "all_gather"], 8)
    assert [both.parallel.data_parallel_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    gathered = f"{CONTEXT} 4 --cp-comm-type all_gather {DELTA_NETS}"
    assert parse_config([*MINIMAL, *gathered.split()], 8).global_batch_size == 2


def test_one_rank_for_all_experts_is_no_setting():
    assert parse_config([*MINIMAL, SIZE, "1"], 4) == parse_config(MINIMAL, 4)


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("", "--moe-router-pre-softmax"),
        ("--moe-router-pre-softmax --moe-router-norm-topk", "--moe-router-no-norm-topk"),
        ("--moe-router-score-function sigmoid --moe-router-norm-topk", "--moe-router-no-norm-topk"),
    ],
)
def test_a_router_whose_single_weight_is_always_1_is_rejected_in_training(flags, instead):
    flags = f"--num-experts 4 --moe-router-topk 1 {flags}"
    message = refusal(*flags.split())
    assert message.startswith("--moe-router-topk: expected ")
    assert f" {instead} " in message
    parse_config([*MINIMAL, *flags.split(), "--skip-train"], 1)


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 4 --moe-router-pre-softmax",
        "--num-experts 4 --moe-router-score-function sigmoid",
        "--num-experts 1",
    ],
)
def test_a_router_whose_one_weight_varies_trains_and_so_does_one_without_a_choice(flags):
    config = parse_config([*MINIMAL, "--moe-router-topk", "1", *flags.split()], 1)
    assert config.model.moe_router_topk == 1
