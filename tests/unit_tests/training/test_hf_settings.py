"""`--hf-model`: what a folder of the transformers library sets, and what may be set beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config, read_yaml
from megatron.training.config import RunConfig
from megatron.training.hf_settings import read_folder, take_settings
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size, train_bpe
from tests.helpers.hf_models import TEXT, VOCAB, save_model

REST = (
    "--mock-data --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --num-workers 0"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def config_of(folder: Path, *flags: object) -> RunConfig:
    return parse_config(["--hf-model", str(folder), *REST, *map(str, flags)], world_size=1)


def refused(folder: Path, *flags: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(folder, *flags)
    return list(caught.value.lines)


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy with another config.json; a value of None takes a field away."""
    target.mkdir()
    content = json.loads((folder / "config.json").read_text()) | changes
    content = {name: value for name, value in content.items() if value is not None}
    (target / "config.json").write_text(json.dumps(content))
    (target / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    return target


def test_the_folder_alone_says_what_the_model_and_the_tokenizer_are(folder):
    config = config_of(folder)
    assert (config.model.num_layers, config.model.hidden_size, config.model.head_dim) == (2, 24, 8)
    assert config.model.num_key_value_heads == 2
    assert config.model.qk_layernorm
    assert not config.model.untie_embeddings_and_output_weights
    assert config.model.max_position_embeddings == 64
    tokenizer = build_tokenizer(config.tokenizer)
    assert tokenizer.vocab_size < VOCAB
    assert padded_vocab_size(config.tokenizer, tokenizer) == VOCAB, "the folder's, to the row"


def test_what_concerns_training_is_the_users(folder):
    assert config_of(folder).model.hidden_dropout == 0.0
    flags = "--hidden-dropout 0.25 --recompute-granularity full --init-method-std 0.5".split()
    config = config_of(folder, *flags, "--num-layers", 2, "--hf-init-random").model
    assert (config.hidden_dropout, config.recompute_granularity) == (0.25, "full")
    assert config.init_method_std == 0.5
    assert config.attention_dropout == 0.0


def test_how_experts_are_balanced_is_the_users_and_how_they_are_chosen_is_not(tmp_path):
    model = read_folder(save_model(tmp_path / "model", "qwen3_moe", router_aux_loss_coef=0.01))
    values: dict[str, object] = {}
    assert take_settings(values, model) == []
    assert (values["moe_aux_loss_coeff"], values["moe_router_topk"]) == (0.01, 2)

    given = {
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.1,
        "moe_router_dtype": "fp32",
        "moe_expert_capacity_factor": 2.0,
    }
    values = dict(given)
    assert take_settings(values, model) == []
    assert {name: values[name] for name in given} == given
    file = f"{tmp_path}/model/config.json"
    assert take_settings({"moe_router_topk": 3}, model) == [
        f"--moe-router-topk: expected 2, as {file} says, got 3."
    ]


def test_contradictions_are_refused_by_name_with_both_values_and_all_at_once(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num-layers: 3\nseq-length: 32\nnormalization: RMSNorm\n")
    lines = refused(folder, "--config", file, "--hidden-size", 32, "--no-qk-layernorm")
    says = f"as {folder}/config.json says"
    assert lines == [
        f"--num-layers: expected 2, {says}, got 3.",
        f"--hidden-size: expected 24, {says}, got 32.",
        f"--qk-layernorm: expected True, {says}, got False.",
    ]
    # A flag that overrides the file is what counts.
    assert config_of(folder, "--config", file, "--num-layers", 2).model.num_layers == 2


def test_the_rows_of_the_embedding_are_not_padded(folder):
    assert refused(folder, "--make-vocab-size-divisible-by", 128) == [
        f"--make-vocab-size-divisible-by: expected a divisor of the {VOCAB} rows that the "
        f"embedding in {folder} has, got 128."
    ]
    (line,) = refused(folder, "--vocab-size", 300)
    assert line.startswith(f"--vocab-size: expected {VOCAB}, as ")
    config = config_of(folder, "--make-vocab-size-divisible-by", 7)
    assert padded_vocab_size(config.tokenizer, build_tokenizer(config.tokenizer)) == VOCAB


def test_rows_are_added_by_the_size_of_the_vocabulary(folder):
    for kind, flags, expected in (
        ("HuggingFaceTokenizer", (), VOCAB + 1),
        ("HuggingFaceTokenizer", ("--make-vocab-size-divisible-by", 8), 304),
        ("NullTokenizer", (), VOCAB + 2),
    ):
        more = ("--vocab-size", VOCAB + 1, "--tokenizer-type", kind, *flags)
        settings = config_of(folder, *more).tokenizer
        assert padded_vocab_size(settings, build_tokenizer(settings)) == expected


def test_another_tokenizer_may_be_named_if_the_embedding_has_room(folder, tmp_path):
    train_bpe([TEXT], 280, tmp_path / "small.json")
    config = config_of(folder, "--tokenizer-model", tmp_path / "small.json")
    assert padded_vocab_size(config.tokenizer, build_tokenizer(config.tokenizer)) == VOCAB
    for kind in ("ByteTokenizer", "NullTokenizer"):
        config = config_of(folder, "--tokenizer-type", kind)
        assert padded_vocab_size(config.tokenizer, build_tokenizer(config.tokenizer)) == VOCAB

    bare = changed(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (line,) = refused(bare)
    assert line.startswith(f"--tokenizer-model: expected a tokenizer's files in {bare}")
    assert config_of(bare, "--tokenizer-type", "ByteTokenizer").model.num_layers == 2
    (bare / "tokenizer.model").touch()
    (line,) = refused(bare)
    assert line.endswith(
        "got tokenizer.model alone, which must be converted to tokenizer.json first."
    )


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(folder, tmp_path):
    small = config_of(changed(folder, tmp_path / "small", vocab_size=200)).tokenizer
    message = "--tokenizer-model: expected at most 200 ids, as many as the embedding in small has "
    with pytest.raises(ConfigError, match=message) as caught:
        build_tokenizer(small, rows_of="small")
    # The way out that is named is one.
    (added,) = re.findall(r"--vocab-size \d+", str(caught.value))
    more = config_of(tmp_path / "small", *added.split()).tokenizer
    assert build_tokenizer(more).vocab_size == more.vocab_size
    for flags in ((), ("--tokenizer-type", "ByteTokenizer"), ("--tokenizer-type", "NullTokenizer")):
        config = config_of(folder, *flags)
        build_tokenizer(config.tokenizer, rows_of=str(folder))


def test_a_sequence_is_no_longer_than_the_folder_says(folder, tmp_path):
    (line,) = refused(folder, "--seq-length", 65)
    assert line == "--seq-length: expected at most --max-position-embeddings 64, got 65."
    endless = changed(folder, tmp_path / "endless", max_position_embeddings=None)
    assert config_of(endless, "--seq-length", 65).model.max_position_embeddings is None
    assert config_of(endless, "--max-position-embeddings", 99).model.max_position_embeddings == 99


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neo"}, "a model_type of llama, "),
        ({"attn_surprise": 2.0}, "attn_surprise 2.0"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None}, "rope"),
    ],
)
def test_a_folder_that_no_gpt_here_computes_is_one_line(folder, tmp_path, changes, message):
    (line,) = refused(changed(folder, tmp_path / "other", **changes))
    assert line.startswith("--hf-model: ")
    assert message in line


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path):
    (line,) = refused(Path("meta-llama/Llama-3.2-1B"))
    expected = "--hf-model: Expected a local folder with config.json, got "
    assert line.startswith(f"{expected}'meta-llama/Llama-3.2-1B', where there is none. Models of ")
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B`" in line

    file, snapshot = tmp_path / "model.gguf", tmp_path / "hub" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (file, snapshot / "config.json"):
        path.touch()
    for path, got in (
        (tmp_path / "none", "where there is none."),
        (file, "which is a file. Give the folder that it is in."),
        (tmp_path / "hub", f"which has none. Give the folder inside it: {snapshot}."),
    ):
        (line,) = refused(path)
        assert line == f"{expected}'{path}', {got}"

    with pytest.raises(ConfigError) as caught:
        parse_config(["--hf-model", "", *REST], world_size=1)
    assert caught.value.lines == ("--hf-model: expected a non-empty string, got ''.",)
    (tmp_path / "config.json").write_text("[")
    (line,) = refused(tmp_path)
    assert "Expected a JSON object" in line
    with pytest.raises(ConfigError, match=r"--hf-model: expected a folder, since --hf-init-random"):
        parse_config(["--hf-init-random", "--num-layers=1", *REST], world_size=1)


def test_a_file_of_settings_may_name_the_folder(folder, tmp_path):
    (tmp_path / "run.yaml").write_text(f"hf-model: {folder}\nseq-length: 16\n")
    assert read_yaml(str(tmp_path / "run.yaml"))["hidden_size"] == 24
    (tmp_path / "run.yaml").write_text(f"hf-model: {folder}\nhidden-size: 16\n")
    with pytest.raises(ConfigError, match="--hidden-size: expected 24, as "):
        read_yaml(str(tmp_path / "run.yaml"))
