"""A plot of how the loads of experts become even, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid.charts import THEMES, Canvas, fixed_axis, px

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 588, 16, 280
GOAL = 0.3  # coefficient of variation
WINDOW = 5  # iterations whose mean is a point of a line


def smoothed(values: Sequence[float]) -> list[tuple[float, float]]:
    """(iteration, mean of a window) for each window, placed in its middle."""
    windows = [values[i : i + WINDOW] for i in range(0, len(values), WINDOW)]
    return [
        (number * WINDOW + (len(window) + 1) / 2, sum(window) / len(window))
        for number, window in enumerate(windows)
    ]


def draw(runs: dict[str, dict[str, list[float]]]) -> str:
    """The plot as SVG."""
    lines = {label: smoothed(run["expert_load_cv"]) for label, run in runs.items()}
    highest = max(cv for line in lines.values() for _, cv in line)
    x = fixed_axis(0, max(len(run["loss"]) for run in runs.values()), LEFT, RIGHT, num_steps=3)
    y = fixed_axis(0, 1.1 * highest, BOTTOM, TOP)

    theme, canvas = THEMES["light"], Canvas(WIDTH, HEIGHT)
    canvas.rect(0, 0, WIDTH, HEIGHT, theme.background)
    for tick, label in zip(y.ticks, y.labels(), strict=True):
        place = y.place(tick)
        canvas.line((LEFT, place), (RIGHT, place), theme.grid)
        canvas.text(LEFT - 8, place + 4, label, theme.muted, anchor="end")
    for tick, label in zip(x.ticks, x.labels(), strict=True):
        canvas.text(x.place(tick), BOTTOM + 16, label, theme.muted, anchor="middle")
    canvas.text((LEFT + RIGHT) / 2, HEIGHT - 6, "iteration", theme.muted, anchor="middle")
    canvas.text(LEFT, TOP - 4, "coefficient of variation", theme.muted)
    canvas.line((LEFT, y.place(GOAL)), (RIGHT, y.place(GOAL)), theme.muted)
    canvas.text(RIGHT + 8, y.place(GOAL) + 4, f"bar: {GOAL:g}", theme.muted)

    bottom = TOP
    for color, label in zip((theme.ours, *theme.peers), lines, strict=False):
        points = " ".join(f"{px(x.place(n))},{px(y.place(cv))}" for n, cv in lines[label])
        canvas.add("polyline", points=points, fill="none", stroke=color, stroke_width=2)
        canvas.text(RIGHT + 8, bottom, label, color, is_bold=True)
        bottom += 16
    return canvas.svg()
