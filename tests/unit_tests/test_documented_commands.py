"""Documents and messages start a program in one way: `python -m megatron_hybrid COMMAND`.

Several ranks are launched by `python -m megatron_hybrid launch`, with torchrun's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_hybrid.command_line import COMMANDS
from tests.helpers.doc_commands import bash_blocks

ROOT = Path(__file__).resolve().parents[2]
_NAMES = "|".join(map(re.escape, sorted(COMMANDS, key=len, reverse=True)))
OTHER_SPELLINGS = {
    "the distribution's name": rf"(?<![\w./-])megatron-hybrid (?:{_NAMES})(?![\w-])(?!:)",
    "a training script by python": r"python3? pretrain_(?:gpt|vlm)\.py",
    "torchrun": r"torchrun (?:[^`\n]|\\\n)*?(?:pretrain_(?:gpt|vlm)\.py|-m megatron_hybrid)",
}


def documents() -> Iterator[Path]:
    """What users read. Decisions tell of the past, and the changelog of what was at its time."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile"):
        yield ROOT / name
    for folder, suffixes in (
        ("docs", {".md"}),
        ("examples", {".md", ".py", ".yaml", ".sbatch"}),
        ("megatron", {".py"}),
        ("megatron_hybrid", {".py"}),
        (".github", {".md", ".yml"}),
    ):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and path.parent.name != "decisions":
                yield path


@pytest.mark.parametrize("kind", OTHER_SPELLINGS)
def test_no_document_starts_a_program_in_another_way(kind: str) -> None:
    pattern = re.compile(OTHER_SPELLINGS[kind])
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in documents()
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_commands_fit_the_page() -> None:
    long = [
        f"{path.name}: {line}"
        for path in documents()
        if path.suffix == ".md"
        for block in bash_blocks(path)
        for line in block.splitlines()
        if len(line) > 100
    ]
    assert long == []


def test_every_command_that_a_document_names_exists() -> None:
    named = {
        (path.name, command)
        for path in documents()
        for command in re.findall(
            r"python -m megatron_hybrid ([a-z][\w-]*)", path.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 20
    assert {command for _, command in named} <= set(COMMANDS)
