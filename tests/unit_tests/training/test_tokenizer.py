"""Tokenizers: round trips, the end of a document, and the size of the vocabulary."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from megatron.core.options import ConfigError
from megatron.training.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    padded_vocab_size,
    say_prefix,
    train_bpe,
)
from tests.helpers.special_files import SPECIAL_FILES

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "naïve café, 東京, 🙂\n\ttabs"] * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(TEXTS, 290, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def _with_vocabulary(folder: Path, vocabulary: dict[str, int]) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _all_tokenizers(model: Path) -> list[Tokenizer]:
    return [HuggingFaceTokenizer(model), ByteTokenizer(), NullTokenizer(100)]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(text=st.text())
def test_the_byte_tokenizer_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


@pytest.mark.parametrize("text", [*TEXTS[:3], "never seen: ÿ\x00\r\n  ", ""])
def test_byte_level_bpe_round_trips(model: Path, text: str) -> None:
    tokenizer = HuggingFaceTokenizer(model)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.eod not in tokenizer.tokenize(text)


def test_bpe_merges_frequent_pairs(model: Path) -> None:
    tokenizer = HuggingFaceTokenizer(model)
    assert tokenizer.vocab_size == 290
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    assert len(tokenizer.tokenize("the cat sat on the mat")) < 12


def test_bpe_training_is_deterministic(model: Path, tmp_path: Path) -> None:
    again = train_bpe(iter(TEXTS), 290, tmp_path / "new" / "again.json")
    assert again.read_bytes() == model.read_bytes()
    assert [path.name for path in again.parent.iterdir()] == ["again.json"]


def test_bpe_has_every_byte_and_rejects_smaller_vocabularies(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(train_bpe([], 257, tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == 257
    assert tokenizer.detokenize(tokenizer.tokenize("é🙂")) == "é🙂"
    with pytest.raises(ValueError, match="at least 257 tokens, got 256"):
        train_bpe([], 256, tmp_path / "tokenizer.json")


def test_the_null_tokenizer_parses_ids() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize(" 1 99\n5 ") == [1, 99, 5]
    assert tokenizer.detokenize([1, 99]) == "1 99"
    with pytest.raises(ValueError, match=r"range\(101\), got 101"):
        tokenizer.tokenize("101")


def test_the_null_tokenizer_accepts_the_end_of_a_document_in_a_text() -> None:
    assert NullTokenizer(100).tokenize("99 100") == [99, 100]


@pytest.mark.parametrize("word", ["one", "1_0", "+1", "-1", "1.0", "\u0661"])
def test_the_null_tokenizer_rejects_other_text_than_decimal_ids(word: str) -> None:
    with pytest.raises(
        ValueError, match=rf"Expected token ids separated by spaces, got {re.escape(repr(word))}"
    ):
        NullTokenizer(100).tokenize(f"5 {word}")


def test_ids_beyond_the_bytes_decode_to_no_text() -> None:
    assert ByteTokenizer().detokenize([97, 256, 300, 98]) == "ab"


def test_tokenizers_can_be_pickled(model: Path) -> None:
    for tokenizer in _all_tokenizers(model):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.tokenize("1 2") == tokenizer.tokenize("1 2")
        assert (again.eod, again.vocab_size, again.name) == (
            tokenizer.eod,
            tokenizer.vocab_size,
            tokenizer.name,
        )


_BYTES = processors.ByteLevel(trim_offsets=False)


def _put_around(single: str) -> processors.PostProcessor:
    """The form of Llama 2 and Gemma."""
    return processors.TemplateProcessing(
        single=single, special_tokens=[("<|endoftext|>", 0), ("at", 257)]
    )


@pytest.mark.parametrize(
    ("processor", "prefix"),
    [
        (None, ()),
        (_BYTES, ()),
        (_put_around("at $A"), (257,)),
        (_put_around("at <|endoftext|> $A"), (257, 0)),
        (_put_around("at $A <|endoftext|>"), (257,)),
        (_put_around("$A <|endoftext|>"), ()),
        # The form of Llama 3.
        (processors.Sequence([_BYTES, _put_around("at $A")]), (257,)),
    ],
)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_texts_start_with_the_prefix_of_the_tokenizer_as_in_transformers(
    model: Path,
    tmp_path: Path,
    processor: processors.PostProcessor | None,
    prefix: tuple[int, ...],
    config: dict[str, bool],
) -> None:
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer.from_file(str(model))
    if processor is not None:
        backend.post_processor = processor
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = HuggingFaceTokenizer(tmp_path)
    assert ours.prefix == prefix
    assert (say_prefix(ours) is None) == (not prefix)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("the cat").input_ids
    whole = [*ours.prefix, *ours.tokenize("the cat")]
    assert theirs[: len(whole)] == whole
    assert pickle.loads(pickle.dumps(ours)).prefix == prefix


def test_a_tokenizer_with_a_small_vocabulary_has_a_prefix_too(tmp_path: Path) -> None:
    folder = _with_vocabulary(tmp_path, {"word": 0, "</s>": 1, "<s>": 2})
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.model = tokenizers.models.WordLevel({"word": 0, "</s>": 1, "<s>": 2}, unk_token="?")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert HuggingFaceTokenizer(folder).prefix == (2,)


@pytest.mark.parametrize("eod", ["<|endoftext|>", "</s>", "<eos>"])
def test_the_end_of_a_document_is_found_by_its_common_names(tmp_path: Path, eod: str) -> None:
    assert HuggingFaceTokenizer(_with_vocabulary(tmp_path, {"a": 0, eod: 1})).eod == 1


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>"}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_of_a_document_is_the_eos_token_of_the_files(
    tmp_path: Path, eos: object, name: str
) -> None:
    folder = _with_vocabulary(tmp_path, {"a": 0, "<|endoftext|>": 1, "<end>": 2})
    (folder / name).write_text(json.dumps({"eos_token": eos}))
    assert HuggingFaceTokenizer(folder).eod == 2
    assert HuggingFaceTokenizer(folder / "tokenizer.json").eod == 2


def test_a_tokenizer_without_an_end_of_document_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an end-of-document token in"):
        HuggingFaceTokenizer(_with_vocabulary(tmp_path, {"a": 0}))


def test_an_eos_token_outside_of_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    folder = _with_vocabulary(tmp_path, {"a": 0, "</s>": 1})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<zz>"}))
    with pytest.raises(
        ConfigError,
        match=r"expected the eos_token that .* among its 2 tokens, got '<zz>', which is not",
    ):
        HuggingFaceTokenizer(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "got "),
        ("[]", "got a list"),
        ("[" * 100_000, "got more than 100 levels"),
        ('{"eos_token": "a", "eos_token": "b"}', "'eos_token' twice"),
        ('{"eos_token": 5}', "got 5"),
        ('{"eos_token": {"content": ["</s>"]}}', "got "),
    ],
)
def test_a_malformed_tokenizer_config_is_rejected(
    tmp_path: Path, content: str, message: str
) -> None:
    folder = _with_vocabulary(tmp_path, {"a": 0, "</s>": 1})
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(
        ConfigError, match=f"^--tokenizer-model: .*tokenizer_config.json.*{message}"
    ):
        HuggingFaceTokenizer(folder)


def test_a_tokenizer_without_tokens_is_rejected(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"expected a tokenizer with tokens in .*, got none"):
        HuggingFaceTokenizer(tmp_path)


def _replace_transformers(monkeypatch: pytest.MonkeyPatch, from_pretrained: Any) -> None:
    loader = types.SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=loader))


@pytest.mark.parametrize("through_transformers", [False, True])
def test_truncation_and_padding_of_the_files_are_ignored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_transformers: bool
) -> None:
    cutting = tokenizers.Tokenizer.from_file(str(model))
    cutting.enable_truncation(3)
    cutting.enable_padding(length=64)
    if through_transformers:
        loaded = types.SimpleNamespace(backend_tokenizer=cutting, eos_token="<|endoftext|>")
        _replace_transformers(monkeypatch, lambda *_, **__: loaded)
    else:
        cutting.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    for text in ("a", TEXTS[0] * 9):
        assert tokenizer.tokenize(text) == HuggingFaceTokenizer(model).tokenize(text)
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_directory_that_transformers_cannot_load_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("needs sentencepiece")

    _replace_transformers(monkeypatch, fail)
    with pytest.raises(
        ConfigError, match=r"--tokenizer-model: expected a tokenizer in .*, got needs sentencepiece"
    ):
        HuggingFaceTokenizer(tmp_path)


def test_ids_with_gaps_are_counted_up_to_the_highest(tmp_path: Path) -> None:
    assert HuggingFaceTokenizer(_with_vocabulary(tmp_path, {"a": 0, "</s>": 900})).vocab_size == 901


def test_a_malformed_tokenizer_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"--tokenizer-model: expected a tokenizer in .*tokenizer.json"
    ):
        HuggingFaceTokenizer(tmp_path)


def test_a_directory_without_tokenizer_json_needs_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"expected a tokenizer.json in .* needs the `hf` extra"):
        HuggingFaceTokenizer(tmp_path)


def test_a_directory_in_another_format_is_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (slow / "merges.txt").write_text("#version: 0.2\na b\n")
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = HuggingFaceTokenizer(slow)
    assert tokenizer.tokenize("abb") == [2, 1]
    assert tokenizer.eod == 3


def test_the_configuration_builds_each_kind(model: Path) -> None:
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(model))).vocab_size == 290
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(model.parent))).vocab_size == 290
    assert build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer")).vocab_size == 257
    assert (
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)).vocab_size
        == 10
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--tokenizer-model: .*got None"),
        ({"tokenizer_model": "/nowhere"}, "--tokenizer-model: .*got '/nowhere'"),
        ({"tokenizer_type": "ByteTokenizer", "tokenizer_model": "x"}, "--tokenizer-model: "),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size: .*got None"),
        ({"tokenizer_type": "Other"}, "--tokenizer-type: .*got 'Other'"),
        (
            {"tokenizer_type": "ByteTokenizer", "make_vocab_size_divisible_by": 0},
            "--make-vocab-size-divisible-by: .*got 0",
        ),
    ],
)
def test_an_invalid_tokenizer_configuration_is_rejected(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokenizer_type", "vocab_size", "divisor", "rows"),
    [
        ("ByteTokenizer", None, 128, 384),
        ("ByteTokenizer", None, 1, 257),
        ("ByteTokenizer", 257, 64, 320),
        ("ByteTokenizer", 1000, 8, 1000),
        ("NullTokenizer", 127, 128, 128),
        ("NullTokenizer", 128, 128, 256),
    ],
)
def test_the_embedding_is_padded(
    tokenizer_type: str, vocab_size: int | None, divisor: int, rows: int
) -> None:
    config = TokenizerConfig(
        tokenizer_type=tokenizer_type, vocab_size=vocab_size, make_vocab_size_divisible_by=divisor
    )
    assert padded_vocab_size(config, build_tokenizer(config)) == rows


def test_ranks_that_cannot_divide_the_embedding_are_rejected() -> None:
    config = TokenizerConfig(tokenizer_type="ByteTokenizer", make_vocab_size_divisible_by=1)
    with pytest.raises(ConfigError, match=r"^--tensor-model-parallel-size: .*257 rows.* got 2"):
        padded_vocab_size(config, build_tokenizer(config), tensor_size=2)


def test_a_vocabulary_smaller_than_the_tokenizer_is_rejected(model: Path) -> None:
    message = "--vocab-size: expected at least the 290 ids of HuggingFaceTokenizer.*, got 289"
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(model), vocab_size=289))


def _spoil(folder: Path, **parts: Any) -> Path:
    """Writes a tokenizer.json with replaced fields."""
    file = _with_vocabulary(folder, {"a": 0, "</s>": 1}) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return folder


def _model(kind: str, **parts: Any) -> dict[str, Any]:
    return {"type": kind, "vocab": {"a": 0, "</s>": 1}, "unk_token": "a", **parts}


@pytest.mark.parametrize("highest", [100_000, 300_000_000])
def test_ids_far_beyond_the_number_of_tokens_need_an_explicit_vocab_size(
    tmp_path: Path, highest: int
) -> None:
    folder = _spoil(tmp_path, model=_model("WordLevel", vocab={"a": 0, "b": highest, "</s>": 1}))
    message = (
        "--tokenizer-model: expected ids that the 3 tokens of .* fill, "
        f"got ids up to {highest}. .*--vocab-size"
    )
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(folder)))
    meant = TokenizerConfig(tokenizer_model=str(folder), vocab_size=highest + 1)
    assert build_tokenizer(meant).vocab_size == highest + 1


def test_more_ids_than_token_files_can_store_are_rejected(tmp_path: Path) -> None:
    folder = _spoil(tmp_path, model=_model("WordLevel", vocab={"a": 0, "b": 2**32 - 1, "</s>": 1}))
    for vocab_size in (None, 2**32):
        config = TokenizerConfig(tokenizer_model=str(folder), vocab_size=vocab_size)
        with pytest.raises(ConfigError, match="--vocab-size: expected at most 2147483648 ids"):
            build_tokenizer(config)
    with pytest.raises(ConfigError, match="--vocab-size: expected at most 2147483648 ids"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=2**31))


@pytest.mark.parametrize(
    "parts",
    [
        {"model": None},
        {"model": "x"},
        {"model": _model("WordLevel", vocab={"a": -1})},
        {"model": _model("WordLevel", vocab={"a": 1 << 32})},
        {"model": _model("WordLevel", vocab=[["a", 0]])},
        {"model": _model("BPE", merges=["x y"])},
        {"model": _model("BPE", merges=[["a"]])},
        {"model": _model("Unigram", vocab=[], unk_id=7)},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(" * 10_000},
                "behavior": "Isolated",
            }
        },
        # The library panics on these, which is not an Exception.
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    ],
)
def test_a_tokenizer_of_another_structure_is_an_error_of_one_line(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    message = r"^--tokenizer-model: expected a tokenizer in .*tokenizer.json, got "
    with pytest.raises(ConfigError, match=message) as error:
        HuggingFaceTokenizer(_spoil(tmp_path, **parts))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\0", "\ud800", '"x"']
)
def test_json_of_any_depth_and_length_is_an_error_of_one_line(
    tmp_path: Path, name: str, content: str
) -> None:
    folder = _with_vocabulary(tmp_path, {"a": 0, "</s>": 1})
    (folder / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=f"^--tokenizer-model: expected .*{name}") as error:
        HuggingFaceTokenizer(folder)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device", "a terabyte"])
def test_only_regular_files_of_bounded_size_are_opened(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = _with_vocabulary(tmp_path, {"a": 0, "</s>": 1}) / name
    path.unlink(missing_ok=True)
    SPECIAL_FILES[kind](path)
    signal.alarm(30)  # ends the process if it waits for a writer
    got = "of at most 268435456 bytes" if kind == "a terabyte" else f"got {kind}"
    with pytest.raises(ConfigError, match=f"^--tokenizer-model: expected .*{got}"):
        HuggingFaceTokenizer(tmp_path)
    signal.alarm(0)


@pytest.mark.parametrize("path", ["fifo", "/dev/zero", "folder"])
def test_directories_with_special_files_are_not_passed_to_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    _replace_transformers(monkeypatch, lambda *_, **__: pytest.fail("was asked"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "vocab.json")
    with pytest.raises(ConfigError, match=r"^--tokenizer-model: expected .* got"):
        HuggingFaceTokenizer(tmp_path / path)


def test_code_in_a_tokenizer_directory_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
        )
    )
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Evil"}}))
    (tmp_path / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path)!r}, 'executed').touch()\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"^--tokenizer-model: expected a tokenizer in"):
        HuggingFaceTokenizer(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_a_text_outside_of_the_vocabulary_is_a_value_error(tmp_path: Path) -> None:
    folder = _spoil(tmp_path, model=_model("WordLevel", unk_token="missing"))
    assert HuggingFaceTokenizer(folder).tokenize("a") == [0]
    with pytest.raises(ValueError, match="expected a text it has tokens for, got WordLevel error"):
        HuggingFaceTokenizer(folder).tokenize("other")


def test_an_id_of_thousands_of_digits_is_rejected() -> None:
    with pytest.raises(ValueError, match="Expected token ids separated by spaces, got '99999"):
        NullTokenizer(100).tokenize("1 " + "9" * 5000)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"])
def test_an_invalid_path_is_rejected(path: str) -> None:
    with pytest.raises(ConfigError, match="--tokenizer-model: expected an existing "):
        TokenizerConfig(tokenizer_model=path)
