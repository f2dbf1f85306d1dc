"""Links between the project's pages lead somewhere, and every page of docs/ is in the site's
navigation. `make docs` checks the links of the site that is built; this needs nothing installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^\s*(```+|~~~+)")
_CODE = re.compile(r"`+[^`]*`+")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?(?P<target>[^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML_LINK = re.compile(r"(?:src|srcset|href)=\"(?P<target>[^\"\s]+)\"")
_ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:")


def pages() -> list[Path]:
    """Everything of the project that is written in Markdown."""
    folders = ("docs", "examples", "tests", "benchmarks", "tools")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *found])


class Link(NamedTuple):
    line: int
    target: str


def text_lines(markdown: str) -> Iterator[tuple[int, str]]:
    """The numbered lines that are not in a block of code."""
    fence = ""
    for number, line in enumerate(markdown.splitlines(), start=1):
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def links(markdown: str) -> list[Link]:
    """Links of a page to files and headings of the project."""
    found = []
    for number, line in text_lines(markdown):
        text = _CODE.sub("code", line)
        for match in (*_LINK.finditer(text), *_HTML_LINK.finditer(text)):
            if not _ELSEWHERE.match(match["target"]):
                found.append(Link(number, match["target"]))
    return found


def anchors(markdown: str) -> set[str]:
    """The names that code hosts and the site give to a page's headings."""
    found: set[str] = set()
    for _, line in text_lines(markdown):
        if re.match(r"#{1,6} ", line):
            title = line.lstrip("#").strip().lower()
            name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            found.add(name if name not in found else f"{name}-1")
    return found


def broken(page: Path, root: Path) -> list[str]:
    """A page's links that lead nowhere, or out of the project."""
    problems = []
    for line, target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(root)}:{line}: {target}"
        if root not in there.parents or not there.exists():
            problems.append(f"{where}: no such file")
        # Of a picture it names the colour scheme that a host shows it in.
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text()):
            problems.append(f"{where}: no such heading")
    return problems


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page, ROOT) == []


def test_broken_links_are_found_and_code_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The `other` page: one\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n"
        "[a](other.md) [b](other.md#the-other-page-one) [c](#here) [d](https://nowhere.invalid)\n"
        "[e](other.md#twice-1) `[f](code.md)`\n"
        "```\n[g](code.md)\n```\n"
        "[h](missing.md) [i](other.md#three) [j](../outside.md)\n"
        '<img alt="k" src="missing.svg">\n'
        "![l](there.svg#gh-dark-mode-only)\n"
    )
    (tmp_path / "there.svg").touch()
    (tmp_path.parent / "outside.md").touch()
    assert broken(page, tmp_path) == [
        "page.md:7: missing.md: no such file",
        "page.md:7: other.md#three: no such heading",
        "page.md:7: ../outside.md: no such file",
        "page.md:8: missing.svg: no such file",
    ]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose own tags stand for what mkdocs makes of them."""


_Loader.add_multi_constructor("!", lambda *_: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def in_navigation(entry: Any) -> Iterator[str]:
    """The files of a part of the navigation; patterns as they are."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from in_navigation(part)


def test_every_page_of_the_docs_is_in_the_navigation_and_exists() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    named = list(in_navigation(config["nav"]))
    there = {path for name in named for path in DOCS.glob(name)}
    assert there == set(DOCS.rglob("*.md"))
    assert all(list(DOCS.glob(name)) for name in named)
