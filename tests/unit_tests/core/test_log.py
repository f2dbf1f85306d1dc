from __future__ import annotations

import io
import logging
import sys

import pytest

from megatron.core import log


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


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "M\\xfcll/\\udcff"), ("latin-1", "Müll/\\udcff"), ("utf-8", "Müll/\\udcff")],
)
def test_a_path_that_the_stream_cannot_encode_is_shown_escaped(monkeypatch, encoding, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    log.configure(rank=0)
    logging.getLogger("megatron").info("saved %s", "Müll/\udcff")  # a byte that is no UTF-8
    assert stream.buffer.getvalue().decode(encoding).endswith(f"saved {shown}\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a loss of 2.5 in Zürich, 東京", "a loss of 2.5 in Zürich, 東京"),
        ("first\nERROR: second\r\n", "first\\nERROR: second\\r\\n"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("safe\u202etxt.exe\u2066", "safe\\u202etxt.exe\\u2066"),
        ("a\u2028b\u2029c\x85d", "a\\u2028b\\u2029c\\x85d"),
        ("\ud800\U000e0041", "\\ud800\\U000e0041"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_escaped(text: str, shown: str) -> None:
    assert log.printable(text) == shown
    assert log.printable(shown) == shown
    shown.encode()  # and any stream takes it


@pytest.mark.parametrize("char", ["a", "\x1b", "\U000e0041"])
@pytest.mark.parametrize("limit", [0, 2, 3, 10, 500])
def test_long_text_is_cut_at_the_limit_with_an_ellipsis(char: str, limit: int) -> None:
    shown = log.printable(char * 1000, limit)
    assert len(shown) == limit
    assert "...".startswith(shown[-3:])
