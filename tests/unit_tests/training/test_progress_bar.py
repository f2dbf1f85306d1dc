from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from megatron.training.log_lines import PeakMemory
from megatron.training.metrics import LoggingConfig, Metrics, Rates
from megatron.training.progress_bar import Pace, ProgressBar
from megatron.training.step import StepResult


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def line(self) -> str:
        """What stands at the bottom, without the bar, whose width is the terminal's."""
        shown = self.getvalue().rstrip("\n").rpartition("\r")[2]
        percent, _, rest = shown.partition("|")
        return f"{percent.strip()} {rest.rpartition('|')[2].strip()}"


@pytest.fixture
def terminal(monkeypatch):
    found = Terminal()
    # Not sys.stderr itself: pytest sets that again between a fixture and its test.
    monkeypatch.setattr("megatron.training.progress_bar.sys", SimpleNamespace(stderr=found))
    # tqdm draws at most ten times a second, and a test's steps take no time.
    everything = partial(tqdm, mininterval=0, miniters=1)
    monkeypatch.setattr("megatron.training.progress_bar.tqdm", everything)
    return found


def step(metrics: Metrics, iteration: int, loss: float = 4.0) -> None:
    outcome = StepResult(loss, 1.5, is_skipped=False, bad_ranks=(), votes=())
    metrics.step(
        outcome, iteration=iteration, consumed_samples=4, learning_rate=0.1, skipped=0, nan=0
    )


def make(now, start_iteration: int = 0, **options) -> Metrics:
    return Metrics(
        Rates(
            train_iters=100,
            global_batch_size=4,
            seq_length=8,
            flops_per_sequence=1e12,
            num_devices=2,
        ),
        LoggingConfig(log_interval=100, **options),
        [],
        start_iteration=start_iteration,
        shows_progress=True,
        memory=lambda: PeakMemory(None, 2**30),
        clock=lambda: now[0],
    )


def test_before_the_first_step_it_says_that_it_is_under_way(terminal):
    make([0.0])
    assert terminal.line == "0% 0/100  the first iteration is under way"


def test_a_resumed_run_begins_where_it_was(terminal):
    metrics = make([0.0], start_iteration=40)
    assert terminal.line == "40% 40/100  the first iteration is under way"
    metrics.resume_clock()
    assert terminal.line == "40% 40/100  the first iteration is under way"


def test_the_time_left_is_that_of_recent_steps_without_the_first_one_and_without_pauses(terminal):
    now = [0.0]
    metrics = make(now)
    now[0] += 30.0  # compiles
    step(metrics, 1)
    metrics.resume_clock()
    assert terminal.line == "1% 1/100  loss 4.0000  1 tok/s  30.0 s/it  eta 49m30s"

    for iteration in (2, 3):
        now[0] += 2.0
        step(metrics, iteration, loss=3.5)
        now[0] += 1000.0  # an evaluation, a save
        metrics.resume_clock()
    assert terminal.line == "3% 3/100  loss 3.5000  16 tok/s  2.00 s/it  eta 3m14s"


def test_an_evaluation_and_a_save_are_shown_in_the_place_of_the_time_left(terminal):
    now = [0.0]
    metrics = make(now)
    now[0] += 0.5
    step(metrics, 1)
    metrics.shows("validation 25%")
    assert terminal.line == "1% 1/100  loss 4.0000  64 tok/s  500 ms/it  validation 25%"
    metrics.shows("saving")
    assert terminal.line == "1% 1/100  loss 4.0000  64 tok/s  500 ms/it  saving"
    metrics.resume_clock()
    assert terminal.line == "1% 1/100  loss 4.0000  64 tok/s  500 ms/it  eta 50s"
    drawn = terminal.getvalue()
    metrics.resume_clock()
    assert terminal.getvalue() == drawn, "nothing was shown that has to go"


def test_what_is_left_at_the_end_tells_of_no_activity(terminal):
    now = [0.0]
    metrics = make(now, start_iteration=99)
    now[0] += 0.5
    step(metrics, 100)
    metrics.shows("test 50%")
    metrics.close()
    assert terminal.line == "100% 100/100  loss 4.0000  64 tok/s  500 ms/it"


def test_the_bar_keeps_its_width_when_the_text_becomes_shorter(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    bar = ProgressBar(100, 0, is_wanted=True)
    bar.step(4.0, 1e4, 1.0)
    bar.shows("validation 100%")
    bar.shows("test 5%")
    ends = [text.rfind("|") for text in terminal.getvalue().split("\r")[-2:]]
    assert ends[0] == ends[1] > 6


@pytest.mark.parametrize("is_wanted", [True, False])
def test_without_a_terminal_or_with_no_progress_bar_nothing_is_written(monkeypatch, is_wanted):
    stream = io.StringIO() if is_wanted else Terminal()
    monkeypatch.setattr("megatron.training.progress_bar.sys", SimpleNamespace(stderr=stream))
    bar = ProgressBar(100, 0, is_wanted=is_wanted)
    bar.step(4.0, 1e4, 1.0)
    bar.shows("saving")
    bar.resumes()
    bar.close()
    assert stream.getvalue() == ""


def test_the_pace_is_the_mean_of_recent_steps():
    pace = Pace()
    assert pace.seconds is None
    pace.add(100.0)
    assert pace.seconds == 100.0
    for number in range(200):
        pace.add(1.0 if number < 150 else 3.0)
    assert pace.seconds == 3.0


def test_the_log_lines_time_left_has_the_same_pace(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(
        "megatron.training.metrics.logger.info", lambda text, *args: lines.append(text % args)
    )
    now = [0.0]
    metrics = Metrics(
        Rates(100, 4, 8, 1e12, 2),
        LoggingConfig(log_interval=2, log_format="short"),
        [],
        start_iteration=0,
        shows_progress=False,
        clock=lambda: now[0],
    )
    for iteration, seconds in ((1, 61.0), (2, 1.0)):
        now[0] += seconds
        step(metrics, iteration)
    assert lines[0].endswith("eta 1m38s"), "98 iterations of one second"
