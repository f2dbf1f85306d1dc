"""A run's metrics file as columns of numbers, also while the run appends to it.

The file may have a million lines, and may hold anything: what is read and kept is bounded, and a
line or a value that makes no sense is skipped. Reading again continues where it stopped.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.files import open_regular
from megatron.training.health.jsonl import MOST_LINE_BYTES, parse_object

TRAIN, TIMING, ACTIVATION_TIMING = "train", "timing", "activation_timing"  # kinds of records
VALIDATION, TEST = "validation", "test"  # splits of records of the kind "eval"

LANES = ("d2h_ms", "host_ms", "h2d_ms")
WAITS = ("waited_d2h_ms", "waited_host_ms", "waited_h2d_ms")
# Auxiliary losses have names of their own; these are those of the project's models.
AUXILIARY = ("balance_loss", "z_loss", "logit_z_loss")
NAMES: dict[str, tuple[str, ...]] = {
    TRAIN: (
        "loss",
        "grad_norm",
        "learning_rate",
        "elapsed_ms",
        "tokens_per_second",
        "peak_host_memory_bytes",
        "peak_device_memory_bytes",
        "loss_scale",
        "expert_load_cv",
        "expert_load_cv_max",
        "busiest_expert",
        "idle_experts",
        *AUXILIARY,
    ),
    VALIDATION: ("loss",),
    TEST: ("loss",),
    TIMING: (*LANES, *WAITS),
    ACTIVATION_TIMING: (*LANES, *WAITS),
}

# A line of a dense model has about 330 bytes, so this is some three million iterations, and half a
# minute. Longer files lose their beginning.
_MOST_BYTES = 2**30
_MOST_ROWS = 2**21  # of a table: of the train records 270 MB
_PLAIN_LINE_BYTES = 4000  # too short for an integer that takes long to convert
_BLOCK_BYTES = 2**20  # read at a time; a block is all that is held of the text
_MOST_ITERATION = 2**52  # a float holds all integers up to twice as many, so the next one too
_MOST_VALUE = 1e300
_NUMBERS = {int, float, type(None)}
_NEWLINE = b"\n"

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """Numbers by iteration, in ascending order, each iteration once. NaN: there is none."""

    iterations: NDArray[np.int64]
    values: Mapping[str, Numbers]

    def has(self, *names: str) -> bool:
        """Whether there is a number in any of these columns."""
        return any(bool(np.isfinite(self.values[name]).any()) for name in names)


class _Table:
    """The records of one kind, in the order of the file.

    A row begins with the number of its record in the file and its iteration.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._chunks: list[Numbers] = []  # [rows, 2 + columns]
        self._num_rows = 0
        self.is_cut = False

    def add(self, records: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """The next ones, with their numbers. Forgets the oldest if there are too many."""
        keys = ("iteration", *self._names)
        chunk = _numbers([(number, *map(record.get, keys)) for number, record in records])
        iterations = chunk[:, 1]
        is_plausible = (iterations >= 0) & (iterations <= _MOST_ITERATION) & (iterations % 1 == 0)
        chunk = chunk[is_plausible]
        self._chunks.append(chunk)
        self._num_rows += len(chunk)

        # The first chunk may hold almost all rows: only as many as are too many go.
        while (surplus := self._num_rows - _MOST_ROWS) > 0:
            first = self._chunks[0]
            self._chunks[:1] = [first[surplus:]] if len(first) > surplus else []
            self._num_rows -= min(surplus, len(first))
            self.is_cut = True

    def rows(self) -> Numbers:
        """All that there are."""
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0] if self._chunks else np.empty((0, 2 + len(self._names)))

    def columns(self, steps: Numbers) -> Columns:
        """The rows that still hold.

        A run that resumes makes iterations again. What an earlier attempt has logged of them, and
        of all that would have come, is not of this run any more: the last row may well be one of
        those, and would be taken for how the run is doing now.

        Args:
            steps: the rows of the steps, which tell where the run has resumed.
        """
        rows = self.rows()
        rows = rows[_is_made_last(rows, steps) & _is_made_last(rows, rows)]
        values = {name: rows[:, 2 + n] for n, name in enumerate(self._names)}
        return Columns(rows[:, 1].astype(np.int64), values)


class MetricsReader:
    """Reads a metrics file, and later what has been appended to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._tables = {name: _Table(names) for name, names in NAMES.items()}
        self._file: tuple[int, int] | None = None  # which one has been read
        self._offset = 0
        self._rest = b""  # of a line whose end was not there yet
        self._num_records = 0
        self._skips_line = False  # this line is too long, or its beginning was not read
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Whether the beginning of the file was left out."""
        return self._is_cut or any(table.is_cut for table in self._tables.values())

    def read(self) -> None:
        """Reads what is new; everything, if the file is another one or has become shorter.

        Raises:
            FileNotFoundError: if there is no file.
            OSError: if it is unreadable or not a regular file.
        """
        with open_regular(self.path, "a regular file of JSON lines") as stream:
            stat = os.fstat(stream.fileno())
            if self._file != (stat.st_dev, stat.st_ino) or stat.st_size < self._offset:
                self._begin_anew()
                self._file = (stat.st_dev, stat.st_ino)
            if stat.st_size - self._offset > _MOST_BYTES:
                self._offset = stat.st_size - _MOST_BYTES
                self._rest, self._skips_line, self._is_cut = b"", True, True

            stream.seek(self._offset)
            while self._offset < stat.st_size:
                block = stream.read(min(_BLOCK_BYTES, stat.st_size - self._offset))
                if not block:
                    break
                self._offset += len(block)
                self._take(block)

    def columns(self, table: str) -> Columns:
        """What has been read: of a kind of records, or of a split's evaluations."""
        return self._tables[table].columns(self._tables[TRAIN].rows())

    def _take(self, block: bytes) -> None:
        first, *lines = block.split(_NEWLINE)
        if not lines:  # the block is in the middle of a line
            self._keep(first)
            return

        whole = lines[:-1] if self._skips_line else [self._rest + first, *lines[:-1]]
        self._add(_records([line for line in whole if line]))
        self._rest, self._skips_line = b"", False
        self._keep(lines[-1])

    def _keep(self, piece: bytes) -> None:
        """A piece of a line that goes on."""
        self._rest += piece
        if self._skips_line or len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._skips_line = b"", True

    def _add(self, records: Iterable[dict[str, Any]]) -> None:
        by_table: dict[str, list[tuple[int, dict[str, Any]]]] = {name: [] for name in self._tables}
        for record in records:
            self._num_records += 1
            kind = record.get("kind")
            name = record.get("split") if kind == "eval" else kind
            if isinstance(name, str) and name in by_table:
                by_table[name].append((self._num_records, record))

        for name, found in by_table.items():
            if found:
                self._tables[name].add(found)


def _is_made_last(rows: Numbers, others: Numbers) -> NDArray[np.bool_]:
    """Whether all of the others that stand further on in the file have greater iterations."""
    least = np.minimum.accumulate(others[::-1, 1])[::-1]
    following = np.searchsorted(others[:, 0], rows[:, 0], side="right")
    return rows[:, 1] < np.append(least, np.inf)[following]


def _records(lines: list[bytes]) -> list[dict[str, Any]]:
    """The objects that lines are; others are skipped.

    Lines of a run are parsed together, as one array, which takes two thirds of the time. Each line
    begins with its only brace, so as many objects as lines means that each line is one.
    """
    is_plain = (
        max(map(len, lines), default=0) <= _PLAIN_LINE_BYTES
        and sum(line.count(b"{") for line in lines) == len(lines)
        and all(line.startswith(b"{") for line in lines)
    )
    if is_plain:
        try:
            found: list[Any] = json.loads(f"[{b','.join(lines).decode()}]")
            # `{...}, 5` is no object, but would be two elements; and a brace may be in a string.
            if len(found) == len(lines) and all(isinstance(each, dict) for each in found):
                return found
        except (ValueError, RecursionError):
            pass  # a line is torn, say: one by one the others are found
    records = (parse_object(line) for line in lines)
    return [record for record in records if record is not None]


def _numbers(rows: list[tuple[Any, ...]]) -> Numbers:
    """[rows, columns]; NaN for what is no finite number."""
    # Almost always all values are numbers, and numpy does everything.
    if not set(map(type, itertools.chain.from_iterable(rows))) <= _NUMBERS:
        rows = [tuple(map(_number, row)) for row in rows]
    try:
        found = np.array(rows, dtype=np.float64)
    except OverflowError:  # an integer that no float can hold
        found = np.array([tuple(map(_number, row)) for row in rows], dtype=np.float64)
    return np.where(np.abs(found) <= _MOST_VALUE, found, np.nan)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= _MOST_VALUE else None
