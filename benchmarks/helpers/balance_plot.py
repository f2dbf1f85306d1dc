"""A plot of how the loads of experts become even, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 132, 16, 40
COLORS = ("#d1495b", "#00798c", "#6a4c93", "#edae49")
GOAL = 0.3  # coefficient of variation
WINDOW = 5  # iterations whose mean is a point of a line


class Scale(NamedTuple):
    """From iterations and coefficients of variation to places in the drawing."""

    last: int
    top: float

    def x(self, iteration: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * iteration / self.last

    def y(self, cv: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * cv / self.top


def smoothed(values: Sequence[float]) -> list[tuple[float, float]]:
    """(iteration, mean of a window) for each window, placed in its middle."""
    windows = [values[i : i + WINDOW] for i in range(0, len(values), WINDOW)]
    return [
        (number * WINDOW + (len(window) + 1) / 2, sum(window) / len(window))
        for number, window in enumerate(windows)
    ]


def draw(runs: dict[str, dict[str, list[float]]]) -> str:
    """The plot as SVG. ValueError for more runs than there are colors."""
    if len(runs) > len(COLORS):
        raise ValueError(f"Expected at most {len(COLORS)} runs, got {len(runs)}.")
    lines = {label: smoothed(run["expert_load_cv"]) for label, run in runs.items()}
    scale = Scale(
        last=max(len(run["loss"]) for run in runs.values()),
        top=1.1 * max(cv for line in lines.values() for _, cv in line),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(scale),
    ]

    ends = sorted((scale.y(line[-1][1]), label) for label, line in lines.items())
    heights: dict[str, float] = {}
    for y, label in ends:  # labels that would overlap move down
        heights[label] = max([y, *(height + 15 for height in heights.values())])
    for color, (label, line) in zip(COLORS[: len(lines)], lines.items(), strict=True):
        points = " ".join(f"{scale.x(n):.1f},{scale.y(cv):.1f}" for n, cv in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{heights[label] + 4:.1f}" fill="{color}">'
            f"{escape(label)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _axes(scale: Scale) -> list[str]:
    right = WIDTH - RIGHT
    parts = []
    ticks = [0.5 * n for n in range(int(scale.top / 0.5) + 1)]
    for cv in ticks:
        y = scale.y(cv)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{cv:g}</text>')
    for iteration in range(0, scale.last + 1, 50):
        x = scale.x(iteration)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{iteration}</text>'
        )

    y = scale.y(GOAL)
    parts.append(
        f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" '
        'stroke-dasharray="4 3"/>'
    )
    parts.append(f'<text x="{LEFT + 4}" y="{y - 4:.1f}" fill="#666">{GOAL:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">iteration</text>'
    )
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        "coefficient of variation</text>"
    )
    return parts
