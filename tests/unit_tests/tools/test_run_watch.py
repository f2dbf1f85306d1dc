from __future__ import annotations

import io

import pytest

from megatron_hybrid.run_watch import View, watch


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Screen:
    """What a terminal shows of text with the two codes that a watch uses."""

    def __init__(self, text: str) -> None:
        self.lines = [""]
        for part in text.replace("\x1b[J", "").split("\x1b["):
            number, found, rest = part.partition("F")
            if found and number.isdigit():
                del self.lines[len(self.lines) - 1 - int(number) :]
                self.lines.append("")
            else:
                rest = part
            first, *others = rest.split("\n")
            self.lines[-1] += first
            self.lines += others


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


def test_on_a_terminal_each_view_takes_the_place_of_the_one_before_lines_that_wrap_too():
    stream = Stream(True)
    long = "trouble: " + "word " * 20
    look = views(View(["state: running", long], True, 0), View(["state: done", "x"], False, 0))
    watch(look, stream, 1.0, sleep=lambda _: None, columns=lambda: 40)
    first = Screen(stream.getvalue().split("\x1b")[0]).lines
    assert len(first) == 5, "one line, three of the long one, and the cursor's"
    assert all(len(line) < 40 for line in first)
    assert Screen(stream.getvalue()).lines == ["state: done", "x", ""]


def test_a_look_that_fails_is_shown_and_the_next_one_may_go_well():
    stream = Stream(True)
    error = OSError(5, "Input/output error")
    look = views(
        View(["state: running"], True, 0), error, error, View(["state: finished"], False, 0)
    )
    assert watch(look, stream, 1.0, sleep=lambda _: None, columns=lambda: 80) == 0
    text = stream.getvalue()
    assert text.count("not seen: [Errno 5] Input/output error") == 2
    assert Screen(text).lines == ["state: finished", ""]
    before = text.rpartition("\x1b[2F")[0]
    shown = Screen(before).lines
    assert shown == ["state: running", "not seen: [Errno 5] Input/output error", ""]


def test_the_first_look_must_succeed():
    with pytest.raises(FileNotFoundError):
        watch(views(FileNotFoundError("no run")), Stream(False), 1.0, sleep=pytest.fail)
