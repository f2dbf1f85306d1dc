"""The public interface is the one that tests/public_interface records, so that each change of it is
deliberate. After such a change, `python -m tests.helpers.public_interface` records the new one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.public_interface import COMMAND, FLAGS, NAMES, flags, names, public_members

ROOT = Path(__file__).resolve().parents[2]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
API_MEMBER = re.compile(r"^        - ([A-Za-z]\w*)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("path", "describe"), [(NAMES, names), (FLAGS, flags)], ids=["names", "flags"]
)
def test_the_public_interface_is_the_recorded_one(
    path: Path, describe: Callable[[], list[str]]
) -> None:
    recorded = path.read_text(encoding="utf-8").splitlines()
    assert describe() == recorded, f"To record a change that is meant, run: {COMMAND}"


def test_every_name_that_a_page_imports_is_recorded() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in PYTHON_BLOCK.findall(page.read_text())]
    imported = {found for block in blocks for found in imports_of(block)}
    recorded = {(module, name) for module, members in public_members().items() for name in members}
    assert len(imported) > 10
    assert imported - recorded == set()


def test_every_name_of_the_reference_pages_is_recorded() -> None:
    words = set(re.findall(r"\w+", NAMES.read_text(encoding="utf-8")))
    listed = {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in API_MEMBER.findall(page.read_text())
    }
    assert len(listed) > 10
    assert listed - words - {"main"} == set()  # of programs, whose flags are recorded


def imports_of(block: str) -> Iterator[tuple[str, str]]:
    """The modules and names that a program imports from this project."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            yield from ((str(node.module), alias.name) for alias in node.names)
