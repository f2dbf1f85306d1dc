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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.training.tokenizer import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from megatron_hybrid import input_files, preprocess_data
from tests.helpers.hf_models import begin_texts
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


def test_plain_files_and_folders_are_documents_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "b/z.md": "z",
        "b/a/y.txt": "yy",
        "b/x.py": "x = 1",
        "b/.git/config": "no",
        "b/e.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "b" / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "first.txt").write_text("é")
    _preprocess(
        "--input",
        tmp_path / "first.txt",
        tmp_path / "b",
        "--output-prefix",
        tmp_path / "out",
        *BYTES,
    )
    assert _texts(tmp_path / "out_text_document") == ["é", "yy", "x = 1", "z"]
    printed = capsys.readouterr().out
    assert "out_text_document: 4 documents, 10 tokens; 1 empty documents skipped\n" in printed
    assert printed.startswith(str(tmp_path))
    assert "10 bytes tokenized in" in printed
    assert "; 1 files skipped that are not UTF-8 text\n" in printed


def test_plain_text_is_what_holds_no_zero_bytes_and_begins_after_its_mark(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "in" / "b.bin").write_bytes(np.arange(9, dtype=np.uint16).tobytes())
    (tmp_path / "in" / "c.txt").write_text("\ufeff")
    _preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["marked"]


def test_suffixes_choose_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "c.txt"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    _preprocess(
        "--input",
        tmp_path / "in",
        *"--suffix .py .md --output-prefix".split(),
        tmp_path / "out",
        *BYTES,
    )
    assert _texts(tmp_path / "out_text_document") == ["a.py", "b.md"]


def test_each_json_key_makes_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        {"text": "one", "title": "1"},
        {"text": "", "title": "2"},
        {"text": "three", "title": "3"},
    ]
    corpus = _write_jsonl(tmp_path / "in.jsonl", records)
    _preprocess(
        "--input",
        corpus,
        *"--json-keys text title --output-prefix".split(),
        tmp_path / "out",
        *BYTES,
    )
    assert _texts(tmp_path / "out_text_document") == ["one", "three"]
    assert _texts(tmp_path / "out_title_document") == ["1", "2", "3"]
    printed = capsys.readouterr().out
    assert "out_text_document: 2 documents, 8 tokens; 1 empty documents skipped\n" in printed
    assert "out_title_document: 3 documents, 3 tokens\n" in printed


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_key_that_is_empty_throughout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": "one", "title": ""}, {"text": "two", "title": ""}]
    )
    keys = ["--json-keys", "text", "title", "--workers", workers]
    _preprocess("--input", corpus, *keys, "--output-prefix", tmp_path / "out", *BYTES, code=1)
    assert (
        "Expected at least one document with text under 'title' in 1 files, got none"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_json_files_are_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = _write_jsonl(tmp_path / "in.json", [{"text": "one"}, {"text": "two"}])
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["one", "two"]
    corpus.write_text(json.dumps({"text": "one"}, indent=2))
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *BYTES, code=1)
    assert "in.json, line 1: expected JSON, got '{\\n'" in capsys.readouterr().err


def test_a_key_given_twice_is_refused_and_what_stands_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", *BYTES)
    _preprocess(
        "--input",
        corpus,
        *"--json-keys text text --output-prefix".split(),
        tmp_path / "out",
        *BYTES,
        code=1,
    )
    assert "--json-keys: expected different keys, got text text" in capsys.readouterr().err
    assert _texts(tmp_path / "out_text_document") == ["one"]


def test_documents_end_with_the_end_of_document_token_if_asked_to(tmp_path: Path) -> None:
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "ab"}, {"text": "c"}])
    _preprocess("--input", corpus, "--append-eod", "--output-prefix", tmp_path / "out", *BYTES)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.get(0).tolist() == [97, 98, 256]
    assert dataset.get(1).tolist() == [99, 256]
    assert dataset.dtype == np.uint16


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_begin_with_what_the_tokenizer_puts_before_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    train_bpe(["the cat sat"], 270, tmp_path / "tokenizer.json")
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "the cat"}, {"text": ""}, {"text": "a"}])
    flags = ["--input", corpus, "--append-eod", "--tokenizer-model", tmp_path / "tokenizer.json"]
    _preprocess(*flags, "--output-prefix", tmp_path / "plain")
    assert "texts start with" not in capsys.readouterr().out
    begin_texts(tmp_path, 7)
    _preprocess(*flags, "--output-prefix", tmp_path / "out", "--workers", str(workers))
    assert "texts start with" in capsys.readouterr().out
    plain, begun = (IndexedDataset(tmp_path / f"{name}_text_document") for name in ("plain", "out"))
    assert len(plain) == len(begun) == 2
    for number in range(2):
        assert begun.get(number).tolist() == [7, *plain.get(number).tolist()]


def test_any_number_of_workers_writes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_data, "_CHUNK_DOCUMENTS", 3)
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": f"document {n} " * (n % 7)} for n in range(100)]
    )
    train = ["--train-tokenizer", "--vocab-size", "300", "--append-eod"]
    _preprocess("--input", corpus, "--output-prefix", tmp_path / "one", *train)
    model = tmp_path / "one_tokenizer.json"
    _preprocess(
        "--input",
        corpus,
        "--output-prefix",
        tmp_path / "two",
        "--tokenizer-model",
        model,
        "--workers",
        "2",
        "--append-eod",
    )
    for suffix in (".bin", ".idx"):
        one, two = (tmp_path / f"{name}_text_document{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    tokenizer = HuggingFaceTokenizer(model)
    dataset = IndexedDataset(tmp_path / "two_text_document")
    assert len(dataset) == sum(n % 7 != 0 for n in range(100))
    assert tokenizer.detokenize(dataset.get(1).tolist()) == "document 2 document 2 <|endoftext|>"


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", "in.jsonl, line 3: expected JSON, got \"{'text': 1}"),
        ('["text"]', "in.jsonl, line 3: expected a JSON object"),
        (
            '{"content": "x"}',
            "in.jsonl, line 3: expected a text under the key 'text', got the keys ['content']",
        ),
        ('{"text": 5}', "in.jsonl, line 3: expected a text under the key 'text', got 5 under it"),
        (
            '{"text": "a\\ud800"}',
            "in.jsonl, line 3: expected a text that UTF-8 can hold under the key 'text', got "
            "'a\\ud800' at character 1",
        ),
        pytest.param(
            "[" * 100_000, "in.jsonl, line 3: expected JSON, got '[[[", id="deeply nested"
        ),
        pytest.param(
            json.dumps({"text": ["x" * 99] * 99}),
            "expected a text under the key 'text', got ['",
            id="long",
        ),
        pytest.param(
            json.dumps(dict.fromkeys(map(str, range(999)))),
            "got the keys ['0', '1', ",
            id="many keys",
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str, workers: str
) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "fine"}\n\n' + line + "\n")
    _preprocess(
        "--input", corpus, "--output-prefix", tmp_path / "out", "--workers", workers, *BYTES, code=1
    )
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed) < len(str(corpus)) + 250
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_line_is_named_while_the_tokenizer_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "fine"}\nnonsense\n')
    _preprocess(
        "--input",
        corpus,
        "--output-prefix",
        tmp_path / "out",
        "--train-tokenizer",
        "--vocab-size",
        "300",
        code=1,
    )
    assert "in.jsonl, line 2: expected JSON, got 'nonsense" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--input", "/nowhere.txt", *BYTES],
            "--input: expected regular files and folders that exist, got /n",
        ),
        (
            ["--input", "{folder}/pipe", *BYTES],
            "--input: expected regular files and folders that exist, got",
        ),
        (["--input", "{folder}/none", *BYTES], "--input: expected files to read, got none in"),
        (
            ["--input", "{folder}/empty.txt", *BYTES],
            "Expected at least one document with text under 'text' in 1",
        ),
        (
            ["--input", "{folder}/a.txt", "--json-keys", "body", *BYTES],
            "--json-keys: expected 'text' for the plain text",
        ),
        (["--input", "{folder}/a.txt"], "--tokenizer-model: expected"),
        (
            ["--input", "{folder}/a.txt", "--train-tokenizer"],
            "--vocab-size: expected a number for --train-tokenizer",
        ),
        (
            ["--input", "{folder}/a.txt", "--train-tokenizer", "--vocab-size", "9", *BYTES],
            "--train-tokenizer: expected",
        ),
        (
            [
                "--input",
                "{folder}/a.txt",
                *"--train-tokenizer --vocab-size 300 --tokenizer-model".split(),
                "{folder}/none",
            ],
            "--tokenizer-model: expected a file to write for --train-tokenizer, got the folder",
        ),
        (
            ["--input", "{folder}/a.txt", "--workers", "-3", *BYTES],
            "--workers: expected an integer >= 1, got -3",
        ),
        (
            ["--input", "{folder}/a.txt", "--vocab-size", "256", *BYTES],
            "--vocab-size: expected at least the 257 ids",
        ),
    ],
)
def test_input_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("text")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    _preprocess(*filled, "--output-prefix", tmp_path / "out", code=1)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_flags_of_the_model_are_not_known_to_preprocessing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--input", "a.txt", "--make-vocab-size-divisible-by", "8", *BYTES]
    with pytest.raises(SystemExit, match="2"):
        _preprocess(*flags, "--output-prefix", tmp_path / "out")
    assert "--make-vocab-size-divisible-by" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    _preprocess(
        "--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "a.txt" / "out", *BYTES, code=1
    )
    assert "error: [Errno" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_disk_that_is_full_at_the_end_leaves_the_files_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Neither of two datasets that belong together is replaced."""
    written = IndexedDatasetBuilder._write_index

    def fail_for_the_later_one(self: IndexedDatasetBuilder) -> None:
        if self.prefix.endswith(("out_title_document", "out_chat_document")):
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


class KilledTokenizer(ByteTokenizer):
    """A worker that the system kills, for want of memory say."""

    def tokenize(self, text: str) -> list[int]:
        if text == "fatal":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tokenize(text)


def test_a_killed_worker_ends_the_run_with_one_line_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preprocess_data, "build_tokenizer", lambda _: KilledTokenizer())
    corpus = _write_jsonl(
        tmp_path / "in.jsonl", [{"text": "fine"}, {"text": "fatal"}, {"text": "fine"}]
    )
    _preprocess(
        "--input", corpus, "--output-prefix", tmp_path / "out", "--workers", "2", *BYTES, code=1
    )
    assert "error: A process in the process pool was terminated abruptly" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


class InterruptedTokenizer(ByteTokenizer):
    """Interrupts all processes of the terminal, once, when two workers are at work."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def tokenize(self, text: str) -> list[int]:
        (self.folder / f"{os.getpid()}.worker").touch()
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob("*.worker"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            (self.folder / "interrupted").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.killpg(os.getpgrp(), signal.SIGINT)
            (self.folder / "unharmed").touch()
        return super().tokenize(text)


_INTERRUPTED = """
import signal, sys
import test_preprocess_data
from megatron_hybrid import preprocess_data
signal.signal(signal.SIGINT, signal.default_int_handler)  # what started this may have it ignored
preprocess_data._CHUNK_DOCUMENTS = 1
preprocess_data.build_tokenizer = lambda _: test_preprocess_data.InterruptedTokenizer(sys.argv[1])
preprocess_data.main(sys.argv[2:])
"""


def _run_in_a_terminal_of_its_own(*command: Any, paths: Sequence[Path]) -> tuple[int, str]:
    """The exit status and what went to stderr. A process group that does not end is killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen(
        list(map(str, command)),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, printed = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, printed


def test_an_interrupt_ends_the_run_at_once_and_leaves_no_files(tmp_path: Path) -> None:
    for name in ("out", "seen"):
        (tmp_path / name).mkdir()
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "fine"}] * 300)
    arguments = [
        "--input",
        corpus,
        "--output-prefix",
        tmp_path / "out" / "web",
        "--workers",
        "2",
        *BYTES,
    ]
    status, printed = _run_in_a_terminal_of_its_own(
        sys.executable,
        "-c",
        _INTERRUPTED,
        tmp_path / "seen",
        *arguments,
        paths=[ROOT, Path(__file__).parent],
    )
    assert (tmp_path / "seen" / "interrupted").exists()
    assert status == -signal.SIGINT, printed
    # It ended the process that was started, and no worker in the midst of its work.
    assert (tmp_path / "seen" / "unharmed").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_line_that_is_too_long_is_named_and_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_text_that_is_too_long_is_refused_and_what_is_no_text_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(input_files, "_MAX_BYTES", 1000)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x" * 1000)
    (tmp_path / "in" / "film").touch()
    os.truncate(tmp_path / "in" / "film", 1 << 40)
    _preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "out", *BYTES)
    assert "; 1 files skipped that are not UTF-8 text" in capsys.readouterr().out
    (tmp_path / "in" / "b.txt").write_text("x" * 1001)
    _preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "new", *BYTES, code=1)
    assert "b.txt: expected a document of at most 1000 bytes, got more." in capsys.readouterr().err


def test_the_name_of_a_file_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\n\x1b[2Jb.jsonl").write_text("nonsense\n")
    _preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "out", *BYTES, code=1)
    printed = capsys.readouterr().err
    assert "a\\n\\x1b[2Jb.jsonl, line 1: expected JSON" in printed
    assert printed.removesuffix("\n").isprintable()


@pytest.mark.parametrize("output_is", ["a terminal", "a file"])
def test_progress_is_shown_where_the_output_is_a_terminal(tmp_path: Path, output_is: str) -> None:
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "some words, some more words"}] * 50)
    command = [
        sys.executable,
        str(TOOLS / "preprocess_data.py"),
        "--input",
        str(corpus),
        "--train-tokenizer",
    ]
    command += ["--vocab-size", "300", "--output-prefix", str(tmp_path / "out")]
    terminal, end = os.openpty()
    # A new one has no lines and no columns, and nothing is drawn there.
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log if output_is == "a file" else end, stderr=end
        )
    os.close(end)
    shown = b""
    # At the end of the last process that has it open, a terminal answers with an error.
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    assert process.wait() == 0, shown
    if output_is == "a file":
        assert shown == b""
        assert "50 documents" in (tmp_path / "log").read_text()
    else:
        assert b"tokenize: 100%" in shown
        assert b"50 documents" in shown


def test_the_standard_library_is_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data" / "stdlib.jsonl"
    monkeypatch.setattr(sys, "argv", ["build_stdlib_corpus.py", "--output", str(output)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOLS / "build_stdlib_corpus.py"), run_name="__main__")
    texts = [json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert 8e6 < output.stat().st_size < 20e6
    assert len(texts) > 500
    assert any('The "assert" statement' in text for text in texts[:20])
    assert any("class OrderedDict" in text for text in texts)
    assert f"{len(texts)} documents" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["stdlib.jsonl"]
