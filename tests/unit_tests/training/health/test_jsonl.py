from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.health.jsonl import JsonLines, read_json_lines

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(), SCALARS, max_size=2)
RECORDS = st.dictionaries(st.text(), VALUES, max_size=3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "lines.jsonl"


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(RECORDS, max_size=3),
    torn=RECORDS,
    after=st.lists(RECORDS, min_size=1, max_size=3),
    data=st.data(),
)
def test_a_line_torn_at_any_byte_is_all_that_is_lost(before, torn, after, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        for record in (*before, torn):
            JsonLines(path).append(record)
        last = json.dumps(torn).encode() + b"\n"
        assert path.read_bytes().endswith(last)
        num_left = data.draw(st.integers(0, len(last)), label="bytes left of the torn line")
        os.truncate(path, path.stat().st_size - len(last) + num_left)
        is_whole = num_left >= len(last) - 1  # only the newline may be missing
        assert read_json_lines(path) == [*before, *([torn] if is_whole else [])]
        for record in after:
            JsonLines(path).append(record)
        assert read_json_lines(path) == [*before, *([torn] if is_whole else []), *after]
        assert b"\n\n" not in path.read_bytes()


def test_lines_that_are_not_objects_or_too_long_are_skipped(path):
    path.parent.mkdir()
    junk = [b"", b"[1]", b'{"a":', b"\xff\xfe", b"\0\0", b"[" * 100_000]
    junk += [b'{"a": ' + b"9" * 10_000 + b"}"]
    path.write_bytes(
        b"\n".join([b'{"a": 1}', *junk, b'{"a": 2}', b'{"a": "' + b"x" * 2**20 + b'"}'])
    )
    JsonLines(path).append({"a": 3})
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_only_the_last_megabytes_of_a_file_are_read(tmp_path):
    with (tmp_path / "lines.jsonl").open("w") as stream:
        stream.seek(2**40)  # a hole, which takes no space on disk
        stream.write('\n{"a": 3}\n')
    assert read_json_lines(tmp_path / "lines.jsonl") == [{"a": 3}]


def test_no_file_has_no_lines(path):
    assert read_json_lines(path) == []
    path.parent.write_text("a file instead of the directory")
    assert read_json_lines(path) == []


def test_what_json_lacks_becomes_null_or_text_at_any_depth(path):
    nested = {"d": np.float64("nan")}
    record = {"a": math.nan, "b": [math.inf, (1.5, -math.inf)], "c": nested, "e": Path("/runs/a")}
    JsonLines(path).append(record)
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found == {"a": None, "b": [None, [1.5, None]], "c": {"d": None}, "e": "/runs/a"}


def test_a_deleted_directory_is_created_again(path):
    lines = JsonLines(path)
    lines.append({"a": 1})
    path.unlink()
    path.parent.rmdir()
    lines.append({"a": 2})
    lines.touch()
    assert read_json_lines(path) == [{"a": 2}]


def test_a_line_that_does_not_fit_on_the_disk_is_an_error_and_the_next_one_is_whole(
    path, monkeypatch
):
    lines = JsonLines(path)
    lines.append({"a": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:4]))
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  only the number matters
    with pytest.raises(OSError, match=r"9 bytes to .*lines.jsonl, got 4 written"):
        lines.append({"a": 2})
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    monkeypatch.undo()
    lines.append({"a": 3})
    assert read_json_lines(path) == [{"a": 1}, {"a": 3}]


def test_threads_append_side_by_side_and_no_line_is_lost(path):
    lines = JsonLines(path)
    text = "x" * 5000  # more than a page: a reader may see a line of another writer half

    def append(thread: int) -> None:
        for number in range(50):
            lines.append({"thread": thread, "number": number, "text": text})

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(record["thread"], record["number"]) for record in read_json_lines(path)]
    assert sorted(found) == [(thread, number) for thread in range(4) for number in range(50)]


APPENDS_FOR_EVER = """
import sys
from megatron.training.health.jsonl import JsonLines

lines = JsonLines(sys.argv[1])
number = 0
while True:
    lines.append({"writer": sys.argv[2], "number": number, "text": "x" * 3000})
    number += 1
    if number == 20:
        print("going", flush=True)
"""


def test_killed_writers_cost_no_line_of_another(path):
    for writer in "abc":
        process = subprocess.Popen(
            [sys.executable, "-c", APPENDS_FOR_EVER, str(path), writer],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "going\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait(timeout=60) == -signal.SIGKILL
    records = read_json_lines(path)
    for writer in "abc":
        numbers = [record["number"] for record in records if record["writer"] == writer]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 20


def _link(path: Path, target: Path) -> None:
    target.write_text("theirs")
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: _link(path, path.with_name("elsewhere")), "a symbolic link"),
        (lambda path: path.symlink_to(path.with_name("nowhere")), "a symbolic link"),
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "a directory"),
    ],
)
def test_only_a_regular_file_is_appended_to(tmp_path, make, what):
    """A link would lead to any file of the user's, and a FIFO without a reader would hold the
    writer for ever.
    """
    path = tmp_path / "lines.jsonl"
    make(path)
    with pytest.raises(OSError, match=f"Expected a regular file of JSON lines, got {what}"):
        JsonLines(path).append({"a": 1})
    with pytest.raises(OSError, match=f"got {what}"):
        JsonLines(path).touch()
    assert sorted(p.name for p in tmp_path.iterdir()) in (
        ["lines.jsonl"],
        ["elsewhere", "lines.jsonl"],
    )
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_text() == "theirs"


def test_a_link_that_takes_the_name_at_the_last_moment_is_not_followed_either(
    tmp_path, monkeypatch
):
    path, target = tmp_path / "lines.jsonl", tmp_path / "elsewhere"
    look = os.lstat

    def look_and_swap(name: Path) -> os.stat_result:
        path.touch()
        found = look(name)
        path.unlink()
        _link(path, target)
        return found

    monkeypatch.setattr(os, "lstat", look_and_swap)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        JsonLines(path).append({"a": 1})
    assert target.read_text() == "theirs"
