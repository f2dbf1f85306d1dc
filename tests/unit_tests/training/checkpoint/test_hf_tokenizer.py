"""Folders of weights have the tokenizer that the model was trained with, whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.tokenizer import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

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
    """The ids that a config.json gets."""
    folder.mkdir()
    extras.check()
    ids = extras.save(folder)
    (folder / "config.json").write_text("{}")
    extras.copy_missing(folder, ids)
    return ids


def test_of_a_file_among_others_only_what_describes_it_is_copied(tmp_path: Path) -> None:
    """`--tokenizer-model data/mine.json`: data has models and vocabularies of other things."""
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
def test_the_tokenizers_own_files_are_copied_and_no_others(tmp_path: Path, of_base: str) -> None:
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


def test_the_base_models_own_tokenizer_is_copied_with_its_further_templates(
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


def test_a_processor_without_a_tokenizer_leaves_the_base_models(tmp_path: Path) -> None:
    class Processor:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "preprocessor_config.json").write_text("{}")

    base = tokenizer_folder(tmp_path / "base")
    saved(tmp_path / "saved", FolderExtras(processor=Processor(), base_model_path=base))
    assert contents(tmp_path / "saved").keys() >= {"tokenizer.json", *FILES}


@pytest.mark.parametrize("form", ["a file of another name", "a folder", "a folder with a config"])
def test_an_end_of_document_that_no_file_names_is_named_in_the_copy(
    tmp_path: Path, form: str
) -> None:
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


def test_a_tokenizer_without_files_leaves_its_id_alone(tmp_path: Path) -> None:
    assert saved(tmp_path / "null", FolderExtras(NullTokenizer(5))) == {"eos_token_id": 5}
    assert contents(tmp_path / "null").keys() == {"config.json", "generation_config.json"}
    assert saved(tmp_path / "bytes", FolderExtras(ByteTokenizer())) == {"eos_token_id": 256}
    assert HuggingFaceTokenizer(tmp_path / "bytes").eod == 256


def test_files_are_found_from_another_folder_and_missed_by_name(
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
