"""Adds the pages that the site needs besides docs/: mkdocs calls these functions while it builds.

Pages link to files of the source tree, such as `../benchmarks/results/x.json`, which a code host
shows and a site does not have. Each linked file becomes a page of the site, below source/, with the
file's text. A linked directory becomes a list of its files; Python files are listed with the
first paragraph of their docstring, including inner packages. A link to a missing file is left
unchanged and fails the build.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
_INLINE_CODE = re.compile(r"<code>[^<]*</code>")
_FLAG = re.compile(r"--[a-z][\w-]*")
_FENCE = re.compile(r"^ *(```|~~~)")
_LANGUAGES = {".sbatch": "bash", ".sh": "bash", ".yml": "yaml", ".h": "cpp", "Makefile": "make"}
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages that match into the place of a pattern in the navigation, by name."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the source tree that a page links to."""
    root = _root(config)
    sources = {
        source
        for file in files.documentation_pages()
        for _, source in _links_out(file.content_string, file.src_uri)
        if (root / source).exists()
    }
    for source in sorted(sources):
        content = _NOT_SEARCHED + _text(root / source, source)
        files.append(File.generated(config, _page(source), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links out of docs/ at the generated pages."""
    del files
    here = posixpath.dirname(page.file.src_uri)
    for link, source in set(_links_out(markdown, page.file.src_uri)):
        if (_root(config) / source).exists():
            there = posixpath.relpath(_page(source), here or ".")
            markdown = markdown.replace(f"]({link}", f"]({there}")
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks the flags in inline code, so that no line ends within one: tables are full of them."""
    del page, config, files
    return _INLINE_CODE.sub(
        lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html
    )


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _expanded(entry: Any, docs: Path) -> Any:
    """A part of the navigation without patterns."""
    if isinstance(entry, dict):
        return {title: _expanded(part, docs) for title, part in entry.items()}
    if not isinstance(entry, list):
        return entry

    named = {part for part in entry if isinstance(part, str)}
    parts: list[Any] = []
    for part in entry:
        if isinstance(part, str) and "*" in part:
            matching = sorted(path.relative_to(docs).as_posix() for path in docs.glob(part))
            parts += [path for path in matching if path not in named]
        else:
            parts.append(_expanded(part, docs))
    return parts


def _links_out(markdown: str, src_uri: str) -> Iterator[tuple[str, str]]:
    """The links that leave docs/, as they are written, and the paths from the root they mean."""
    # Paths of mkdocs are relative to docs/; the source tree is one directory up.
    here = posixpath.join("docs", posixpath.dirname(src_uri))
    is_code = False
    for line in markdown.splitlines():
        if _FENCE.match(line):
            is_code = not is_code
        if is_code:
            continue
        for match in _LINK.finditer(line):
            source = posixpath.normpath(posixpath.join(here, match["path"]))
            if not source.startswith(("docs/", "..")):
                yield match["path"], source


def _page(source: str) -> str:
    return f"source/{source}.md"


def _text(path: Path, source: str) -> str:
    """The page of a file or a directory."""
    if path.is_dir():
        return _listing(path, source)

    language = _LANGUAGES.get(path.suffix or path.name, path.suffix.removeprefix("."))
    # A Markdown file is shown as source, since its links are relative to another directory.
    fence = "`" * 6
    text = path.read_text(encoding="utf-8")
    return f"# `{source}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _listing(folder: Path, source: str) -> str:
    """The page of a directory: its files, then a section for each package inside it."""
    package = folder / "__init__.py"
    entries = sorted(entry.name for entry in os.scandir(folder) if entry.name[0] not in "._")
    lines = [f"# `{source}/`", "", _summary(package) if package.exists() else "", ""]
    inner = []
    for name in entries:
        if (folder / name / "__init__.py").exists():
            inner.append(name)
        else:
            summary = _summary(folder / name) if name.endswith(".py") else ""
            lines.append(f"- `{name}`: {summary}" if summary else f"- `{name}`")

    sections = (_listing(folder / name, f"{source}/{name}") for name in inner)
    return "\n".join(lines) + "\n\n" + "\n".join(f"#{section}" for section in sections)


def _summary(path: Path) -> str:
    """The first paragraph of a module's docstring, as one line of text."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
