"""The style sheet and the script of a run's page. Both are in the page itself, which loads
nothing.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d1f21; --muted: #686d73; --hair: #e3e3df;
  --c0: #1f6fb5; --c1: #cf5a00; --c2: #00845f; --good: #0a7a4b; --bad: #b3261e; --wait: #6a5acd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101214; --card: #181b1e; --ink: #e7e7e4; --muted: #979da4; --hair: #2b3035;
    --c0: #6bb0f5; --c1: #f29a4a; --c2: #4cc99a; --good: #58c995; --bad: #ff8a80; --wait: #a99cf5;
  }
}
* { box-sizing: border-box; }
html { background: var(--page); }
body {
  margin: 0 auto; max-width: 1320px; padding: 32px 28px 64px; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; }
h1 { font-size: 26px; font-weight: 650; letter-spacing: -0.015em; margin: 0; line-height: 1.2;
  overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 650; margin: 40px 0 12px; letter-spacing: -0.005em; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
.badge { font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 99px;
  border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .wait { color: var(--wait); }
.moment { color: var(--muted); font-size: 13px; margin-left: auto; }
.card { background: var(--card); border: 1px solid var(--hair); border-radius: 10px; }
.tiles { display: grid; gap: 12px; margin: 20px 0 12px;
  grid-template-columns: repeat(auto-fit, minmax(168px, 1fr)); }
.tile { padding: 12px 16px 13px; }
.tile span { display: block; color: var(--muted); font-size: 13px; }
.tile b { display: block; font-size: 23px; font-weight: 600; letter-spacing: -0.01em;
  line-height: 1.3; }
.tile small { display: block; color: var(--muted); font-size: 13px; white-space: nowrap; }
progress { appearance: none; display: block; width: 100%; height: 5px; border: 0; margin: 5px 0 3px;
  border-radius: 3px; overflow: hidden; background: var(--hair); }
progress::-webkit-progress-bar { background: var(--hair); }
progress::-webkit-progress-value { background: var(--c0); }
progress::-moz-progress-bar { background: var(--c0); }
dl.status { display: grid; grid-template-columns: max-content 1fr; gap: 5px 18px; margin: 0;
  padding: 15px 18px; }
dl.status dt { color: var(--muted); } dl.status dd { margin: 0; overflow-wrap: anywhere; }
.wide { grid-column: span 2; }
.narrow { display: none; }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
figure { margin: 0; padding: 12px 14px 6px; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 16px; font-size: 13px;
  padding: 0 2px 4px; }
figcaption h3 { margin-right: auto; }
.at, figcaption small { color: var(--muted); font-weight: 400; font-size: 13px; }
.keys { width: 100%; min-height: 20px; display: flex; flex-wrap: wrap; gap: 0 18px; }
.key { white-space: nowrap; color: var(--muted); } .key b { color: var(--ink); font-weight: 600; }
.swatch { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: 4px; background: currentColor; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { font-size: 12px; fill: var(--muted); }
.ytick { text-anchor: end; dominant-baseline: central; }
.xtick { text-anchor: middle; } .xtick.last { text-anchor: end; }
.grid { stroke: var(--hair); } .axis { stroke: var(--muted); stroke-opacity: 0.6; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
path.line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; }
path.band { fill: currentColor; fill-opacity: 0.22; stroke: currentColor; stroke-opacity: 0.3;
  stroke-width: 0.8; }
.point { fill: currentColor; }
.dot { display: none; fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.cursor { display: none; stroke: var(--ink); stroke-opacity: 0.5; }
.live .cursor, .live .dot.on { display: inline; }
.mark line { stroke: currentColor; stroke-opacity: 0.5; stroke-dasharray: 2 3; }
.mark path { fill: currentColor; } .mark .cross { fill: none; stroke: currentColor;
  stroke-width: 1.8; }
.mark.save, .what.save { color: var(--good); } .mark.restart, .what.restart { color: var(--wait); }
.mark.skip, .what.skip { color: var(--c1); } .mark.trouble, .what.trouble { color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; color: var(--muted); font-size: 13px;
  margin: 0 0 12px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
.legend svg { width: 14px; height: 14px; }
.empty { color: var(--muted); padding: 14px 18px; margin: 0; }
.note { color: var(--muted); font-size: 13px; margin: 0 0 12px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--muted); font-size: 13px;
  white-space: nowrap; }
th, td { padding: 7px 14px; border-bottom: 1px solid var(--hair); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.nowrap { white-space: nowrap; } th.number, td.number { text-align: right; white-space: nowrap; }
td.text { width: 100%; overflow-wrap: anywhere; }
.settings { columns: 3 320px; column-gap: 36px; padding: 14px 18px; margin: 0; font-size: 14px; }
.settings div { display: flex; gap: 12px; justify-content: space-between; break-inside: avoid;
  padding: 2px 0; }
.settings dt { color: var(--muted); white-space: nowrap; } .settings dd { margin: 0;
  text-align: right; overflow-wrap: anywhere; min-width: 0; }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.command { padding: 12px 18px; margin: 12px 0 0; }
@media (max-width: 900px) {
  body { padding: 20px 14px 48px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .wide { display: none; }
  .narrow { display: block; }
  .moment { margin-left: 0; width: 100%; }
}
@media print { figure, .tile { break-inside: avoid; } }
"""

# Moving over any chart shows the iteration under the pointer in all of them.
SCRIPT = """
"use strict";
(() => {
  const charts = [...document.querySelectorAll("figure[data-chart]")].map((figure) => {
    const values = [...figure.querySelectorAll(".key b")];
    const at = figure.querySelector(".at");
    return {
      figure, at, values,
      svg: figure.querySelector("svg"),
      cursor: figure.querySelector(".cursor"),
      dots: [...figure.querySelectorAll(".dot")],
      data: JSON.parse(document.getElementById(figure.dataset.chart).textContent),
      last: [at.textContent, ...values.map((value) => value.textContent)],
    };
  });

  // The bin that holds the iteration, or the nearest one before its end.
  const find = (ends, iteration) => {
    let low = 0, high = ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] < iteration) low = middle + 1; else high = middle;
    }
    return low > 0 && iteration - ends[low - 1] < ends[low] - iteration ? low - 1 : low;
  };

  const show = (iteration) => {
    for (const chart of charts) {
      const [first, last] = chart.data.domain, [left, right] = chart.data.plot;
      const x = left + (right - left) * (iteration - first) / (last - first);
      chart.figure.classList.add("live");
      chart.cursor.setAttribute("x1", x);
      chart.cursor.setAttribute("x2", x);
      chart.at.textContent = "iteration " + iteration.toLocaleString("en");
      chart.data.lines.forEach((line, n) => {
        chart.dots[n].classList.toggle("on", line.at.length > 0);
        if (!line.at.length) return;
        const bin = find(line.at, iteration);
        chart.values[n].textContent = line.text[bin];
        chart.dots[n].setAttribute("cx", line.x[bin]);
        chart.dots[n].setAttribute("cy", line.y[bin]);
      });
    }
  };

  const reset = () => {
    for (const chart of charts) {
      chart.figure.classList.remove("live");
      chart.at.textContent = chart.last[0];
      chart.values.forEach((value, n) => { value.textContent = chart.last[n + 1]; });
    }
  };

  for (const { svg, data } of charts) {
    const follow = (event) => {
      const box = svg.getBoundingClientRect();
      if (!box.width) return;
      const x = (event.clientX - box.left) / box.width * data.width;
      const [first, last] = data.domain, [left, right] = data.plot;
      const share = Math.min(1, Math.max(0, (x - left) / (right - left)));
      show(Math.round(first + share * (last - first)));
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", reset);
  }
})();
"""
