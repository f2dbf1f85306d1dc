from __future__ import annotations

import logging

import pytest

from megatron.core import log


@pytest.fixture(autouse=True)
def _restore_logger():
    logger = logging.getLogger("megatron")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_rank_zero_shows_information_and_names_the_level_of_warnings_only(capsys):
    log.configure(rank=0)
    logging.getLogger("megatron.some.file").info("loss %.1f", 1.25)
    logging.getLogger("megatron.some.file").warning("careful")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("] loss 1.2")
    assert second.endswith("] WARNING: careful")


def test_other_ranks_show_warnings_with_their_rank(capsys):
    log.configure(rank=3)
    logging.getLogger("megatron.some.file").info("silence")
    logging.getLogger("megatron.some.file").error("broken")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[rank 3] [")
    assert line.endswith("] ERROR: broken")


def test_configuring_again_does_not_say_everything_twice(capsys):
    log.configure(rank=0)
    log.configure(rank=0)
    logging.getLogger("megatron").info("once")
    assert capsys.readouterr().out.count("once") == 1


def test_an_exception_is_shown_with_its_traceback(capsys):
    log.configure(rank=0)
    try:
        raise ValueError("the cause")
    except ValueError:
        logging.getLogger("megatron").exception("it failed")
    shown = capsys.readouterr().out
    assert "Traceback" in shown
    assert "the cause" in shown
