"""`tools/merge_datasets.py` with the arguments of Megatron's."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.answer_dataset import AnswerFiles, mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tools.merge_datasets import main


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> None:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    write(folder / "b_text_document", [[3], [4, 5]])
    write(folder / "a_text_document", [[1, 2]])
    (folder / "README.txt").touch()
    return folder


def test_parts_are_merged_in_the_order_of_their_names(parts, capsys):
    output = parts.parent / "corpus"
    assert main(["--input", str(parts), "--output-prefix", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}: 2 datasets, 3 documents, 3 sequences, 5 tokens\n"

    merged = IndexedDataset(output)
    assert merged.dtype == np.uint16
    assert [each.tolist() for each in merged] == [[1, 2], [3], [4, 5]]
    write(parts.parent / "at_once", [[1, 2], [3], [4, 5]])
    for suffix in (".bin", ".idx"):
        other = (parts.parent / f"at_once{suffix}").read_bytes()
        assert Path(f"{output}{suffix}").read_bytes() == other


def write_chats(prefix: Path, masks: list[list[int]], first_token: int = 0) -> None:
    write(
        prefix,
        [[first_token + number for number in range(len(mask))] for mask in masks],
    )
    write(Path(mask_prefix(prefix)), masks, np.uint8)


def test_masks_of_conversations_are_merged_along_with_their_tokens(tmp_path, capsys):
    folder, output = tmp_path / "parts", tmp_path / "all_chat_document"
    # Sorted by name, a mask may come between the tokens of two conversations.
    write_chats(folder / "a", [[0, 1, 1], [0, 1]])
    write_chats(folder / "a_more", [[0, 0, 0, 1]], first_token=70)
    assert main(["--input", str(folder), "--output-prefix", f"{output}.bin"]) == 0
    assert "2 datasets, 3 documents, 3 sequences, 9 tokens, with masks" in capsys.readouterr().out

    files = AnswerFiles(output)
    assert files.mask is not None
    assert [each.tolist() for each in files.tokens] == [[0, 1, 2], [0, 1], [70, 71, 72, 73]]
    assert [each.tolist() for each in files.mask] == [[0, 1, 1], [0, 1], [0, 0, 0, 1]]


def test_text_that_replaces_conversations_does_not_keep_their_mask(parts, tmp_path):
    output = tmp_path / "all"
    write_chats(output, [[0, 1], [1], [0, 1]])
    assert main(["--input", str(parts), "--output-prefix", str(output)]) == 0
    assert [each.tolist() for each in IndexedDataset(output)] == [[1, 2], [3], [4, 5]]
    assert AnswerFiles(output).mask is None


def test_a_disk_that_is_full_at_the_end_leaves_earlier_files_alone(tmp_path, monkeypatch):
    folder, output = tmp_path / "parts", tmp_path / "all"
    write_chats(folder / "a", [[0, 0, 1]], first_token=50)
    write_chats(output, [[0, 1, 1]])
    complete = IndexedDatasetBuilder.complete

    def complete_masks_alone(self: IndexedDatasetBuilder) -> None:
        if self.prefix == str(output):
            raise OSError(errno.ENOSPC, "No space left on device", self.prefix)
        complete(self)

    monkeypatch.setattr(IndexedDatasetBuilder, "complete", complete_masks_alone)
    assert main(["--input", str(folder), "--output-prefix", str(output)]) == 1
    files = AnswerFiles(output)
    assert files.mask is not None
    assert [files.tokens[0].tolist(), files.mask[0].tolist()] == [[0, 1, 2], [0, 1, 1]]


@pytest.mark.parametrize(
    ("spoil", "output", "message"),
    [
        (lambda folder: (folder / "b_text_document.idx").unlink(), "corpus", "other half, got no"),
        (lambda folder: write(folder / "c", [[1]], np.int32), "corpus", "got int32"),
        (lambda folder: (folder / "c.bin").touch(), "corpus", "expected .*c.idx next to"),
        (lambda _: None, "parts/a_text_document", "--output-prefix: expected another name"),
        (lambda _: None, "parts/a_text_document.bin", "--output-prefix: expected another name"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "corpus", "got none in"),
        (lambda folder: folder.rename(folder.with_name("gone")), "corpus", "existing directory"),
        (lambda folder: write_chats(folder / "c", [[0, 1]]), "corpus", "no mask for .*a_text_doc"),
        (
            lambda folder: write(folder / "c_chat_document", [[1]]),
            "corpus",
            "its loss mask.*--chat",
        ),
        (
            lambda folder: write(folder / "c_mask", [[1]], np.uint8),
            "corpus",
            "c.bin next to its m",
        ),
        (
            lambda folder: (
                [write_chats(folder / name, [[0, 1]]) for name in "ab"]
                + [write(folder / "b_mask", [[1]], np.uint8)]
            ),
            "corpus",
            "another length in sequence 0",
        ),
        (
            lambda folder: (
                [write(folder / f"a_{part}", [[1]]) for part in ("text", "images")]
                + [(folder / "a.json").touch()]
            ),
            "corpus",
            "images in .*a.json.*--data-path",
        ),
    ],
)
def test_errors_are_one_line_and_leave_no_files(parts, spoil, output, message, capsys):
    spoil(parts)
    before = sorted(parts.parent.rglob("*"))
    assert main(["--input", str(parts), "--output-prefix", str(parts.parent / output)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert sorted(parts.parent.rglob("*")) == before
