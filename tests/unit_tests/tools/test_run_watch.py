from __future__ import annotations

import io

import pytest

from megatron_hybrid.run_status import View, watch


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def views(*found: View | OSError):
    waiting = iter(found)

    def look() -> View:
        view = next(waiting)
        if isinstance(view, OSError):
            raise view
        return view

    return look


def test_it_looks_until_the_run_has_ended_and_waits_between():
    naps: list[float] = []
    look = views(
        View(["state: running"], True, 0),
        View(["state: running"], True, 0),
        View(["state: failed"], False, 5),
    )
    stream = Stream(False)
    assert watch(look, stream, 2.5, sleep=naps.append) == 5
    assert naps == [2.5, 2.5]
    assert stream.getvalue() == "state: running\n\nstate: running\n\nstate: failed\n\n"


def test_on_a_terminal_each_view_clears_the_one_before():
    look = views(View(["state: running"], True, 0), View(["state: failed"], False, 5))
    stream = Stream(True)
    watch(look, stream, 1.0, sleep=lambda _: None)
    _, first, second = stream.getvalue().split("\x1b[H\x1b[2J")
    assert (first, second) == ("state: running\n\n", "state: failed\n\n")


def test_a_look_that_fails_is_shown_and_the_next_one_may_go_well():
    stream = Stream(False)
    error = OSError(5, "Input/output error")
    last = View(["state: finished"], False, 0)
    look = views(View(["state: running"], True, 0), error, error, last)
    assert watch(look, stream, 1.0, sleep=lambda _: None) == 0
    first, second, third, fourth, _ = stream.getvalue().split("\n\n")
    assert first == "state: running"
    assert second == third
    assert second.startswith("state: running\n")
    assert str(error) in second
    assert fourth == "state: finished"


def test_the_first_look_must_succeed():
    with pytest.raises(FileNotFoundError):
        watch(views(FileNotFoundError("no run")), Stream(False), 1.0, sleep=pytest.fail)
