"""How all pictures look: sizes, type, and colours that keep their meaning from one to the next.

The colours are Okabe and Ito's, which people with any of the common colour vision deficiencies tell
apart; nothing is said by colour alone. Pictures have no background: they lie on the page's own, for
which there are two themes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.contents import is_ours

WIDTH = 8.0  # inches, 96 pixels each where a browser shows them at their own size
MARGIN = 0.12

TITLE, TEXT, SMALL = 10.5, 8.5, 7.5  # points


class Theme(NamedTuple):
    """Colours for pages of one brightness."""

    text: str
    muted: str
    grid: str
    page: str  # what such pages usually have behind a picture: for gaps between filled areas
    ours: str
    peers: Sequence[str]
    missed: str


THEMES = {
    "light": Theme(
        text="#1f2328",
        muted="#59636e",
        grid="#d1d9e0",
        page="#ffffff",
        ours="#0072b2",
        peers=("#d55e00", "#009e73", "#a3568a", "#8c6d00", "#4d5763", "#7a5195"),
        missed="#c4320a",
    ),
    "dark": Theme(
        text="#e6edf3",
        muted="#9aa4af",
        grid="#3d444d",
        page="#0d1117",
        ours="#56b4e9",
        peers=("#f0883e", "#2fc49a", "#e29ac6", "#e3c341", "#aab4be", "#b794f4"),
        missed="#ff7b5c",
    ),
}

# Wider than the usual sans-serif typefaces, and matplotlib brings it along: in a reader's own, text
# takes less room than was kept for it, never more.
LAYOUT_FONT = "DejaVu Sans"

RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "megatron-hybrid",
    "font.family": LAYOUT_FONT,
    "font.size": TEXT,
    "text.parse_math": False,
    "axes.unicode_minus": True,
}


def side_colors(sides: Sequence[str], theme: Theme) -> dict[str, str]:
    """A colour a side: ours always the same, and a peer that appears in several pictures too."""
    named = {"FSDP2": 0, "PyTorch": 0, "DCP": 0, "DeepSpeed": 1, "Megatron": 2, "transformers": 3}
    colors: dict[str, str] = {}
    for side in sides:
        place = next((index for name, index in named.items() if name in side), None)
        if is_ours(side) and theme.ours not in colors.values():
            colors[side] = theme.ours
        elif place is not None and theme.peers[place] not in colors.values():
            colors[side] = theme.peers[place]

    free = [color for color in reversed(theme.peers) if color not in colors.values()]
    for index, side in enumerate(side for side in sides if side not in colors):
        colors[side] = free[index % len(free)] if free else theme.muted
    return {side: colors[side] for side in sides}


def figure_of(height: float) -> Figure:
    """An empty picture, `height` inches high."""
    figure = Figure(figsize=(WIDTH, height))
    figure.patch.set_visible(False)
    return figure


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes without a frame, placed in inches from the picture's upper left corner."""
    total = figure.get_figheight()
    axes = figure.add_axes(
        (left / WIDTH, 1 - (top + height) / total, width / WIDTH, height / total)
    )
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=3)
    return axes


def write(
    figure: Figure,
    x: float,
    y: float,
    text: str,
    color: str,
    *,
    size: float = TEXT,
    align: str = "left",
    is_bold: bool = False,
) -> None:
    """Text on its baseline, placed in inches from the picture's upper left corner."""
    figure.text(
        x / WIDTH,
        1 - y / figure.get_figheight(),
        text,
        color=color,
        fontsize=size,
        fontweight="bold" if is_bold else "normal",
        horizontalalignment=align,
        verticalalignment="baseline",
    )


def write_title(figure: Figure, title: str, theme: Theme) -> None:
    write(figure, MARGIN, 0.26, title, theme.text, size=TITLE, is_bold=True)


def caption_height(lines: Sequence[str]) -> float:
    """How many inches a caption takes."""
    return 0.15 * len(lines) + 0.2


def write_caption(figure: Figure, lines: Sequence[str], theme: Theme) -> None:
    """Small lines at the picture's foot: how to read it, the machine, the date."""
    foot = figure.get_figheight() - 0.08
    for index, line in enumerate(reversed(lines)):
        write(figure, MARGIN, foot - 0.15 * index, line, theme.muted, size=SMALL)
