from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.health.events import (
    EVENTS_FILE,
    HEARTBEAT_FILE,
    METRICS_FILE,
    EventKind,
)
from megatron.training.health.exits import ExitCode
from megatron.training.health.jsonl import JsonLines
from megatron_hybrid import run_status
from tests.unit_tests.tools.helpers.run_files import BEGIN, Run


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "line", "path", "circle"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "script" in self._open or "style" in self._open:
            return
        self.words.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1].append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def values(self, tag: str, name: str) -> list[str | None]:
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Run]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield Run(tmp_path / "gpt")
    time.tzset()


def page_text(folder: Path, *flags: str) -> str:
    path = folder.parent / "report.html"
    run_status.main([str(folder), "--html", str(path), *flags])
    return path.read_text()


def page_of(run: Run, *flags: str) -> Page:
    return Page(page_text(run.folder, *flags))


def rich(run: Run) -> Run:
    """A run to which everything has happened."""
    run.start(max_restarts=3)
    run.metrics(
        range(1, 121),
        expert_load_cv=0.2,
        expert_load_cv_max=0.4,
        busiest_expert=1.5,
        idle_experts=0,
    )
    run.evaluation(100, 2.75)
    run.lanes(100)
    run.save(100)
    run.write("inject", spec="kill:rank=1,step=121", iteration=121, phase="forward")
    run.write("lost", rank=0, ranks=[1], cause="rank 1 was killed in iteration 121")
    run.exit(ExitCode.LOST_RANK, "rank 1 was killed", 121)
    run.now += 20.0
    settings = {"num_layers": 2, "lr": 1e-3, "swiglu": True}
    run.start(iteration=100, max_restarts=3, settings=settings)
    run.write("damaged", checkpoint="/runs/iter_0000110", reason="Expected it whole, got half.")
    run.metrics(range(101, 201))
    run.write("skip", iteration=150, grad_norm=None)
    run.write("nan", iteration=150, ranks=[0])
    run.write("signal", signal="SIGTERM", iteration=160)
    run.now += 60.0
    run.beat(200)
    return run


def test_the_page_has_every_section_with_its_numbers(run):
    page = page_of(rich(run))
    for words in (
        "train 1.667", "validation 2.750", "Gradient norm", "all devices 5000", "time 400.0 ms",
        "host 1.000 GiB", "host update 2.500 ms", "worst layer 0.4000", "Events", "Starts",
        "iter_0000100", "num-layers 2", "swiglu true", "pretrain_gpt.py", "restarts 1 by",
    ):  # fmt: skip
        assert words in page.text, words


def test_what_happened_is_in_the_table_latest_first_and_on_the_curves(run):
    page = page_of(rich(run))
    kinds = [row[1] for row in page.rows if len(row) == 5 and row[0].startswith("2023")]
    assert kinds[:4] == ["signal", "nan iteration", "skipped iteration", "damaged checkpoint"]
    for kind in ("resume", "start", "exit", "rank lost", "injected fault", "save"):
        assert kind in kinds
    marks = Counter(value for value in page.values("path", "class") if value.startswith("mark"))
    charts = page.tags["figure"]
    # A nan and a skipped iteration share a pixel; so do the fault and the end that it brought.
    assert marks["mark skip"] == charts + 1, "and one in the legend"
    assert marks["mark trouble"] == 3 * charts + 1, "121, 110, 160"
    assert marks["mark restart"] == charts + 1
    assert marks["mark save"] == charts + 1


def test_sections_without_content_are_left_out_or_have_a_note(run):
    run.start()
    text = page_of(run).text
    for words in ("No metrics yet", "No checkpoints", "No settings"):
        assert words in text
    run.start(metrics=None)
    assert "it was started with --metrics-jsonl none" in page_of(run).text
    run.metrics([1])
    text = page_of(run).text
    assert "The last start writes no metrics" in text
    for words in ("Validation loss", "Lanes of offloading", "Balance of experts"):
        assert words not in text
    (run.folder / "iter_0000500").mkdir()
    (run.folder / EVENTS_FILE).unlink()
    assert "No events" in page_of(run).text


def test_the_rank_of_an_event_is_the_lost_rank_rather_than_its_witness(run):
    run.start()
    run.write("lost", ranks=[3], cause="it was killed")
    run.write("hang", ranks=[1, 2], cause="they sleep")
    ranks = {row[1]: row[3] for row in page_of(run).rows if len(row) > 4}
    assert (ranks["rank lost"], ranks["hang"]) == ("3", "\u2013")


def test_a_resume_without_a_checkpoint_is_from_the_kept_host_state_or_the_beginning(run):
    run.start()
    run.write("resume", iteration=0, checkpoint=None, failed_at=None)
    run.write("resume", iteration=7, checkpoint=None, failed_at=run.now - 2.5)
    details = {row[2]: row[4] for row in page_of(run).rows if len(row) > 4 and row[1] == "resume"}
    assert "2.5" not in details["0"]
    assert "2.5 s" in details["7"]


def test_starts_are_by_the_launcher_or_by_hand(run):
    for restart in (0, 1, 0):
        run.start(restart=restart)
        run.exit(ExitCode.FAILED, "an error", 7)
    starts = page_text(run.folder).split("<h2>Starts</h2>")[1].split("<h2>")[0]
    assert re.findall(r">(hand|launcher)<", starts) == ["hand", "launcher", "hand"]


def test_metrics_are_read_from_the_file_in_the_last_start_or_else_next_to_the_events(run, tmp_path):
    elsewhere = tmp_path / "elsewhere.jsonl"
    JsonLines(elsewhere).append({"kind": "train", "iteration": 1, "loss": 7.25})
    run.start(metrics=str(elsewhere))
    run.metrics([1], loss=3.5)
    assert "train 7.250" in page_of(run).text
    for wrong in ("/nowhere/metrics.jsonl", "relative", "\0", "/" + "x" * 5000, 7):
        run.start(metrics=wrong)
        assert "train 3.500" in page_of(run).text
    (run.folder / METRICS_FILE).unlink()
    os.mkfifo(run.folder / METRICS_FILE)
    assert "could not be read" in page_of(run).text


def test_the_page_needs_and_allows_nothing_from_outside(run):
    text = page_text(rich(run).folder)
    page = Page(text)
    for tag in ("link", "img", "iframe", "object", "embed", "base", "form", "a"):
        assert not page.tags[tag]
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "style", "srcset"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "://" not in text
    policy = page.values("meta", "content")[0]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_page_reloads_itself_while_the_run_may_continue(run):
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    run.now = time.time()
    run.start(max_restarts=1, **here)
    run.beat(20)
    assert "refresh" in page_of(run).values("meta", "http-equiv")
    run.exit(ExitCode.HANG, "nothing happened", 21)
    assert "refresh" in page_of(run).values("meta", "http-equiv"), "torchrun starts it again"
    run.start(max_restarts=1, **here)
    run.exit(ExitCode.HANG, "nothing happened", 21)
    assert "refresh" not in page_of(run).values("meta", "http-equiv"), "not any more"


def test_a_run_that_ended_long_ago_with_restarts_left_is_over(run):
    run.start(max_restarts=3)
    run.exit(ExitCode.HANG, "nothing happened", 21)
    assert run.status()["is_live"]
    run.now += 3600.0
    assert not run.status()["is_live"]


HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</script><b>", "'&amp;",
    "\x1b]0;x\x07", "\ud800", "\u202e", "x" * 10_000, 10**500, -1, 1e308, None, True, [["<i>"]],
    {"<u>": "<u>"}, "http://example.org/", "iter_0000001", "metrics.jsonl", "FINISHED", "LOST_RANK",
    "a\nb", "s3://a/b", "\0",
]  # fmt: skip
NAMES = [*EventKind, "<b>", None, 3, []]
KEYS = (
    "time rank restart iteration train_iters checkpoint reason what settings pid command metrics "
    "cause ranks seconds world_size code name spec grad_norm max_restarts host signal phase loss "
    "ms_per_iteration"
).split()
FIELDS = ["iteration", "loss", "grad_norm", "elapsed_ms", "split", "host_ms", "expert_load_cv"]
ANYTHING = st.sampled_from(HOSTILE) | st.integers(-3, 500) | st.floats(allow_nan=True)
FIELDS_OF_EVENTS = st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=8)
RECORDS = st.dictionaries(st.sampled_from(FIELDS), ANYTHING)
KNOWN = set(
    "html head meta title style body header h1 h2 h3 span div b small progress dl dt dd p figure "
    "figcaption i svg line text path circle g table thead tbody tr th td code script".split()
)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(st.sampled_from(NAMES), FIELDS_OF_EVENTS), min_size=1, max_size=8),
    heartbeat=st.none() | FIELDS_OF_EVENTS,
    records=st.lists(
        st.tuples(st.sampled_from(["train", "eval", "timing", "<b>"]), RECORDS), max_size=8
    ),
    torn=st.integers(0, 40),
)
def test_files_with_any_content_are_five_short_lines_and_a_page_without_their_markup(
    tmp_path_factory, events, heartbeat, records, torn
):
    folder = tmp_path_factory.mktemp("run")
    written = [{"event": kind, **fields} for kind, fields in events]
    (folder / EVENTS_FILE).write_text("".join(json.dumps(each) + "\n" for each in written))
    if heartbeat is not None:
        (folder / HEARTBEAT_FILE).write_text(json.dumps(heartbeat))
    lines = "".join(json.dumps({"kind": kind, **fields}) + "\n" for kind, fields in records)
    (folder / METRICS_FILE).write_text(lines[: max(0, len(lines) - torn)])

    status = run_status.run_status(folder, now=BEGIN)
    lines = run_status.lines_of(status)
    assert len(lines) == 5
    assert all(line.isprintable() and len(line) < 1100 for line in lines)
    assert 0 <= json.loads(json.dumps(status))["exit_code"] <= 255

    page = Page(page_text(folder))
    assert page.tags.keys() <= KNOWN
    assert page.tags["script"] == page.tags["figure"] + 1
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "onerror"}
    assert "\x1b" not in page.text


def test_only_a_page_is_overwritten(run, capsys):
    run.start()
    path = run.folder / EVENTS_FILE
    with pytest.raises(SystemExit):
        run_status.main([str(run.folder), "--html", str(path)])
    assert str(path) in capsys.readouterr().err
    assert path.stat().st_size > 0
    missing = run.folder / "missing" / "report.html"
    assert run_status.main([str(run.folder), "--html", str(missing)]) == run_status.EXIT_NO_RUN
    (line,) = capsys.readouterr().err.splitlines()
    assert "No such file or directory" in line


@pytest.mark.parametrize("seconds", ["0", "nan", "x", "1e9"])
def test_only_a_plausible_interval_is_watched(run, capsys, seconds):
    run.start()
    with pytest.raises(SystemExit):
        run_status.main([str(run.folder), "--watch", seconds])
    assert "--watch" in capsys.readouterr().err


def test_watching_rewrites_the_page_until_the_run_has_ended(run, tmp_path, capsys, monkeypatch):
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    path, naps, pages = tmp_path / "report.html", [], []
    run.now = time.time()
    run.start(**here)
    run.metrics(range(1, 11))
    run.beat(10, train_iters=20)

    def nap(seconds: float) -> None:
        naps.append(seconds)
        pages.append(path.read_text())
        if len(naps) == 1:
            run.metrics(range(11, 21))
            run.beat(20, train_iters=20)
        else:
            run.exit(ExitCode.FINISHED, "trained to the end", 20)

    monkeypatch.setattr(time, "sleep", nap)
    code = run_status.main([str(run.folder), "--html", str(path), "--watch", "7"])
    assert (code, naps) == (0, [7.0, 7.0])
    assert capsys.readouterr().out.count("state: ") == 3
    first, second = map(Page, pages)
    assert "train 4.545" in first.text
    assert "train 4.167" in second.text
    assert "7" in first.values("meta", "content")
    last = Page(path.read_text())
    assert "refresh" not in last.values("meta", "http-equiv")
    assert "finished" in last.text
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".tmp"] == []


def test_the_page_of_a_long_run_is_small(run):
    run.start()
    lines = "".join(
        f'{{"kind": "train", "iteration": {n}, "loss": {1 + 1 / n}}}\n' for n in range(1, 20_001)
    )
    (run.folder / METRICS_FILE).write_text(lines)
    assert len(page_text(run.folder)) < 300_000
