"""A run's page: one HTML file that needs nothing else, not even a network.

Its policy allows the two pieces of style and script that are in it, by their digests, and nothing
else: text from the run's files that slipped through as markup could load and execute nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.log import printable
from megatron_hybrid.report.assets import SCRIPT, STYLE
from megatron_hybrid.report.axis import figures
from megatron_hybrid.report.charts import (
    RECENT,
    Section,
    iterations_of,
    memory_text,
    now_of,
    sections_of,
)
from megatron_hybrid.report.collect import Report
from megatron_hybrid.report.svg import (
    BOTTOM,
    NARROW,
    RESTART,
    SAVE,
    SKIP,
    TOP,
    TROUBLE,
    WIDE,
    Drawing,
    Mark,
    drawing_of,
    reading,
    readings,
    svg_of,
    symbol,
)

_MOST_CHARACTERS = 1000  # of a text that a file holds
_MOST_EVENTS = 200
_MOST_SETTINGS = 500
_NONE = "\u2013"  # in the place of a value that is not known
_GOOD, _BAD, _WAIT = "good", "bad", "wait"
_TONES = {
    "running": _GOOD,
    "saving": _GOOD,
    "finished": _GOOD,
    "stopped": _WAIT,
    "preempted": _WAIT,
    "unknown": _WAIT,
}
_MARKS = {
    SAVE: "save",
    RESTART: "resumed",
    SKIP: "skipped or nan iteration",
    TROUBLE: "fault, signal, failure",
}
_HALF = ((NARROW, ""),)


def page_of(
    report: Report,
    *,
    refresh_seconds: float,
    date: Callable[[float], str],
    duration: Callable[[float], str],
) -> str:
    """The page.

    Args:
        refresh_seconds: after which a browser loads the page again while the run is live.
        date, duration: write a moment, and seconds.
    """
    is_live, title = bool(report.status["is_live"]), f"{report.name}: {report.status['state']}"
    sections = sections_of(report.metrics, report.metrics_note)
    data: list[str] = []
    body = [
        *_header(report, date),
        *_tiles(report, duration),
        _status(report.lines),
        *_charts(report, sections, data),
        *_events(report, date),
        *_starts(report, date),
        *_checkpoints(report, date),
        *_settings(report),
    ]

    style_digest, script_digest = _digest(STYLE), _digest(SCRIPT)
    policy = (
        f"default-src 'none'; style-src '{style_digest}'; script-src '{script_digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    refresh = f'<meta http-equiv="refresh" content="{max(1, round(refresh_seconds))}">'
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        *([refresh] if is_live else []),
        f"<title>{_escape(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    parts = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body]
    return "\n".join([*parts, *data, f"<script>{SCRIPT}</script>", "</body>", "</html>", ""])


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _escape(value: object) -> str:
    """Any text as harmless text of the page, of bounded length."""
    return html.escape(printable(str(value), _MOST_CHARACTERS))


def _header(report: Report, date: Callable[[float], str]) -> list[str]:
    state = str(report.status["state"])
    live = ", refreshes itself" if report.status["is_live"] else ""
    return [
        "<header>",
        f"<h1>{_escape(report.name)}</h1>",
        f'<span class="badge {_TONES.get(state, _BAD)}">{_escape(state)}</span>',
        f'<span class="moment">as of {_escape(date(report.now))}{live}</span>',
        "</header>",
    ]


def _tiles(report: Report, duration: Callable[[float], str]) -> list[str]:
    progress, now = report.status["progress"], now_of(report.metrics)
    tiles = [_progress_tile(progress, duration)]
    speed = "" if now.tokens_per_second is None else figures(now.tokens_per_second)
    recent = f"median of the last {RECENT}"
    texts = {
        "Loss": ("" if now.loss is None else figures(now.loss), "last"),
        "Validation loss": (
            "" if now.validation_loss is None else figures(now.validation_loss),
            "last",
        ),
        "Tokens per second": (speed, recent),
        "Time per iteration": ("" if now.seconds is None else _time_text(now.seconds), recent),
        "Memory of rank 0": (memory_text(now), "at most so far"),
    }
    # What nothing is known of, a validation that the run does not make for example, has no tile.
    tiles += [
        _tile(name, text, f"<small>{which}</small>")
        for name, (text, which) in texts.items()
        if text
    ]
    return ['<div class="tiles">', *tiles, "</div>"]


def _progress_tile(progress: Mapping[str, Any], duration: Callable[[float], str]) -> str:
    iteration, total = progress["iteration"], progress["train_iters"]
    if iteration is None:
        return _tile("Iteration", "none yet")
    if not total:
        return _tile("Iteration", f"{iteration:,}")
    left = progress["seconds_left"]
    bar = f'<progress max="{total}" value="{min(iteration, total)}"></progress>'
    more = f"{bar}<small>{100 * iteration / total:.0f} % of {total:,}</small>"
    more += "" if left is None else f"<small>{_escape(duration(left))} left</small>"
    return _tile("Iteration", f"{iteration:,}", more)


def _tile(name: str, text: str, more: str = "") -> str:
    return f'<div class="card tile"><span>{name}</span><b>{_escape(text)}</b>{more}</div>'


def _time_text(seconds: float) -> str:
    return f"{figures(1000 * seconds)} ms" if seconds < 1 else f"{figures(seconds)} s"


def _status(lines: Iterable[str]) -> str:
    pairs = (line.partition(": ") for line in lines)
    rows = (f"<dt>{_escape(name)}</dt><dd>{_escape(text)}</dd>" for name, _, text in pairs)
    return f'<dl class="card status">{"".join(rows)}</dl>'


def _charts(report: Report, sections: Sequence[Section], data: list[str]) -> list[str]:
    """The sections of charts. Their numbers, for the script, are added to `data`."""
    iterations, parts = iterations_of(report.metrics), []
    for number, section in enumerate(sections):
        parts.append(f"<h2>{section.title}</h2>")
        if number == 0 and section.charts:
            parts += _legend(report.marks)
            parts += [_note(report.metrics_note)] if report.metrics_note else []
        if not section.charts:
            parts.append(_empty(section.absence))
        parts.append('<div class="charts">')
        for place, chart in enumerate(section.charts):
            # The first of an odd number takes a row of its own, where there is room for two.
            is_alone = place == 0 and len(section.charts) % 2 == 1
            for width, classes in ((WIDE, " wide"), (NARROW, " narrow")) if is_alone else _HALF:
                drawing = drawing_of(chart, iterations, width)
                parts.append(_figure(drawing, report.marks, f"chart-{len(data)}", classes))
                data.append(_data(f"chart-{len(data)}", drawing))
        parts.append("</div>")
    return parts


def _figure(drawing: Drawing, marks: Sequence[Mark], name: str, classes: str) -> str:
    """A chart with its title and key, which says the last values until the script says others."""
    chart = drawing.chart
    last = max(int(curve.last[-1]) for curve in chart.curves)
    notes = [chart.unit.strip(), "logarithmic" if drawing.y.is_logarithmic else ""]
    note = ", ".join(note for note in notes if note)
    keys = "".join(
        f'<span class="key"><i class="swatch c{line.color}"></i>{line.name} '
        f"<b>{reading(chart, line.curve, -1) if len(line.curve) else _NONE}</b></span>"
        for line in chart.lines
    )
    return (
        f'<figure class="card{classes}" data-chart="{name}">'
        f"<figcaption><h3>{chart.title} <small>{note}</small></h3>"
        f'<span class="at">iteration {last:,}</span>'
        f'<div class="keys">{keys}</div></figcaption>'
        f"{svg_of(drawing, marks)}</figure>"
    )


def _data(name: str, drawing: Drawing) -> str:
    """A chart's numbers for the script. A browser does not execute this type."""
    content = {
        "width": drawing.width,
        "plot": [drawing.x.start, drawing.x.end],
        "domain": [drawing.x.low, drawing.x.high],
        "lines": readings(drawing),
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _legend(marks: Sequence[Mark]) -> list[str]:
    """What the marks mean that are there."""
    kinds = {mark.kind for mark in marks}
    items = []
    for kind, words in _MARKS.items():
        if kind in kinds:
            top = BOTTOM - 4 if kind == SAVE else TOP - 13
            box = f'<svg viewBox="-7 {top} 14 14" aria-hidden="true">'
            shape = f'<g class="mark {kind}">{symbol(kind, 0)}</g></svg>'
            items.append(f"<span>{box}{shape}{words}</span>")
    return [f'<p class="legend">{"".join(items)}</p>'] if items else []


def _events(report: Report, date: Callable[[float], str]) -> list[str]:
    parts = ["<h2>Events</h2>"]
    if not report.events:
        return [*parts, _empty("No events: the run has written no event log (--events-dir).")]
    shown = report.events[: -_MOST_EVENTS - 1 : -1]
    if len(shown) < len(report.events):
        parts.append(_note(f"The last {len(shown)} of {len(report.events)}, the latest first."))
    rows = [
        [
            _cell(_date(row.time, date), "nowrap"),
            _cell(row.what, f"nowrap what {row.mark}"),
            _cell(_count(row.iteration), "number"),
            _cell(_count(row.rank), "number"),
            _cell(row.detail, "text"),
        ]
        for row in shown
    ]
    heads = [("Time", ""), ("Event", ""), ("Iteration", "number"), ("Rank", "number"), ("", "")]
    return [*parts, _table(heads, rows)]


def _starts(report: Report, date: Callable[[float], str]) -> list[str]:
    parts = ["<h2>Starts</h2>"]
    if not report.starts:
        return [*parts, _empty("No starts: the event log has none.")]
    starts = report.starts[: -_MOST_EVENTS - 1 : -1]
    rows = [
        [
            _cell(_date(row.time, date), "nowrap"),
            _cell(row.started_by, "nowrap"),
            _cell(_count(row.world_size), "number"),
            _cell(_count(row.iteration), "number"),
            _cell(_count(row.last_iteration), "number"),
            _cell(row.end, "text"),
        ]
        for row in starts
    ]
    heads = [
        ("Started", ""),
        ("By", ""),
        ("Ranks", "number"),
        ("From iteration", "number"),
        ("Last known", "number"),
        ("Ended", ""),
    ]
    return [*parts, _table(heads, rows)]


def _checkpoints(report: Report, date: Callable[[float], str]) -> list[str]:
    parts = ["<h2>Checkpoints</h2>"]
    if not report.checkpoints:
        return [*parts, _empty("No checkpoints in the run's folder: --save and --save-interval.")]
    if len(report.checkpoints) < report.num_checkpoints:
        parts.append(_note(f"The last {len(report.checkpoints)} of {report.num_checkpoints}."))
    rows = [
        [
            _cell(_count(row.iteration), "number"),
            _cell(_date(row.time, date), "nowrap"),
            _cell(_NONE if row.seconds is None else f"{row.seconds:.2f} s", "number"),
            _cell(row.name, "text"),
        ]
        for row in reversed(report.checkpoints)
    ]
    heads = [("Iteration", "number"), ("Published", ""), ("Save took", "number"), ("Folder", "")]
    return [*parts, _table(heads, rows)]


def _settings(report: Report) -> list[str]:
    parts = ["<h2>Settings</h2>"]
    if not report.settings:
        parts.append(_empty("No settings: the event log does not have them."))
    else:
        pairs = sorted(report.settings.items(), key=lambda pair: str(pair[0]))[:_MOST_SETTINGS]
        rows = (
            f"<div><dt>{_escape(str(name).replace('_', '-'))}</dt>"
            f"<dd>{_escape(_value(value))}</dd></div>"
            for name, value in pairs
        )
        parts.append(_note("Those that are not at their defaults, at the last start."))
        parts.append(f'<dl class="card settings">{"".join(rows)}</dl>')
    if report.command:
        command = _escape(shlex.join(report.command))
        parts.append(f'<p class="card command"><code>{command}</code></p>')
    return parts


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _date(moment: float | None, date: Callable[[float], str]) -> str:
    return _NONE if moment is None else date(moment)


def _count(number: int | None) -> str:
    return _NONE if number is None else f"{number:,}"


def _cell(text: str, classes: str) -> str:
    return f'<td class="{classes.strip()}">{_escape(text)}</td>'


def _table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="{classes}">{text}</th>' for text, classes in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        '<div class="card scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _note(text: str) -> str:
    return f'<p class="note">{_escape(text)}</p>'


def _empty(text: str) -> str:
    return f'<p class="card empty">{_escape(text)}</p>'
