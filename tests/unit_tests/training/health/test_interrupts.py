from __future__ import annotations

import os
import signal
import sys

import pytest

from megatron.training.health.signals import OnInterrupt, Press, Presses, SignalSocket

WHEN = "in iteration 7, forward"


def presses_at(*seconds: float) -> list[Press]:
    """What SIGINTs at these times are."""
    times = iter(seconds)
    presses = Presses(lambda: next(times))
    return [presses.add() for _ in seconds]


def test_a_second_ctrl_c_differs_from_the_first_one_that_arrives_twice():
    """The time since the first one counts, or a key that is held down would have no effect."""
    assert presses_at(5.0, 5.01, 5.4) == [Press.FIRST, Press.ECHO, Press.ECHO]
    assert presses_at(5.0, 5.3, 5.6, 9.0)[2:] == [Press.SECOND, Press.SECOND]


def test_the_line_for_a_handled_ctrl_c_depends_on_what_follows(monkeypatch):
    def line(is_saved: bool = False, **options: bool) -> str:
        return OnInterrupt(is_handled=True, **options).first(WHEN, is_saved)

    assert line(saves=True).startswith("SIGINT in iteration 7, forward: the run will")
    assert len({line(saves=True), line(), line(saves=True, is_saved=True)}) == 3
    # torchrun handles the second one.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    assert "Ctrl-C" in line(saves=True)
    assert "after 300 s" in line(saves=True, is_elastic=True)


def test_the_line_for_a_ctrl_c_that_ends_the_run_depends_on_what_is_lost():
    found = [
        OnInterrupt(saves=saves).unhandled(WHEN, has_trained, is_saved)
        for saves, has_trained, is_saved in (
            (True, False, False),
            (True, True, False),
            (True, True, True),
            (False, True, False),
        )
    ]
    assert len(set(found)) == 4
    assert "--exit-signal-handler" in found[1]


@pytest.mark.parametrize(
    ("handler", "at_prompt", "is_taken"),
    [
        (signal.default_int_handler, False, True),
        (signal.SIG_DFL, False, True),
        (signal.default_int_handler, True, False),  # a user at the prompt
        (signal.SIG_IGN, False, False),  # as shells start their background jobs
        (lambda *_: None, False, False),
    ],
    ids=["Python's", "the system's", "at a prompt", "ignored", "the program's"],
)
def test_the_watchdog_handles_sigint_only_where_no_other_handler_does(
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
            assert signals.wait(600) == [signal.SIGINT]
        signals.uninstall()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
        signals.close()
