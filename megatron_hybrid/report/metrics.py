"""Reads a run's metrics file into columns of numbers."""

from __future__ import annotations

import io
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

_MOST_BYTES = 4 * 2**30  # of a file: metrics of ten million iterations
_MOST_ITERATION = 2**52  # a float holds every integer up to this
_MOST_VALUE = 1e100  # squares of larger values would overflow


@dataclass(frozen=True)
class Columns:
    """Numbers by iteration, ascending, each iteration once; NaN where a number is missing."""

    iterations: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]

    def last(self, name: str) -> float | None:
        """Returns the last number of a column, or None."""
        return next(iter(self.recent(name)[::-1].tolist()), None)

    def recent(self, name: str, count: int = 0) -> NDArray[np.float64]:
        """Returns the numbers of the last `count` iterations; 0: of all."""
        values = self.values[name][-count:]
        return values[np.isfinite(values)]


class MetricsReader:
    """Reads a metrics file, and later the lines that were appended to it.

    Args:
        tables: Column names of each kind of records, or of the evaluations of each split.
    """

    def __init__(self, tables: Mapping[str, Sequence[str]]) -> None:
        self._tables = tables
        self._path: Path | None = None
        self._file: tuple[int, int] | None = None  # device and inode
        self._start()

    def _start(self) -> None:
        # A row is the number of its line, its iteration, and the values.
        self._rows = {name: array("d") for name in self._tables}
        self._offset = self._num_lines = 0
        self._is_in_long_line = False

    def read(self, path: Path) -> None:
        """Reads the new lines, or all lines of another or a shorter file.

        The rows of another path are forgotten, even if this one is unreadable. Damaged lines and
        implausible numbers are skipped. OSError for a file that is missing, unreadable, irregular
        or too large.
        """
        if path != self._path:
            self._path = path
            self._start()
        with io.BufferedReader(open_regular(path, "a regular file of JSON lines")) as stream:
            stat = os.fstat(stream.fileno())
            if stat.st_size > _MOST_BYTES:
                raise OSError(f"expected at most {_MOST_BYTES} bytes, got {stat.st_size}")
            file = (stat.st_dev, stat.st_ino)
            if file != self._file or stat.st_size < self._offset:
                self._file = file
                self._start()
            stream.seek(self._offset)
            for line in iter(lambda: stream.readline(MOST_LINE_BYTES), b""):
                is_end = line.endswith(b"\n")
                if not is_end and len(line) < MOST_LINE_BYTES:
                    break  # the rest of the line is not written yet
                self._offset += len(line)
                if is_end and not self._is_in_long_line:
                    self._add(line)
                self._is_in_long_line = not is_end

    def _add(self, line: bytes) -> None:
        self._num_lines += 1
        record = parse_object(line)
        if record is None:
            return
        kind = record.get("kind")
        table = record.get("split") if kind == "eval" else kind
        iteration = _number(record.get("iteration"))
        is_iteration = 0 <= iteration <= _MOST_ITERATION and iteration % 1 == 0
        if isinstance(table, str) and table in self._tables and is_iteration:
            values = (_number(record.get(name)) for name in self._tables[table])
            self._rows[table].extend((self._num_lines, iteration, *values))

    def columns(self) -> dict[str, Columns]:
        """Returns the numbers of each table.

        A resumed run repeats iterations. Everything that an earlier attempt logged from there on is
        left out, including iterations that the run has not repeated yet.
        """
        arrays = {
            name: np.array(rows).reshape(-1, 2 + len(self._tables[name]))
            for name, rows in self._rows.items()
        }
        steps = arrays[TRAIN]
        return {name: _columns(arrays[name], steps, self._tables[name]) for name in arrays}


def _columns(
    rows: NDArray[np.float64], steps: NDArray[np.float64], names: Sequence[str]
) -> Columns:
    rows = rows[_is_made_last(rows, steps) & _is_made_last(rows, rows)]
    values = {name: rows[:, 2 + number] for number, name in enumerate(names)}
    return Columns(rows[:, 1].astype(np.int64), values)


def _is_made_last(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether all other rows later in the file have greater iterations."""
    least = np.minimum.accumulate(others[::-1, 1])[::-1]
    following = np.searchsorted(others[:, 0], rows[:, 0], side="right")
    return rows[:, 1] < np.append(least, np.inf)[following]


def _number(value: Any) -> float:
    """Returns NaN for anything but a plausible number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if abs(value) <= _MOST_VALUE else math.nan
