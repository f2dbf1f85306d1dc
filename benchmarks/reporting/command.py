"""`python -m benchmarks report`: pictures and blocks of Markdown, from the stored results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.reporting.blocks import MarkerError, blocks_of, content_of, with_contents
from benchmarks.reporting.contents import PICTURES, pictures
from benchmarks.reporting.drawing import svg_of
from benchmarks.reporting.peers import peers_block, read_comparison
from benchmarks.reporting.stored import ResultFileError, StoredResult, stored_results
from benchmarks.reporting.tables import benchmark_block, file_names, picture_block, results_block
from benchmarks.runner.registry import RESULTS, ROOT, registered
from megatron.core.files import published

COMMAND = "python -m benchmarks report"

# Blocks without which a page is incomplete.
REQUIRED = {"README.md": ("peers",), "docs/benchmarks.md": ("results",)}
_PICTURE = "picture-"
_GENERATED = "<!-- Written by python -m benchmarks report -->"  # the first line of a picture


@dataclass(frozen=True)
class Report:
    """The pages and pictures of a project, as its results require them.

    Attributes:
        root: The project's directory, with README.md, docs/*.md and docs/img/*.svg.
        benchmarks: All benchmarks by name.
        results: The stored results by benchmark.
    """

    root: Path
    benchmarks: Mapping[str, Benchmark]
    results: Mapping[str, StoredResult]

    @property
    def pages(self) -> list[Path]:
        """The pages that may have blocks."""
        return [self.root / "README.md", *sorted((self.root / "docs").glob("*.md"))]

    @property
    def folder(self) -> Path:
        """The directory of the pictures."""
        return self.root / "docs" / "img"

    def pictures(self) -> dict[Path, str]:
        """The SVG of every picture by its path."""
        return {
            self.folder / file: f"{_GENERATED}\n{svg_of(contents, theme)}"
            for name, contents in pictures(self.results).items()
            for theme, file in file_names(name).items()
        }

    def unwanted(self) -> list[Path]:
        """Pictures drawn by this command whose results no longer exist."""
        others = set(self.folder.glob("*.svg")) - self.pictures().keys()
        return sorted(path for path in others if path.read_text("utf-8").startswith(_GENERATED))

    def block(self, name: str, page: Path) -> str:
        """The content of a block. MarkerError for an unknown name."""
        root = "../" * (len(page.relative_to(self.root).parts) - 1)
        if name == "peers":
            return peers_block(read_comparison(), self.results, root)
        if name == "results":
            return results_block(self.benchmarks.values(), self.results, root)
        if name.removeprefix(_PICTURE) in PICTURES and name.startswith(_PICTURE):
            picture = name.removeprefix(_PICTURE)
            return picture_block(picture, is_drawn=picture in pictures(self.results), root=root)
        if name in self.benchmarks:
            return benchmark_block(self.results.get(name), root)
        raise MarkerError(
            f"{page.relative_to(self.root)}: Expected the name of a benchmark, peers, results or "
            f"{_PICTURE}NAME, of {', '.join(PICTURES)}, in a marker, got {name}."
        )

    def renderer(self, page: Path) -> Callable[[str], str]:
        return lambda name: self.block(name, page)


def main(argv: Sequence[str]) -> int:
    """Returns 1 if `--check` finds stale content, 2 for unreadable results or pages."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not write; name each block and picture that would change, and return 1 if any",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="the directory of results; default: benchmarks/results",
    )
    arguments = parser.parse_args(argv)
    if not arguments.results.is_dir():
        print(f"Expected a directory of results, got {arguments.results}.", file=sys.stderr)
        return 2

    try:
        results = stored_results(arguments.results)
        report = Report(ROOT, registered(), results)
        return check(report) if arguments.check else write(report)
    except (ResultFileError, MarkerError) as error:
        print(error, file=sys.stderr)
        return 2


def check(report: Report) -> int:
    """Prints the blocks and pictures that are stale."""
    stale = [*stale_blocks(report), *stale_pictures(report)]
    for line in stale:
        print(line)
    if stale:
        print(f"{len(stale)} would change. Run `{COMMAND}` and commit the changes.")
    else:
        print("All blocks and pictures agree with the stored results.")
    return int(bool(stale))


def stale_blocks(report: Report) -> Iterator[str]:
    """Yields a line for each stale block of Markdown."""
    for page in report.pages:
        name = str(page.relative_to(report.root))
        text = page.read_text(encoding="utf-8")
        blocks = blocks_of(name, text)
        for required in set(REQUIRED.get(name, ())) - {block.name for block in blocks}:
            yield f"{name}: the markers of the block {required} are missing"
        for block in blocks:
            if content_of(text, block) != report.block(block.name, page):
                yield f"{name}:{block.first}: the block {block.name} is stale"


def stale_pictures(report: Report) -> Iterator[str]:
    """Yields a line for each picture that is stale or no longer wanted."""
    for path, svg in report.pictures().items():
        if not path.is_file():
            yield f"docs/img/{path.name}: it does not exist"
        elif path.read_text(encoding="utf-8") != svg:
            yield f"docs/img/{path.name}: the stored results would be drawn differently"
    for path in report.unwanted():
        yield f"docs/img/{path.name}: it has no results"


def write(report: Report) -> int:
    """Writes changed blocks and pictures. All are rendered and drawn before any is written."""
    contents = {page: _page_text(report, page) for page in report.pages}
    contents.update(report.pictures())
    changed = [
        path
        for path, text in contents.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]

    report.folder.mkdir(parents=True, exist_ok=True)
    for path in changed:
        with published(path) as stream:
            stream.write(contents[path].encode())
        print(f"wrote {path.relative_to(report.root)}")
    for path in report.unwanted():
        path.unlink()
        print(f"removed {path.relative_to(report.root)}")
    if not changed:
        print("Nothing has changed.")
    return 0


def _page_text(report: Report, page: Path) -> str:
    name = str(page.relative_to(report.root))
    return with_contents(name, page.read_text(encoding="utf-8"), report.renderer(page))
