"""How the loads of experts become even: from the records of runs to a file of results and a plot.

    torchrun --nproc-per-node 2 pretrain_gpt.py --config examples/moe_cpu.yaml \
        --metrics-jsonl none.jsonl --moe-aux-loss-coeff 0 --save runs/none
    ... others
    python benchmarks/expert_balance.py "no balancing=none.jsonl" "auxiliary loss=loss.jsonl" \
        "expert bias=bias.jsonl" --results results.json --svg plot.svg

Without runs the plot is drawn again from the results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 132, 16, 40
COLORS = ("#d1495b", "#00798c", "#6a4c93", "#edae49")
GOAL = 0.3
WINDOW = 5  # iterations whose mean is a point of a line
NAMES = ("expert_load_cv", "expert_load_cv_max", "busiest_expert", "idle_experts", "loss")


class Scale(NamedTuple):
    """From iterations and coefficients of variation to places in the drawing."""

    last: int
    top: float

    def x(self, iteration: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * iteration / self.last

    def y(self, cv: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * cv / self.top


def read_run(path: Path) -> dict[str, list[float]]:
    """Of each iteration: the mean of the layers' coefficients of variation, the largest one, the
    largest load in units of its layer's mean, the experts without tokens, and the loss.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {r["iteration"]: r for r in records if r["kind"] == "train"}
    return {name: [round(steps[n][name], 4) for n in sorted(steps)] for name in NAMES}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="LABEL=METRICS_JSONL")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--svg", type=Path, required=True)
    arguments = parser.parse_args()

    if arguments.runs:
        pairs = [text.rpartition("=") for text in arguments.runs]
        found = {label: read_run(Path(path)) for label, _, path in pairs}
        arguments.results.write_text(json.dumps(found, indent=None) + "\n")
    runs = json.loads(arguments.results.read_text())
    arguments.svg.write_text(draw(runs))
    for label, run in runs.items():
        mean = {name: sum(run[name][-25:]) / len(run[name][-25:]) for name in NAMES}
        print(
            f"{label}: cv {mean['expert_load_cv']:.3f}, worst layer "
            f"{max(run['expert_load_cv_max'][-25:]):.3f}, busiest expert "
            f"{mean['busiest_expert']:.2f}, idle {mean['idle_experts']:.1f}, loss "
            f"{mean['loss']:.3f} (last 25 iterations)"
        )


if __name__ == "__main__":
    main()
