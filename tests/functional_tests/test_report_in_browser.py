"""The page of a run in a real browser: no errors, every section, a cursor that follows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.health.events import METRICS_FILE
from megatron_hybrid import run_status
from tests.functional_tests.helpers.recovery_scenes import Job, kill_process, started, until
from tests.functional_tests.helpers.runs import SETTINGS
from tests.unit_tests.tools.helpers.run_files import Run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome")
     if (path := shutil.which(name))), None,
)  # fmt: skip
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome"),
]
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --enable-logging=stderr "
    "--window-size=1280,2000"
).split()
LANES = "Lanes of offloading, per step"
HOVER = """
const svg = document.querySelector("figure svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
"""


def opened(page: Path, home: Path) -> tuple[str, list[str]]:
    """(the document after its script has run, the lines of the console)."""
    command = [str(BROWSER), *QUIET, f"--user-data-dir={home}", "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def assert_opens(folder: Path, tmp_path: Path, state: str, *lanes: str) -> str:
    """The run's page opens without errors; see `assert_complete`. Returns its document."""
    page = tmp_path / "report.html"
    run_status.main([str(folder), "--html", str(page)])
    document, console = opened(page, tmp_path / "browser")
    assert console == []
    assert_complete(document, state, *lanes)
    return document


def assert_complete(document: str, state: str, *lanes: str) -> None:
    """The page has the state of its run, and a section for everything that the run has."""
    assert re.search(rf'class="badge \w+">{state}<', document)
    headings = re.findall("<h2>(.*?)</h2>", document)
    found = ["Learning", "Speed and memory", *lanes, "Events", "Starts", "Checkpoints", "Settings"]
    assert headings == found


def test_a_prepared_page_opens_without_errors_and_follows_the_pointer(tmp_path):
    run = Run(tmp_path / "run")
    run.start()
    run.metrics(range(1, 101))
    run.beat(100, train_iters=500)
    page = tmp_path / "report.html"
    run_status.main([str(run.folder), "--html", str(page)])

    # The policy rejects a script of the test, which is the only error.
    text = page.read_text().replace("</body>", f"<script>{HOVER}</script></body>")
    page.write_text(text)
    document, console = opened(page, tmp_path / "browser")
    assert_complete(document, "dead")
    assert ">iteration 100</span>" in document
    assert len(console) == 1
    assert "Content Security Policy" in console[0]
    assert 'class="card wide live"' not in document

    page.write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text))
    document, console = opened(page, tmp_path / "browser")
    assert console == []
    assert 'class="card wide live"' in document
    number = re.search(">iteration ([0-9]+)</span>", document)
    assert number is not None
    assert 40 < int(number[1]) < 60


@pytest.mark.wide
def test_the_pages_of_a_live_run_of_one_that_died_and_of_one_that_finished(tmp_path):
    job = Job(tmp_path / "live")
    flags = [*SETTINGS, "--log-interval", "1", "--optimizer-cpu-offload"]
    flags += ["--timing-log-level", "1", "--eval-interval", "50", "--save-interval", "20"]
    forever = ["--train-iters", "1000000"]
    with started(job, [sys.executable], *flags, *forever) as process:
        metrics = job.folder / METRICS_FILE
        until(lambda: metrics.exists() and metrics.read_text().count('"train"') > 60, "60 steps")
        document = assert_opens(job.saved, tmp_path, "(running|saving)", LANES)
        assert 'http-equiv="refresh"' in document
        assert "Optimizer: lanes at work" in document
        kill_process(process.pid)
        process.wait()

    document = assert_opens(job.saved, tmp_path, "dead", LANES)
    assert 'http-equiv="refresh"' not in document

    # Metrics beside the events, as by default.
    saved = tmp_path / "finished"
    command = [sys.executable, "pretrain_gpt.py", *flags, "--save", str(saved)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    assert (saved / METRICS_FILE).exists()
    document = assert_opens(saved, tmp_path, "finished", LANES)
    assert 'http-equiv="refresh"' not in document
    assert "iter_0000004" in document
