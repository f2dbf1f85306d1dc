"""The timer behind the watchdog. That it ends a process is in test_watchdog_failures.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.health import backstop as backstop_module
from megatron.training.health import watchdog as watchdog_module
from megatron.training.health.backstop import Backstop
from megatron.training.health.events import EventLog
from megatron.training.health.progress import Phase
from megatron.training.health.watchdog import Watchdog
from megatron.training.launch import Launch

WAIT = 120.0  # seconds, for expected events


class Timer:
    """Stands in for `faulthandler` and the clock, and keeps the starts of the timer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.seconds: float | None = None  # None: off
        self.num_starts = 0
        self.is_broken = False
        monkeypatch.setattr(backstop_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(backstop_module, "faulthandler", self)

    def dump_traceback_later(self, seconds: float, *, exit: bool, file: int) -> None:
        assert exit
        assert file == 2
        if self.is_broken:
            raise RuntimeError("no thread")
        self.seconds = seconds
        self.num_starts += 1

    def cancel_dump_traceback_later(self) -> None:
        self.seconds = None


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    return Timer(monkeypatch)


def test_the_timer_starts_again_only_for_another_limit_and_after_an_eighth_of_it(timer):
    backstop, starts = Backstop(), []
    for passed, seconds in [(0, 80), (5, 80), (4, 80), (1, 80), (1, 40), (4, 40), (1, 40)]:
        timer.now += passed
        backstop.arm(seconds)
        starts.append(timer.num_starts)
    assert starts == [1, 1, 1, 2, 3, 3, 4]
    backstop.cancel()
    assert timer.seconds is None
    backstop.arm(40)
    assert timer.seconds == 40, "armed at once after it was off"


def test_a_timer_that_cannot_start_is_tried_again_later(timer):
    backstop, timer.is_broken = Backstop(), True
    backstop.arm(80)
    timer.is_broken = False
    backstop.arm(80)
    assert timer.seconds is None
    timer.now += 10
    backstop.arm(80)
    assert timer.seconds == 80


@pytest.mark.parametrize("is_child", [True, False])
def test_a_fork_leaves_the_timer_to_the_parent(timer, is_child):
    backstop = Backstop()
    backstop.arm(80)
    backstop.before_fork()
    assert timer.seconds is None
    backstop.after_fork(is_child=is_child)
    assert timer.seconds == (None if is_child else 80)
    backstop.arm(80)
    assert timer.seconds == 80


_FORK = """
import os
from megatron.training.health.backstop import OF_THIS_PROCESS
OF_THIS_PROCESS.arm(3600.0)
child = os.fork()
if child:
    print(child, flush=True)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_exits_as_usual():
    """The interpreter's end waits for the timer's thread, which a child does not have."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _FORK], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert process.wait(WAIT) == 0
    finally:
        if process.poll() is None:
            os.kill(child, 9)
        process.kill()
        process.communicate()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, timer: Timer) -> Callable[..., tuple[Watchdog, Any]]:
    """watched(**options) -> a watchdog, and what arms the timer for it and returns its seconds."""

    def begin(**options: Any) -> tuple[Watchdog, Any]:
        monkeypatch.setattr(backstop_module, "OF_THIS_PROCESS", Backstop())
        timer.seconds = None
        watchdog = Watchdog(launch=Launch(), store=None, events=EventLog(None), **options)

        def look() -> float | None:
            watchdog._progress.look()
            watchdog._arm_backstop()
            return timer.seconds

        return watchdog, look

    return begin


def test_it_waits_twice_as_long_as_the_watchdog_in_every_phase(watched):
    watchdog, look = watched(hang_timeout_seconds=100.0, long_timeout_seconds=700.0)
    is_saving = False
    watchdog.takes_long_while(lambda: is_saving)
    assert look() == 1400.0
    for iteration in (1, 2):
        watchdog.mark(Phase.STEP, iteration)
    assert look() == 200.0
    is_saving = True
    assert look() == 1400.0
    is_saving = False
    assert look() == 200.0
    watchdog.mark(Phase.SAVE, 2)
    assert look() == 1400.0


def test_it_is_patient_under_a_short_limit_and_off_without_one(watched):
    _, look = watched(hang_timeout_seconds=1.0, long_timeout_seconds=1.0)
    assert look() == watchdog_module._LEAST_BACKSTOP_SECONDS >= 60.0
    _, look = watched(hang_timeout_seconds=None)
    assert look() is None
