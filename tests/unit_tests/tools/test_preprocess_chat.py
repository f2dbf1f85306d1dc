"""`preprocess --chat`: from JSON lines to tokens, and which of them are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron.core.datasets.answer_dataset import AnswerFiles
from megatron_hybrid import preprocess_chat, preprocess_data
from megatron_hybrid.input_files import Line, lines_of
from megatron_hybrid.sample_lines import SampleError, try_to_make
from tests.unit_tests.tools.helpers.odd_records import odd_records
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a tokenizer and its template."""
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def talk(number: int) -> str:
    turns = [
        {"role": "user", "content": f"question {number}?"},
        {"role": "assistant", "content": f"answer {number}"},
    ]
    return json.dumps({"messages": turns})


def preprocess(folder: Path, lines: list[str], *flags: object, name: str = "out") -> int:
    (folder / "in.jsonl").write_text("\n".join(lines))
    argv = ["--chat", "--input", folder / "in.jsonl", "--output-prefix", folder / name]
    argv += ["--tokenizer-model", folder, *flags]
    return preprocess_data.main([str(word) for word in argv])


def contents(folder: Path, name: str = "out") -> dict[str, bytes]:
    found = sorted(folder.glob(f"{name}_chat_document*"))
    return {path.name.removeprefix(name): path.read_bytes() for path in found}


def test_conversations_keep_their_order_and_have_a_loss_mask(folder, capsys):
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    lines = [*map(talk, range(40)), "", json.dumps(shared)]
    assert preprocess(folder, lines) == 0
    told = capsys.readouterr().out
    assert "out_chat_document: 41 conversations, " in told
    assert ", 0 skipped, in " in told

    files = AnswerFiles(folder / "out_chat_document")
    assert len(files) == 41
    assert files.mask is not None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number, expected in ((0, "answer 0"), (39, "answer 39"), (40, "b")):
        tokens, mask = files.tokens.get(number), files.mask.get(number)
        assert set(mask.tolist()) == {0, 1}
        answer = tokens[mask.astype(np.bool_)].tolist()
        assert backend.decode(answer, skip_special_tokens=False) == f"{expected}<|im_end|>"

    assert preprocess(folder, lines, "--workers", 2, name="more") == 0
    assert contents(folder, "more") == contents(folder)
    assert len(contents(folder)) == 4


USER = {"role": "user", "content": "a"}
BROKEN = {
    "{": "expected a JSON object, got",
    '{"text": "a"}': "expected messages or conversations",
    json.dumps({"messages": [{"role": "tool", "content": "a"}]}): "got TemplateError: no tools",
    json.dumps({"messages": [USER]}): "expected text of the assistant",
}


def test_a_bad_line_is_an_error_with_its_place_and_leaves_no_files(folder, capsys):
    for bad, told in BROKEN.items():
        assert preprocess(folder, [talk(0), bad]) == 1
        error = capsys.readouterr().err
        assert f"{folder / 'in.jsonl'}, line 2: " in error
        assert told in error
        assert error.count("\n") == 1
        assert contents(folder) == {}


def test_workers_get_few_conversations_at_a_time(folder, monkeypatch):
    read = 0

    def counted(files: list[Path]) -> Iterator[Line]:
        nonlocal read
        for line in lines_of(files):
            read += 1
            yield line

    monkeypatch.setattr(preprocess_chat, "lines_of", counted)
    assert preprocess(folder, ["{", *map(talk, range(1000))], "--workers", 2) == 1
    assert read < 100


def test_bad_lines_are_skipped_and_counted_if_that_is_allowed(folder, capsys):
    lines = [talk(0), *BROKEN, *map(talk, range(1, 9 * len(BROKEN)))]
    assert preprocess(folder, lines, "--skip-bad-samples") == 0
    told = capsys.readouterr()
    assert f"{9 * len(BROKEN)} conversations, " in told.out
    assert f"{len(BROKEN)} skipped" in told.out
    assert told.err.count("skipped: ") == len(BROKEN)
    assert preprocess(folder, ["{"], "--skip-bad-samples", name="none") == 1
    assert "got 1 of 1" in capsys.readouterr().err
    assert preprocess(folder, [], name="none") == 1
    assert "at least one conversation" in capsys.readouterr().err


def test_fields_of_any_type_make_a_sample_or_a_bad_line(folder):
    maker = preprocess_chat.ChatMaker(str(folder))
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    whole = json.loads(talk(0)) | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    num_bad = 0
    for record in (whole, {"conversations": turns}):
        for odd in odd_records(record):
            line = Line("line 7", json.dumps(odd).encode(), folder)
            made = try_to_make(maker, line)
            num_bad += isinstance(made, SampleError)
    assert num_bad > 100


def test_turns_with_weight_0_are_not_in_the_loss(folder):
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "bad", "weight": 0},
        {"from": "human", "value": "c"},
        {"from": "gpt", "value": "good"},
    ]
    assert preprocess(folder, [json.dumps({"conversations": turns, "system": "Be brief."})]) == 0
    files = AnswerFiles(folder / "out_chat_document")
    assert files.mask is not None
    tokens, mask = files.tokens.get(0), files.mask.get(0).astype(np.bool_)
    decode = Tokenizer.from_file(str(folder / "tokenizer.json")).decode
    assert decode(tokens[mask].tolist(), skip_special_tokens=False) == "good<|im_end|>"
    text = decode(tokens.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "assistant\nbad<|im_end|>" in text


def test_another_template_may_be_given(folder):
    other = folder / "other.jinja"
    other.write_text(TEMPLATE.replace("<|im_end|>", "<|endoftext|>"))
    assert preprocess(folder, [talk(0)]) == 0
    first = contents(folder)
    assert preprocess(folder, [talk(0)], "--chat-template", other) == 0
    assert contents(folder) != first


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tokenizer-type", "ByteTokenizer"], "--tokenizer-model: expected a Hugging Face"),
        (["--append-eod"], "--chat: expected neither --train-tokenizer nor --append-eod"),
        (["--chat-template", "none.jinja"], "--chat-template: expected a file with a template"),
        (["--workers", "0"], "--workers: expected an integer >= 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(folder, capsys, flags, told):
    assert preprocess(folder, [talk(0)], *flags) == 1
    assert told in capsys.readouterr().err
