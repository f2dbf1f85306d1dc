"""Files of one JSON object per line, which several processes append to.

They stay readable after any kill: a torn line is skipped, and so is any other line that is not a
JSON object of bounded size.
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
_FILE = "a regular file of JSON lines"  # in messages

_MOST_BYTES = 16 * 2**20  # of a file: 100,000 events
MOST_LINE_BYTES = 2**20  # the command in an event may be long


class JsonLines:
    """Appends objects to a file. Creates the file and its directory if necessary.

    A line is one write(2) to a descriptor in append mode, which on a local file system keeps the
    lines of several ranks apart. A kill or a full disk may leave half a line at the end: the next
    append terminates it with a newline, and only that line is lost. No lock or descriptor is kept
    between two lines, so threads may append in parallel, and so may a signal handler that
    interrupts an append.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one object. Non-finite numbers become null, and objects that JSON lacks their
        `str`.

        Raises:
            OSError: if the whole line could not be written, or the file is not a regular one.
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
        """Creates the file if it is missing. OSError if it is not writable."""
        os.close(self._open())

    def _open(self) -> int:
        # Readable as well, for a look at the last byte.
        try:
            return open_for_append(self.path, _FILE)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return open_for_append(self.path, _FILE)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects in a file, in order; an empty list for a missing file. Other lines are
    skipped.

    Only the last 16 MiB of a file are read. OSError if it is unreadable or irregular.
    """
    try:
        with open_regular(path, _FILE) as stream:
            size = os.fstat(stream.fileno()).st_size
            content = _end_of(stream, size)
    except (FileNotFoundError, NotADirectoryError):
        return []

    lines = content.split(_NEWLINE)
    if size > _MOST_BYTES:
        del lines[0]  # its start is missing
    objects = (parse_object(line) for line in lines)
    return [each for each in objects if each is not None]


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Returns a JSON object; None for any other text, and for one of more than 1 MiB."""
    if len(text) > MOST_LINE_BYTES:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _end_of(stream: FileIO, size: int) -> bytes:
    """Returns the last bytes of a file of this size, up to the limit."""
    stream.seek(max(0, size - _MOST_BYTES))
    pieces: list[bytes] = []
    rest = _MOST_BYTES
    while rest > 0 and (piece := stream.read(rest)):
        pieces.append(piece)
        rest -= len(piece)
    return b"".join(pieces)


def _has_open_line(descriptor: int) -> bool:
    """Returns whether the file's last line lacks its newline."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != _NEWLINE


def finite(value: Any) -> Any:
    """Returns plain data with None for non-finite floats, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
