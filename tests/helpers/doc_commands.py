"""The commands that a page of docs/ shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
_RANKS = re.compile(r"--nproc-per-node (\d+)")


class Command(NamedTuple):
    """`pretrain_gpt.py` as a page shows it."""

    num_ranks: int
    argv: list[str]


def section_of(page: str, title: str) -> str:
    """A section of a page, without its title."""
    return (DOCS / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def bash_blocks(path: Path) -> list[str]:
    """A page's blocks of bash, as they stand."""
    return re.findall(r"```bash\n(.*?)```", path.read_text(), re.S)


def commands_in(text: str) -> list[Command]:
    """The calls of `pretrain_gpt.py` in a text's blocks of bash."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            launcher, program, arguments = line.partition("pretrain_gpt.py ")
            if program:
                ranks = _RANKS.search(launcher)
                argv = shlex.split(arguments, comments=True)
                found.append(Command(int(ranks[1]) if ranks else 1, argv))
    return found
