"""The generated blocks of a page: found, compared, replaced, and nothing else touched."""

from __future__ import annotations

import pytest

from benchmarks.reporting.blocks import MarkerError, blocks_of, content_of, with_contents

PAGE = """\
# Title

<!-- benchmarks:first begin -->
old
<!-- benchmarks:first end -->
Write `<!-- benchmarks:first begin -->` into a page.

  <!-- benchmarks:second-one begin -->
  <!-- benchmarks:second-one end -->
the end"""


def test_blocks_are_replaced_and_the_rest_stays() -> None:
    text = with_contents("page.md", PAGE, lambda name: f"new {name}\nof two lines")
    assert (
        text
        == """\
# Title

<!-- benchmarks:first begin -->

new first
of two lines

<!-- benchmarks:first end -->
Write `<!-- benchmarks:first begin -->` into a page.

  <!-- benchmarks:second-one begin -->

new second-one
of two lines

  <!-- benchmarks:second-one end -->
the end"""
    )
    contents = [content_of(text, block) for block in blocks_of("page.md", text)]
    assert contents == ["new first\nof two lines", "new second-one\nof two lines"]


def test_writing_again_changes_nothing() -> None:
    once = with_contents("page.md", PAGE + "\n", str.upper)
    assert with_contents("page.md", once, str.upper) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- benchmarks:a begin -->", "page.md:1: the block a has no end"),
        ("\n<!-- benchmarks:a end -->", "page.md:2: the end of the block a, which has no start"),
        (
            "<!-- benchmarks:a begin -->\n<!-- benchmarks:b end -->",
            "page.md:2: the end of the block b, which has no start",
        ),
        (
            "<!-- benchmarks:a begin -->\n<!-- benchmarks:b begin -->",
            "page.md:2: the block a must end before the block b begins",
        ),
    ],
)
def test_unpaired_markers_are_rejected(text: str, message: str) -> None:
    with pytest.raises(MarkerError, match=message):
        blocks_of("page.md", text)
