"""Kinds of input files, compressed input, and bad lines of text."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import random
from pathlib import Path

import pytest
from fsspec.compression import compr

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.tokenizer import ByteTokenizer
from megatron_hybrid import preprocess_data

LINES = b'{"text": "one"}\n\n{"text": "two"}\r\n{"text": "three"}'


def preprocess(*arguments: object, code: int = 0) -> None:
    """Tokenizes bytes."""
    argv = [str(each) for each in (*arguments, "--tokenizer-type", "ByteTokenizer")]
    assert preprocess_data.main(argv) == code


def texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(f"{prefix}_text_document")
    return [ByteTokenizer().detokenize(dataset.get(i).tolist()) for i in range(len(dataset))]


def as_it_is(content: bytes) -> bytes:
    return content


def in_two_parts(content: bytes) -> bytes:
    return gzip.compress(content[:20]) + gzip.compress(content[20:])


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("a.ndjson", as_it_is),
        ("a.JsonLines", as_it_is),
        ("part-00000", as_it_is),
        ("part.00000", as_it_is),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.gz", in_two_parts),
        ("A.JSON.BZ2", bz2.compress),
        ("part.xz", lzma.compress),
        ("marked.jl", b"\xef\xbb\xbf".__add__),
        ("marked.ndjson.gz", lambda content: gzip.compress(b"\xef\xbb\xbf" + content)),
    ],
)
def test_json_lines_are_read_regardless_of_the_suffix_and_the_compression(tmp_path, name, packed):
    (tmp_path / name).write_bytes(packed(LINES))
    preprocess("--input", tmp_path / name, "--output-prefix", tmp_path / "out")
    assert texts(tmp_path / "out") == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("LICENSE", "Permission is granted {to all}."),
        ("style.css", "{ not JSON }\n"),
        ("app.js.map", '{"version": 3, "sources": []}'),
        ("notes", "\n\n[1] a footnote\n"),
    ],
)
def test_text_is_one_document_also_if_it_is_compressed(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    files = [tmp_path / name, tmp_path / f"{name}.gz"]
    preprocess("--input", *files, "--output-prefix", tmp_path / "out")
    assert texts(tmp_path / "out") == [content, content]


def test_a_file_without_a_suffix_that_may_be_either_is_rejected(tmp_path, capsys):
    (tmp_path / "part-1").write_text('{"text": "cut off\n{"text": "whole"}\n')
    preprocess("--input", tmp_path / "part-1", "--output-prefix", tmp_path / "out", code=1)
    assert str(tmp_path / "part-1") in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_suffixes_choose_files_in_any_case_and_compressed_ones(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number, name in enumerate(("a.JSONL", "b.jsonl.gz", "c.txt", "d.gz", "e.json")):
        content = json.dumps({"text": str(number)}).encode()
        (folder / name).write_bytes(gzip.compress(content) if "gz" in name else content)
    preprocess("--input", folder, "--suffix", ".jsonl", "--output-prefix", tmp_path / "out")
    assert texts(tmp_path / "out") == ["0", "1"]
    preprocess("--input", folder, "--suffix", ".GZ", "--output-prefix", tmp_path / "out")
    assert texts(tmp_path / "out") == ["1", "3"]


@pytest.mark.parametrize("codec", [None, print])
def test_a_compression_without_a_package_is_an_error(tmp_path, monkeypatch, capsys, codec):
    """A function is what fsspec has where only `zstandard` is installed: it reads one frame."""
    monkeypatch.setitem(compr, "zstd", codec)
    (tmp_path / "a.jsonl.ZST").write_bytes(b"\x28\xb5\x2f\xfd")
    preprocess("--input", tmp_path / "a.jsonl.ZST", "--output-prefix", tmp_path / "out", code=1)
    assert "a.jsonl.ZST" in capsys.readouterr().err


PACKERS = [
    (".gz", gzip.compress),
    (".bz2", lambda content: bz2.compress(content, 1)),
    (".xz", lzma.compress),
]


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
@pytest.mark.parametrize("damage", ["cut off", "something else"])
@pytest.mark.parametrize("name", ["in.jsonl", "in", "in.md"])
def test_damaged_compressed_input_is_one_line(tmp_path, capsys, suffix, pack, damage, name):
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(pack(LINES * 1000)[:-9] if damage == "cut off" else LINES)
    preprocess("--input", path, "--output-prefix", tmp_path / "out", code=1)
    told = capsys.readouterr().err
    assert str(path) in told
    assert told.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def numbered(first: int, last: int) -> list[str]:
    """Texts that compress badly, so that they fill several blocks of a compressed file."""
    return [random.Random(number).randbytes(200).hex() for number in range(first, last)]


def as_lines(numbers: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in numbers).encode()


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
@pytest.mark.parametrize("name", ["b.jsonl", "b"])
def test_a_damaged_file_is_skipped_from_its_damage_on(tmp_path, capsys, suffix, pack, name):
    folder, path = tmp_path / "in", tmp_path / "in" / f"{name}{suffix}"
    folder.mkdir()
    first, cut, last = numbered(0, 30), numbered(30, 1030), numbered(1030, 1060)
    (folder / "a.jsonl").write_bytes(b"nonsense\n" + as_lines(first))
    packed = pack(as_lines(cut))
    path.write_bytes(packed[: len(packed) * 3 // 4])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(as_lines(last)))
    preprocess("--input", folder, "--output-prefix", tmp_path / "out", "--skip-bad-samples")

    told = capsys.readouterr()
    found = texts(tmp_path / "out")
    num_kept = len(found) - 60
    assert 300 < num_kept < 900, "some blocks of the file are whole"
    assert found == [*first, *cut[:num_kept], *last]
    assert "2 bad lines skipped" in told.out
    damaged, nonsense = told.err.splitlines()
    assert str(path) in damaged
    assert f"line {num_kept + 1} " in damaged
    assert "a.jsonl, line 1: " in nonsense


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", gzip.compress(b"words " * 999)[:-9]],
    ids=["empty", "nonsense", "truncated"],
)
def test_a_damaged_text_is_left_out_as_a_whole(tmp_path, capsys, content):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text("first\n" * 10)
    (tmp_path / "in" / "b.md.gz").write_bytes(content)
    preprocess(
        "--input", tmp_path / "in", "--output-prefix", tmp_path / "out", "--skip-bad-samples"
    )
    assert texts(tmp_path / "out") == ["first\n" * 10]
    assert ("b.md.gz" in capsys.readouterr().err) == bool(content)


def test_a_disk_that_fails_is_no_damaged_file(tmp_path, monkeypatch, capsys):
    def fail(*_arguments: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_lines(numbered(0, 100))))
    monkeypatch.setattr(gzip.GzipFile, "read1", fail)
    arguments = ["--input", tmp_path / "a.jsonl.gz", "--output-prefix", tmp_path / "out"]
    preprocess(*arguments, "--skip-bad-samples", code=1)
    assert "Input/output error" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "field",
    [b'"a": 1, "a": 2', b'"id": ' + b"9" * 50, b'"tree": ' + b"[" * 40 + b"]" * 40],
    ids=["key twice", "long integer", "many levels"],
)
def test_other_fields_of_a_text_may_have_any_content(tmp_path, field):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "one", ' + field + b"}\n")
    preprocess("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out")
    assert texts(tmp_path / "out") == ["one"]


BAD_LINES = {
    "no JSON": b"nonsense",
    "no UTF-8": b'{"text": "caf\xe9"}',
    "no text": b'{"text": ["a"]}',
    "no such key": b'{"body": "a"}',
    "no object": b'["text"]',
    "half a surrogate pair": b'{"text": "\\ud800"}',
}


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_of_text_are_skipped_and_counted_where_that_is_wanted(tmp_path, capsys, workers):
    good = [json.dumps({"text": f"text {number}"}).encode() for number in range(70)]
    lines = [good[0], *BAD_LINES.values(), *good[1:]]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    arguments = ["--input", tmp_path / "in.jsonl", "--workers", workers, "--output-prefix"]
    preprocess(*arguments, tmp_path / "out", "--skip-bad-samples")
    assert texts(tmp_path / "out") == [f"text {number}" for number in range(70)]
    told = capsys.readouterr()
    num_bytes = sum(len(line) + 1 for line in good) - 1
    assert f"{num_bytes} bytes tokenized" in told.out
    assert f"{len(BAD_LINES)} bad lines skipped" in told.out
    skipped = [line for line in told.err.splitlines() if line.startswith("skipped: ")]
    assert [f"in.jsonl, line {number}: " in line for number, line in enumerate(skipped, 2)] == (
        [True] * len(BAD_LINES)
    )
    preprocess(*arguments, tmp_path / "new", code=1)
    assert "in.jsonl, line 2: expected a JSON object" in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("trains", [False, True])
def test_more_than_a_tenth_of_bad_lines_is_an_error_without_output_files(tmp_path, capsys, trains):
    flags = ["--skip-bad-samples", "--output-prefix", tmp_path / "out"]
    tokenizer: list[object] = ["--tokenizer-type", "ByteTokenizer"]
    if trains:
        tokenizer = ["--train-tokenizer", "--vocab-size", "300"]

    def run(num_good: int) -> int:
        lines = [json.dumps({"text": "fine words"})] * num_good + ["nonsense"] * 2
        (tmp_path / "in.jsonl").write_text("\n".join(lines))
        argv = ["--input", tmp_path / "in.jsonl", *flags, *tokenizer]
        return preprocess_data.main([str(each) for each in argv])

    assert run(17) == 1
    told = capsys.readouterr().err
    assert "--skip-bad-samples" in told
    assert "2 of 19" in told
    assert "in.jsonl, line 18" in told
    assert not list(tmp_path.glob("out*"))
    assert run(18) == 0
