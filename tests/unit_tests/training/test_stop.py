from __future__ import annotations

import contextlib
import logging
import os
import signal

import pytest

from megatron.core.options import ConfigError
from megatron.training.config import StopConfig
from megatron.training.health.exits import ExitCode
from megatron.training.stop import Stop, StopConditions, Votes


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def sigint_as_in_the_foreground():
    """Sets Python's SIGINT handler, since the parent of the tests may have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_becomes_a_vote_and_the_old_handler_is_restored(number):
    before = signal.getsignal(number)
    with StopConditions(StopConfig(exit_signal_handler=True)) as stop:
        assert stop.votes() == Votes()
        os.kill(os.getpid(), number)
        assert stop.votes() == Votes(signalled=1.0)
        assert stop.stop(7, Votes(signalled=1.0)) == Stop(
            f"{number.name} was received", ExitCode.PREEMPTED, saves=True
        )
    assert signal.getsignal(number) is before


def test_without_the_flag_signals_are_not_handled():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with StopConditions(StopConfig()):
        assert [signal.getsignal(number) for number in numbers] == before


def interrupt(clock: Clock, *times: float, is_watched: bool) -> None:
    config = StopConfig(exit_signal_handler=True)
    with StopConditions(config, clock, is_watched=is_watched) as stop:
        for now in times:
            clock.now = now
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.votes() == Votes(signalled=1.0)


def test_the_second_sigint_is_a_keyboard_interrupt_unless_a_watchdog_ends_the_process():
    interrupt(Clock(), 1.0, 1.2, is_watched=False)  # one Ctrl-C that arrives twice
    interrupt(Clock(), 1.0, 3.0, is_watched=True)
    with pytest.raises(KeyboardInterrupt):
        interrupt(Clock(), 1.0, 3.0, is_watched=False)


def test_a_sigterm_between_two_sigints_counts_as_neither():
    clock = Clock()
    with StopConditions(StopConfig(exit_signal_handler=True), clock) as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
            clock.now += 10.0
        assert stop.stop(3, stop.votes()).reason == "SIGINT was received"


def test_a_sigint_ignored_by_the_parent_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopConditions(StopConfig(exit_signal_handler=True)) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.votes() == Votes()


def test_signals_to_forked_processes_do_not_end_the_run():
    """Forked data workers inherit the handler, and two SIGINTs must not end them."""
    clock = Clock()
    with StopConditions(StopConfig(exit_signal_handler=True), clock):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
                    clock.now += 10.0
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_sigint_logged_by_the_watchdog_is_not_logged_again(caplog, monkeypatch):
    monkeypatch.setattr("megatron.training.stop.logger", logging.getLogger("test_stop"))
    for is_watched, grace in ((True, None), (True, 30.0), (False, None)):
        config = StopConfig(exit_signal_handler=True, exit_signal_grace_seconds=grace)
        with StopConditions(config, Clock(), is_watched=is_watched) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            stop.votes()
    with_grace, unwatched = caplog.messages
    assert "30.0 s of 30 s are left" in with_grace
    assert unwatched.startswith("SIGINT was received by rank 0")


def test_a_rank_votes_to_stop_once_its_clock_has_run_out():
    clock = Clock()
    stop = StopConditions(StopConfig(exit_duration_in_mins=2.0), clock)
    clock.now += 119.0
    assert stop.votes() == Votes()
    clock.now += 2.0
    assert stop.votes() == Votes(out_of_time=1.0)


def test_the_vote_of_one_rank_is_enough_and_has_its_reason():
    stop = StopConditions(StopConfig(exit_interval=10, exit_duration_in_mins=3.0))
    assert stop.stop(7, Votes()) is None
    assert stop.stop(7, Votes(signalled=1.0)) == Stop(
        "another rank was signalled", ExitCode.PREEMPTED, saves=True
    )
    assert stop.stop(7, Votes(out_of_time=1.0)) == Stop(
        "--exit-duration-in-mins 3.0 is over", ExitCode.FINISHED, saves=True
    )
    assert stop.stop(20, Votes()) == Stop(
        "iteration 20 is a multiple of --exit-interval 10", ExitCode.FINISHED, saves=True
    )


def test_a_signal_outranks_the_other_reasons():
    stop = StopConditions(StopConfig(exit_interval=10, exit_duration_in_mins=3.0))
    assert stop.stop(20, Votes(signalled=1.0, out_of_time=1.0)).code is ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("grace", "passed", "save_seconds", "too_short"),
    [
        (None, 1e9, 1e9, 0.0),  # no limit: always saved
        (30.0, 5.0, 24.9, 0.0),
        (30.0, 5.0, 25.1, 1.0),
        (30.0, 29.9, None, 0.0),  # an unknown duration fits
        (30.0, 30.1, None, 1.0),  # unless no time is left
    ],
)
def test_a_rank_votes_against_saving_if_a_save_takes_longer_than_the_grace_period(
    grace, passed, save_seconds, too_short
):
    clock = Clock()
    config = StopConfig(exit_signal_handler=True, exit_signal_grace_seconds=grace)
    with StopConditions(config, clock) as stop:
        assert stop.votes(save_seconds) == Votes(), "a rank without a signal has all the time"
        os.kill(os.getpid(), signal.SIGTERM)
        signal.getsignal(signal.SIGTERM)  # bytecode, so that the handler has run
        clock.now += passed
        assert stop.votes(save_seconds) == Votes(signalled=1.0, too_short=too_short)


def test_the_grace_period_starts_with_the_first_signal():
    clock = Clock()
    with StopConditions(
        StopConfig(exit_signal_handler=True, exit_signal_grace_seconds=30.0), clock
    ) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.votes(20.0) == Votes(signalled=1.0)
        clock.now += 15.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.votes(20.0) == Votes(signalled=1.0, too_short=1.0)
        assert stop.stop(3, Votes(signalled=1.0, too_short=1.0)).reason.startswith(
            "SIGUSR1 was received"
        )


def test_no_rank_saves_if_one_rank_has_no_time():
    stop = StopConditions(StopConfig(exit_signal_handler=True, exit_signal_grace_seconds=30.0))
    decision = stop.stop(7, Votes(signalled=2.0, too_short=1.0))
    assert (decision.code, decision.saves) == (ExitCode.PREEMPTED_UNSAVED, False)
    assert decision.reason == (
        "another rank was signalled, and a save takes longer than the rest of "
        "--exit-signal-grace-seconds 30.0"
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, "soon"])
def test_a_grace_period_is_a_positive_number(seconds):
    with pytest.raises(ConfigError, match="--exit-signal-grace-seconds"):
        StopConfig(exit_signal_grace_seconds=seconds)
