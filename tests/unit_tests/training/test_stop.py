from __future__ import annotations

import os
import signal

from megatron.training.stop import StopConditions, StopConfig


def test_a_signal_becomes_a_vote_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopConditions(StopConfig(exit_signal_handler=True)) as stop:
        assert stop.votes() == (0.0, 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.votes() == (1.0, 0.0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_the_flag_the_signal_is_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    with StopConditions(StopConfig()):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_votes_to_stop_once_its_clock_has_run_out():
    now = [100.0]
    stop = StopConditions(StopConfig(exit_duration_in_mins=2.0), clock=lambda: now[0])
    now[0] += 119.0
    assert stop.votes() == (0.0, 0.0)
    now[0] += 2.0
    assert stop.votes() == (0.0, 1.0)


def test_one_ranks_vote_is_enough_and_the_reason_is_named():
    stop = StopConditions(StopConfig(exit_interval=10, exit_duration_in_mins=3.0))
    assert stop.reason(7, (0.0, 0.0)) is None
    assert stop.reason(7, (1.0, 0.0)) == "SIGTERM was received"
    assert stop.reason(7, (0.0, 1.0)) == "--exit-duration-in-mins 3.0 is over"
    assert stop.reason(20, (0.0, 0.0)) == "iteration 20 is a multiple of --exit-interval 10"
