"""The commands that a page of docs/ shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
_PROGRAM = re.compile(r"(?:pretrain_gpt\.py|python -m megatron_hybrid pretrain) ")
_RANKS = re.compile(r"--nproc-per-node (\d+)")


class Command(NamedTuple):
    """A training run as a page shows it."""

    num_ranks: int
    argv: list[str]


def section_of(page: str, title: str) -> str:
    """A section of a page, without its title."""
    return (DOCS / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def bash_blocks(path: Path) -> list[str]:
    """A page's blocks of bash, as they stand."""
    return re.findall(r"```bash\n(.*?)```", path.read_text(), re.S)


def commands_in(text: str) -> list[Command]:
    """The training runs in a text's blocks of bash."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if program := _PROGRAM.search(line):
                ranks = _RANKS.search(line[: program.start()])
                argv = shlex.split(line[program.end() :], comments=True)
                found.append(Command(int(ranks[1]) if ranks else 1, argv))
    return found
