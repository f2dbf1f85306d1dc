"""From text to token files with the command-line tools."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.training.tokenizer import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from megatron_hybrid import input_files, preprocess_data, sample_lines
from tests.helpers.hf_models import begin_texts
from tests.unit_tests.tools.helpers.stopping_tokenizers import KilledTokenizer
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "tools"
BYTES = ["--tokenizer-type", "ByteTokenizer"]


def _preprocess(*arguments: str | Path, code: int = 0) -> None:
    assert preprocess_data.main([str(argument) for argument in arguments]) == code


def _texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [
        ByteTokenizer().detokenize(dataset.get(index).tolist()) for index in range(len(dataset))
    ]


def _write_jsonl(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_and_directories_are_documents_in_order(tmp_path, capsys):
    for name, content in {
        "b/z.md": b"\xef\xbb\xbfz",  # the byte order mark is no part of the text
        "b/a/y.txt": b"yy",
        "b/x.py": b"x = 1",
        "b/.git/config": b"no",
        "b/e.txt": b"",
        "b/image.png": b"\x89PNG\xff",
        "b/numbers.bin": b"1\0",
        "first.txt": "é".encode(),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    inputs = ["--input", tmp_path / "first.txt", tmp_path / "b"]
    _preprocess(*inputs, "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["é", "yy", "x = 1", "z"]
    printed = capsys.readouterr().out
    assert "out_text_document: 4 documents, 10 tokens; 1 empty documents skipped\n" in printed
    assert "; 2 files skipped" in printed
    _preprocess(
        *inputs[:1], tmp_path / "b", "--suffix", ".PY", "--output-prefix", tmp_path / "py", *BYTES
    )
    assert _texts(tmp_path / "py_text_document") == ["x = 1"]


def test_each_json_key_makes_a_dataset(tmp_path, capsys):
    texts = {"one": "1", "": "2", "three": "3"}
    records = [{"text": text, "title": title} for text, title in texts.items()]
    corpus = _write_jsonl(tmp_path / "in.json", records)
    keys = ["--json-keys", "text", "title"]
    _preprocess("--input", corpus, *keys, "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["one", "three"]
    assert _texts(tmp_path / "out_title_document") == ["1", "2", "3"]
    printed = capsys.readouterr().out
    assert "out_text_document: 2 documents, 8 tokens; 1 empty documents skipped\n" in printed
    assert "out_title_document: 3 documents, 3 tokens\n" in printed


def test_a_key_without_any_text_is_an_error(tmp_path, capsys):
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": "one", "title": ""}, {"text": "two", "title": ""}]
    )
    keys = ["--json-keys", "text", "title"]
    _preprocess("--input", corpus, *keys, "--output-prefix", tmp_path / "out", *BYTES, code=1)
    assert "'title'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_error_leaves_earlier_files_alone(tmp_path, capsys):
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *BYTES)
    keys = ["--json-keys", "text", "text"]
    _preprocess("--input", corpus, *keys, "--output-prefix", tmp_path / "out", *BYTES, code=1)
    assert "--json-keys: " in capsys.readouterr().err
    assert _texts(tmp_path / "out_text_document") == ["one"]


def test_documents_end_with_the_end_of_document_token_if_asked_to(tmp_path):
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "ab"}, {"text": "c"}])
    _preprocess("--input", corpus, "--append-eod", "--output-prefix", tmp_path / "out", *BYTES)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.get(0).tolist() == [97, 98, 256]
    assert dataset.get(1).tolist() == [99, 256]
    assert dataset.dtype == np.uint16


def test_documents_start_with_the_tokenizers_prefix(tmp_path, capsys):
    train_bpe(["the cat sat"], 270, tmp_path / "tokenizer.json")
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "the cat"}, {"text": ""}, {"text": "a"}])
    flags = ["--input", corpus, "--append-eod", "--tokenizer-model", tmp_path / "tokenizer.json"]
    _preprocess(*flags, "--output-prefix", tmp_path / "plain")
    assert "texts start with" not in capsys.readouterr().out
    begin_texts(tmp_path, 7)
    _preprocess(*flags, "--output-prefix", tmp_path / "out")
    assert "texts start with" in capsys.readouterr().out
    plain, begun = (IndexedDataset(tmp_path / f"{name}_text_document") for name in ("plain", "out"))
    assert len(plain) == len(begun) == 2
    for number in range(2):
        assert begun.get(number).tolist() == [7, *plain.get(number).tolist()]


def test_any_number_of_workers_writes_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_lines, "_CHUNK_BYTES", 100)
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": f"document {n} " * (n % 7)} for n in range(100)]
    )
    train = ["--train-tokenizer", "--vocab-size", "300", "--append-eod"]
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "one", *train)
    model = tmp_path / "one_tokenizer.json"
    again = ["--tokenizer-model", model, "--workers", "2", "--append-eod"]
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "two", *again)
    for suffix in (".bin", ".idx"):
        one, two = (tmp_path / f"{name}_text_document{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    tokenizer = HuggingFaceTokenizer(model)
    dataset = IndexedDataset(tmp_path / "two_text_document")
    assert len(dataset) == sum(n % 7 != 0 for n in range(100))
    assert tokenizer.detokenize(dataset.get(1).tolist()) == "document 2 document 2 <|endoftext|>"


@pytest.mark.parametrize(
    "line",
    [
        "{'text': 1}",
        '["text"]',
        '{"content": "x"}',
        '{"text": 5}',
        '{"text": "a\\ud800"}',
        pytest.param("[" * 100_000, id="deeply nested"),
        pytest.param(json.dumps({"text": ["x" * 99] * 99}), id="long"),
        pytest.param(json.dumps(dict.fromkeys(map(str, range(999)))), id="many keys"),
    ],
)
@pytest.mark.parametrize("trains", [False, True])
def test_a_bad_line_is_an_error_with_its_place_and_leaves_no_files(tmp_path, capsys, line, trains):
    corpus = tmp_path / "a\n\x1b[2Jb.jsonl"
    corpus.write_text('{"text": "fine"}\n\n' + line + "\n")
    tokenizer = ["--train-tokenizer", "--vocab-size", "300"] if trains else BYTES
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *tokenizer, code=1)
    printed = capsys.readouterr().err
    assert "a\\n\\x1b[2Jb.jsonl, line 3: " in printed
    assert printed.removesuffix("\n").isprintable()
    assert len(printed) < len(str(corpus)) + 250
    assert [path.name for path in tmp_path.iterdir()] == [corpus.name]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--input /nowhere.txt", "--input: expected existing files and directories, got /nowhere"),
        ("--input {0}/pipe", "--input: expected existing files and directories, got"),
        ("--input {0}/none", "--input: expected files to read, got none in"),
        ("--input {0}/empty.txt", "Expected a document with text under 'text' in 1"),
        ("--json-keys body", "--json-keys: expected 'text' for the plain text"),
        ("--json-keys text title --skip-bad-samples", "--json-keys: expected 'text' for the plain"),
        ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model: expected"),
        ("--train-tokenizer", "--vocab-size: expected a number for --train-tokenizer"),
        ("--train-tokenizer --vocab-size 9", "--train-tokenizer: expected"),
        (
            "--train-tokenizer --vocab-size 300 --tokenizer-model {0}/none "
            "--tokenizer-type HuggingFaceTokenizer",
            "--tokenizer-model: expected a file",
        ),
        ("--workers -3", "--workers: expected an integer >= 1, got -3"),
        (
            "--workers 0 --train-tokenizer --vocab-size 300 --tokenizer-type HuggingFaceTokenizer",
            "--workers: expected an integer >= 1, got 0",
        ),
        ("--vocab-size 256", "--vocab-size: expected at least the 257 ids"),
        ("--chat-template {0}/a.txt", "--chat-template: expected --chat"),
        ("--output-prefix {0}/a.txt/out", "error: [Errno"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_no_files(tmp_path, capsys, flags, message):
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("text")
    default = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "out", *BYTES]
    _preprocess(*default, *(word.format(tmp_path) for word in flags.split()), code=1)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_full_disk_leaves_earlier_files_alone(tmp_path, monkeypatch, capsys, kind):
    """Neither of two datasets that belong together is replaced."""
    written = IndexedDatasetBuilder._write_index

    def fail_for_the_later_one(self: IndexedDatasetBuilder) -> None:
        if self.prefix.endswith(("out_text_document", "out_chat_document")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.glob("out*")}

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if kind == "chat":
        make_tokenizer(tmp_path)
        template = tmp_path / "chat_template.jinja"
        template.write_text(
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
        )
        flags: list[str | Path] = ["--chat", "--tokenizer-model", tmp_path]
    else:
        flags = ["--json-keys", "text", "title", *BYTES]
    corpus = tmp_path / "in.jsonl"

    def preprocess(text: str, *, code: int = 0) -> None:
        turns[1]["content"] = text
        corpus.write_text(json.dumps({"text": text, "title": text, "messages": turns}))
        _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *flags, code=code)

    preprocess("before")
    before = files()
    assert len(before) == 4
    monkeypatch.setattr(IndexedDatasetBuilder, "_write_index", fail_for_the_later_one)
    preprocess("afterwards", code=1)
    assert "No space left on device: " in capsys.readouterr().err
    assert files() == before


def test_a_killed_worker_ends_the_run_with_one_line_and_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preprocess_data, "build_tokenizer", lambda _: KilledTokenizer())
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": "fine"}, {"text": "fatal"}, {"text": "fine"}]
    )
    _preprocess(
        "--input", corpus, "--output-prefix", tmp_path / "out", "--workers", "2", *BYTES, code=1
    )
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


_INTERRUPTED = """
import signal, sys
from megatron_hybrid import preprocess_data, sample_lines
from tests.unit_tests.tools.helpers.stopping_tokenizers import InterruptedTokenizer
signal.signal(signal.SIGINT, signal.default_int_handler)  # what started this may have it ignored
sample_lines._CHUNK_BYTES = 1
preprocess_data.build_tokenizer = lambda _: InterruptedTokenizer(sys.argv[1])
preprocess_data.main(sys.argv[2:])
"""


def test_an_interrupt_ends_the_run_at_once_and_leaves_no_files(tmp_path):
    for name in ("out", "seen"):
        (tmp_path / name).mkdir()
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "fine"}] * 300)
    arguments = ["--input", corpus, "--output-prefix", tmp_path / "out" / "web", "--workers", "2"]
    command = [sys.executable, "-c", _INTERRUPTED, tmp_path / "seen", *arguments, *BYTES]
    # A new session, because the signal reaches the whole process group.
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=600,
    )
    assert (tmp_path / "seen" / "interrupted").exists()
    assert done.returncode == -signal.SIGINT, done.stderr
    # It ended the process that was started, not a worker during its work.
    assert (tmp_path / "seen" / "unharmed").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_line_that_is_too_long_is_named_and_not_read_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(input_files, "_MAX_BYTES", 1000)
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": "fine"}, {"text": "x" * 980}, {"text": "fine"}]
    )
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *BYTES)
    assert len(_texts(tmp_path / "out_text_document")) == 3
    _write_jsonl(corpus, [{"text": "fine"}, {"text": "fine"}])
    os.truncate(corpus, 1 << 40)  # a line of a terabyte, sparse
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "new", *BYTES, code=1)
    assert "in.jsonl, line 3: expected at most 1000 bytes, got more." in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_a_long_text_is_an_error_and_a_long_binary_file_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(input_files, "_MAX_BYTES", 1000)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x" * 1000)
    (tmp_path / "in" / "film").touch()
    os.truncate(tmp_path / "in" / "film", 1 << 40)
    _preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "out", *BYTES)
    assert "; 1 files skipped" in capsys.readouterr().out
    (tmp_path / "in" / "b.txt").write_text("x" * 1000 + "é")
    _preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "new", *BYTES, code=1)
    assert "b.txt: expected at most 1000 bytes, got more." in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_if_the_output_is_a_terminal(tmp_path, is_terminal):
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "some words, some more words"}] * 50)
    command = [sys.executable, "-m", "megatron_hybrid", "preprocess", "--input", corpus]
    command += ["--train-tokenizer", "--vocab-size", "300", "--output-prefix", tmp_path / "out"]
    terminal, end = os.openpty()
    # A new terminal has no size, and no bar is drawn there.
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdout=end if is_terminal else log, stderr=end
        )
    os.close(end)
    shown = b""
    # A terminal ends with an error when its last process closes it.
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    assert process.wait() == 0, shown
    if is_terminal:
        assert b"tokenize: 100%" in shown
    assert (b"50 documents" in shown) == is_terminal
    assert ("50 documents" in (tmp_path / "log").read_text()) != is_terminal


def test_the_standard_library_is_a_corpus(tmp_path, monkeypatch, capsys):
    output = tmp_path / "data" / "stdlib.jsonl"
    monkeypatch.setattr(sys, "argv", ["build_stdlib_corpus.py", "--output", str(output)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOLS / "build_stdlib_corpus.py"), run_name="__main__")
    texts = [json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(texts) > 500
    assert any('The "assert" statement' in text for text in texts[:20])
    assert any("class OrderedDict" in text for text in texts)
    assert f"{len(texts)} documents" in capsys.readouterr().out
