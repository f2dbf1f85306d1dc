"""Files of one JSON object a line, for several processes to append to; readable after any kill.

They may be in a folder that others can write to, so a line may hold anything and be of any length.
What is read is bounded, and implausible lines are skipped like torn ones.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from megatron.core.files import open_for_append, open_regular

_NEWLINE = b"\n"

_MOST_BYTES = 16 * 2**20  # of a file: 100,000 events. Parsed, a hostile one takes 20 times as much
MOST_LINE_BYTES = 2**20  # the command in an event may be long
_MOST_DEPTH = 16
_MOST_DIGITS = 1000  # of an integer; a float has no more than 309 before its point


class JsonLines:
    """Appends to such a file. Makes the file and its folder if need be.

    A line is one write(2) to a descriptor in append mode, which on a local file system keeps lines
    of several ranks apart. A kill or a full disk may leave half a line at the end: the next append
    closes it off with a newline, and only that line is lost. No lock or descriptor is kept between
    two lines, so threads may append side by side, and a signal handler in the middle of an append.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one object. Numbers that are not finite become null, and what JSON does not know
        becomes its `str`.

        Raises:
            OSError: if the line could not be written whole, or the file is not a regular one.
        """
        line = json.dumps(finite(record), default=str, allow_nan=False).encode("ascii") + _NEWLINE
        descriptor = self._open()
        try:
            if _has_open_line(descriptor):
                line = _NEWLINE + line
            num_written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if num_written < len(line):
            wanted = f"to append {len(line)} bytes to {self.path}"
            raise OSError(f"Expected {wanted}, got {num_written} written.")

    def touch(self) -> None:
        """Makes the file if there is none yet. OSError if it cannot be written."""
        os.close(self._open())

    def _open(self) -> int:
        try:
            return self._open_once()
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._open_once()

    def _open_once(self) -> int:
        # Readable too, for a look at the last byte.
        return open_for_append(self.path, "a regular file of JSON lines")


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects in such a file, in order; none if there is no file. Other lines are skipped.

    Of a file larger than 16 MiB only the end is read. OSError if it is unreadable or irregular.
    """
    try:
        with open_regular(path, "a regular file of JSON lines") as stream:
            size = os.fstat(stream.fileno()).st_size
            content = _end_of(stream, size)
    except (FileNotFoundError, NotADirectoryError):
        return []

    lines = content.split(_NEWLINE)
    if size > _MOST_BYTES:
        del lines[0]  # its beginning is missing
    objects = (parse_object(line) for line in lines)
    return [each for each in objects if each is not None]


def parse_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None. One too long, too deep or too large is none."""
    if len(text) > MOST_LINE_BYTES:
        return None
    # A metrics file has a million lines: what is checked in Python is checked only where a line
    # could fail. A short one has no long integers, one with few brackets is not deep.
    decoder = _DECODER if len(text) <= _MOST_DIGITS else _BOUNDED_DECODER
    try:
        value = decoder.decode(text.decode())
    except (ValueError, RecursionError):  # not JSON, not UTF-8; or nested without end
        return None
    if not isinstance(value, dict):
        return None
    is_shallow = text.count(b"{") + text.count(b"[") <= _MOST_DEPTH
    return value if is_shallow or _is_shallow(value, _MOST_DEPTH) else None


def _end_of(stream: FileIO, size: int) -> bytes:
    """The last bytes of a file of this size, as many as may be read."""
    stream.seek(max(0, size - _MOST_BYTES))
    pieces: list[bytes] = []
    rest = _MOST_BYTES
    while rest > 0 and (piece := stream.read(rest)):
        pieces.append(piece)
        rest -= len(piece)
    return b"".join(pieces)


def _bounded_int(text: str) -> int:
    """ValueError for very many digits, which take long to convert and not all Pythons refuse."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"Expected an integer of at most {_MOST_DIGITS} digits, got {len(text)}.")
    return int(text)


_DECODER = json.JSONDecoder()
_BOUNDED_DECODER = json.JSONDecoder(parse_int=_bounded_int)


def _is_shallow(value: object, depth: int) -> bool:
    """Whether `value` is nested at most so deep. What is deeper has no readable `str`."""
    if isinstance(value, dict):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value)
    return True


def _has_open_line(descriptor: int) -> bool:
    """Whether the file's last line lacks its newline."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != _NEWLINE


def finite(value: Any) -> Any:
    """Plain data with None for floats that are not finite, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
