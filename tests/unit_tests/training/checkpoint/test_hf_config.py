"""`--hf-model`: the settings from a directory of the transformers library, the comparison of its
config.json with a model, and the files that a save copies from the tokenizer and the base model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import hf_config
from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config, read_yaml
from megatron.training.checkpoint.hf_config import (
    FolderExtras,
    config_problems,
    read_folder,
    take_settings,
)
from megatron.training.config import RunConfig
from megatron.training.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    build_tokenizer,
    padded_vocab_size,
    train_bpe,
)
from tests.helpers.hf_models import TEXT, VOCAB, save_model
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer
from tests.unit_tests.training.helpers.hf_folders import QWEN3

SPECIAL = ["<bos>", "<turn_end>", "<fill>", "</s>"]
BOS, TURN_END, FILL, EOS = range(256, 260)
CONFIG = {
    "add_bos_token": True,
    "bos_token": {"content": "<bos>", "__type": "AddedToken"},
    "eos_token": "<turn_end>",
    "pad_token": "<fill>",
    "model_max_length": 77,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
FILES = {
    "tokenizer_config.json": json.dumps(CONFIG),
    "special_tokens_map.json": '{"eos_token": "<turn_end>"}',
    "added_tokens.json": '{"<fill>": 258}',
    "chat_template.jinja": "{{ bos_token }}{% for m in messages %}{{ m.content }}!{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "tokenization_own.py": "raise RuntimeError",
}
OTHERS = {
    "README.md": "x",
    "model.safetensors": "x",
    "data.json": "{}",
    "notes/tokenizer.json": "x",
}
REST = (
    "--mock-data --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --num-workers 0"
).split()


# Settings of a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def config_of(folder: Path, *flags: object) -> RunConfig:
    return parse_config(["--hf-model", str(folder), *REST, *map(str, flags)], world_size=1)


def errors_of(folder: Path, *flags: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(folder, *flags)
    return list(caught.value.lines)


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """Copies a directory and changes its config.json. None removes a field."""
    target.mkdir()
    content = json.loads((folder / "config.json").read_text()) | changes
    content = {name: value for name, value in content.items() if value is not None}
    (target / "config.json").write_text(json.dumps(content))
    (target / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    return target


def test_a_directory_sets_the_model_and_the_tokenizer(folder):
    config = config_of(folder)
    assert (config.model.num_layers, config.model.hidden_size, config.model.head_dim) == (2, 24, 8)
    assert config.model.num_key_value_heads == 2
    assert config.model.qk_layernorm
    assert not config.model.untie_embeddings_and_output_weights
    assert config.model.max_position_embeddings == 64
    tokenizer = build_tokenizer(config.tokenizer)
    assert tokenizer.vocab_size < VOCAB
    assert padded_vocab_size(config.tokenizer, tokenizer) == VOCAB


def test_training_settings_are_not_taken_from_the_directory(folder):
    assert config_of(folder).model.hidden_dropout == 0.0
    flags = "--hidden-dropout 0.25 --recompute-granularity full --init-method-std 0.5".split()
    config = config_of(folder, *flags, "--num-layers", 2, "--hf-init-random").model
    assert (config.hidden_dropout, config.recompute_granularity) == (0.25, "full")
    assert config.init_method_std == 0.5
    assert config.attention_dropout == 0.0


def test_balancing_flags_may_differ_from_the_directory_and_routing_flags_may_not(tmp_path):
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
    (line,) = take_settings({"moe_router_topk": 3}, model)
    assert line.startswith("--moe-router-topk: expected 2, ")


def test_all_contradictions_are_reported_together_with_both_values(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num-layers: 3\nseq-length: 32\nnormalization: RMSNorm\n")
    lines = errors_of(folder, "--config", file, "--hidden-size", 32, "--no-qk-layernorm")
    for line, (flag, theirs, own) in zip(
        lines,
        [("num-layers", 2, 3), ("hidden-size", 24, 32), ("qk-layernorm", True, False)],
        strict=True,
    ):
        assert line.startswith(f"--{flag}: expected {theirs}, ")
        assert line.endswith(f"got {own}.")
    # A flag overrides the file.
    assert config_of(folder, "--config", file, "--num-layers", 2).model.num_layers == 2


def test_the_rows_of_the_embedding_are_not_padded(folder):
    (line,) = errors_of(folder, "--make-vocab-size-divisible-by", 128)
    assert line.startswith("--make-vocab-size-divisible-by: ")
    (line,) = errors_of(folder, "--vocab-size", 300)
    assert line.startswith(f"--vocab-size: expected {VOCAB}, as ")
    config = config_of(folder, "--make-vocab-size-divisible-by", 7)
    assert padded_vocab_size(config.tokenizer, build_tokenizer(config.tokenizer)) == VOCAB


def test_a_larger_vocab_size_adds_rows(folder):
    for kind, flags, expected in (
        ("HuggingFaceTokenizer", (), VOCAB + 1),
        ("HuggingFaceTokenizer", ("--make-vocab-size-divisible-by", 8), 304),
        ("NullTokenizer", (), VOCAB + 2),
    ):
        more = ("--vocab-size", VOCAB + 1, "--tokenizer-type", kind, *flags)
        settings = config_of(folder, *more).tokenizer
        assert padded_vocab_size(settings, build_tokenizer(settings)) == expected


def test_another_tokenizer_may_be_used_if_the_embedding_has_enough_rows(folder, tmp_path):
    train_bpe([TEXT], 280, tmp_path / "small.json")
    config = config_of(folder, "--tokenizer-model", tmp_path / "small.json")
    assert padded_vocab_size(config.tokenizer, build_tokenizer(config.tokenizer)) == VOCAB
    for kind in ("ByteTokenizer", "NullTokenizer"):
        config = config_of(folder, "--tokenizer-type", kind)
        assert padded_vocab_size(config.tokenizer, build_tokenizer(config.tokenizer)) == VOCAB

    bare = changed(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (line,) = errors_of(bare)
    assert line.startswith(f"--tokenizer-model: expected a tokenizer's files in {bare}")
    assert config_of(bare, "--tokenizer-type", "ByteTokenizer").model.num_layers == 2
    (bare / "tokenizer.model").touch()
    (line,) = errors_of(bare)
    assert "got tokenizer.model alone" in line


def test_a_tokenizer_with_more_ids_than_rows_of_the_embedding_is_rejected(folder, tmp_path):
    small = config_of(changed(folder, tmp_path / "small", vocab_size=200)).tokenizer
    with pytest.raises(ConfigError, match="--tokenizer-model: expected at most 200 ids") as caught:
        build_tokenizer(small, rows_of="small")
    # The setting in the message helps.
    (added,) = re.findall(r"--vocab-size \d+", str(caught.value))
    more = config_of(tmp_path / "small", *added.split()).tokenizer
    assert build_tokenizer(more).vocab_size == more.vocab_size
    for flags in ((), ("--tokenizer-type", "ByteTokenizer"), ("--tokenizer-type", "NullTokenizer")):
        config = config_of(folder, *flags)
        build_tokenizer(config.tokenizer, rows_of=str(folder))


def test_seq_length_is_limited_by_the_directory(folder, tmp_path):
    (line,) = errors_of(folder, "--seq-length", 65)
    assert line.startswith("--seq-length: expected at most --max-position-embeddings 64")
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
def test_an_unknown_model_is_an_error_of_one_line(folder, tmp_path, changes, message):
    (line,) = errors_of(changed(folder, tmp_path / "other", **changes))
    assert line.startswith("--hf-model: ")
    assert message in line


def test_an_unreadable_directory_is_an_error_of_one_line_with_advice(tmp_path):
    (line,) = errors_of(Path("meta-llama/Llama-3.2-1B"))
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B`" in line
    file, snapshot = tmp_path / "model.gguf", tmp_path / "hub" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (file, snapshot / "config.json"):
        path.touch()
    for path, got in (
        (tmp_path / "none", "not exist"),
        (file, "file"),
        (tmp_path / "hub", str(snapshot)),
    ):
        (line,) = errors_of(path)
        assert line.startswith("--hf-model: Expected a local directory with config.json, got ")
        assert got in line.partition(str(path))[2]

    (tmp_path / "config.json").write_text("[")
    (line,) = errors_of(tmp_path)
    assert "Expected a JSON object" in line
    with pytest.raises(ConfigError, match="--hf-model: expected a non-empty string"):
        parse_config(["--hf-model", "", *REST], world_size=1)
    with pytest.raises(ConfigError, match="--hf-model: expected a directory"):
        parse_config(["--hf-init-random", "--num-layers=1", *REST], world_size=1)


def test_a_settings_file_may_set_hf_model(folder, tmp_path):
    (tmp_path / "run.yaml").write_text(f"hf-model: {folder}\nseq-length: 16\n")
    assert read_yaml(str(tmp_path / "run.yaml"))["hidden_size"] == 24
    (tmp_path / "run.yaml").write_text(f"hf-model: {folder}\nhidden-size: 16\n")
    with pytest.raises(ConfigError, match="--hidden-size: expected 24, as "):
        read_yaml(str(tmp_path / "run.yaml"))


# config.json compared with a model


def their_model(**options: Any) -> torch.nn.Module:
    """A module with a config of the transformers library."""
    transformers = pytest.importorskip("transformers")
    model = torch.nn.Module()
    model.config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2, **options)
    return model


def test_configs_are_compared_as_the_library_parses_them():
    """Files of version 4, default values, and fields that do not affect the arithmetic."""
    model = their_model(rope_theta=500.0)
    heads = {"hidden_size": 16, "num_attention_heads": 2}
    for same in (
        {},
        heads | {"rope_theta": 500.0, "rope_scaling": None, "hidden_act": "silu"},
        heads | {"model_type": "llama", "rope_theta": 500, "use_cache": False, "vocab_size": 7},
    ):
        assert config_problems(model, same) == []
    scaled = their_model(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    for key in ("type", "rope_type"):
        scaling = {"rope_theta": 500.0, "rope_scaling": {key: "linear", "factor": 2.0}}
        assert config_problems(scaled, heads | scaling) == []
        (problem,) = config_problems(model, heads | scaling)
        assert "linear" in problem


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"num_key_value_heads": 1}, ("num_key_value_heads 1", "2")),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, ("num_attention_heads 4", "2")),
        ({"hidden_act": "relu"}, ("hidden_act 'relu'", "silu")),
        ({"rms_norm_eps": 0.5}, ("rms_norm_eps 0.5", "1e-06")),
        ({"rope_theta": 7.0}, ("7.0", "10000.0")),
        ({"model_type": "qwen2"}, ("model_type 'qwen2'", "llama")),
    ],
)
def test_fields_that_change_results_are_differences_with_both_values(changes, values):
    content = {"hidden_size": 16, "num_attention_heads": 2} | changes
    problem = config_problems(their_model(), content)[0]
    assert all(value in problem for value in values)


HOSTILE = "x\n\x1b[2J" + "y" * 10**6


@pytest.mark.parametrize("changes", [{"rope_parameters": [1]}, {"num_attention_heads": HOSTILE}])
def test_a_config_that_the_library_rejects_is_an_error_of_bounded_length(changes):
    with pytest.raises(CheckpointDamagedError, match="LlamaConfig") as caught:
        config_problems(their_model(), changes)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200


def test_differences_are_bounded_and_on_one_line():
    nested: list[Any] = []
    for _ in range(40):
        nested = [nested, nested]
    with torch.device("meta"):
        gpt = GPTModel(QWEN3, 16)
    content = hf_config(ModelDescription(gpt.config, gpt.vocab_size))
    problems = config_problems(their_model(), {"model_type": HOSTILE})
    for name, value in {"model_type": HOSTILE, "head_dim": nested, HOSTILE: nested}.items():
        problems += config_problems(gpt, content | {name: value})
    assert len(problems) == 4
    assert all(problem.isprintable() and len(problem) < 1200 for problem in problems)


# Tokenizers and files of the base model


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def tokenizer_folder(folder: Path, files: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    make_tokenizer(folder, SPECIAL)
    return write(folder, FILES if files is None else files)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def saved(folder: Path, extras: FolderExtras) -> dict[str, Any]:
    """Returns the token ids for a config.json."""
    folder.mkdir()
    extras.check()
    ids = extras.save(folder)
    (folder / "config.json").write_text("{}")
    extras.copy_missing(folder, ids)
    return ids


def test_only_known_tokenizer_files_are_copied(tmp_path: Path) -> None:
    """`--tokenizer-model data/mine.json`: the directory has other models and vocabularies."""
    data = tokenizer_folder(tmp_path / "data", {})
    write(data, {"lid.model": "x", "vocab.de.txt": "y", "tokenizer (old).json": "{}"})
    own = (data / "tokenizer.json").rename(data / "mine.json")
    config = {"eos_token": SPECIAL[0]}
    write(data, {"tokenizer_config.json": json.dumps(config)})
    saved(tmp_path / "saved", FolderExtras.of_model(HuggingFaceTokenizer(own), str(own), None))
    found = contents(tmp_path / "saved")
    assert set(found) == {
        "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json",
    }  # fmt: skip
    assert found["tokenizer.json"] == own.read_text()


@pytest.mark.parametrize("of_base", ["nothing", "another tokenizer"])
def test_only_files_of_the_tokenizer_are_copied(tmp_path: Path, of_base: str) -> None:
    own = tokenizer_folder(tmp_path / "own")
    write(own, OTHERS)
    base = None
    if of_base != "nothing":
        base = tokenizer_folder(tmp_path / "base", {"merges.txt": "a b", "vocab.json": "{}"})
        write(base, {"generation_config.json": '{"top_p": 0.5, "eos_token_id": [1, 2]}'})
        write(base, {"additional_chat_templates/rag.jinja": "x", "preprocessor.json": "{}"})
    extras = FolderExtras.of_model(
        HuggingFaceTokenizer(own), str(own), None if base is None else str(base)
    )
    ids = saved(tmp_path / "saved", extras)
    assert ids == {"bos_token_id": BOS, "eos_token_id": TURN_END, "pad_token_id": FILL}

    found = contents(tmp_path / "saved")
    generation = json.loads(found.pop("generation_config.json"))
    assert generation == (ids if base is None else {"top_p": 0.5} | ids)
    del found["config.json"]
    assert found.pop("preprocessor.json", None) == (None if base is None else "{}")
    assert found == {"tokenizer.json": (own / "tokenizer.json").read_text(), **FILES}


def test_the_tokenizer_of_the_base_model_is_copied_with_its_templates(
    tmp_path: Path,
) -> None:
    base = tokenizer_folder(tmp_path / "base")
    ids = {"bos_token_id": 3, "eos_token_id": [4, 5]}
    write(base, {"config.json": json.dumps({"text_config": ids, "pad_token_id": None})})
    write(base, {"generation_config.json": '{"eos_token_id": [4, 5]}'})
    extras = FolderExtras.of_model(HuggingFaceTokenizer(base), str(base), str(base))
    assert saved(tmp_path / "saved", extras) == ids
    found = contents(tmp_path / "saved")
    del found["config.json"]
    expected = contents(base)
    del expected["config.json"]
    assert found == expected


def test_a_processor_without_a_tokenizer_keeps_the_base_models_tokenizer(tmp_path: Path) -> None:
    class Processor:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "preprocessor_config.json").write_text("{}")

    base = tokenizer_folder(tmp_path / "base")
    saved(tmp_path / "saved", FolderExtras(processor=Processor(), base_model_path=base))
    assert contents(tmp_path / "saved").keys() >= {"tokenizer.json", *FILES}


@pytest.mark.parametrize("form", ["a file of another name", "a folder", "a folder with a config"])
def test_the_copy_adds_the_end_of_document_if_no_file_has_it(tmp_path: Path, form: str) -> None:
    own = tokenizer_folder(tmp_path / "own", {})
    path = own
    if form == "a file of another name":
        path = (own / "tokenizer.json").rename(own / "mine.json")
        tokenizer_folder(tmp_path / "other")
    if form == "a folder with a config":
        write(own, {"tokenizer_config.json": '{"pad_token": "<fill>", "eos_token": null}'})
    ids = saved(tmp_path / "saved", FolderExtras(HuggingFaceTokenizer(path)))
    has_pad = form == "a folder with a config"
    assert ids == {"eos_token_id": EOS} | ({"pad_token_id": FILL} if has_pad else {})

    found = HuggingFaceTokenizer(tmp_path / "saved")
    assert found.eod == EOS
    assert found.tokenize("a<bos>b") == HuggingFaceTokenizer(path).tokenize("a<bos>b")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (theirs.eos_token_id, theirs.pad_token_id) == (EOS, FILL if has_pad else None)
    assert theirs("a<bos>b")["input_ids"] == found.tokenize("a<bos>b")


def test_a_tokenizer_without_files_saves_its_end_of_document_id(tmp_path: Path) -> None:
    assert saved(tmp_path / "null", FolderExtras(NullTokenizer(5))) == {"eos_token_id": 5}
    assert contents(tmp_path / "null").keys() == {"config.json", "generation_config.json"}
    assert saved(tmp_path / "bytes", FolderExtras(ByteTokenizer())) == {"eos_token_id": 256}
    assert HuggingFaceTokenizer(tmp_path / "bytes").eod == 256


def test_a_relative_path_stays_valid_and_deleted_files_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tokenizer_folder(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    tokenizer = HuggingFaceTokenizer("own")
    monkeypatch.chdir("own")
    saved(tmp_path / "saved", FolderExtras(tokenizer))
    own.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=f"{own}.* removed"):
        FolderExtras(tokenizer).check()
