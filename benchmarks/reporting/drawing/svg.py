"""From a picture's contents to the text of an SVG file, the same for the same contents."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.figure import Figure

from benchmarks.reporting.contents import Contents, Memory, Peers, Ratios, Scaling
from benchmarks.reporting.drawing import memory, peers, ratios, scaling
from benchmarks.reporting.drawing.style import LAYOUT_FONT, RC, THEMES, Theme

# What readers' machines have, best first, in the place of the typeface of the layout.
FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def svg_of(contents: Contents, theme_name: str) -> str:
    """The picture for pages of one brightness: "light" or "dark"."""
    with matplotlib.rc_context(RC):
        return _text_of(_figure_of(contents, THEMES[theme_name]))


def _figure_of(contents: Contents, theme: Theme) -> Figure:
    if isinstance(contents, Ratios):
        return ratios.draw(contents, theme)
    if isinstance(contents, Peers):
        return peers.draw(contents, theme)
    if isinstance(contents, Scaling):
        return scaling.draw(contents, theme)
    assert isinstance(contents, Memory), "the last kind of contents"
    return memory.draw(contents, theme)


def _text_of(figure: Figure) -> str:
    buffer = io.StringIO()
    # Without a date and matplotlib's name, whose version would change with every release.
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=metadata)
    # What comes before the element is XML's prologue, which no comment could precede.
    _, start, drawing = buffer.getvalue().partition("<svg")
    return start + drawing.replace(f"'{LAYOUT_FONT}'", FONTS)
