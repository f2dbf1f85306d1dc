"""Reads a run's metrics file into columns of numbers, also while the run appends to it.

The file may be long and may hold anything. Lines and values that make no sense are skipped.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.files import open_regular
from megatron.training.health.jsonl import MOST_LINE_BYTES, parse_object

TRAIN = "train"  # the kind of a step's record

# The end of a longer file is read. A line has about 330 bytes, so these are 1.5 million iterations.
_MOST_BYTES = 2**29
_BLOCK_BYTES = 2**20  # read at a time
_MOST_ITERATION = 2**52  # a float holds every integer up to this
_MOST_VALUE = 1e100  # sums and squares of larger values would overflow


@dataclass(frozen=True)
class Columns:
    """Numbers by iteration, in ascending order, each iteration once. NaN: missing."""

    iterations: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]

    def last(self, name: str) -> float | None:
        """The last number of a column, or None."""
        return next(iter(self.recent(name)[::-1].tolist()), None)

    def recent(self, name: str, count: int | None = None) -> NDArray[np.float64]:
        """The numbers of the last `count` iterations."""
        values = self.values[name][-(count or 0) :]
        return values[np.isfinite(values)]


class MetricsReader:
    """Reads a metrics file, and later the lines that were appended to it."""

    def __init__(self, path: Path, tables: Mapping[str, Sequence[str]]) -> None:
        """
        Args:
            tables: Columns of a kind of records, or of the evaluations of a split, by its name.
        """
        self.path = path
        self.tables = tables
        self._start(None)

    def _start(self, file: tuple[int, int] | None) -> None:
        """Forgets everything, in order to read a file from its beginning."""
        # A row is the number of its record in the file, its iteration, and the values.
        self._rows = {name: array("d") for name in self.tables}
        self._num_records = 0
        self._file = file
        self._offset = 0
        self._rest = b""  # of a line whose end was not there yet
        self._skips_line = False  # the current line is too long, or its start was not read
        self.is_cut = False  # the beginning of the file was left out

    def read(self) -> None:
        """Reads the new lines, or everything if the file is another one or has become shorter.

        Raises:
            FileNotFoundError: There is no file.
            OSError: The file is unreadable, or not a regular file.
        """
        with open_regular(self.path, "a regular file of JSON lines") as stream:
            stat = os.fstat(stream.fileno())
            file = (stat.st_dev, stat.st_ino)
            if file != self._file or stat.st_size < self._offset:
                self._start(file)
            if stat.st_size - self._offset > _MOST_BYTES:
                self._offset = stat.st_size - _MOST_BYTES
                self._rest, self._skips_line, self.is_cut = b"", True, True
            stream.seek(self._offset)
            while block := stream.read(_BLOCK_BYTES):
                self._take(block)

    def columns(self, table: str) -> Columns:
        """The numbers of a kind of records, or of a split's evaluations.

        A run that resumes makes iterations again. Everything that an earlier attempt logged from
        there on is left out, including iterations that are yet to be made again.
        """
        rows, steps = self._array(table), self._array(TRAIN)
        rows = rows[_is_made_last(rows, steps) & _is_made_last(rows, rows)]
        values = {name: rows[:, 2 + n] for n, name in enumerate(self.tables[table])}
        return Columns(rows[:, 1].astype(np.int64), values)

    def _array(self, table: str) -> NDArray[np.float64]:
        return np.array(self._rows[table]).reshape(-1, 2 + len(self.tables[table]))

    def _take(self, block: bytes) -> None:
        self._offset += len(block)
        *lines, rest = (self._rest + block).split(b"\n")
        if self._skips_line and lines:
            self._skips_line = False
            del lines[0]
        for line in lines:
            record = parse_object(line)
            if record is not None:
                self._add(record)
        self._skips_line |= len(rest) > MOST_LINE_BYTES
        self._rest = b"" if self._skips_line else rest

    def _add(self, record: Mapping[str, Any]) -> None:
        self._num_records += 1
        kind = record.get("kind")
        table = record.get("split") if kind == "eval" else kind
        iteration = _number(record.get("iteration"))
        is_iteration = 0 <= iteration <= _MOST_ITERATION and iteration % 1 == 0
        if isinstance(table, str) and table in self.tables and is_iteration:
            values = (_number(record.get(name)) for name in self.tables[table])
            self._rows[table].extend((self._num_records, iteration, *values))


def _is_made_last(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether all of the others that come later in the file have greater iterations."""
    least = np.minimum.accumulate(others[::-1, 1])[::-1]
    following = np.searchsorted(others[:, 0], rows[:, 0], side="right")
    return rows[:, 1] < np.append(least, np.inf)[following]


def _number(value: object) -> float:
    """NaN for anything but a number of a plausible size."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if abs(value) <= _MOST_VALUE else math.nan
