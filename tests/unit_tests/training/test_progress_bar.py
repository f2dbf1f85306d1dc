from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from megatron.training.config import LoggingConfig
from megatron.training.log_lines import PeakMemory
from megatron.training.metrics import Metrics, Rates
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


def test_an_evaluation_and_a_save_are_shown_instead_of_the_time_left(terminal):
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


@pytest.mark.parametrize("is_wanted", [True, False])
def test_without_a_terminal_or_with_no_progress_bar_there_is_no_output(monkeypatch, is_wanted):
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
