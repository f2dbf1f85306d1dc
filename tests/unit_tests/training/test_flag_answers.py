"""Flags of Megatron-LM: accepted without effect, or rejected with a replacement, in one message."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron.core.options import ConfigError, options_of
from megatron.training.arguments import parse_command_line, parse_config, read_yaml
from megatron.training.config import RunConfig, all_options
from megatron.training.flag_answers import Given, Ruling, answer, answer_rows
from megatron_hybrid import pretrain_gpt

MINIMAL = [
    *("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mock-data").split(),
    *"--tokenizer-type NullTokenizer --vocab-size 31".split(),
    *"--micro-batch-size 1 --train-iters 4 --lr 0.1".split(),
]


def refusal(*flags: str, world_size: int = 1) -> tuple[str, ...]:
    """Returns the lines of the error."""
    with pytest.raises(ConfigError) as error:
        parse_config([*MINIMAL, *flags], world_size)
    assert "\n" not in str(error.value)
    return error.value.lines


def test_flags_without_effect_do_not_change_the_configuration():
    flags = (
        "--use-mcore-models --pipeline-model-parallel-size 1 --transformer-impl local "
        "--use-distributed-optimizer --overlap-grad-reduce --no-gradient-accumulation-fusion"
    )
    parsed = parse_command_line([*MINIMAL, *flags.split()], 1)
    assert parsed.config == parse_config(MINIMAL, 1)
    assert " ".join(map(str, parsed.without_effect)) == flags


def test_omitting_the_attention_mask_is_rejected_if_documents_are_separated():
    given = Given("--no-create-attention-mask-in-dataloader", ())
    plain, apart = answer(given, {}, 0), answer(given, {"reset_attention_mask": True}, 0)
    assert plain is not None
    assert apart is not None
    assert (plain.ruling, apart.ruling) == (Ruling.NO_EFFECT, Ruling.REMOVE)


def test_inter_document_masking_is_accepted_with_conversations():
    """Conversations reject --reset-attention-mask, the equivalent flag for text."""
    given = Given("--dataloader-inter-document-masking", ())
    of_text, of_chats = answer(given, {}, 0), answer(given, {"sft": True}, 0)
    assert of_text is not None
    assert of_chats is not None
    assert of_text.use == ("--reset-attention-mask",)
    assert of_chats.ruling is Ruling.NO_EFFECT


def test_flags_without_effect_are_one_log_line(capsys):
    parsed = parse_command_line([*MINIMAL, "--use-mcore-models", "--manual-gc-interval", "5"], 1)
    pretrain_gpt.log.configure(rank=0)
    try:
        parsed.log_without_effect()
        parse_command_line(MINIMAL, 1).log_without_effect()
    finally:
        logging.getLogger("megatron").handlers.clear()
        logging.getLogger("megatron").propagate = True
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "--use-mcore-models, --manual-gc-interval 5" in lines[0]


def test_all_errors_are_reported_together():
    """Unknown flags, flags of Megatron-LM, invalid values, and flags that require others."""
    lines = refusal(
        *"--adam-bet1 0.9 --pipeline-model-parallel-size 2 --no-such-thing a b".split(),
        *"--clip-grad -1 --dropout".split(),
        *"--save-interval 5 --bf16 yes --fp8-output-proj".split(),
    )
    assert lines == (
        "--adam-bet1: expected a known flag, got one that does not exist. Did you mean "
        "--adam-beta1?",
        "--pipeline-model-parallel-size 2: remove it. Pipeline parallelism is not offered; FSDP "
        "shards.",
        "--no-such-thing: expected a known flag, got one that does not exist.",
        "--dropout: expected a known flag, got one that does not exist.",
        "--fp8-output-proj: remove it. --fp8-recipe and --fp4-format choose the arithmetic of all "
        "linear layers in the decoder.",
        "--bf16: expected no value, got 'yes'.",
        "--clip-grad: expected a number >= 0, got -1.0.",
        "--save: expected a directory, since --save-interval is given, got None.",
    )


def test_all_missing_required_flags_are_reported_together():
    with pytest.raises(ConfigError) as error:
        parse_config(["--mock-data"], 1)
    missing = [line.split(":")[0] for line in error.value.lines if "it has no default" in line]
    assert missing == [
        *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"),
        *("--train-iters", "--micro-batch-size"),
    ]


def test_errors_of_the_replacement_are_reported_with_it():
    assert refusal("--recompute-activations") == (
        "--recompute-activations: use --recompute-granularity selective instead. It is the same "
        "setting.",
    )
    # With the replacement, a batch of 3 is not divisible over two ranks.
    assert refusal("--batch-size", "3", "--global-batch-size", "8", world_size=2) == (
        "--batch-size 3: use --micro-batch-size 3 instead. It is the same setting.",
        "--global-batch-size: expected a multiple of 6, micro-batch-size 3 x 2 ranks, got 8.",
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        # 22 // 4: Megatron-LM drops the remainder, too.
        ("--train-samples 22", "use --train-iters 5 instead."),
        ("--lr-warmup-samples 1", "use --lr-warmup-iters 1 instead."),
        ("--lr-warmup-samples 0", "use --lr-warmup-iters 0 instead."),
        ("--lr-decay-samples many", "use --lr-decay-iters N instead."),
        ("--lr-decay-samples " + "9" * 5000, "use --lr-decay-iters N instead."),
    ],
)
def test_samples_are_converted_to_iterations_of_the_global_batch(given, line):
    (found,) = refusal("--global-batch-size", "4", *given.split(), world_size=2)
    assert line in found


def test_samples_are_converted_with_the_default_global_batch_size():
    assert "--train-iters 5 " in refusal("--train-samples", "15", world_size=3)[0]
    for size in ("context-parallel-size", "tensor-model-parallel-size"):
        divided = f"--{size} 2 --train-samples 15".split()
        assert "--train-iters 5 " in refusal(*divided, world_size=6)[0]


def test_an_invalid_value_of_a_required_flag_is_one_line():
    assert refusal("--hidden-size", "wide", "--lr", "fast") == (
        "--hidden-size: expected an integer >= 1, got 'wide'.",
        "--lr: expected a number >= 0, got 'fast'.",
    )


def test_required_flags_set_by_a_replacement_are_not_reported_as_missing():
    flags = [*MINIMAL[: MINIMAL.index("--tokenizer-type")], *MINIMAL[-6:]]
    with pytest.raises(ConfigError) as error:
        parse_config([*flags, "--vocab-file", "gpt2-vocab.json"], 1)
    assert error.value.lines == (
        "--vocab-file gpt2-vocab.json: use --tokenizer-model FILE instead. FILE is the "
        "tokenizer.json of the same vocabulary.",
    )


def test_a_value_that_only_megatron_supports_has_a_replacement():
    assert refusal("--ckpt-format", "torch_dist") == (
        "--ckpt-format torch_dist: use --ckpt-format fsdp_dtensor instead. It is the project's "
        "own; Megatron-LM's torch and torch_dist are neither written nor read.",
    )


def test_a_replacement_may_depend_on_another_flag():
    flags = ["--experimental-attention-variant", "gdn"]
    assert "use --linear-attention-freq N instead" in refusal(*flags)[0]
    given = Given(flags[0], ("gdn",))
    found = parse_command_line([*MINIMAL, *flags, "--linear-attention-freq", "2"], 1)
    assert found.without_effect == (given,)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--adam-bet1", "--adam-beta1"),
        ("--num_layers", "--num-layers"),
        ("--globalbatchsize", "--global-batch-size"),
        ("--hiden-size", "--hidden-size"),
        ("--seq-lenght", "--seq-length"),
        # Similar to other flags, with another meaning.
        ("--adam-beta3", None),
        ("--no-lr-decay-iters", None),
        ("--max-lr", None),
        ("--fp32", None),
        ("--lr-decay-steps", None),
        ("--no-save", None),
        ("--save-dir", None),
    ],
)
def test_a_similar_flag_is_suggested_only_if_it_means_the_same(flag, meant):
    (line,) = refusal(flag)
    hint = "" if meant is None else f" Did you mean {meant}?"
    assert line == f"{flag}: expected a known flag, got one that does not exist.{hint}"


def write(tmp_path: Path, content: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    return str(path)


def test_a_settings_file_gets_the_same_errors_as_the_command_line(tmp_path):
    parsed = parse_command_line([*MINIMAL, "--config", write(tmp_path, "manual_gc: true\n")], 1)
    assert parsed.without_effect == (Given("--manual-gc", ()),)

    path = write(
        tmp_path,
        "use-mcore-models: true\noverlap_grad_reduce: false\nfp8-format: null\n"
        "pipeline-model-parallel-size: 4\nno-such: [1, 2]\nckpt-format: torch_dist\n",
    )
    lines = refusal("--config", path)
    assert [line.split(". ")[0] for line in lines] == [
        f"{path}: --pipeline-model-parallel-size 4: remove it",
        f"{path}: no-such: expected a known key, got one that does not exist.",
        f"{path}: --ckpt-format torch_dist: use --ckpt-format fsdp_dtensor instead",
    ]
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 4: remove it"):
        read_yaml(path)


def test_the_message_for_a_thousand_unknown_keys_is_bounded(tmp_path):
    path = write(tmp_path, "".join(f"k{number}: 1\n" for number in range(1_000)))
    lines = refusal("--config", path)
    assert 50 < len(lines) < 70
    assert lines[-1] == "There may be more."


def test_arguments_without_a_flag_are_rejected():
    with pytest.raises(ConfigError) as error:
        parse_config(["train", *MINIMAL, "--lr", "1", "2"], 1)
    assert error.value.lines == (
        "train: expected a flag, which starts with --, or its value.",
        "--lr: expected one value, got 2: '1 2'. One with blanks needs quotes.",
    )


def test_flags_without_effect_do_not_consume_following_arguments():
    """Otherwise a mistyped `-bf16` would be ignored, and the run would train in fp32."""
    with pytest.raises(ConfigError, match="-bf16: expected a flag, which starts with --"):
        parse_config([*MINIMAL, "--sequence-parallel", "-bf16"], 1)
    with pytest.raises(
        ConfigError, match="--use-flash-attn: expected at most one value, got 'foo bar'"
    ):
        parse_config([*MINIMAL, "--use-flash-attn", "foo", "bar"], 1)
    config = parse_config(
        [*MINIMAL, "--position-embedding-type", "rope", "--no-position-embedding"], 1
    )
    assert config.model.position_embedding_type == "rope"


def test_the_suggested_checkpoint_format_fits_the_engine():
    with pytest.raises(ConfigError) as error:
        parse_config([*MINIMAL, "--use-torch-fsdp2", "--ckpt-format", "torch_dist"], 1)
    (line,) = error.value.lines
    assert "use --ckpt-format torch_dcp instead" in line


def test_values_may_follow_an_equals_sign_and_be_negative():
    config = parse_config([*MINIMAL, "--lr=0.5", "--data-cache-path=a=b"], 1)
    assert config.schedule.lr == 0.5
    assert config.data.data_cache_path == "a=b"
    assert refusal("--lr", "-1e-3") == ("--lr: expected a number >= 0, got -0.001.",)


@pytest.mark.parametrize("split", ["'99,1,0'", '"99,1,0"', "99,1,0"])
def test_quotes_of_a_bash_array_around_a_split_are_removed(split):
    config = parse_config([*MINIMAL, "--split", split], 1)
    assert config.data == parse_config([*MINIMAL, "--split", "99,1,0"], 1).data
    assert config.data.split_fractions == (0.99, 0.01, 0)


def field_of(flag: str) -> str:
    """Returns the name of the field that a flag sets, as in `answer`."""
    return flag.lstrip("-").replace("-", "_")


def test_no_row_of_the_table_matches_a_supported_flag():
    """Except for rows with values that only Megatron-LM supports."""
    for field in all_options().values():
        admitted = field.option.choices or ("1",)
        for value in (*map(str, admitted), ""):
            for flag in (field.flag, field.off_flag):
                given = Given(flag, (value,) if value else ())
                assert answer(given, {}, 1) is None, given


def test_every_replacement_is_a_supported_flag_with_a_valid_value():
    flags = {field.flag: field for field in all_options().values()}
    replacing = [row for row in answer_rows() if row.ruling is Ruling.REPLACE]
    assert replacing
    for row in replacing:
        words = row.use.split()
        for flag, value in zip(words, [*words[1:], ""], strict=True):
            if flag.startswith("--"):
                choices = flags[flag].option.choices
                assert value.isupper() or "{" in value or not choices or value in choices, row


def test_every_row_of_the_table_is_reachable():
    """No row is shadowed by an earlier one."""
    for number, row in enumerate(answer_rows()):
        # A setting that an earlier row excludes leaves the flag to this one.
        earlier = [other for other in answer_rows()[:number] if {*other.flags} & {*row.flags}]
        settings = {field_of(other.unless): True for other in earlier if other.unless}
        if row.unless:
            settings[field_of(row.unless)] = False
        for name in row.flags:
            given = Given(name.replace("*", "x"), (row.values or ("7",))[:1])
            found = answer(given, settings, 1)
            assert found is not None
            assert found.why == row.why, given


def test_the_table_refers_to_existing_options():
    options = {(field.flag, field.name) for section in _sections() for field in options_of(section)}
    named = {(row.unless, field_of(row.unless)) for row in answer_rows() if row.unless}
    assert named
    assert named <= options


def _sections() -> list[type]:
    return [type(section) for _, section in _config().sections()]


def _config() -> RunConfig:
    return parse_config(MINIMAL, 1)
