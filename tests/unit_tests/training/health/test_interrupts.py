from __future__ import annotations

import os
import signal
import sys

import pytest

from megatron.training.health.interrupts import OnInterrupt, Press, Presses
from megatron.training.health.signals import SignalSocket

WHEN = "in iteration 7, forward"


def presses_at(*seconds: float) -> list[Press]:
    """What SIGINTs at these times are."""
    times = iter(seconds)
    presses = Presses(lambda: next(times))
    return [presses.add() for _ in seconds]


def test_a_ctrl_c_that_arrives_twice_is_one():
    """As from a program that passes it on to a child in the same process group."""
    assert presses_at(5.0, 5.01, 5.4) == [Press.FIRST, Press.ECHO, Press.ECHO]


def test_a_second_ctrl_c_is_told_by_its_distance_from_the_first():
    """Not from the one before, or a key that is held down would never count."""
    assert presses_at(5.0, 5.3, 5.6, 9.0)[2:] == [Press.SECOND, Press.SECOND]


def test_the_line_says_what_the_run_will_do(monkeypatch):
    line = OnInterrupt(is_handled=True, saves=True).first(WHEN, is_saved=False)
    assert line == (
        "SIGINT in iteration 7, forward: the run will finish its step, save and end. A second "
        "Ctrl-C ends it at once."
    )
    assert "Without --save, nothing" in OnInterrupt(is_handled=True).first(WHEN, is_saved=False)
    saved = OnInterrupt(is_handled=True, saves=True).first(WHEN, is_saved=True)
    assert "its state is saved, and the run ends after what is under way" in saved

    # torchrun takes the second one for itself.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    elastic = OnInterrupt(is_handled=True, saves=True, is_elastic=True).first(WHEN, is_saved=False)
    assert "second" not in elastic
    assert "after 300 s" in elastic


@pytest.mark.parametrize(
    ("saves", "has_trained", "end"),
    [
        (True, False, "before its first step."),
        (True, True, "--exit-signal-handler saves that first."),
        (False, True, "Without --save, nothing of it is kept."),
    ],
)
def test_the_line_says_what_is_lost_and_what_would_have_saved_it(saves, has_trained, end):
    assert OnInterrupt(saves=saves).unhandled(WHEN, has_trained, is_saved=False).endswith(end)
    saved = OnInterrupt(saves=True).unhandled(WHEN, has_trained=True, is_saved=True)
    assert saved.endswith("Its state is saved.")


@pytest.mark.parametrize(
    ("handler", "at_prompt", "is_taken"),
    [
        (signal.default_int_handler, False, True),
        (signal.SIG_DFL, False, True),
        (signal.default_int_handler, True, False),  # who types there wants the prompt back
        (signal.SIG_IGN, False, False),  # as shells start their background jobs
        (lambda *_: None, False, False),
    ],
    ids=["Python's", "the system's", "at a prompt", "ignored", "the program's"],
)
def test_the_watchdog_takes_sigint_only_where_nobody_else_does(
    monkeypatch, handler, at_prompt, is_taken
):
    if at_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = signal.signal(signal.SIGINT, handler)
    signals = SignalSocket()
    try:
        signals.install(lambda: True)
        assert signals.is_own(signal.SIGINT) == is_taken
        if is_taken:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.wait(60.0) == [signal.SIGINT]
        signals.uninstall()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
        signals.close()
