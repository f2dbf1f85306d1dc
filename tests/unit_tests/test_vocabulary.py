"""The vocabulary of docs/architecture.md: one word, one meaning, one class of a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 30


def vocabulary(text: str) -> dict[str, list[str]]:
    """The classes of each word."""
    section = text.partition("\n## Vocabulary\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+ \|([^|]*)\|$", section, re.MULTILINE)
    rows = [(word, classes) for word, classes in rows if word != "word"]
    return {word: re.findall(r"`(\w+)`", classes) for word, classes in rows}


def files_by_class(package: Path) -> dict[str, set[str]]:
    """Where classes of each name are defined, nested ones too."""
    found = defaultdict(set)
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path.relative_to(package)))
    return found


WORDS = vocabulary((ROOT / "docs" / "architecture.md").read_text())
FILES = files_by_class(ROOT / "megatron")


def test_the_vocabulary_is_small_and_its_rows_are_read():
    assert 20 < len(WORDS) <= MOST_WORDS
    assert WORDS["chunk"] == ["Chunk", "SavedChunk"]


@pytest.mark.parametrize("word", WORDS)
def test_a_class_of_the_vocabulary_is_defined_once_and_has_its_word_alone(word):
    assert {name: len(FILES[name]) for name in WORDS[word]} == dict.fromkeys(WORDS[word], 1)
    name = word.title().replace(" ", "")
    assert name not in FILES or name in WORDS[word]
