from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import threading
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.health.events import (
    EVENTS_FILE,
    HEARTBEAT_FILE,
    EarlierFindings,
    EventKind,
    EventLog,
    read_events,
    read_heartbeat,
)


@pytest.fixture
def shown(caplog, monkeypatch):
    """The lines that are logged, also if an earlier test has configured the project's logger."""
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    caplog.set_level(logging.INFO, logger="megatron")
    return caplog


def test_a_line_has_the_time_event_rank_and_number_of_restarts(tmp_path):
    events = EventLog(tmp_path / "run", rank=3, restart=2, clock=lambda: 1e9 + 0.25)
    # Fields may have the names of the parameters.
    events.write(EventKind.RESUME, kind="x", self=1, seconds=0.1 + 0.2, norm=math.nan)
    assert read_events(tmp_path / "run") == [
        {"time": 1e9 + 0.25, "event": "resume", "rank": 3, "restart": 2}
        | {"kind": "x", "self": 1, "seconds": 0.1 + 0.2, "norm": None}
    ]


def test_a_rank_that_several_threads_end_writes_one_exit(tmp_path):
    events, start = EventLog(tmp_path, rank=1), threading.Barrier(4)

    def end(number: int) -> None:
        start.wait()
        events.write(EventKind.EXIT, code=number)

    threads = [threading.Thread(target=end, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    EventLog(tmp_path, rank=1, restart=1).write(EventKind.EXIT, code=0)
    assert [event["restart"] for event in read_events(tmp_path)] == [0, 1]


def test_without_a_directory_events_are_not_written(tmp_path, monkeypatch, shown):
    monkeypatch.chdir(tmp_path)
    events = EventLog(None)
    events.write(EventKind.START)
    events.beat()
    assert list(tmp_path.iterdir()) == []
    assert shown.records == []


def test_the_heartbeat_is_replaced_atomically_without_leftover_files(tmp_path):
    folder = tmp_path / "run"
    assert read_heartbeat(folder) is None
    events = EventLog(folder, restart=4, clock=lambda: 2.0)
    for iteration in (1, 2):
        events.beat(iteration=iteration, loss=math.inf)
        beat = {"time": 2.0, "restart": 4, "iteration": iteration, "loss": None}
        assert read_heartbeat(folder) == beat
        assert [path.name for path in folder.iterdir()] == [HEARTBEAT_FILE]


def test_a_heartbeat_that_cannot_be_read_is_none(tmp_path):
    for content in (b"", b"[1]", b'{"time":', b"\xff"):
        (tmp_path / HEARTBEAT_FILE).write_bytes(content)
        assert read_heartbeat(tmp_path) is None


def test_a_reader_never_sees_half_a_heartbeat(tmp_path):
    events = EventLog(tmp_path)
    text = "x" * 20_000
    events.beat(number=-1, text=text)
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.is_set():
            events.beat(number=number, text=text)
            number += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        seen = set()
        while len(seen) < 50:
            heartbeat = read_heartbeat(tmp_path)
            assert heartbeat is not None
            assert heartbeat["text"] == text
            seen.add(heartbeat["number"])
    finally:
        stop.set()
        thread.join()


def full_disk(*_arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_is_one_warning_and_no_end(tmp_path, monkeypatch, shown):
    events = EventLog(tmp_path)
    monkeypatch.setattr(os, "write", full_disk)
    monkeypatch.setattr(Path, "replace", full_disk)
    for _ in range(3):
        events.write(EventKind.START)
        events.beat(iteration=1)
    (line,) = shown.messages
    assert f"{tmp_path / EVENTS_FILE}: [Errno 28] No space left on device." in line
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS_FILE]
    monkeypatch.undo()
    events.write(EventKind.EXIT)
    assert [event["event"] for event in read_events(tmp_path)] == ["exit"], "it is tried again"


def test_no_field_makes_a_write_raise(tmp_path, shown):
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    loop: list = []
    loop.append(loop)
    events = EventLog(tmp_path)
    for value in (Unprintable(), loop, {(1, 2): 3}):
        events.write(EventKind.START, value=value)
        events.beat(value=value)
    assert read_events(tmp_path) == []
    assert len(shown.messages) == 1


def test_a_signal_handler_may_write_in_the_middle_of_a_write(tmp_path, monkeypatch):
    events = EventLog(tmp_path)
    write = os.write

    def interrupted(descriptor: int, line: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGUSR1)
        return write(descriptor, line)

    previous = signal.signal(
        signal.SIGUSR1, lambda *_: events.write(EventKind.SIGNAL, signal="SIGUSR1")
    )
    try:
        monkeypatch.setattr(os, "write", interrupted)
        events.write(EventKind.START)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert [event["event"] for event in read_events(tmp_path)] == ["signal", "start"]


def test_a_heartbeat_that_is_no_file_or_too_long_is_an_error_before_it_is_read(tmp_path):
    path = tmp_path / HEARTBEAT_FILE
    path.write_text(json.dumps({"phase": "x" * 10**5}))
    with pytest.raises(OSError, match="Expected a heartbeat of at most 65536 bytes, got 1000"):
        read_heartbeat(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="Expected a heartbeat, got a FIFO"):
        read_heartbeat(tmp_path)


# Earlier starts

START, RESTART = {"event": "start", "restart": 0}, {"event": "start", "restart": 1}
RESUME = {"event": "resume", "iteration": 4}
DAMAGED = {"event": "damaged", "checkpoint": "a", "reason": "short"}
PUBLISHED = {"event": "save_published", "checkpoint": "a"}


@pytest.mark.parametrize(
    ("events", "findings"),
    [
        ([RESUME, DAMAGED, RESTART, RESUME], EarlierFindings({"a": "short"}, [4, 4])),
        ([RESUME, DAMAGED, PUBLISHED], EarlierFindings({}, [4], has_saved=True)),
        ([DAMAGED, {"event": "set_aside", "checkpoint": "a"}], EarlierFindings()),
        ([PUBLISHED, RESUME, DAMAGED, RESTART, START], EarlierFindings()),
        ([RESUME, {"event": ["damaged"]}, {"event": "other"}, [1]], EarlierFindings({}, [4])),
        ([RESUME, {"event": "start", "restart": False}], EarlierFindings({}, [4])),
    ],
)
def test_a_relaunch_has_the_findings_of_its_earlier_starts(tmp_path, events, findings):
    """Since the job was last launched by hand. Lines that are no events are ignored."""
    lines = [json.dumps(event) for event in events]
    (tmp_path / EVENTS_FILE).write_text("\n".join([*lines, "[" * 10**5, "\0"]) + "\n")
    assert EarlierFindings.read(tmp_path) == findings


@pytest.mark.parametrize(
    "event",
    [
        *({"event": "resume", "iteration": value} for value in (True, -5, 4.0, "4", [4], None)),
        {"event": "resume"},
        {"event": "damaged", "checkpoint": ["a"], "reason": "short"},
        {"event": "damaged", "checkpoint": "a", "reason": 5},
        {"event": "save_published", "checkpoint": True},
        {"event": "set_aside"},
    ],
)
def test_an_event_with_a_field_of_another_type_ends_a_relaunch(tmp_path, event):
    (tmp_path / EVENTS_FILE).write_text(json.dumps(event) + "\n")
    with pytest.raises(CheckpointError, match=EVENTS_FILE):
        EarlierFindings.read(tmp_path)


def test_the_reason_of_an_earlier_start_is_one_bounded_line(tmp_path):
    reason = "gone\n\x1b[2JERROR: all is lost" + "x" * 10**5
    EventLog(tmp_path).write(EventKind.DAMAGED, checkpoint="a", reason=reason)
    found = EarlierFindings.read(tmp_path).damaged["a"]
    assert found.startswith(r"gone\n\x1b[2JERROR: all is lostxxx")
    assert len(found) == 1000


def test_an_event_log_that_cannot_be_read_is_a_warning(tmp_path, shown):
    os.mkfifo(tmp_path / EVENTS_FILE)
    assert EarlierFindings.read(tmp_path) == EarlierFindings()
    assert "got a FIFO" in shown.text
