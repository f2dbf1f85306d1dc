"""The programs in documents run: every block of Python of the pages docs/coming-from*.md, and the
loop of one's own in docs/offload.md.

The blocks of a section continue each other, on two ranks, in a folder of their own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.ranks import RankError, run_ranks

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)$")


class Program(NamedTuple):
    """The blocks of Python under one heading."""

    path: str  # of the document
    heading: str
    blocks: list[tuple[int, str]]  # the line that a block begins behind, and its text


def programs(path: str, text: str) -> list[Program]:
    """The programs of a document, by its headings of the second level."""
    found = [Program(path, "", [])]
    language: str | None = None  # of the block that is open
    start = 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence is None:
            if language is None and line.startswith("## "):
                found.append(Program(path, line.removeprefix("## "), []))
        elif language is None:
            language, start = fence[1], number
        else:
            if language == "python":
                found[-1].blocks.append((start, "\n".join(lines[start : number - 1])))
            language = None
    return [program for program in found if program.blocks]


def run(program: Program, folder: str) -> None:
    """On every rank: runs the blocks in one namespace, below `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        names: dict[str, Any] = {"__name__": "__main__"}
        for line, text in program.blocks:
            # Tracebacks have the document's lines.
            exec(compile("\n" * line + text, program.path, "exec"), names)
    finally:
        os.chdir(before)


COMING_FROM = [
    program
    for page in sorted((ROOT / "docs").glob("coming-from*.md"))
    for program in programs(f"docs/{page.name}", page.read_text())
]
OFFLOAD = [
    program
    for program in programs("docs/offload.md", (ROOT / "docs" / "offload.md").read_text())
    if program.heading == "In a loop of your own"
]


@pytest.mark.parametrize(
    "program", [*COMING_FROM, *OFFLOAD], ids=lambda program: f"{program.path}: {program.heading}"
)
def test_a_section_of_a_document_runs(program: Program, tmp_path: Path) -> None:
    run_ranks(2, run, program, str(tmp_path))


def test_the_sections_that_must_have_programs_have_them() -> None:
    headings = [f"{program.path}: {program.heading}" for program in COMING_FROM]
    for name in ("FSDP2", "Megatron-FSDP v2", "TransformerEngine", "AReaL", "deepspeed"):
        assert any(name in heading for heading in headings), name
    assert len(OFFLOAD) == 1


def test_blocks_that_continue_each_other_are_run_and_errors_have_their_line(
    tmp_path: Path,
) -> None:
    blocks = [("python", "a = 1"), ("bash", "false"), ("python", "b = a\n1 / 0")]
    text = "# T\n\n## One\n\n" + "\n\n".join(f"```{kind}\n{own}\n```" for kind, own in blocks)
    (program,) = programs("docs/some.md", text)
    assert program.heading == "One"
    assert program.blocks == [(5, "a = 1"), (13, "b = a\n1 / 0")]
    with pytest.raises(RankError, match=r'(?s)"docs/some\.md", line 15.*ZeroDivisionError'):
        run_ranks(2, run, program, str(tmp_path))
