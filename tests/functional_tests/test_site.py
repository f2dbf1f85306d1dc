"""The site as `make docs` builds it, and what docs/hooks/ does for a small one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.helpers.recovery_scenes import ROOT, TIMEOUT

pytestmark = pytest.mark.docs

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome")
     if (path := shutil.which(name))), None
)  # fmt: skip
# Leaves nothing of a page but the code blocks that are wider than their place.
CUT_OFF = """<script>addEventListener("load", () => {
  const all = [...document.querySelectorAll("pre > code")];
  const cut = all.filter(code => code.scrollWidth > code.clientWidth + 1);
  document.body.textContent = `${all.length} blocks:` + cut.map(code => code.textContent).join();
})</script>"""

# The real configuration's hook and checks, with a theme that needs nothing.
SMALL = f"""
site_name: Small
theme: mkdocs
use_directory_urls: false
strict: true
hooks: [{ROOT}/docs/hooks/site_pages.py]
not_in_nav: source/
nav:
  - index.md
  - Notes:
      - notes/README.md
      - notes/*.md
markdown_extensions: [pymdownx.superfences]
validation: {{links: {{not_found: warn, anchors: warn, unrecognized_links: warn}}}}
"""


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """mkdocs, in a directory that has a mkdocs.yml."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def make_small(folder: Path, index: str) -> Path:
    """A project with a few pages, and a script that they may link to."""
    notes = folder / "docs" / "notes"
    notes.mkdir(parents=True)
    (folder / "mkdocs.yml").write_text(SMALL)
    (folder / "docs" / "index.md").write_text(index)
    for name, title in (("README", "All"), ("0002-b", "0002: B"), ("0001-a", "0001: A")):
        (notes / f"{name}.md").write_text(f"# {title}\n\n[run](../../tools/run.py)\n")
    (folder / "tools").mkdir()
    (folder / "tools" / "run.py").write_text('"""Runs\nthe tool.\n\nMore."""\nanswer = 42\n')
    (folder / "tools" / "inner").mkdir()
    (folder / "tools" / "inner" / "__init__.py").write_text('"""Helpers."""\n')
    return folder


def test_the_site_builds_without_a_warning_or_external_resources(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.html")}
    for page in ("index.html", "tutorial.html", "api/optimizer.html", "decisions/index.html"):
        assert page in pages
    assert "HybridDeviceOptimizer" in pages["api/optimizer.html"].read_text()
    for page, path in pages.items():
        assert not re.search(r'src="(https?:)?//', path.read_text()), page


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome")
def test_code_is_not_cut_off_in_a_window_of_1300_pixels(tmp_path: Path) -> None:
    assert build(ROOT, tmp_path).returncode == 0
    for name in ("training", "recovery", "architecture", "fsdp"):
        page = tmp_path / f"{name}.html"
        page.write_text(page.read_text().replace("</head>", f"{CUT_OFF}</head>"))
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--window-size=1300,1000", "--dump-dom", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT).stdout
        assert re.search(r"<body[^>]*>[1-9]\d* blocks:\s*</body>", shown), name


def test_links_to_the_source_tree_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    index = "# Home\n\n[the script](../tools/run.py), [all](../tools)\n\n`[x](../tools/none.py)`\n"
    done = build(make_small(tmp_path / "small", index), tmp_path / "site")
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="source/tools/run.py.html"' in home
    assert 'href="source/tools.html"' in home
    note = (tmp_path / "site" / "notes" / "0001-a.html").read_text()
    assert 'href="../source/tools/run.py.html"' in note
    assert "answer" in (tmp_path / "site" / "source" / "tools" / "run.py.html").read_text()
    listing = (tmp_path / "site" / "source" / "tools.html").read_text()
    assert "<code>run.py</code>: Runs the tool.</li>" in listing
    assert re.search(r"<h2[^>]*><code>tools/inner/</code></h2>\s*<p>Helpers.</p>", listing)


def test_a_pattern_in_the_navigation_becomes_its_pages_by_name(tmp_path: Path) -> None:
    done = build(make_small(tmp_path / "small", "# Home\n"), tmp_path / "site")
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    titles = re.findall(r'href="notes/[^"]*" class="dropdown-item">([^<]*)<', home)
    assert titles == ["All", "0001: A", "0002: B"]


@pytest.mark.parametrize("link", ["../tools/missing.py", "missing.md", "#missing"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str) -> None:
    done = build(make_small(tmp_path / "small", f"# Home\n\n[a]({link})\n"), tmp_path / "site")
    assert done.returncode != 0
    assert link in done.stderr
