"""Reads a run's metrics file into columns of numbers."""

from __future__ import annotations

import io
import math
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


def read_metrics(path: Path, tables: Mapping[str, Sequence[str]]) -> dict[str, Columns]:
    """Returns the columns of a metrics file. Damaged lines and implausible numbers are skipped.

    A resumed run repeats iterations. Everything that an earlier attempt logged from there on is
    left out, including iterations that the run has not repeated yet.

    Args:
        tables: Column names of each kind of records, or of the evaluations of each split.

    Raises:
        OSError: The file is missing, unreadable, or not a regular file.
    """
    # A row is the number of its line, its iteration, and the values.
    rows = {name: array("d") for name in tables}
    with io.BufferedReader(open_regular(path, "a regular file of JSON lines")) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MOST_LINE_BYTES), b"")):
            record = parse_object(line)
            if record is None:
                continue
            kind = record.get("kind")
            table = record.get("split") if kind == "eval" else kind
            iteration = _number(record.get("iteration"))
            is_iteration = 0 <= iteration <= _MOST_ITERATION and iteration % 1 == 0
            if isinstance(table, str) and table in tables and is_iteration:
                values = (_number(record.get(name)) for name in tables[table])
                rows[table].extend((number, iteration, *values))

    arrays = {
        name: np.array(rows[name]).reshape(-1, 2 + len(tables[name])) for name in (TRAIN, *tables)
    }
    return {name: _columns(arrays[name], arrays[TRAIN], tables[name]) for name in tables}


def no_metrics(tables: Mapping[str, Sequence[str]]) -> dict[str, Columns]:
    """Returns columns without numbers."""
    empty = np.empty(0)
    columns = (dict.fromkeys(names, empty) for names in tables.values())
    return {
        name: Columns(empty.astype(np.int64), each)
        for name, each in zip(tables, columns, strict=True)
    }


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
