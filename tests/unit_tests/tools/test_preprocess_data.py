"""From text to token files with the command-line tools."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.tokenizer import ByteTokenizer, HuggingFaceTokenizer

TOOLS = Path(__file__).parents[3] / "tools"
BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.fixture(autouse=True)
def _tools_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    # Worker processes import the tool by its name as well.
    monkeypatch.syspath_prepend(str(TOOLS))


def _preprocess(*arguments: str | Path) -> None:
    import preprocess_data

    preprocess_data.main([str(argument) for argument in arguments])


def _texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [ByteTokenizer().detokenize(dataset.get(index).tolist()) for index in range(len(dataset))]


def _write_jsonl(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_plain_files_and_folders_are_documents_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    _preprocess("--input", tmp_path / "first.txt", tmp_path / "b", "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["é", "yy", "x = 1", "z"]
    printed = capsys.readouterr().out
    assert "4 documents, 10 tokens from 10 bytes in" in printed
    assert "1 empty documents skipped; 1 files skipped that are not UTF-8 text" in printed


def test_suffixes_choose_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "c.txt"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    _preprocess("--input", tmp_path / "in", "--suffix", ".py", ".md", "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["a.py", "b.md"]


def test_each_json_key_makes_a_dataset(tmp_path: Path) -> None:
    records = [{"text": "one", "title": "1"}, {"text": "", "title": "2"}, {"text": "three", "title": "3"}]
    corpus = _write_jsonl(tmp_path / "in.jsonl", records)
    _preprocess("--input", corpus, "--json-keys", "text", "title", "--output-prefix", tmp_path / "out", *BYTES)
    assert _texts(tmp_path / "out_text_document") == ["one", "three"]
    assert _texts(tmp_path / "out_title_document") == ["1", "2", "3"]


def test_documents_end_with_the_end_of_document_token_if_asked_to(tmp_path: Path) -> None:
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": "ab"}, {"text": "c"}])
    _preprocess("--input", corpus, "--append-eod", "--output-prefix", tmp_path / "out", *BYTES)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.get(0).tolist() == [97, 98, 256]
    assert dataset.get(1).tolist() == [99, 256]
    assert dataset.dtype == np.uint16


def test_any_number_of_workers_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import preprocess_data

    monkeypatch.setattr(preprocess_data, "_CHUNK_DOCUMENTS", 3)
    corpus = _write_jsonl(tmp_path / "in.jsonl", [{"text": f"document {n} " * (n % 7)} for n in range(100)])
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
        ("{'text': 1}", "in.jsonl, line 3: expected JSON, got b\"{'text': 1}"),
        ('["text"]', "in.jsonl, line 3: expected a JSON object"),
        ('{"content": "x"}', "in.jsonl, line 3: expected a text under the key 'text', got the keys ['content']"),
        ('{"text": 5}', "in.jsonl, line 3: expected a text under the key 'text', got 5 under it"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str, workers: str
) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(SystemExit) as error:
        _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", "--workers", workers, *BYTES)
    assert error.value.code == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_line_is_named_while_the_tokenizer_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "fine"}\nnonsense\n')
    with pytest.raises(SystemExit):
        _preprocess("--input", corpus, "--output-prefix", tmp_path / "out", "--train-tokenizer", "--vocab-size", "300")
    assert "in.jsonl, line 2: expected JSON, got b'nonsense" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "/nowhere.txt", *BYTES], "--input: expected files and folders that exist, got /nowhere.txt"),
        (["--input", "{folder}/none", *BYTES], "--input: expected files to read, got none in"),
        (["--input", "{folder}/empty.txt", *BYTES], "Expected at least one document with text in 1 files, got none"),
        (
            ["--input", "{folder}/a.txt", "--json-keys", "body", *BYTES],
            "--json-keys: expected 'text' for the plain text",
        ),
        (["--input", "{folder}/a.txt"], "--tokenizer-model: expected"),
        (["--input", "{folder}/a.txt", "--train-tokenizer"], "--vocab-size: expected a number for --train-tokenizer"),
        (
            ["--input", "{folder}/a.txt", "--train-tokenizer", "--vocab-size", "9", *BYTES],
            "--train-tokenizer: expected",
        ),
        (["--input", "{folder}/a.txt", "--vocab-size", "256", *BYTES], "--vocab-size: expected at least the 257 ids"),
    ],
)
def test_input_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("text")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit):
        _preprocess(*filled, "--output-prefix", tmp_path / "out")
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_the_standard_library_is_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data" / "stdlib.jsonl"
    monkeypatch.setattr(sys, "argv", ["build_stdlib_corpus.py", "--output", str(output)])
    runpy.run_path(str(TOOLS / "build_stdlib_corpus.py"), run_name="__main__")
    texts = [json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert 8e6 < output.stat().st_size < 20e6
    assert len(texts) > 500
    assert any('The "assert" statement' in text for text in texts[:20])
    assert any("class OrderedDict" in text for text in texts)
    assert f"{len(texts)} documents" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["stdlib.jsonl"]
