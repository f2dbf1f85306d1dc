"""Files of one JSON object a line that several processes append to, and that a kill at any moment leaves readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NEWLINE = b"\n"


class JsonLines:
    """Appends to such a file. Makes the file and its folder if need be.

    A line is one write(2) to a descriptor in append mode, so that lines of several ranks do not mix on a local file
    system. A process that was killed, or a disk that was full, may leave half a line at the end: whoever appends next
    closes it off with a newline first, so that nothing but that line is lost. No lock and no descriptor is kept between
    two lines: threads may append side by side, and a signal handler in the middle of an append.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one object. Numbers that are not finite become null, and what JSON does not know becomes its `str`.

        Raises:
            OSError: if the line could not be written whole.
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
            raise OSError(f"Expected to append {len(line)} bytes to {self.path}, got {num_written} written.")

    def touch(self) -> None:
        """Makes the file, if there is none yet. OSError if it cannot be written."""
        os.close(self._open())

    def _open(self) -> int:
        try:
            return self._open_once()
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._open_once()

    def _open_once(self) -> int:
        # Readable too, for a look at the last byte.
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects in such a file, in order; none if there is no file. Lines that are no JSON object are passed over."""
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    objects = (parse_object(line) for line in content.split(_NEWLINE))
    return [each for each in objects if each is not None]


def parse_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not UTF-8; or nested without end
        return None
    return value if isinstance(value, dict) else None


def _has_open_line(descriptor: int) -> bool:
    """Whether the file's last line lacks its newline."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != _NEWLINE


def finite(value: Any) -> Any:
    """`value`, plain data, with None for every float in it that is not finite, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
